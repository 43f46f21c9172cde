"""The settings of an evaluation, and the plan of each task."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jshadow.evaluation.tasks import Case
from jshadow.ops.layout import round_up
from jshadow.policies import Policy
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import with_fitted
from jshadow.policies.checks import reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention

WIDTHS = 8  # prompts of different lengths are padded to at most this many widths
ROOM_STEP = 64  # rooms are multiples of it


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """The settings of `evaluate`.

    Attributes:
        samples: number of cases of each task and length. Their depths are spread evenly.
        seed: seed of the cases.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        shares: shares of full attention's device bytes in bfloat16. Each policy runs with its largest settings within
            each share, with its rows offloaded if it offloads. You may give a setting only if it takes almost no device
            memory, for example `quest:budget=256`. With shares there is no negative control, and all tasks of a length
            have the same capacity.
        sweeps: maps the dotted name of a setting to policies that differ in it. They run with their settings unchanged,
            in addition to the policies at shares. With sweeps there is no negative control.
        prefill: the attention between the tokens of every prompt, also under full attention. None means exact.
        fitted: maps the name of a policy to the arrays that it has learned (`policy.fit`, `load_fitted`).
        data: local files (.jsonl, .json, .parquet) whose rows are also evaluated (see `evaluation.data`).
        truncate: "middle" cuts a context that exceeds the model's context, and reports it. None raises an error.
        limit: number of rows that are read from each file. None means all.
        together: number of samples of a task that run as the rows of one batch, if each has one question. Their scores
            are those of single samples, except where rounding decides a near tie.
        cases: a file of the tasks' prompts. If it exists, they are read from it, and the packages that make them are
            not needed. Otherwise they are made and written to it (see `evaluation.case_file`).
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
    together: int = 1
    cases: str | os.PathLike[str] | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """The arguments that all samples share.

    Attributes:
        params: the model's Params, with a tokenizer.
        fetch: the resolved fetch mode.
        prefill: the attention between the tokens of a prompt. None means exact.
        fitted: learned arrays by name of the policy that reads them.
        together: see `EvalSettings`.
    """

    params: Any
    fetch: str
    prefill: PrefillAttention | None
    fitted: Mapping[str, Any]
    together: int = 1

    def arrays_of(self, policy: Policy) -> Any:
        """Return the learned arrays that a policy reads, or None."""
        return self.fitted.get(innermost(policy).name) if reads_fitted(policy) else None

    def taught(self, policy: Policy) -> Policy:
        """Return the policy, set to read learned arrays if there are arrays for it."""
        return with_fitted(policy) if innermost(policy).name in self.fitted else policy


@dataclasses.dataclass(frozen=True)
class Entry:
    """A policy in the table of a task.

    Attributes:
        policy: the policy that runs. None means that nothing runs, for the reason `infeasible`.
        control_of: for a negative control, the label of the policy whose device bytes it gets. Otherwise None.
        share: the share of full attention's device bytes that the policy must not exceed, or None.
        name: name of the policy if `policy` is None.
        infeasible: the reason if `policy` is None.
        sweeps: names of the settings whose sweeps contain the policy.
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
        task: name of the task.
        length: requested number of tokens of the prompts. For data, the length of the longest prompt. For the tasks of
            RULER, the number of tokens of a prompt and its answer.
        capacity: maximum number of tokens of each state.
        cases: the cases.
        entries: the policies that run.
        depths: place of each case's fact, from 0 to 1, or None if a case has none.
    """

    task: str
    length: int
    capacity: int
    cases: tuple[Case, ...]
    entries: tuple[Entry, ...]
    depths: tuple[float | None, ...] = ()

    @property
    def shortest(self) -> int:
        """Length of the shortest prompt in tokens."""
        return min(len(case.prompt) for case in self.cases)

    @property
    def room(self) -> int | None:
        """Number of tokens that a state may take after its prompt, or None if all prompts have the same length.

        It sizes the windows of the states. It is rounded up, so that tasks with similar answers share their programs.
        """
        if self.shortest == max(len(case.prompt) for case in self.cases):
            return None
        return round_up(max(case.growth for case in self.cases), ROOM_STEP)

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `footprint` that describe the states."""
        return {"capacity": self.capacity, "prompt": self.shortest, "room": self.room}

    def width(self, case: Case) -> int:
        """Return the width that a prompt is padded to: a multiple of an eighth of the longest prompt.

        So few programs are compiled. If all prompts of a task have the same length, they are not padded.
        """
        step = -(-self.length // WIDTHS)
        return round_up(len(case.prompt), step, self.length)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluate` has to do. Everything in it is checked.

    Attributes:
        setup: the arguments that all samples share.
        plans: a plan for each task and length.
        settings: the settings.
    """

    setup: Setup
    plans: tuple[TaskPlan, ...]
    settings: EvalSettings

    @property
    def model(self) -> str:
        """The config of the model, and the digest of its weights."""
        return model_of(self.setup.params)


def model_of(params: Any) -> str:
    """Return the config of a model and the digest of its weights."""
    return f"{params.config} {params.digest}"
