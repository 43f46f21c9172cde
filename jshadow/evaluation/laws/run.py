"""The laws on one policy, one after the other: what `jshadow laws` prints."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax

from jshadow.errors import ConfigError
from jshadow.evaluation.laws.inputs import FETCH_MODES, modes_of
from jshadow.evaluation.laws.law import LAWS, Case, Difference, Law, LawBroken, Subject


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a law on a policy.

    Attributes:
        law: the law.
        cases: how many cases were checked.
        broken: one error for each case that breaks the law.
        unclaimed: why the law says nothing about the policy; None: it does.
    """

    law: Law
    cases: int
    broken: tuple[LawBroken, ...] = ()
    unclaimed: str | None = None

    @property
    def status(self) -> str:
        """ "ok", "not claimed" or "BROKEN"."""
        if self.unclaimed is not None:
            return "not claimed"
        return "BROKEN" if self.broken else "ok"


def run_laws(
    subject: Subject, fetches: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> Iterator[Outcome]:
    """Check laws on a policy, and give what became of each as soon as it is known.

    Args:
        subject: the policy, see `subject_of`.
        fetches: fetch modes of the laws that hold in each; None: the one that offloads, where the policy offloads.
            The law that the modes agree compares all of them in any case.
        names: of laws; None: all.

    Raises:
        ConfigError: an unknown law or fetch mode, before any law runs.
    """
    laws = [find_law(name) for name in LAWS if names is None] + [find_law(name) for name in names or ()]
    for fetch in fetches or ():
        if fetch not in FETCH_MODES:
            raise ConfigError(f"fetch must be among {', '.join(FETCH_MODES)}, got {fetch!r}")
    return (outcome_of(law, subject, fetches) for law in laws)


def find_law(name: str) -> Law:
    """A law by its name. Raises ConfigError where there is none."""
    if name not in LAWS:
        raise ConfigError(f"law must be one of {', '.join(LAWS)}, got {name!r}")
    return LAWS[name]


def outcome_of(law: Law, subject: Subject, fetches: Sequence[str] | None = None) -> Outcome:
    """Check all cases of a law. An error that the policy raises on the way breaks the law too."""
    broken: list[LawBroken] = []
    cases = [Case(subject)]
    try:
        if (reason := law.unclaimed(subject)) is not None:
            return Outcome(law, 0, unclaimed=reason)
        cases = list(law.cases(subject, tuple(fetches or modes_of(subject))))
    except Exception as error:
        broken.append(as_broken(law, cases[0], error))
        return Outcome(law, 1, tuple(broken))
    for case in cases:
        try:
            law(case)
        except Exception as error:
            broken.append(as_broken(law, case, error))
    return Outcome(law, len(cases), tuple(broken))


def as_broken(law: Law, case: Case, error: Exception) -> LawBroken:
    """A law's own error, or one that says which error the policy raised."""
    if isinstance(error, LawBroken):
        return error
    text = " ".join(str(error).split())
    broken = LawBroken(law.name, case, Difference(f"{type(error).__name__}: {text:.300}"))
    broken.__cause__ = error
    return broken


def compile_cheaply() -> None:
    """Run on the CPU and leave out LLVM's optimisations, unless JAX_PLATFORMS and XLA_FLAGS say otherwise.

    The laws' tolerances are those of float32 on a CPU, and they spend nearly all of their time compiling. It must be
    called before JAX has computed anything.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
