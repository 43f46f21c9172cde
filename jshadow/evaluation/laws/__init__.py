"""The laws that every policy must keep. They need neither pytest nor the tests folder.

A law is a sentence, and a function that checks it on one case. A case is a policy with its small or lossless settings
in one fetch mode. All cases use the same tiny random model and the same ragged batch. The command
`jshadow laws my_module:MyPolicy` runs all laws. In Python:

    from jshadow.evaluation.laws import run_laws, subject_of

    for outcome in run_laws(subject_of(MyPolicy)):
        print(outcome.status, outcome.law.name, *outcome.broken)
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax

from jshadow.errors import ConfigError
from jshadow.evaluation.laws import laws
from jshadow.evaluation.laws.law import (
    FETCH_MODES,
    LAWS,
    Case,
    Difference,
    Law,
    LawBroken,
    Subject,
    modes_of,
    subject_of,
)

__all__ = ["LAWS", "Case", "Law", "LawBroken", "Outcome", "Subject", "laws", "run_laws", "subject_of"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of checking a law on a policy: how many cases were checked, and the error of each broken one.

    `unclaimed` says why the law does not apply to the policy, or is None if it applies.
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
    """Check laws on a policy, and yield each outcome as soon as it is known.

    Args:
        subject: the policy, see `subject_of`.
        fetches: fetch modes of the laws that are checked in each mode. None means "device_put" if the policy offloads,
            else "resident". The law that all modes agree always checks all of them.
        names: names of the laws to check. None means all.

    Raises:
        ConfigError: a law or a fetch mode is unknown. It is raised before any law runs.
    """
    laws = [_find_law(name) for name in LAWS if names is None] + [_find_law(name) for name in names or ()]
    for fetch in fetches or ():
        if fetch not in FETCH_MODES:
            raise ConfigError(f"fetch must be among {', '.join(FETCH_MODES)}, got {fetch!r}")
    return (_outcome_of(law, subject, fetches) for law in laws)


def _find_law(name: str) -> Law:
    """Return the law of a name. Raises ConfigError if there is none."""
    if name not in LAWS:
        raise ConfigError(f"law must be one of {', '.join(LAWS)}, got {name!r}")
    return LAWS[name]


def _outcome_of(law: Law, subject: Subject, fetches: Sequence[str] | None = None) -> Outcome:
    """Check all cases of a law. Any error that the policy raises also counts as breaking the law."""
    broken: list[LawBroken] = []
    cases = [Case(subject)]
    try:
        if (reason := law.unclaimed(subject)) is not None:
            return Outcome(law, 0, unclaimed=reason)
        cases = list(law.cases(subject, tuple(fetches or modes_of(subject))))
    except Exception as error:
        broken.append(_as_broken(law, cases[0], error))
        return Outcome(law, 1, tuple(broken))
    for case in cases:
        try:
            law(case)
        except Exception as error:
            broken.append(_as_broken(law, case, error))
    return Outcome(law, len(cases), tuple(broken))


def _as_broken(law: Law, case: Case, error: Exception) -> LawBroken:
    """Return a LawBroken unchanged, and wrap any other error in a LawBroken that names it."""
    if isinstance(error, LawBroken):
        return error
    text = " ".join(str(error).split())
    broken = LawBroken(law.name, case, Difference(f"{type(error).__name__}: {text:.300}"))
    broken.__cause__ = error
    return broken


def compile_cheaply() -> None:
    """Make JAX run on the CPU without LLVM optimizations, unless JAX_PLATFORMS or XLA_FLAGS is set.

    The tolerances of the laws are made for float32 on a CPU, and the laws spend nearly all of their time compiling.
    This function must be called before JAX computes anything.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
