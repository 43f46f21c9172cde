"""Which groups of rows may exist at once: the planner's bytes against the limits of the engine."""

import dataclasses
from collections.abc import Iterable

import jax

from jshadow.cache.host_memory import available_memory, least_limit
from jshadow.errors import CapacityError
from jshadow.planner.machine import device_here
from jshadow.serving.classes import PlannedClass
from jshadow.serving.requests import check_integer


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine may take.

    Attributes:
        device_bytes: bytes of device memory beside the weights. None: what is free when the engine is made.
        host_bytes: bytes of host memory for offloaded rows. None: what is free when the engine is made.
        waiting: number of requests that may wait. A further request is refused. A sixteenth of it is for clients of
            which no request waits. None: no limit.

    Raises:
        ConfigError: a value is not None and not an integer of at least 1.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    waiting: int | None = None

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

    def fits(self, plans: Iterable[PlannedClass], paused: PlannedClass | None = None) -> bool:
        """Whether the memory suffices for groups of these plans, for a step, and for the reading of a prompt.

        `paused` is the class of another prompt, whose reading is paused.
        """
        device, host = needed_bytes(plans)
        if paused is not None:
            device, host = device + paused.bytes.reading, host + paused.bytes.reading_host
        most_device, most_host = self.limits.device_bytes, self.limits.host_bytes
        return (most_device is None or device <= most_device) and (most_host is None or host <= most_host)

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


def needed_bytes(plans: Iterable[PlannedClass]) -> tuple[int, int]:
    """Return the bytes that groups of these plans need on the device and on the host.

    The groups are stepped one after the other, and one prompt is read at a time. So the largest step and the largest
    reading count once.
    """
    plans = list(plans)
    device, host = held_bytes(plans)
    sizes = [plan.bytes for plan in plans]
    device += max((one.step for one in sizes), default=0) + max((one.reading for one in sizes), default=0)
    return device, host + max((one.reading_host for one in sizes), default=0)


def held_bytes(plans: Iterable[PlannedClass]) -> tuple[int, int]:
    """Return the bytes on the device and on the host that the rows of these plans take. A document counts once."""
    device = host = 0
    documents = set()
    for plan in plans:
        sizes = plan.bytes
        device, host = device + sizes.device, host + sizes.host
        if plan.document not in documents:
            documents.add(plan.document)
            device, host = device + sizes.shared_device, host + sizes.shared_host
    return device, host
