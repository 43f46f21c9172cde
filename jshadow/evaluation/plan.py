"""Planning an evaluation: its settings, and for each task and length its cases and the policies that run on them."""

import dataclasses
import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError, Infeasible, check_integer
from jshadow.evaluation.data import read_cases, whole_file
from jshadow.evaluation.tasks import Case, Sample, ruler, sample_of
from jshadow.evaluation.tasks.documents import document_case
from jshadow.models.config import ModelConfig
from jshadow.ops.buckets import round_up
from jshadow.planner.machine import footprint
from jshadow.policies import Full, Policy, ShadowKV, StreamingLLM, Wrapper
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import Sized, with_fitted
from jshadow.policies.checks import check_fitted, reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.settings import changed_settings, dotted_settings, policy_settings, with_settings
from jshadow.policies.sizing import at_share as sized_to

_WIDTHS = 8  # prompts of different lengths are padded to at most this many widths
_ROOM_STEP = 64  # rooms are multiples of it


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
            not needed. Otherwise they are made and written to it (see `_write_case_file`).
        documents: texts by name, on which policies are compared with full attention (`tasks.documents`).
        questions: questions about each of these texts. Without any, passages of the texts are continued.
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
    documents: Mapping[str, str] | None = None
    questions: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Setup:
    """The arguments that all samples share: the Params with a tokenizer, the resolved fetch mode, and settings.

    `fitted` has the learned arrays by the name of the policy that reads them.
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
    """A policy in the table of a task. If no setting stays within its `share`, it has no policy, but a name and a
    reason.

    For a negative control, `control_of` is the label of the policy whose device bytes it gets. `sweeps` names the
    settings whose sweeps contain the policy.
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

    `length` is the requested number of tokens of the prompts; for data, that of the longest prompt; for the tasks of
    RULER, that of a prompt and its answer. `depths` has the place of each case's fact, from 0 to 1, or None.
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
        return round_up(max(case.growth for case in self.cases), _ROOM_STEP)

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `footprint` that describe the states."""
        return {"capacity": self.capacity, "prompt": self.shortest, "room": self.room}

    def width(self, case: Case) -> int:
        """Return the width that a prompt is padded to: a multiple of an eighth of the longest prompt.

        So few programs are compiled. If all prompts of a task have the same length, they are not padded.
        """
        step = -(-self.length // _WIDTHS)
        return round_up(len(case.prompt), step, self.length)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluate` has to do, with a plan for each task and length. Everything in it is checked."""

    setup: Setup
    plans: tuple[TaskPlan, ...]
    settings: EvalSettings

    @property
    def model(self) -> str:
        """The config of the model, and the digest of its weights."""
        return model_of(self.setup.params)

    def with_policies(self, policies: Sequence[Policy]) -> "Evaluation":
        """Return the evaluation of other policies on the same cases, without shares and sweeps.

        Raises:
            ConfigError: a policy cannot run.
        """
        measured = list(dict.fromkeys([Full(), *policies]))
        entries = [_entries_of(self.setup, plan, measured, (), {}) for plan in self.plans]
        plans = (dataclasses.replace(plan, entries=of_plan) for plan, of_plan in zip(self.plans, entries, strict=True))
        return dataclasses.replace(self, plans=tuple(plans))


def model_of(params: Any) -> str:
    """Return the config of a model and the digest of its weights."""
    return f"{params.config} {params.digest}"


def label(policy: Policy) -> str:
    """Return a policy in the syntax of `--policies`: NAME, and :key=value for each setting that is not its default."""
    if isinstance(policy, Wrapper):
        keys = [name for name in policy_settings(policy) if name != "inner"]
        around = [f"{policy.name}.{name}={json.dumps(getattr(policy, name))}" for name in keys]
        return ":".join([label(policy.inner), *around])
    changed = changed_settings(policy)
    return ":".join([policy.name, *(f"{name}={json.dumps(value)}" for name, value in changed.items())])


# The cases of a task, each with the place of its fact, from 0 to 1, or None.
Cases = list[tuple[Case, float | None]]
_VERSION = 1


