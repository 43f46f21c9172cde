"""Check that offloaded rows fit into host memory before they are allocated. The error names sizes that would fit.

There are two limits. One is the memory that the system has available. The other, on a GPU, is XLA's pool of pinned
memory (`xla_gpu_host_bfc`). An environment variable sets the size of the pool when jax starts.
"""

import bisect
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from jshadow.cache.offload import host_bytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.cache.system_memory import GIB, POOL_VARIABLE, available_memory, pool_gib
from jshadow.errors import HostMemoryError

Plans = Sequence[tuple[CacheSpec, ...]]  # the specs of all layers, one tuple for each state that is made

_POOL_ADVICE = f"{POOL_VARIABLE}, set before jax starts, is its size in GiB"


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit of host memory.

    Attributes:
        owner: text that follows the number of bytes in an error message, such as "that the system has available".
    """

    free: int
    owner: str


class Sharing:
    """The processes that share the memory of this host.

    Attributes:
        processes: how many of a joined run's processes are on this host. `jshadow.engine.processes.join` sets it.
    """

    processes = 1


def check_host_memory(plans: Plans) -> None:
    """Raise HostMemoryError if the offloaded rows of the planned states exceed a known limit.

    Args:
        plans: the specs of all layers, one tuple for each state. States that offload nothing are ignored.
    """
    plans = [specs for specs in plans if host_bytes(specs)]
    least = least_limit()
    if not plans or least is None:
        return  # if no limit is known, `placing` reports a failed allocation
    needed = _planned_bytes(plans)
    if needed > least.free:
        raise HostMemoryError(
            f"host_bytes must be at most {_amount(least.free)} {least.owner}; got {_amount(needed)} for "
            f"{_describe(plans)}; {_what_fits(plans, least.free)}"
        )


@contextlib.contextmanager
def placing(plans: Plans) -> Iterator[None]:
    """A context manager for code that copies offloaded rows to host memory.

    An out-of-memory error of the JAX runtime becomes a HostMemoryError that describes `plans`. Without rows to offload,
    the error is raised unchanged.
    """
    try:
        yield
        if jax.default_backend() == "gpu":  # elsewhere there is no pool
            Pool.note()
    except jax.errors.JaxRuntimeError as error:
        plans = [specs for specs in plans if host_bytes(specs)]
        if not plans or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = f", or make XLA's pinned-host pool larger: {_POOL_ADVICE}" if jax.default_backend() == "gpu" else ""
        raise HostMemoryError(
            f"host_bytes={_planned_bytes(plans)} for {_describe(plans)} were being placed, and the runtime could not "
            f"allocate more than the {_amount(pinned_bytes())} that pinned_host arrays take; use fewer rows or a "
            f"smaller capacity{advice}"
        ) from error


def settle(layers: Sequence[LayerState], plans: Plans) -> None:
    """Wait until the host rows of these layers have been copied to host memory."""
    # Wait for the layers' other arrays first, so that a failure on the device is not reported as lack of host memory.
    jax.block_until_ready([(layer.frozen, layer.live) for layer in layers])
    with placing(plans):
        jax.block_until_ready([layer.host for layer in layers])


# Limits


class Pool:
    """XLA's pool of pinned memory. The pool grows when it is full, and never returns memory to the system.

    Attributes:
        taken: maximum number of bytes that arrays in the pool had at any call of `note`.
    """

    taken = 0

    @classmethod
    def note(cls) -> int:
        """Update `taken`, and return the bytes of all arrays that are in the pool now."""
        now = pinned_bytes()
        cls.taken = max(cls.taken, now)
        return now


def pinned_bytes() -> int:
    """Return the bytes of all arrays in pinned host memory that lie beside devices of this process."""
    pinned = [array for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host"]
    parts = [shard.data for array in pinned for shard in array.addressable_shards]
    # Reading a shard makes a second array of the same memory, which must not be counted again.
    return sum({_address(part): part.nbytes for part in parts}.values())


def _address(array: jax.Array) -> int:
    """Return a number that arrays on one device share if they lie in the same memory."""
    try:
        return array.unsafe_buffer_pointer()
    except RuntimeError:  # the runtime tells no address
        return id(array)


def least_limit() -> Limit | None:
    """Return the limit of host memory that leaves the fewest bytes, or None if none is known."""
    taken = Pool.note() if jax.default_backend() == "gpu" else 0
    limits = [limit for limit in (_system_limit(taken), _pool_limit(taken)) if limit is not None]
    return min(limits, key=lambda limit: limit.free, default=None)


def _system_limit(taken: int) -> Limit | None:
    """Return the limit of the system, or None if it is not known.

    It is the available memory, and on a GPU also the unused part of XLA's pool.
    """
    free = available_memory()
    if free is None:
        return None
    spare = max(0, Pool.taken - taken) if jax.default_backend() == "gpu" else 0
    owner = "that the system has available"
    if Sharing.processes > 1:
        owner += f", of which each of {Sharing.processes} processes gets a part"
    return Limit(free // Sharing.processes + spare, owner)


def _pool_limit(taken: int) -> Limit | None:
    """Return the limit of XLA's pool of pinned memory, or None if the backend is not a GPU."""
    if jax.default_backend() != "gpu":
        return None
    size = pool_gib() * GIB
    pool = f"XLA's pinned-host pool (xla_gpu_host_bfc) of {_amount(size)}, of which live arrays take {_amount(taken)}"
    return Limit(max(0, size - taken), f"left in {pool}; {_POOL_ADVICE}")


