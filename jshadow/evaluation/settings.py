"""The records of an evaluation: what it was asked to do, and what runs on each task."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jshadow.evaluation.tasks import Case
from jshadow.ops.buckets import round_up
from jshadow.policies import Policy
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import with_fitted
from jshadow.policies.checks import reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention

WIDTHS = 8  # to which prompts of many lengths are padded


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """How `evaluate` measures.

    Attributes:
        samples: cases of each task and length, their depths spread evenly.
        seed: of the cases.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        shares: run each policy at its `nominal` setting for each of these shares of full attention's device bytes in
            bfloat16, offloaded where it offloads. A given setting is only kept where it takes no memory
            (`quest:budget=256`). There is no negative control then, and all tasks of a length have one capacity.
        sweeps: policies by the setting in which they differ. They run as they are, beside those at shares. There is no
            negative control then.
        prefill: how the tokens of every prompt attend to each other, under full attention too; None: exactly.
        fitted: arrays that a policy learned (`policy.fit`, `load_fitted`), by the policy's name, for all its settings.
        data: local files (.jsonl, .json, .parquet) whose rows are evaluated too (`evaluation.data`).
        truncate: "middle": cut a context that does not fit the model, and report it; None: that is an error.
        limit: rows of each file; None: all.
    """

    samples: int = 10
    seed: int = 0
    fetch: str = "auto"
    shares: Sequence[float] = ()
    sweeps: Mapping[str, Sequence[Policy]] | None = None
    prefill: PrefillAttention | None = None
    fitted: Mapping[str, Any] | None = None
    data: Sequence[str | os.PathLike[str]] = ()
    truncate: str | None = None
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all samples have in common.

    Attributes:
        params: Params with a tokenizer.
        fetch: a resolved fetch mode.
        prefill: how a prompt's tokens attend to each other; None: exactly.
        fitted: learned arrays, by the name of the policy that reads them.
    """

    params: Any
    fetch: str
    prefill: PrefillAttention | None
    fitted: Mapping[str, Any]

    def arrays_of(self, policy: Policy) -> Any:
        """What a policy learned, or None."""
        return self.fitted.get(innermost(policy).name) if reads_fitted(policy) else None

    def taught(self, policy: Policy) -> Policy:
        """The policy, switched to its learned arrays where there are any."""
        return with_fitted(policy) if innermost(policy).name in self.fitted else policy


@dataclasses.dataclass(frozen=True)
class Entry:
    """A policy in the table of a task.

    Attributes:
        policy: what runs; None: nothing does, and `infeasible` says why.
        control_of: the policy at whose bytes a negative control runs.
        share: of full attention's device bytes that the policy was given.
        name: the policy's name, where `policy` is None.
        infeasible: why there is no policy.
        sweeps: the settings in whose sweep it is a step.
    """

    policy: Policy | None
    control_of: str | None = None
    share: float | None = None
    name: str = ""
    infeasible: str | None = None
    sweeps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """One task at one length: the cases, the capacity that they share, and the policies that run on them.

    Attributes:
        task: its name.
        length: tokens of the prompts as asked for; of data, tokens of the longest prompt.
        capacity: tokens that each state may hold.
        cases: the samples.
        entries: what runs.
        depths: of the cases' facts, 0 to 1; None in place of a depth where a case has none.
    """

    task: str
    length: int
    capacity: int
    cases: tuple[Case, ...]
    entries: tuple[Entry, ...]
    depths: tuple[float | None, ...] = ()

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt, by which the windows of all are sized."""
        return min(len(case.prompt) for case in self.cases)

    def width(self, case: Case) -> int:
        """Tokens to which a prompt is padded: a multiple of an eighth of the longest one, so that few programs do.

        The step follows from the longest prompt, not from this one: a task of one length is never padded.
        """
        step = -(-self.length // WIDTHS)
        return round_up(len(case.prompt), step, self.length)