def _read_case_file(
    path: str | os.PathLike[str], rule: Mapping[str, Any], wanted: Mapping[int, Sequence[str]]
) -> dict[int, dict[str, Cases]]:
    """Return the wanted cases of a file. Raises ConfigError if it has other entries than those of `rule`."""
    try:
        content = json.loads(gzip.decompress(Path(path).read_bytes()))
        for name, value in rule.items():
            if content[name] != value:
                raise ConfigError(f"cases must be a file with {name}={value!r}, got {content[name]!r} in {path}")
        made = {
            int(length): {task: [_case_of(*pair) for pair in pairs] for task, pairs in tasks.items()}
            for length, tasks in content["cases"].items()
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cases must be a file that --cases wrote, got {path}: {error!r}") from error
    for length, tasks in wanted.items():
        if missing := [task for task in tasks if task not in made.get(length, {})]:
            raise ConfigError(f"cases must be a file with {missing[0]} at {length} tokens, but {path} has none")
    return {length: {task: made[length][task] for task in tasks} for length, tasks in wanted.items()}


def _case_of(case: Mapping[str, Any], depth: float | None) -> tuple[Case, float | None]:
    """Return a case and the place of its fact from their JSON form."""
    samples = tuple(Sample(**{name: _as_tuple(value) for name, value in one.items()}) for one in case["samples"])
    others = {name: _as_tuple(value) for name, value in case.items() if name != "samples"}
    return Case(samples, **others), depth


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _write_case_file(
    path: str | os.PathLike[str], rule: Mapping[str, Any], made: Mapping[int, Mapping[str, Cases]]
) -> None:
    cases = {
        length: {task: [(dataclasses.asdict(case), depth) for case, depth in pairs] for task, pairs in tasks.items()}
        for length, tasks in made.items()
    }
    with whole_file(path, "cases") as part:
        part.write_bytes(gzip.compress(json.dumps({**rule, "cases": cases}).encode(), mtime=0))


SERVED = "bfloat16"  # shares count bytes in this dtype; beside float32, packed codes would look better than they are
_SLACK = 0.05  # a setting may be given with a share if it changes the policy's device bytes by at most this fraction


def control(params: Any, policy: ShadowKV, plan: TaskPlan) -> StreamingLLM | None:
    """Return StreamingLLM with the device bytes of a ShadowKV whose values are offloaded.

    The result is None if even the smallest StreamingLLM takes more bytes. This is a negative control. It keeps the
    newest tokens and selects nothing. If it solves a task, the task does not need selection.
    """
    taken = footprint(params.config, policy, **plan.sizes, dtype=params.dtype.name, fetch="device_put")
    try:
        return sized_to(StreamingLLM(), taken["device_bytes"] / taken["full_bytes"], plan.capacity, params.config)
    except Infeasible:
        return None


def _at_share(setup: Setup, policy: Policy, share: float, plan: TaskPlan) -> Entry:
    """Return a policy with the largest settings whose device bytes stay within a share of full attention's."""
    config, capacity = setup.params.config, plan.capacity

    def taken(policy: Policy) -> float:
        used = footprint(config, policy, **plan.sizes, dtype=SERVED, fetch="device_put")
        return float(used["device_bytes"] / used["full_bytes"])

    fraction = share
    try:
        while (used := taken(sized := setup.taught(sized_to(policy, fraction, capacity, config)))) > share:
            fraction -= max(used - share, share / 200)
    except (Infeasible, ConfigError):
        least = _least_share(policy, capacity, config, taken)
        reason = f"{policy.name}: the share must be at least {least:.4f} of full attention's bytes, got {share!r}"
        return Entry(None, None, share, policy.name, reason)
    given, changed = changed_settings(policy), changed_settings(sized)
    asked = with_settings(sized, given)
    free = policy.size_free if isinstance(policy, Sized) else ()
    decided = [name for name in given if name in changed and name.partition(".")[0] not in free]
    if decided or abs(taken(asked) - used) > _SLACK * used:
        raise ConfigError(f"shares decide all settings of a policy that take memory, got {label(policy)}")
    return Entry(asked, share=share)


def _least_share(policy: Policy, capacity: int, config: ModelConfig, taken: Callable[[Policy], float]) -> float:
    """Return the share of device bytes of a policy's smallest settings."""
    low, high = 0.0, 2.0  # a policy may take more than full attention, because it also stores masks and positions
    for _ in range(13):
        middle = (low + high) / 2
        try:
            sized_to(policy, middle, capacity, config)
            high = middle
        except Infeasible:
            low = middle
    return taken(sized_to(policy, high, capacity, config))


def plan_tasks(
    setup: Setup, tasks: Sequence[str], lengths: Sequence[int], policies: Sequence[Policy], settings: EvalSettings
) -> list[TaskPlan]:
    """Create every case and check every policy, before anything runs. The arguments are those of `evaluate`.

    Raises:
        ConfigError: a task is unknown, there is no policy, a number is out of range, a length or a row of data exceeds
            the model's context, a file cannot be read or does not fit, no policy reads the learned arrays, or RULER's
            package or data is missing.
    """
    samples, shares = settings.samples, settings.shares
    check_integer("samples", samples, least=1)
    lists: list[tuple[str, Any]] = [("tasks", tasks), ("lengths", lengths), ("policies", policies)]
    for name, values in lists[2 if (settings.data or settings.documents) and not tasks else 0 :]:
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"{name} must be a non-empty list, got {values!r}")
    measured, swept = _checked_policies(setup, policies, shares), _checked_sweeps(settings.sweeps or {})
    one_table = bool(shares or swept)  # one table shows all tasks
    made = _cases_of(setup, tasks, lengths, settings)
    plans = [plan for length in made for plan in _plans_at(setup, length, made[length], one_table)]
    if not one_table:
        plans.sort(key=lambda plan: tasks.index(plan.task))
    plans += [*_data_plans(setup, settings), *_document_plans(setup, settings)]
    return [dataclasses.replace(plan, entries=_entries_of(setup, plan, measured, shares, swept)) for plan in plans]


