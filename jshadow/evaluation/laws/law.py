"""What a law is: a sentence that holds for every policy, and a function that checks it on one case."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jshadow.errors import JshadowError
from jshadow.policies.base import Policy

# Times the wanted number, this is added to every tolerance: float32 holds seven digits.
RELATIVE = 1e-7


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy in the two settings in which the laws run.

    Attributes:
        name: as reports call it.
        small: settings that drop or approximate something on the laws' prompts.
        lossless: settings that equal full attention there; None: the policy claims none.
    """

    name: str
    small: Policy
    lossless: Policy | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """What one check of a law runs on.

    Attributes:
        subject: the policy.
        fetch: fetch mode.
        setting: "small" or "lossless".
        row: the row of the batch that the law is about; None: all.
        piece: tokens of a piece of the prompt; None: the prompt is one piece.
    """

    subject: Subject
    fetch: str = "resident"
    setting: str = "small"
    row: int | None = None
    piece: int | None = None

    @property
    def policy(self) -> Policy:
        """The subject in the case's setting."""
        policy = self.subject.small if self.setting == "small" else self.subject.lossless
        assert policy is not None, f"{self.subject.name} claims no lossless settings"
        return policy

    def __str__(self) -> str:
        """Such as "quest small device_put row 1"."""
        words = [self.subject.name, self.setting, self.fetch]
        words += [f"{name} {value}" for name, value in (("row", self.row), ("piece", self.piece)) if value is not None]
        return " ".join(words)


class Difference(Exception):
    """What a law's function raises: two things that must agree do not.

    Attributes:
        place: what differs, such as "logits" or the path of a leaf of the state.
        largest: the largest absolute difference; None where it is no number (a shape, a missing error).
        tolerance: what it may be at most; None likewise.
    """

    def __init__(self, place: str, largest: float | None = None, tolerance: float | None = None) -> None:
        super().__init__(place)
        self.place, self.largest, self.tolerance = place, largest, tolerance

    def __str__(self) -> str:
        """One line."""
        if self.largest is None:
            return self.place
        return f"{self.place} differ by {self.largest:.3g}, tolerance {self.tolerance:g}"


class LawBroken(JshadowError, AssertionError):
    """A policy breaks a law.

    Attributes:
        law: the law's name.
        case: on which it broke.
        difference: what differs there, by how much, and what the tolerance is.
    """

    def __init__(self, law: str, case: Case, difference: Difference) -> None:
        super().__init__(f"{law}: {case}: {difference}")
        self.law, self.case, self.difference = law, case, difference


Cases = Callable[[Subject, tuple[str, ...]], Iterable[Case]]
Claim = Callable[[Subject], str | None]


@dataclasses.dataclass(frozen=True)
class Law:
    """A law. Calling it with a case checks the case.

    Attributes:
        name: a Python name.
        statement: one sentence.
        check: raises `Difference` where the case breaks the law.
        cases: (subject, fetch modes) -> the cases that `jshadow laws` checks.
        unclaimed: why the law says nothing about a subject, or None where it does.
    """

    name: str
    statement: str
    check: Callable[[Case], None]
    cases: Cases
    unclaimed: Claim

    def __call__(self, case: Case) -> None:
        """Raise LawBroken where the case breaks the law."""
        try:
            self.check(case)
        except Difference as difference:
            raise LawBroken(self.name, case, difference) from None


LAWS: dict[str, Law] = {}


def in_each_mode(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """The small settings, in every fetch mode."""
    return [Case(subject, fetch) for fetch in fetches]


def in_one_mode(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """The small settings in the first fetch mode: the law that the modes agree speaks for the others."""
    return [Case(subject, fetches[0])]


def both_settings(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """The small and, where there are any, the lossless settings, in every fetch mode."""
    settings = ("small",) if subject.lossless is None else ("small", "lossless")
    return [Case(subject, fetch, setting) for fetch in fetches for setting in settings]


def always(subject: Subject) -> str | None:
    """The law is about every policy."""
    return None


def lossless_only(subject: Subject) -> str | None:
    """The law is about policies with lossless settings."""
    return "no lossless settings are registered" if subject.lossless is None else None


def law(statement: str, *, cases: Cases = in_each_mode, unclaimed: Claim = always) -> Callable[[Any], Law]:
    """A decorator that makes a law of the function that checks it, and lists it in LAWS.

    Args:
        statement: one sentence.
        cases: see `Law`.
        unclaimed: see `Law`.
    """

    def add(check: Callable[[Case], None]) -> Law:
        new = Law(check.__name__, statement, check, cases, unclaimed)
        LAWS[new.name] = new
        return new

    return add


# What a law's function compares with


def close(got: Any, want: Any, tolerance: float, place: str = "logits") -> None:
    """Raise Difference where two arrays of one shape differ by more than the tolerance."""
    try:
        np.testing.assert_allclose(got, want, rtol=RELATIVE, atol=tolerance)
    except AssertionError:
        raise Difference(*measured(got, want, place), tolerance) from None


def equal(got: Any, want: Any, place: str) -> None:
    """Raise Difference where two arrays differ at all."""
    try:
        np.testing.assert_array_equal(got, want)
    except AssertionError:
        raise Difference(*measured(got, want, place), 0.0) from None


def holds(condition: Any, place: str) -> None:
    """Raise Difference, with a sentence about what is wrong, unless the condition is true."""
    if not condition:
        raise Difference(place)


def measured(got: Any, want: Any, place: str) -> tuple[str, float]:
    """The place, and the largest difference there: infinite where shapes differ or one has no number."""
    one, two = (np.asarray(array).astype(np.float64) for array in (got, want))
    if one.shape != two.shape:
        return f"{place}: shapes {one.shape} and {two.shape}", float("inf")
    apart = np.abs(one - two)[~((one == two) | (np.isnan(one) & np.isnan(two)))]
    return place, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


def paths_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
