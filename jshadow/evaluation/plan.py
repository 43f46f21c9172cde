"""What one evaluation runs: each task at each length, its cases, and the policies side by side on them."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jshadow.errors import ConfigError, Infeasible
from jshadow.evaluation import results as metrics
from jshadow.evaluation.data import read_cases
from jshadow.evaluation.tasks import Case, sample_of
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import footprint
from jshadow.policies import Full, Policy, ShadowKV, StreamingLLM, Wrapper
from jshadow.policies.base import check_fitted
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.settings import changed_settings, dotted_settings, with_settings
from jshadow.policies.wrappers import innermost

WIDTHS = 8  # to which prompts of many lengths are padded
SERVED = "bfloat16"  # shares are of bytes in this dtype, whatever computes: packed bits are no fewer beside float32
SLACK = 0.05  # of a policy's device bytes: what a setting changes that may be given with a share


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all samples have in common.

    Attributes:
        params: Params with a tokenizer.
        fetch: a fetch mode, resolved.
        prefill: how a prompt's tokens attend to each other; None: exactly.
        fitted: learned arrays, by the name of the policy that reads them.
    """

    params: Any
    fetch: str
    prefill: PrefillAttention | None
    fitted: Mapping[str, Any]

    def arrays_of(self, policy: Policy) -> Any:
        """What a policy learned, or None."""
        return self.fitted.get(innermost(policy).name) if policy.reads_fitted else None

    def taught(self, policy: Policy) -> Policy:
        """The policy, switched to what it learned where there is that."""
        return policy.with_fitted() if innermost(policy).name in self.fitted else policy


@dataclasses.dataclass(frozen=True)
class Data:
    """Local files to evaluate on.

    Attributes:
        paths: .jsonl, .json or .parquet.
        truncate: "middle", or None: a prompt that does not fit is an error.
        limit: rows of each file; None: all.
    """

    paths: Sequence[str | os.PathLike[str]]
    truncate: str | None = None
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A policy in one table.

    Attributes:
        policy: what runs; None: `infeasible` says why nothing does.
        control_of: the policy at whose bytes a negative control runs.
        share: of full attention's device bytes that it was given.
        name: where it has no policy.
        infeasible: why there is no policy.
        sweeps: settings that it is a step in the sweep of.
    """

    policy: Policy | None
    control_of: str | None = None
    share: float | None = None
    name: str = ""
    infeasible: str | None = None
    sweeps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One task at one length: the cases, the capacity that they share, and what runs on them.

    Attributes:
        task: its name.
        length: tokens of the prompts as asked for; of data, of the longest one.
        capacity: tokens that each state may hold.
        cases: the samples.
        entries: what runs.
        depths: of the cases; None where there is none.
    """

    task: str
    length: int
    capacity: int
    cases: tuple[Case, ...]
    entries: tuple[Entry, ...]
    depths: tuple[float | None, ...] = ()

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt: the windows of all are sized by it."""
        return min(len(case.prompt) for case in self.cases)

    def width(self, case: Case) -> int:
        """Tokens to which a prompt is padded: an eighth of the longest one or another, so that few programs do."""
        step = -(-self.length // WIDTHS)
        return min(-(-len(case.prompt) // step) * step, self.length)


def control(params: Any, policy: ShadowKV, capacity: int, length: int) -> StreamingLLM | None:
    """StreamingLLM at the device bytes that ShadowKV takes with its values offloaded; None where none is that small.

    It keeps the newest tokens whatever they say, so what it finds needs no selection.
    """
    sizes = {"capacity": capacity, "prompt": length, "dtype": params.dtype.name, "fetch": "device_put"}
    taken = footprint(params.config, policy, **sizes)
    try:
        return StreamingLLM.nominal(taken["device_bytes"] / taken["full_bytes"], capacity, params.config)
    except Infeasible:
        return None


def at_share(setup: Setup, policy: Policy, share: float, capacity: int, length: int) -> Entry:
    """A policy at the largest setting that keeps to a share of full attention's device bytes for such a prompt.

    `at_share` counts a prompt that fills the capacity; what a policy keeps of later tokens comes on top here. Settings
    that hardly take device memory (how many tokens a query attends to, of which ids are kept) stay as they were given.

    Raises:
        ConfigError: a setting was given that the share decides.
    """
    config = setup.params.config

    def taken(made: Policy) -> float:
        used = footprint(config, made, capacity=capacity, prompt=length, dtype=SERVED, fetch="device_put")
        return float(used["device_bytes"] / used["full_bytes"])

    fraction = share
    try:
        while (used := taken(made := setup.taught(policy.at_share(fraction, capacity, config)))) > share:
            fraction -= max(used - share, share / 200)
    except (Infeasible, ConfigError):
        least = least_share(policy, capacity, config, taken)
        told = f"{policy.name}: the share must be at least {least:.4f} of full attention's bytes, got {share!r}"
        return Entry(None, None, share, policy.name, told)
    given, changed = changed_settings(policy), changed_settings(made)
    asked = with_settings(made, given)
    decided = [name for name in given if name in changed and name.partition(".")[0] not in policy.kept_fields]
    if decided or abs(taken(asked) - used) > SLACK * used:
        raise ConfigError(f"shares decide all settings of a policy that take memory, got {metrics.label(policy)}")
    return Entry(asked, share=share)


def least_share(policy: Policy, capacity: int, config: ModelConfig, taken: Callable[[Policy], float]) -> float:
    """What a policy's smallest setting takes."""
    low, high = 0.0, 2.0  # masks and positions may take a little more than full attention itself
    for _ in range(13):
        middle = (low + high) / 2
        try:
            policy.at_share(middle, capacity, config)
            high = middle
        except Infeasible:
            low = middle
    return taken(policy.at_share(high, capacity, config))


