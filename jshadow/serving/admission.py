"""The classes of rows of an engine, the bytes of their groups, and which groups may exist at once."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jshadow.cache.accounting import ByteCount, total
from jshadow.cache.host_memory import least_limit
from jshadow.cache.offload import host_bytes
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState, specs_with_fetch
from jshadow.cache.system_memory import available_memory
from jshadow.engine.placement import fetch_for, shards_of
from jshadow.engine.rows import RowParts, RowSettings, row_of
from jshadow.engine.speculation.drafter import Drafter, check_state, check_suits
from jshadow.engine.types import Fitted
from jshadow.errors import CapacityError, ConfigError, check_integer
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of
from jshadow.planner.limits import MemoryLimits
from jshadow.planner.machine import device_here
from jshadow.planner.pieces import extend_peak, turn_piece
from jshadow.planner.sessions import SessionClass, class_plan
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.checks import check_fitted
from jshadow.policies.full import or_full
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.params import Params


@dataclasses.dataclass(frozen=True, order=True)
class RowClass:
    """The size of the rows of a class. All requests of a class share their compiled programs.

    Attributes:
        prompt: maximum number of tokens in a prompt.
        room: maximum number of new tokens.
        rows: number of rows in a group. The rows of a group are stepped by one call.

    Raises:
        ConfigError: a value is not an integer of at least 1.
    """

    prompt: int
    room: int
    rows: int = 8

    def __post_init__(self) -> None:
        for name in ("prompt", "room", "rows"):
            check_integer(f"row_class.{name}", getattr(self, name), least=1)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return self.prompt + self.room


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine that all its requests share.

    Attributes:
        fetch: "auto", "resident", "device_put" or "zero_copy".
        fitted: arrays that the policy learned, or None.
        prefill: the sparse attention of prompts, or None for exact attention.
        prefill_chunk: number of tokens of a prompt that are taken through a layer in a part, or as many operations in
            other units. At least one unit runs.
        turn_chunk: number of tokens of a stored document's continuation that are fed in a part.
        prompt_parts: number of parts of prompts that are read between two steps. With more, a waiting prompt is read
            sooner, more rows share a step, and the tokens of an answer come further apart while prompts are read.
        penalties: whether requests may have penalties, as in `RowParts`.
        bias_limit: the largest number of biased tokens of a request.
        grammar: whether requests may have a grammar (`Request.allowed`).
        logprobs: whether requests may have log-probabilities (`Request.logprobs`).
        speculate: a drafter that proposes tokens, or None. It changes no token. An answer that it cannot serve is drawn
            token by token, and its report says why.
        spill: whether rows begin with all arrays in device memory (`fetch` "resident"), and the rows that a fetch mode
            keeps in host memory move there when device memory is short, and back later. It changes no token.
        threaded: whether the engine runs in a thread of its own. If not, the caller calls `Engine.run_once`.

    Raises:
        ConfigError: prefill_chunk, turn_chunk or prompt_parts is not an integer of at least 1.
    """

    fetch: str = "auto"
    fitted: Fitted | None = None
    prefill: PrefillAttention | None = None
    prefill_chunk: int = 2048
    turn_chunk: int = 64
    prompt_parts: int = 4
    penalties: bool = False
    bias_limit: int = 0
    grammar: bool = False
    logprobs: bool = False
    speculate: Drafter | None = None
    spill: bool = False
    threaded: bool = True

    def __post_init__(self) -> None:
        for name in ("prefill_chunk", "turn_chunk", "prompt_parts"):
            check_integer(name, getattr(self, name), least=1)

    def piece(self, row_class: RowClass) -> int:
        """Return the maximum number of tokens of a unit, which grows with the longest prompt of the class.

        The last piece of a prompt is padded, so a class of short prompts has short pieces. A GPU takes longer for many
        short pieces than for a few long ones, because it reads the weights for each. A CPU loses little by short ones.
        """
        least, share = (128, 16) if jax.default_backend() == "cpu" else (256, 8)
        return min(self.prefill_chunk, max(least, row_class.prompt // share))

    def parts(self, params: Params) -> RowParts:
        """Return which arrays the sampling settings of rows have."""
        return RowParts(params.config.vocab_size, self.penalties, self.bias_limit, self.grammar)


_NONE = ByteCount()


@dataclasses.dataclass(frozen=True)
class GroupBytes:
    """The bytes that a group needs.

    Attributes:
        rows: bytes of its rows, with their sampling settings.
        step: an upper bound on the device bytes of a step beside weights and rows.
        reading: an upper bound on the bytes of the reading of one prompt, beside the weights.
        shared: bytes of the prompt half of the document that the rows share.
    """

    rows: ByteCount
    step: int
    reading: ByteCount
    shared: ByteCount = _NONE


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How tokens are proposed for the rows of a class.

    Attributes:
        drafter: what proposes them, or None.
        plain: why nothing does, or None.
        state: the abstract state of one row.
    """

    drafter: Drafter | None
    plain: str | None
    state: KVState


@dataclasses.dataclass(frozen=True)
class PlannedClass:
    """A class with all that follows from the model and the policy.

    Attributes:
        row_class: the class.
        policy: the resolved policy. It is Full if the engine's policy has no effect at this capacity.
        fallback: the reason why Full replaces the engine's policy, or None.
        fetch: the fetch mode.
        bytes: the bytes of a group.
        document: the key of the stored document that the rows of the group share, or None.
        specs: the specs of one row on that document, or None.
        drafting: how tokens are proposed, or None if the engine does not speculate.
        spilled: the same class after its rows have moved to host memory, or None if they cannot.
    """

    row_class: RowClass
    policy: Policy
    fallback: str | None
    fetch: str
    bytes: GroupBytes
    document: str | None = None
    specs: tuple[CacheSpec, ...] | None = None
    drafting: Drafting | None = dataclasses.field(default=None, compare=False, repr=False)
    spilled: "PlannedClass | None" = None

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of the rows. None: no tokens are proposed for them."""
        return None if self.drafting is None else self.drafting.drafter

    @property
    def key(self) -> tuple[str | None, RowClass]:
        """What tells which jobs can use a row."""
        return self.document, self.row_class


def plan_classes(
    params: Params, policy: Policy | None, classes: Sequence[RowClass], options: EngineOptions
) -> tuple[PlannedClass, ...]:
    """Return the plans of the classes, by capacity.

    Raises:
        ConfigError: there is no class, an item is not a RowClass, a setting is out of range, or `options.speculate` is
            no drafter for an engine with this model.
        CapacityError: a class has more tokens than the model's context.
    """
    if (drafter := options.speculate) is not None:
        check_suits(drafter, params, 1)
        if not drafter.in_engines:
            raise ConfigError(f"speculate must be a drafter that engines can use, got {drafter.name!r}")
    if not classes or not all(isinstance(one, RowClass) for one in classes):
        raise ConfigError(f"classes must be a non-empty list of RowClass, got {classes!r:.80}")
    ordered = sorted(set(classes), key=lambda one: (one.capacity, one.prompt))
    if not options.spill:
        return tuple(_plan_class(params, policy, one, options) for one in ordered)
    if options.fetch not in ("auto", "resident"):
        raise ConfigError(f"fetch must be 'auto' or 'resident' for rows that spill, got {options.fetch!r}")
    options = dataclasses.replace(options, fetch="resident")
    plans = tuple(_with_spilled(_plan_class(params, policy, one, options), params, policy, options) for one in ordered)
    if not any(plan.spilled for plan in plans):
        raise ConfigError(f"policy must keep rows in host memory with another fetch mode to spill, got {policy}")
    return plans


def _with_spilled(plan: PlannedClass, params: Params, policy: Policy | None, options: EngineOptions) -> PlannedClass:
    """Return the plan of a class with that of its rows in host memory, if a fetch mode has the same other arrays."""
    sizes = SessionClass(plan.row_class.prompt, plan.row_class.room, plan.row_class.rows)
    specs = sizes.session(str(params.dtype), plan.fetch, shards_of(params, 1)).specs(params.config, plan.policy)
    fitted = None if plan.fallback else options.fitted
    for mode in ("zero_copy", "device_put"):
        with contextlib.suppress(ConfigError):  # no kernel serves the settings
            other = specs_with_fetch(specs, mode, fitted)
            if other is not None and host_bytes(other):
                spilled = _plan_class(params, policy, plan.row_class, dataclasses.replace(options, fetch=mode))
                # A prompt is read into device memory.
                needed = dataclasses.replace(spilled.bytes, reading=plan.bytes.reading)
                return dataclasses.replace(plan, spilled=dataclasses.replace(spilled, bytes=needed))
    return plan


def effective_policy(config: ModelConfig, policy: Policy | None, capacity: int) -> tuple[Policy, str | None]:
    """Return the resolved policy of rows of this capacity, and the reason why Full replaces `policy`, or None."""
    return or_full((policy or ShadowKV()).resolve(config, capacity), config, capacity)


def _plan_class(params: Params, policy: Policy | None, row_class: RowClass, options: EngineOptions) -> PlannedClass:
    """Return the plan of a class. Raises the errors of `plan_classes`."""
    config, dtype, capacity = params.config, str(params.dtype), row_class.capacity
    if capacity > config.context:
        raise CapacityError(
            f"row_class must have at most the model's context={config.context} tokens, got prompt={row_class.prompt} + "
            f"room={row_class.room}"
        )
    resolved, fallback = effective_policy(config, policy, capacity)
    if not fallback:
        check_fitted(resolved, config, options.fitted)
    sizes = SessionClass(row_class.prompt, row_class.room, row_class.rows)
    session = sizes.session(dtype, options.fetch, shards_of(params, 1))
    session = session.with_fetch(fetch_for(params, resolved, session.with_batch(row_class.rows)).fetch)
    kinds: dict[str, Any] = {"prefill_chunk": options.piece(row_class), "attention": options.prefill}
    plan = class_plan(config, resolved, sizes, session, jax.default_backend(), **kinds)
    rows = total([plan.group_bytes, settings_bytes(options.parts(params), row_class.rows)])
    needed = GroupBytes(rows, sum(plan.temporaries.values()), plan.prefill)
    planned = PlannedClass(row_class, resolved, fallback, plan.fetch, needed)
    planned = with_drafting(planned, options.speculate, config, session.specs(config, resolved))
    if planned.drafter is None or planned.drafter.reader is None:
        return planned
    own, policy = planned.drafter.reader
    kinds = {"prefill_chunk": options.piece(row_class)}
    session, policy = sizes.session(str(own.dtype), "resident"), policy.resolve(own.config, capacity)
    reading = class_plan(own.config, policy, sizes, session, jax.default_backend(), **kinds).prefill
    # Both states of the prompt are held while it is read.
    return dataclasses.replace(
        planned, bytes=dataclasses.replace(planned.bytes, reading=total([plan.prefill, reading]))
    )


def with_drafting(
    plan: PlannedClass, drafter: Drafter | None, config: ModelConfig, specs: tuple[CacheSpec, ...]
) -> PlannedClass:
    """Return the plan with the bytes that a drafter takes, or with the reason why it proposes nothing.

    `specs` are those of one row. Without a drafter, the plan stays as it is.
    """
    if drafter is None:
        return plan
    drafting, memory, step = _drafting_of(drafter, config, plan.policy, specs, plan.row_class.rows, bool(plan.specs))
    sizes = dataclasses.replace(plan.bytes, rows=total([plan.bytes.rows, memory]), step=max(plan.bytes.step, step))
    return dataclasses.replace(plan, bytes=sizes, drafting=drafting)


@functools.lru_cache(maxsize=256)
def _drafting_of(
    drafter: Drafter, config: ModelConfig, policy: Policy, specs: tuple[CacheSpec, ...], rows: int, shared: bool
) -> tuple[Drafting, ByteCount, int]:
    """Return how tokens are proposed, the bytes of what the drafter remembers, and the device bytes of a step.

    `shared` tells whether the rows of a group share their prompt half.
    """
    state = abstract_of(specs, policy)
    reads, writes = state.split()
    many = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), writes)
    try:
        check_state(drafter, config, KVState.of(reads, many) if shared else state)
        if shared and drafter.reader is not None:
            raise ConfigError(f"speculate={drafter.name!r} needs rows with prompts of their own, got a stored document")
        if turn_piece(state, 2) == 1:
            raise ConfigError(f"policy must take the tokens of a turn together to gain by it, got {policy.name}")
    except ConfigError as error:
        return Drafting(None, str(error), state), _NONE, 0
    whole = abstract_of(tuple(dataclasses.replace(spec, batch=rows) for spec in specs), policy)
    peak, logits = extend_peak(config, whole, drafter.tokens + 1), 4 * rows * (drafter.tokens + 1) * config.vocab_size
    memory = drafter.row_bytes(config, state).times(rows)
    return Drafting(drafter, None, state), memory, peak["piece"] + peak["hooks"] + 2 * logits