def _checked_policies(setup: Setup, policies: Sequence[Policy], shares: Sequence[float]) -> list[Policy]:
    """Return full attention and the policies without duplicates. Raises ConfigError for bad policies or shares."""
    if bad := [policy for policy in policies if not isinstance(policy, Policy)]:
        raise ConfigError(f"policies must be Policy values, got {bad[0]!r}")
    if wrong := [share for share in shares if isinstance(share, bool) or not 0 < share <= 1]:
        raise ConfigError(f"shares must be in (0, 1], got {wrong[0]!r}")
    measured = list(dict.fromkeys([Full(), *policies]))
    if shares and (wrapped := [policy for policy in measured if isinstance(policy, Wrapper)]):
        raise ConfigError(f"shares decide all settings of a policy, wrappers too, got {label(wrapped[0])}")
    if unread := [name for name in setup.fitted if name not in {innermost(policy).name for policy in measured}]:
        raise ConfigError(f"fitted must be arrays of these policies, got those of {unread[0]}")
    return measured


def _checked_sweeps(sweeps: Mapping[str, Sequence[Policy]]) -> dict[Policy, tuple[str, ...]]:
    """Return each policy of the sweeps with the names of the settings that it belongs to."""
    swept: dict[Policy, tuple[str, ...]] = {}
    for name, policies in sweeps.items():
        for policy in policies:
            if not isinstance(policy, Policy) or name not in dotted_settings(policy):
                raise ConfigError(f"sweeps must map a setting to policies that have it, got {policy!r} for {name!r}")
            swept[policy] = (*swept.get(policy, ()), name)
    return swept