def plan(
    setup: Setup, tasks: Sequence[str], lengths: Sequence[int], policies: Sequence[Policy], samples: int, seed: int,
    shares: Sequence[float] = (), data: Data | None = None, sweeps: Mapping[str, Sequence[Policy]] | None = None,
) -> list[Cell]:  # fmt: skip
    """Make every case and check every policy, before anything runs.

    Raises:
        ConfigError: an unknown task, no policy, a number out of range, a length or a row of data that the model has no
            room for, a file that cannot be read, or learned arrays that no policy reads.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"samples must be an integer of at least 1, got {samples!r}")
    lists: list[tuple[str, Any]] = [("tasks", tasks), ("lengths", lengths), ("policies", policies)]
    for name, given in lists[2 if data and not tasks else 0 :]:
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigError(f"{name} must be a non-empty list, got {given!r}")
    own, swept = checked_policies(setup, policies, shares), checked_sweeps(sweeps or {})
    whole = bool(shares or swept)  # one table of all tasks
    made = [cell for length in dict.fromkeys(lengths) for cell in cells_at(setup, tasks, length, samples, seed, whole)]
    cells = sorted(made, key=lambda cell: tasks.index(cell.task)) if not whole else made
    if data:
        cells += data_cells(setup, data)
    return [
        dataclasses.replace(
            cell, entries=entries_of(setup, own, cell.cases[0], cell.shortest, cell.capacity, shares, swept)
        )
        for cell in cells
    ]  # fmt: skip


def checked_policies(setup: Setup, policies: Sequence[Policy], shares: Sequence[float]) -> list[Policy]:
    """Full attention and the policies, each once. Raises ConfigError for what could not run."""
    if bad := [policy for policy in policies if not isinstance(policy, Policy)]:
        raise ConfigError(f"policies must be Policy values, got {bad[0]!r}")
    if wrong := [share for share in shares if isinstance(share, bool) or not 0 < share <= 1]:
        raise ConfigError(f"shares must be in (0, 1], got {wrong[0]!r}")
    own = list(dict.fromkeys([Full(), *policies]))
    if shares and (given := [policy for policy in own if isinstance(policy, Wrapper)]):
        raise ConfigError(f"shares decide all settings of a policy, wrappers too, got {metrics.label(given[0])}")
    if unread := [name for name in setup.fitted if name not in {innermost(policy).name for policy in own}]:
        raise ConfigError(f"fitted must be arrays of these policies, got those of {unread[0]}")
    return own


def checked_sweeps(sweeps: Mapping[str, Sequence[Policy]]) -> dict[Policy, tuple[str, ...]]:
    """Each policy of the sweeps once, with the settings whose sweep it is in. Raises ConfigError."""
    found: dict[Policy, tuple[str, ...]] = {}
    for name, policies in sweeps.items():
        for policy in policies:
            if not isinstance(policy, Policy) or name not in dotted_settings(policy):
                raise ConfigError(f"sweeps must map a setting to policies that have it, got {policy!r} for {name!r}")
            found[policy] = (*found.get(policy, ()), name)
    return found


def cells_at(
    setup: Setup, tasks: Sequence[str], length: int, samples: int, seed: int, one_capacity: bool
) -> list[Cell]:
    """The cells of all tasks at one length, nothing running on them yet. Raises ConfigError."""
    params = setup.params
    made = {
        task: [sample_of(task, params.tokenizer, length, index, samples, seed) for index in range(samples)]
        for task in dict.fromkeys(tasks)
    }
    if not made:
        return []
    most = max(growth(case) for cases in made.values() for case, _ in cases)
    cells = []
    for task, pairs in made.items():
        cases, depths = zip(*pairs, strict=True)
        # shares and sweeps compare whole tables, so that all tasks of a length have one capacity
        capacity = length + (most if one_capacity else max(map(growth, cases)))
        if capacity > params.config.context:
            room = f"the model's context={params.config.context}"
            raise ConfigError(f"lengths must leave room in {room}, got {length} + {capacity - length} for {task}")
        cells.append(Cell(task, length, capacity, cases, (), () if cases[0].forced else depths))
    return cells


def data_cells(setup: Setup, data: Data) -> list[Cell]:
    """The cells of local files, nothing running on them yet. Raises ConfigError."""
    params, cells = setup.params, []
    for one in read_cases(
        data.paths, params.tokenizer, params.config.context, truncate=data.truncate, limit=data.limit
    ):  # fmt: skip
        length = max(len(case.prompt) for case in one.cases)
        # the longest prompt and the longest answer may be of two cases
        capacity = min(length + max(map(growth, one.cases)), params.config.context)
        cells.append(Cell(one.task, length, capacity, one.cases, (), one.depths))
    return cells


def entries_of(
    setup: Setup, policies: Sequence[Policy], case: Case, length: int, capacity: int, shares: Sequence[float],
    swept: Mapping[Policy, tuple[str, ...]],
) -> tuple[Entry, ...]:  # fmt: skip
    """Full attention first, then what runs beside it. Raises ConfigError where a policy cannot run."""
    if shares:
        full, *others = policies
        entries = [Entry(full)]
        entries += [at_share(setup, policy, share, capacity, length) for share in shares for policy in others]
    else:
        entries = [Entry(setup.taught(policy)) for policy in policies]
        for policy in policies:
            if isinstance(policy, ShadowKV) and not case.forced and not swept:
                policy.resolve(setup.params.config, capacity)
                small = control(setup.params, policy, capacity, length)
                entries += [Entry(small, metrics.label(policy))] if small is not None else []
    entries += [Entry(setup.taught(policy), sweeps=names) for policy, names in swept.items()]
    for entry in entries:
        if entry.policy is not None:
            resolved = entry.policy.resolve(setup.params.config, capacity)
            check_fitted(resolved, setup.params.config, setup.arrays_of(resolved))
    return tuple(entries)


def growth(case: Case) -> int:
    """Tokens that a state needs beyond the prompt."""
    return case.growth