def settings_bytes(parts: RowParts, rows: int) -> ByteCount:
    """Return the bytes of the sampling settings of rows."""
    return ByteCount(sum(leaf.nbytes for leaf in jax.tree.leaves(row_of(RowSettings(), parts))) * rows)


def fitting(plans: Sequence[PlannedClass], prompt: int, room: int) -> list[PlannedClass]:
    """Return the plans whose rows can hold a prompt of `prompt` tokens and `room` new ones, by capacity.

    Raises:
        CapacityError: there is none.
    """
    classes = [plan.row_class for plan in plans]
    found = [plan for plan in plans if plan.row_class.prompt >= prompt and plan.row_class.room >= room]
    if not found:
        sizes = ", ".join(f"prompt={one.prompt} + room={one.room}" for one in classes)
        raise CapacityError(
            f"prompt + max_new_tokens must fit a class of the engine ({sizes}), got {prompt} + {room} tokens"
        )
    return found


def storable(plans: Sequence[PlannedClass], capacity: int, fetch: str) -> list[PlannedClass]:
    """Return the plans whose rows a library of this capacity and fetch mode can store.

    Raises:
        CapacityError: there is none of this capacity.
        ConfigError: those of this capacity have another fetch mode.
    """
    found = [plan for plan in plans if plan.row_class.capacity == capacity]
    if not found:
        classes = [plan.row_class for plan in plans]
        sizes = ", ".join(f"{one.capacity} (prompt={one.prompt} + room={one.room})" for one in classes)
        raise CapacityError(
            f"store needs a class with the capacity of the library, {capacity}, got a request for the capacity {sizes}"
        )
    same = [plan for plan in found if plan.fetch == fetch]
    if not same:
        raise ConfigError(f"store needs a class with the fetch mode of the library, {fetch!r}, got {found[0].fetch!r}")
    return same


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine may take.

    Attributes:
        device_bytes: bytes of device memory beside the weights. None: what is free when the engine is made.
        host_bytes: bytes of host memory for offloaded rows. None: what is free when the engine is made.
        waiting: number of requests that may wait. A further request is refused. A sixteenth of it is for clients of
            which no request waits. None: no limit.
        rows: number of requests that may have a row. None: as many as the memory holds.

    Raises:
        ConfigError: a value is not None and not an integer of at least 1.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    waiting: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                check_integer(f"limits.{field.name}", value, least=1)

    def of_machine(self) -> "Limits":
        """Return the limits with the free memory of this machine in place of None.

        On a CPU, both memories are the memory that the system has available.
        """
        device, host = self.device_bytes, self.host_bytes
        if device is None:
            device = available_memory() if jax.default_backend() == "cpu" else device_here()[1]
        if host is None:
            least = least_limit()
            host = None if least is None else least.free
        return dataclasses.replace(self, device_bytes=device, host_bytes=host)