def _cases_of(
    setup: Setup, tasks: Sequence[str], lengths: Sequence[int], settings: EvalSettings
) -> Mapping[int, Mapping[str, Cases]]:
    """Return the cases of each length and task. They are read from the file `settings.cases`, or made."""
    params, samples, seed, file = setup.params, settings.samples, settings.seed, settings.cases
    wanted = {length: list(dict.fromkeys(tasks)) for length in lengths}
    rule: dict[str, Any] = {}
    if file is not None:
        rule = {"version": _VERSION, "tokenizer": params.tokenizer_digest, "samples": samples, "seed": seed}
        if Path(file).exists():
            return _read_case_file(file, rule, wanted)
    ruler.check_tasks(tasks, lengths, params.config.context)
    made: dict[int, dict[str, Cases]] = {}
    for length, names in wanted.items():
        published = ruler.among(names)
        theirs = ruler.cases_at(published, params.tokenizer, length, samples, seed) if published else {}
        made[length] = {
            task: [(case, None) for case in theirs[task]]
            if task in theirs
            else [sample_of(task, params.tokenizer, length, index, samples, seed) for index in range(samples)]
            for task in names
        }
    if file is not None:
        _write_case_file(file, rule, made)
    return made


def _plans_at(setup: Setup, length: int, pairs_of: Mapping[str, Cases], one_capacity: bool) -> list[TaskPlan]:
    """Plan all tasks at one length, without entries. With `one_capacity`, all tasks have the same capacity."""
    params, published, plans = setup.params, ruler.among(list(pairs_of)), []
    # The length of a task of RULER includes the answer.
    growths = {
        task: 0 if task in published else max(case.growth for case, _ in pairs) for task, pairs in pairs_of.items()
    }
    for task, pairs in pairs_of.items():
        cases, depths = zip(*pairs, strict=True)
        capacity = length + (max(growths.values()) if one_capacity else growths[task])
        if capacity > params.config.context:
            room = f"the model's context={params.config.context}"
            raise ConfigError(f"lengths must leave room in {room}, got {length} + {capacity - length} for {task}")
        plans.append(TaskPlan(task, length, capacity, cases, (), () if cases[0].forced else depths))
    return plans


def _data_plans(setup: Setup, settings: EvalSettings) -> list[TaskPlan]:
    if not settings.data:
        return []
    params, plans = setup.params, []
    files = tuple(settings.data)
    for group in read_cases(
        files, params.tokenizer, params.config.context, truncate=settings.truncate, limit=settings.limit
    ):
        length = max(len(case.prompt) for case in group.cases)
        # The longest prompt and the longest answer may belong to different cases.
        capacity = min(length + max(case.growth for case in group.cases), params.config.context)
        plans.append(TaskPlan(group.task, length, capacity, group.cases, (), group.depths))
    return plans


def _document_plans(setup: Setup, settings: EvalSettings) -> list[TaskPlan]:
    """Return one plan with all documents, so that they share their programs."""
    config, tokenizer, questions = setup.params.config, setup.params.tokenizer, settings.questions
    texts = (settings.documents or {}).items()
    cases = tuple(document_case(tokenizer, name, text, questions, config.context) for name, text in texts)
    if not cases:
        return []
    length = max(len(case.prompt) for case in cases)
    capacity = min(length + max(case.growth for case in cases), config.context)
    return [TaskPlan("documents", length, capacity, cases, ())]


def _entries_of(
    setup: Setup,
    plan: TaskPlan,
    policies: Sequence[Policy],
    shares: Sequence[float],
    swept: Mapping[Policy, tuple[str, ...]],
) -> tuple[Entry, ...]:
    """Return the entries of a task's table, full attention first. Raises ConfigError if a policy cannot run."""
    if shares:
        full, *others = policies
        entries = [Entry(full)]
        entries += [_at_share(setup, policy, share, plan) for share in shares for policy in others]
    else:
        entries = [Entry(setup.taught(policy)) for policy in policies]
        has_control = not plan.cases[0].compares and not ruler.among([plan.task])
        for policy in policies:
            if isinstance(policy, ShadowKV) and has_control and not swept:
                policy.resolve(setup.params.config, plan.capacity)
                small = control(setup.params, policy, plan)
                entries += [Entry(small, label(policy))] if small is not None else []
    entries += [Entry(setup.taught(policy), sweeps=names) for policy, names in swept.items()]
    for entry in entries:
        if entry.policy is not None:
            resolved = entry.policy.resolve(setup.params.config, plan.capacity)
            check_fitted(resolved, setup.params.config, setup.arrays_of(resolved))
    return tuple(entries)
