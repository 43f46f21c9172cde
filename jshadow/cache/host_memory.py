"""Whether offloaded rows fit into host memory. This is checked before any is allocated; the error says what would fit.

There are two limits: the memory that the system has left, and on a GPU XLA's pool of pinned memory
(`xla_gpu_host_bfc`), whose size an environment variable sets when jax starts.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax

from jshadow.cache.offload import host_bytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.errors import HostMemoryError

Plans = Sequence[tuple[CacheSpec, ...]]  # the layers of one state, or of several that are made at once

POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PREALLOCATE_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
POOL_ADVICE = f"{POOL_VARIABLE}, set before jax starts, is its size in GiB"
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit of host memory.

    Attributes:
        free: bytes that may still be allocated.
        owner: whose limit it is, as words behind the number of bytes.
    """

    free: int
    owner: str


def check_host_memory(plans: Plans) -> None:
    """Raise HostMemoryError where the offloaded rows of the planned states clearly do not fit.

    Args:
        plans: specs of all layers, one tuple a state; states that offload nothing do not count.
    """
    plans = [specs for specs in plans if host_bytes(specs)]
    taken = Pool.note()
    limits = [limit for limit in (system_limit(taken), pool_limit(taken)) if limit is not None]
    if not plans or not limits:
        return  # where no limit is known, the allocation itself fails
    needed, least = planned_bytes(plans), min(limits, key=lambda limit: limit.free)
    if needed > least.free:
        raise HostMemoryError(
            f"host_bytes must be at most {amount(least.free)} {least.owner}; got {amount(needed)} for "
            f"{describe(plans)}; {what_fits(plans, least.free)}"
        )


@contextlib.contextmanager
def placing(plans: Plans) -> Iterator[None]:
    """While offloaded rows are placed, turn the runtime's error about host memory into a HostMemoryError."""
    try:
        yield
        Pool.note()
    except jax.errors.JaxRuntimeError as error:
        plans = [specs for specs in plans if host_bytes(specs)]
        if not plans or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = f", or make XLA's pinned-host pool larger: {POOL_ADVICE}" if jax.default_backend() == "gpu" else ""
        raise HostMemoryError(
            f"host_bytes={planned_bytes(plans)} for {describe(plans)} were being placed, and the runtime could not "
            f"allocate more than the {amount(pinned_bytes())} that pinned_host arrays take; use fewer rows or a "
            f"smaller capacity{advice}"
        ) from error


def settle(layers: Sequence[LayerState], plans: Plans) -> None:
    """Wait until the host rows of these layers have arrived.

    Raises:
        HostMemoryError: the runtime lacked the memory for them.
    """
    # Wait for the layers' other arrays first: a failure of the device must not be reported as one of host memory.
    jax.block_until_ready([(layer.frozen, layer.live) for layer in layers])
    with placing(plans):
        jax.block_until_ready([layer.host for layer in layers])


# What there is


class Pool:
    """XLA's pool of pinned memory, which gives nothing back to the system.

    Attributes:
        taken: the most bytes of it that arrays took at any check.
    """

    taken = 0

    @classmethod
    def note(cls) -> int:
        """Update `taken`, and return the bytes that arrays take now."""
        now = pinned_bytes()
        cls.taken = max(cls.taken, now)
        return now


def pinned_bytes() -> int:
    """Bytes of all arrays in pinned host memory."""
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host")


def system_limit(taken: int) -> Limit | None:
    """The memory that the system has left, and on a GPU the part of XLA's pool that no array uses."""
    free = available_memory()
    if free is None:
        return None
    spare = max(0, Pool.taken - taken) if jax.default_backend() == "gpu" else 0
    return Limit(free + spare, "that the system has available")


def available_memory() -> int | None:
    """Bytes that a program may still allocate; None where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        return available[0] if available else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def pool_limit(taken: int) -> Limit | None:
    """What is left of XLA's pool of pinned memory; None where there is no such pool."""
    if jax.default_backend() != "gpu":
        return None
    size = pool_gib() * GIB
    pool = f"XLA's pinned-host pool (xla_gpu_host_bfc) of {amount(size)}, of which live arrays take {amount(taken)}"
    return Limit(max(0, size - taken), f"left in {pool}; {POOL_ADVICE}")


def pool_gib() -> int:
    """Size of XLA's pinned-host pool by the environment, with XLA's own defaults."""
    preallocated = os.environ.get(PREALLOCATE_VARIABLE, "").strip().lower() in ("1", "true")
    try:
        return int(os.environ.get(POOL_VARIABLE, ""))
    except ValueError:
        return 16 if preallocated else 64


# What would fit


def planned_bytes(plans: Plans) -> int:
    """Bytes in host memory of all planned states."""
    return sum(host_bytes(specs) for specs in plans)


def describe(plans: Plans) -> str:
    """The sizes of planned states, which are all alike."""
    spec = plans[0][0]
    states = f" in each of {len(plans)} states" if len(plans) > 1 else ""
    return f"{count_rows(spec.batch)} at capacity={spec.capacity}{states}"


def what_fits(plans: Plans, free: int) -> str:
    """How many of the rows fit at this capacity, and which capacity at so many rows."""
    batch = plans[0][0].batch
    rows, capacity = free * batch // planned_bytes(plans), largest_capacity(plans, free)
    if rows == 0 and capacity == 0:
        return "not even a shorter row would fit"
    fitting = [f"{count_rows(rows)} at this capacity"] if rows else []
    fitting += [f"{count_rows(batch)} at capacity={capacity}"] if capacity else []
    return " or ".join(fitting) + " would fit"


def largest_capacity(plans: Plans, free: int) -> int:
    """The largest capacity at which as many rows fit, rounded down by less than a 32nd; 0 where none does."""

    def size(capacity: int) -> int:
        return planned_bytes([tuple(at_capacity(spec, capacity) for spec in specs) for specs in plans])

    low, high = 0, plans[0][0].capacity
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= free else (low, middle)
    low -= low % max(1, 1 << max(0, low.bit_length() - 6))
    return low if low and size(low) else 0  # a capacity so small that nothing is offloaded is no answer


def at_capacity(spec: CacheSpec, capacity: int) -> CacheSpec:
    """The spec with a smaller capacity; the window shrinks by as much."""
    return dataclasses.replace(spec, capacity=capacity, window=max(0, spec.window - (spec.capacity - capacity)))


def count_rows(rows: int) -> str:
    """1 row, 2 rows."""
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def amount(size: int) -> str:
    """Bytes, and roughly how many that are."""
    for factor, unit in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= factor:
            return f"{size} bytes ({size / factor:.1f} {unit})"
    return f"{size} bytes"
