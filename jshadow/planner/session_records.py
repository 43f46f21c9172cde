"""The records of a plan of sessions: the classes of a serving engine, their bytes, and the limits of memory."""

import dataclasses
from typing import Any

from jshadow.errors import CapacityError
from jshadow.policies.base import Policy
from jshadow.policies.settings import policy_settings

Parts = dict[str, tuple[int, int]]  # bytes (device, host) by the name of the part
PLAIN: tuple[str, ...] = (
    "fetch",
    "prompt_parts",
    "live_parts",
    "document_live",
    "documents_bytes",
    "group_bytes",
    "state_bytes",
)
PLAIN += ("temporaries", "prefill", "sessions", "sessions_any_spread")


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


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """The memory that an engine may take.

    Attributes:
        device: bytes of device memory. None: no limit.
        host: bytes of host memory for states. None: no limit.
        reserve: bytes of device memory outside of arrays.
    """

    device: int | None = None
    host: int | None = None
    reserve: int = 0


@dataclasses.dataclass(frozen=True)
class ClassPlan:
    """The bytes of one class of sessions. Pairs are (device, host).

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
    prompt_parts: Parts
    live_parts: Parts
    document_live: tuple[int, int]
    temporaries: dict[str, int]
    prefill: tuple[int, int]

    @property
    def documents_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of all shared prompt halves, each with the live half for new sessions."""
        return scaled(self.sizes.documents, added(total(self.prompt_parts), self.document_live))

    @property
    def group_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of one group: its live halves, and its prompt halves unless they are shared."""
        live, prompt = total(self.live_parts), total(self.prompt_parts)
        return scaled(self.sizes.group_rows, live if self.sizes.documents else added(live, prompt))

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of all documents and groups."""
        return added(self.documents_bytes, scaled(self.sizes.groups or 0, self.group_bytes))

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
        weights_bytes: bytes of the weights, in the dtype of keys and values.
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
    def prefill_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of one prompt that is being read, for the class in which it takes the most."""
        device, host = zip(*(plan.prefill for plan in self.classes), strict=True)
        return max(device), max(host)

    @property
    def device_bytes(self) -> int:
        """Bytes in device memory: weights, states, one step, one prefill and the reserve."""
        states = sum(plan.state_bytes[0] for plan in self.classes)
        return self.weights_bytes + states + self.temporaries_bytes + self.prefill_bytes[0] + self.limits.reserve

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory: states, and the one that is being built."""
        return sum(plan.state_bytes[1] for plan in self.classes) + self.prefill_bytes[1]

    @property
    def fits(self) -> bool:
        """Whether at least one session is planned and all bytes are within the limits."""
        return self.sessions > 0 and not self.excess()

    def excess(self) -> list[str]:
        """Return a text for each memory that is too small, with the bytes needed and the limit."""
        needs = (("device", self.device_bytes, self.limits.device), ("host", self.host_bytes, self.limits.host))
        return [
            f"{self.sessions} sessions need {needed} bytes of {name} memory, and the limit is {limit}"
            for name, needed, limit in needs
            if limit is not None and needed > limit
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
            values |= {name: getattr(plan, name) for name in PLAIN}
            values["policy"] = {"name": plan.policy.name, **policy_settings(plan.policy)}
            classes.append(values)
        names = ("sessions", "weights_bytes", "temporaries_bytes", "prefill_bytes", "device_bytes", "host_bytes")
        figures = {name: getattr(self, name) for name in (*names, "fits")}
        return figures | {"classes": classes, "limits": dataclasses.asdict(self.limits)}


def total(parts: Parts) -> tuple[int, int]:
    """Return the bytes (device, host) of all parts."""
    return sum(device for device, _ in parts.values()), sum(host for _, host in parts.values())


def added(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
    """Return the sums of device bytes and of host bytes."""
    return one[0] + two[0], one[1] + two[1]


def scaled(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return `count` times the device bytes and the host bytes."""
    return count * size[0], count * size[1]