class Admission:
    """The bytes of groups against the limits."""

    def __init__(self, limits: Limits) -> None:
        """Take limits that `of_machine` returned."""
        self.limits = limits

    def fits(self, plans: Iterable[PlannedClass], paused: Iterable[PlannedClass] = ()) -> bool:
        """Whether the memory suffices for groups of these plans, for a step, and for the reading of a prompt.

        `paused` are the classes of other prompts, whose reading is paused.
        """
        needed = total([needed_bytes(plans), *(plan.bytes.reading for plan in paused)])
        return MemoryLimits(self.limits.device_bytes, self.limits.host_bytes).fits(needed)

    def check(self, plan: PlannedClass) -> None:
        """Raise CapacityError if not even one group of this plan fits."""
        if not self.fits([plan]):
            device, host = needed_bytes([plan])
            one = plan.row_class
            raise CapacityError(
                f"a group of {one.rows} rows of prompt={one.prompt} + room={one.room} must fit "
                f"device_bytes={self.limits.device_bytes} and host_bytes={self.limits.host_bytes}, "
                f"got {device} and {host} bytes"
            )


def needed_bytes(plans: Iterable[PlannedClass]) -> ByteCount:
    """Return the bytes that groups of these plans need.

    The groups are stepped one after the other, and one prompt is read at a time. So the largest step and the largest
    reading count once.
    """
    plans = list(plans)
    step = ByteCount(max((plan.bytes.step for plan in plans), default=0))
    readings = zip(_NONE, *(plan.bytes.reading for plan in plans), strict=True)
    return total([held_bytes(plans), step, ByteCount(*map(max, readings))])


def held_bytes(plans: Iterable[PlannedClass]) -> ByteCount:
    """Return the bytes that the rows of these plans take. A document counts once."""
    plans = list(plans)
    shared = {plan.document: plan.bytes.shared for plan in plans}
    return total([*(plan.bytes.rows for plan in plans), *shared.values()])