# Sizes that would fit


def _planned_bytes(plans: Plans) -> int:
    """Return the bytes that all planned states need in host memory."""
    return sum(host_bytes(specs) * _devices_here(specs[0]) for specs in plans)


def _devices_here(spec: CacheSpec) -> int:
    """Return how many devices of the mesh are of this process. A spec describes one device."""
    mesh = spec.shards.mesh if spec.shards is not None else None
    return len(mesh.local_devices) if isinstance(mesh, Mesh) else 1


def _describe(plans: Plans) -> str:
    """Return the number of rows and the capacity of the planned states as text. All states have the same sizes."""
    spec = plans[0][0]
    states = f" in each of {len(plans)} states" if len(plans) > 1 else ""
    return f"{_count_rows(spec.batch)} at capacity={spec.capacity}{states}"


def _what_fits(plans: Plans, free: int) -> str:
    """Return the number of rows that fit at this capacity, and the capacity at which all rows fit, as text."""
    batch = plans[0][0].batch
    rows, capacity = free * batch // _planned_bytes(plans), _largest_capacity(plans, free)
    if rows == 0 and capacity == 0:
        return "not even a shorter row would fit"
    fitting = [f"{_count_rows(rows)} at this capacity"] if rows else []
    fitting += [f"{_count_rows(batch)} at capacity={capacity}"] if capacity else []
    return " or ".join(fitting) + " would fit"


def _largest_capacity(plans: Plans, free: int) -> int:
    """Return the largest capacity at which all rows fit, or 0 if there is none.

    It is rounded down by less than 1/32 of its value.
    """

    def size(capacity: int) -> int:
        return _planned_bytes([tuple(_at_capacity(spec, capacity) for spec in specs) for specs in plans])

    low = bisect.bisect_right(range(1, plans[0][0].capacity), free, key=size)
    low -= low % max(1, 1 << max(0, low.bit_length() - 6))
    return low if low and size(low) else 0  # a capacity so small that nothing is offloaded is not proposed


def _at_capacity(spec: CacheSpec, capacity: int) -> CacheSpec:
    """Return the spec with a smaller capacity. The window shrinks by the same number of tokens."""
    return dataclasses.replace(spec, capacity=capacity, window=max(0, spec.window - (spec.capacity - capacity)))


def _count_rows(rows: int) -> str:
    """Return the number of rows as text: "1 row", "2 rows"."""
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _amount(size: int) -> str:
    """Return a number of bytes as text, with the size in GiB or MiB: "3221225472 bytes (3.0 GiB)"."""
    for factor, unit in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= factor:
            return f"{size} bytes ({size / factor:.1f} {unit})"
    return f"{size} bytes"
