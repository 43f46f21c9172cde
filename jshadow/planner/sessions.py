"""How many sessions a serving engine can hold: the bytes of its groups of rows, counted without allocating anything.

A session is one row of a group. One program steps the rows of a group, and the groups are stepped one after another. So
temporaries count once, for the largest group. Sessions on one document share its prompt half, which is held once on the
device and once in host memory (`KVState.share`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jshadow.cache import offload
from jshadow.cache.accounting import ByteCount, leaf_bytes, state_nbytes, total
from jshadow.cache.records import HostTier
from jshadow.cache.spec import Shards
from jshadow.cache.state import KVState, with_room
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import Workload, abstract_of, on_backend, prefill_parts, step_temporaries, weight_bytes
from jshadow.planner.fetch_choice import kernel_refusal
from jshadow.planner.limits import MemoryLimits
from jshadow.policies.base import Policy
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.settings import policy_settings

_Parts = dict[str, ByteCount]  # by the name of the part
_PLAIN: tuple[str, ...] = (
    "fetch",
    "prompt_parts",
    "live_parts",
    "document_live",
    "documents_bytes",
    "group_bytes",
    "state_bytes",
)
_PLAIN += ("temporaries", "prefill", "sessions", "sessions_any_spread")


@dataclasses.dataclass(frozen=True)
class SessionClass:
    """Sessions of one size.

    Attributes:
        prompt: number of tokens in the longest prompt.
        room: number of tokens that a session may take after its prompt.
        group_rows: number of rows that one program steps.
        groups: number of groups. None: as many as fit.
        documents: number of prompts that sessions share. 0: every session has its own prompt.
        policy: the policy. None: that of the plan.
    """

    prompt: int
    room: int
    group_rows: int = 8
    groups: int | None = None
    documents: int = 0
    policy: Policy | None = None

    @property
    def capacity(self) -> int:
        """Number of tokens that each session may hold."""
        return self.prompt + self.room

    def session(self, dtype: str, fetch: str, shards: Shards | None = None) -> Workload:
        """Return one session as a workload."""
        return Workload(self.prompt, self.room, 1, dtype, fetch, room=self.room, shards=shards)


@dataclasses.dataclass(frozen=True)
class ClassPlan:
    """The bytes of one class of sessions.

    Attributes:
        sizes: the class, with the number of its groups.
        policy: the resolved policy.
        fetch: the fetch mode.
        prompt_parts: bytes of one prompt half, by part.
        live_parts: bytes of one session's live half, by part. "counts" are its lengths and counters.
        document_live: bytes of the live half that each stored document keeps for new sessions. It has no room.
        temporaries: upper bound on the device bytes of a step of one group beside weights and states, by part.
        prefill: upper bound on the bytes of one prompt that is being read, with the state that it becomes.
    """

    sizes: SessionClass
    policy: Policy
    fetch: str
    prompt_parts: _Parts
    live_parts: _Parts
    document_live: ByteCount
    temporaries: dict[str, int]
    prefill: ByteCount

    @property
    def documents_bytes(self) -> ByteCount:
        """Bytes of all shared prompt halves, each with the live half for new sessions."""
        return total([*self.prompt_parts.values(), self.document_live]).times(self.sizes.documents)

    @property
    def group_bytes(self) -> ByteCount:
        """Bytes of one group: its live halves, and its prompt halves unless they are shared."""
        prompt = () if self.sizes.documents else self.prompt_parts.values()
        return total([*self.live_parts.values(), *prompt]).times(self.sizes.group_rows)

    @property
    def state_bytes(self) -> ByteCount:
        """Bytes of all documents and groups."""
        return total([self.documents_bytes, self.group_bytes.times(self.sizes.groups or 0)])

    @property
    def sessions(self) -> int:
        """Number of sessions that the groups hold."""
        return (self.sizes.groups or 0) * self.sizes.group_rows

    @property
    def sessions_any_spread(self) -> int:
        """Number of sessions that the groups hold, whatever the number of sessions on each document.

        The last group of a document may have as few as one session.
        """
        sizes = self.sizes
        return max(0, self.sessions - sizes.documents * (sizes.group_rows - 1))


@dataclasses.dataclass(frozen=True)
class SessionPlan:
    """The bytes of a serving engine.

    It leaves out the memory of compiled programs, the workspace of cuDNN, fragmentation, copies on their way between
    memories, arrays that a policy learned, and on the host everything but states.

    Attributes:
        classes: the plan of each class.
        weights_bytes: bytes of the weights.
        limits: the memory that the engine may take.
    """

    classes: tuple[ClassPlan, ...]
    weights_bytes: int
    limits: MemoryLimits

    @property
    def sessions(self) -> int:
        """Number of sessions of all classes."""
        return sum(plan.sessions for plan in self.classes)

    @property
    def temporaries_bytes(self) -> int:
        """Device bytes of the step of one group. It is that of the largest, because groups step one after another."""
        return max(sum(plan.temporaries.values()) for plan in self.classes)

    @property
    def prefill_bytes(self) -> ByteCount:
        """Bytes of one prompt that is being read, for the class in which it takes the most."""
        return ByteCount(*map(max, zip(*(plan.prefill for plan in self.classes), strict=True)))

    @property
    def needed(self) -> ByteCount:
        """Bytes of weights, states, one step, one prefill and the reserve."""
        beside = ByteCount(self.weights_bytes + self.temporaries_bytes + self.limits.reserve)
        return total([beside, self.prefill_bytes, *(plan.state_bytes for plan in self.classes)])

    @property
    def device_bytes(self) -> int:
        """Bytes in device memory (`needed`)."""
        return self.needed.device

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory: states, and the one that is being built."""
        return self.needed.host

    @property
    def fits(self) -> bool:
        """Whether at least one session is planned and all bytes are within the limits."""
        return self.sessions > 0 and not self.excess()

    def excess(self) -> list[str]:
        """Return a text for each memory that is too small, with the bytes needed and the limit."""
        return [
            f"{self.sessions} sessions need {needed} bytes of {name} memory, and the limit is {limit}"
            for name, needed, limit in self.limits.excess(self.needed)
        ]

    def check(self) -> None:
        """Raise CapacityError if the engine does not fit, with the bytes needed and the limit."""
        if excess := self.excess():
            raise CapacityError("; ".join(excess))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON, with each policy as its name and settings."""
        classes = []
        for plan in self.classes:
            values = dataclasses.asdict(dataclasses.replace(plan.sizes, policy=None))
            values |= {name: getattr(plan, name) for name in _PLAIN}
            values["policy"] = {"name": plan.policy.name, **policy_settings(plan.policy)}
            classes.append(values)
        names = ("sessions", "weights_bytes", "temporaries_bytes", "prefill_bytes", "device_bytes", "host_bytes")
        figures = {name: getattr(self, name) for name in (*names, "fits")}
        return figures | {"classes": classes, "limits": dataclasses.asdict(self.limits)}


def session_plan(
    config: ModelConfig,
    policy: Policy,
    classes: Sequence[SessionClass],
    limits: MemoryLimits,
    *,
    dtype: str = "bfloat16",
    fetch: str = "auto",
    backend: str = "gpu",
    quantize: str | None = None,
) -> SessionPlan:
    """Plan the sessions of a serving engine on one device.

    Args:
        config: the model.
        policy: the policy of the classes that have none. Settings that are None are resolved for each class.
        classes: the sizes of sessions. In at most one class, the number of groups may be None.
        limits: the memory that the engine may take.
        dtype: dtype of weights, keys and values.
        fetch: fetch mode. "auto": the mode with the most sessions. If modes are equal, it is the first of "resident",
            "zero_copy" and "device_put". If no mode fits, it is the one that needs the least device memory.
        backend: "gpu" for an NVIDIA GPU, or the name of another backend.
        quantize: the type of the projections' weights, as in `jshadow.load`.

    Raises:
        CapacityError: a class has a prompt without tokens, a room below 0, or more tokens than the model's context.
        ConfigError: a count or setting is out of range, two classes leave out their groups, or no kernel serves the
            settings with "zero_copy".
    """
    for sizes in classes:
        _check_class(config, sizes)
    if not classes or sum(sizes.groups is None for sizes in classes) > 1:
        raise ConfigError(f"classes must be at least one, with groups=None in at most one, got {tuple(classes)!r:.200}")
    offload.check_fetch(fetch)
    plans, weights = [], weight_bytes(config, dtype, quantize)
    free = next((place for place, sizes in enumerate(classes) if sizes.groups is None), None)
    for mode in ("resident", "zero_copy", "device_put") if fetch == "auto" else (fetch,):
        each = [
            ((sizes.policy or policy).resolve(config, sizes.capacity), sizes, sizes.session(dtype, mode))
            for sizes in classes
        ]
        if mode == "zero_copy" and backend == "gpu":
            specs = [one.specs(config, resolved) for resolved, _, one in each]
            if fetch == "auto" and any(map(kernel_refusal, specs)):
                continue
            for spec in itertools.chain(*specs):
                if (layout := spec.policy.host_layout(spec)) is not None:
                    layout.check_kernel(spec.policy.name)
        made = tuple(class_plan(config, *one, backend) for one in each)
        plan = SessionPlan(made, weights, limits)
        plans.append(plan if free is None else _filled(plan, free))
    # The first of equal ones. If no mode fits, it is the one that needs the least device memory.
    return max(plans, key=lambda plan: (not plan.excess(), plan.sessions, -plan.device_bytes if plan.excess() else 0))


def _check_class(config: ModelConfig, sizes: SessionClass) -> None:
    """Raise ConfigError or CapacityError for a class that is out of range."""
    if sizes.prompt < 1 or sizes.room < 0 or sizes.capacity > config.context:
        raise CapacityError(
            f"prompt must be at least 1, room at least 0, and both together at most the model's "
            f"context={config.context}, got {sizes.prompt} + {sizes.room}"
        )
    groups = 0 if sizes.groups is None else sizes.groups
    for name, value, least in (("group_rows", sizes.group_rows, 1), ("groups", groups, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if sizes.documents < 0:
        raise ConfigError(f"documents must be at least 0, got {sizes.documents}")


def class_plan(
    config: ModelConfig,
    policy: Policy,
    sizes: SessionClass,
    workload: Workload,
    backend: str,
    *,
    prefill_chunk: int = 2048,
    attention: PrefillAttention | None = None,
) -> ClassPlan:
    """Return the plan of a class.

    Args:
        policy: the resolved policy.
        sizes: the class. The number of groups is that of `sizes`.
        workload: one session of the class (`SessionClass.session`).
        backend: "gpu" for an NVIDIA GPU, or the name of another backend.
        prefill_chunk, attention: as in `prefill_peak`.
    """
    specs = on_backend(workload.specs(config, policy), backend)
    prompt, live = halves(abstract_of(specs, policy))
    document = total(halves(abstract_of(with_room(specs, 0), policy))[1].values())
    group = tuple(dataclasses.replace(spec, batch=sizes.group_rows) for spec in specs)
    alone = dataclasses.replace(workload, room=0 if sizes.documents else sizes.room, shards=None)
    options: dict[str, Any] = {"prefill_chunk": prefill_chunk, "attention": attention, "backend": backend}
    peak = prefill_parts(config, policy, alone, **options)
    held = total([*prompt.values(), *([document] if sizes.documents else live.values())])
    return ClassPlan(
        sizes=sizes,
        policy=policy,
        fetch=workload.fetch,
        prompt_parts=prompt,
        live_parts=live,
        document_live=document,
        temporaries=step_temporaries(config, policy, group),
        prefill=ByteCount(sum(peak.values()) - peak["weights"] - peak["state"] + held.device, held.host),
    )


def _filled(plan: SessionPlan, place: int) -> SessionPlan:
    """Return the plan with as many groups of the class at `place` as fit."""
    free, limits = plan.classes[place], plan.limits
    sizes = zip((limits.device, limits.host), free.group_bytes, strict=True)
    most = [limit // size for limit, size in sizes if limit is not None and size]
    if not most:
        raise ConfigError("groups must be given where no memory has a limit, got None")

    def with_groups(groups: int) -> SessionPlan:
        one = dataclasses.replace(free, sizes=dataclasses.replace(free.sizes, groups=groups))
        return dataclasses.replace(plan, classes=(*plan.classes[:place], one, *plan.classes[place + 1 :]))

    return with_groups(limits.most(lambda groups: with_groups(groups).needed, min(most)))


def halves(state: KVState) -> tuple[_Parts, _Parts]:
    """Return the bytes of the prompt half and of the live half of a state, by part.

    The lengths, the last tokens and the counters are "counts". Arrays that the policy learned are left out.
    """
    layers = state.layers
    prompt = tuple(layer.replace(live=None, host=HostTier(layer.host.prompt)) for layer in layers)
    live = tuple(layer.replace(frozen=None, host=HostTier(None, layer.host.tail)) for layer in layers)
    counts = jax.tree.leaves((state.lengths, state.last, state.counters))
    return (
        state_nbytes(state.replace(layers=prompt, shared=None, fitted=None)),
        state_nbytes(state.replace(layers=live, fitted=None)) | {"counts": ByteCount(sum(map(leaf_bytes, counts)))},
    )
