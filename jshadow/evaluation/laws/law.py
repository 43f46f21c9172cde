"""The class of laws. A law is a sentence that must hold for every policy, and a function that checks it on one case."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jshadow.errors import JshadowError
from jshadow.policies.base import Policy

# This times the expected number is added to every tolerance, because float32 has about seven digits.
RELATIVE = 1e-7


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy with the two settings that the laws use.

    The `small` settings drop or approximate tokens of the laws' prompts. The `lossless` settings, if there are any,
    equal full attention on them.
    """

    name: str
    small: Policy
    lossless: Policy | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one check of a law. The `setting` is "small" or "lossless".

    `row` is the row of the batch that is checked, or None for all. `piece` is the number of tokens of a piece of the
    prompt, or None for one piece.
    """

    subject: Subject
    fetch: str = "resident"
    setting: str = "small"
    row: int | None = None
    piece: int | None = None

    @property
    def policy(self) -> Policy:
        """The policy of the subject with the case's setting."""
        policy = self.subject.small if self.setting == "small" else self.subject.lossless
        assert policy is not None, f"{self.subject.name} claims no lossless settings"
        return policy

    def __str__(self) -> str:
        """Describe the case, for example "quest small device_put row 1"."""
        words = [self.subject.name, self.setting, self.fetch]
        words += [f"{name} {value}" for name, value in (("row", self.row), ("piece", self.piece)) if value is not None]
        return " ".join(words)


class Difference(Exception):
    """The error that the function of a law raises if two values that must agree differ, such as the leaf `place`.

    `largest` is the largest absolute difference, and `tolerance` the allowed one. Both are None if there is no number.
    """

    def __init__(self, place: str, largest: float | None = None, tolerance: float | None = None) -> None:
        super().__init__(place)
        self.place, self.largest, self.tolerance = place, largest, tolerance

    def __str__(self) -> str:
        """Describe the difference in one line."""
        if self.largest is None:
            return self.place
        return f"{self.place} differ by {self.largest:.3g}, tolerance {self.tolerance:g}"


class LawBroken(JshadowError, AssertionError):
    """The error that a law raises if a policy breaks it in a case."""

    def __init__(self, law: str, case: Case, difference: Difference) -> None:
        super().__init__(f"{law}: {case}: {difference}")
        self.law, self.case, self.difference = law, case, difference


Cases = Callable[[Subject, tuple[str, ...]], Iterable[Case]]
Claim = Callable[[Subject], str | None]


@dataclasses.dataclass(frozen=True)
class Law:
    """A law: a `statement` of one sentence, and a `check` that raises `Difference` if a case breaks it.

    `cases` returns the cases that `jshadow laws` checks for (subject, fetch modes). `unclaimed` returns why the law
    does not apply to a subject, or None if it applies. Calling a law with a case checks the case.
    """

    name: str
    statement: str
    check: Callable[[Case], None]
    cases: Cases
    unclaimed: Claim

    def __call__(self, case: Case) -> None:
        """Raise LawBroken if the case breaks the law."""
        try:
            self.check(case)
        except Difference as difference:
            raise LawBroken(self.name, case, difference) from None


LAWS: dict[str, Law] = {}


def in_each_mode(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """Return the cases with small settings in every fetch mode."""
    return [Case(subject, fetch) for fetch in fetches]


def in_one_mode(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """Return the case with small settings in the first fetch mode. Another law checks that all modes agree."""
    return [Case(subject, fetches[0])]


def both_settings(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """Return the cases with small settings, and with lossless settings if there are any, in every fetch mode."""
    settings = ("small",) if subject.lossless is None else ("small", "lossless")
    return [Case(subject, fetch, setting) for fetch in fetches for setting in settings]


def _always(subject: Subject) -> str | None:
    return None


def lossless_only(subject: Subject) -> str | None:
    """Return why a law about lossless settings does not apply to a policy, or None if it applies."""
    return "no lossless settings are registered" if subject.lossless is None else None


def law(statement: str, *, cases: Cases = in_each_mode, unclaimed: Claim = _always) -> Callable[[Any], Law]:
    """Return a decorator that turns the function that checks a law into a `Law`, and adds it to LAWS."""

    def add(check: Callable[[Case], None]) -> Law:
        new = Law(check.__name__, statement, check, cases, unclaimed)
        LAWS[new.name] = new
        return new

    return add


# Comparisons for the functions of laws


def close(got: Any, want: Any, tolerance: float, place: str = "logits") -> None:
    """Raise Difference if the shapes of two arrays differ, or if their numbers differ by more than the tolerance.

    `place` is the name of the arrays in the error.
    """
    try:
        np.testing.assert_allclose(got, want, rtol=RELATIVE, atol=tolerance)
    except AssertionError:
        raise Difference(*_measured(got, want, place), tolerance) from None


def equal(got: Any, want: Any, place: str) -> None:
    """Raise Difference unless two arrays are equal. `place` is the name of the arrays in the error."""
    try:
        np.testing.assert_array_equal(got, want)
    except AssertionError:
        raise Difference(*_measured(got, want, place), 0.0) from None


def holds(condition: Any, place: str) -> None:
    """Raise Difference unless the condition is true. `place` is a sentence that describes the problem."""
    if not condition:
        raise Difference(place)


def _measured(got: Any, want: Any, place: str) -> tuple[str, float]:
    """Return the place and the largest absolute difference of two arrays."""
    one, two = (np.asarray(array).astype(np.float64) for array in (got, want))
    if one.shape != two.shape:
        return f"{place}: shapes {one.shape} and {two.shape}", float("inf")
    apart = np.abs(one - two)[~((one == two) | (np.isnan(one) & np.isnan(two)))]
    return place, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


def paths_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
