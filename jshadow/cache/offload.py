"""The host tier: place the rows of a prompt, write new rows, fetch selected rows. Only this module moves rows.

There are three fetch modes:

- "resident" keeps the rows on the device. It is the reference that offloading must equal.
- "device_put" keeps the rows in pinned host memory. Inside the compiled step the indices travel to the host, the host
  gathers the rows, and `jax.device_put` brings them back while the device rebuilds the keys. XLA overlaps the two,
  because they meet only at an optimization barrier.
- "zero_copy" keeps the rows in pinned host memory too. On an NVIDIA GPU one kernel reads them itself while it rebuilds
  the keys; it leaves out rows that lie on the device from the step before. Keys and values for which there is no such
  kernel are refused. Elsewhere, and where no keys are rebuilt, the rows are fetched as by "device_put".

Inside jit, only these are safe on host arrays on a GPU: device_put of a whole array, dynamic_slice,
dynamic_update_slice, a function under compute_on("device_host"), and a kernel of this project. So this module does not
index, reshape or scatter host arrays.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from jshadow.cache.records import Fetched, HostArray, HostTier, HostWrite, Selection
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.ops.packing import dequantise_rows, row_bytes, split_rows
from pallas_kernels import ChosenKeys, HostRows, KeptRows, fetch_reconstruct, on_host

Space = jax.memory.Space
FETCH_MODES = ("resident", "device_put", "zero_copy")
FETCH_QUANTUM = 64  # bytes in one count of Counters.fetched


def resolve_fetch(fetch: str) -> str:
    """The fetch mode that a setting means: "auto" offloads on an accelerator, and is "resident" on a CPU.

    Raises:
        ConfigError: not a fetch mode.
    """
    if not isinstance(fetch, str) or fetch not in ("auto", *FETCH_MODES):
        raise ConfigError(f"fetch must be 'auto' or one of {FETCH_MODES}, got {fetch!r}")
    if fetch == "auto":
        return "resident" if jax.default_backend() == "cpu" else "device_put"
    return fetch


def memory_of(fetch: str) -> str:
    """Memory kind in which a fetch mode keeps the host tier."""
    return "device" if fetch == "resident" else "pinned_host"


def tier_shapes(layout: HostLayout | None, spec: CacheSpec) -> HostTier:
    """The host tier of a layer as ShapeDtypeStructs: no allocation.

    Raises:
        ConfigError: zero_copy on a GPU where no kernel fetches such values while it rebuilds such keys.
    """
    if layout is None:
        return HostTier()
    if layout.no_kernel and spec.fetch == "zero_copy" and jax.default_backend() == "gpu":
        raise ConfigError(
            f"fetch must be 'device_put' or 'resident' for {spec.policy.name} with {layout.no_kernel} on a GPU, where "
            "no kernel fetches such values while it rebuilds such keys, got 'zero_copy'"
        )
    shape = (spec.head_dim * layout.planes * layout.unit, jnp.dtype(spec.dtype))
    if layout.bits is not None:
        shape = (unit_bytes(spec, layout), jnp.dtype(jnp.uint8))

    def part(units: int) -> HostArray | None:
        if units == 0:
            return None
        array = jax.ShapeDtypeStruct((spec.batch, layout.heads, units, shape[0]), shape[1])
        return HostArray(array, memory_of(spec.fetch))

    # The tail has one unit more, which takes the rows that must not be written.
    return HostTier(part(layout.units), part(layout.tail_units + 1 if layout.tail_units else 0))


def host_bytes(specs: tuple[CacheSpec, ...]) -> int:
    """Bytes that all layers keep in host memory."""
    tiers = [tier_shapes(spec.policy.host_layout(spec), spec) for spec in specs]
    parts = [part for tier in tiers for part in (tier.prompt, tier.tail) if part is not None]
    return sum(part.array.size * part.array.dtype.itemsize for part in parts if part.memory == "pinned_host")


def place(layout: HostLayout | None, spec: CacheSpec, prompt: HostWrite | None) -> HostTier:
    """Start moving a layer's prompt rows to their tier and return at once; the tail begins as zeros."""
    shapes = tier_shapes(layout, spec)
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=memory_of(spec.fetch))

    def put(shape: HostArray | None, data: Array | np.ndarray | None) -> HostArray | None:
        if shape is None:
            return None
        if shape.memory == "device" and isinstance(data, Array):
            return HostArray(data, shape.memory)  # it stays where it is, also where that is several devices
        if data is None:
            data = np.zeros(shape.array.shape, shape.array.dtype)  # by NumPy, so that nothing is on the device
        return HostArray(jax.device_put(data, sharding), shape.memory)

    return HostTier(put(shapes.prompt, prompt.data if prompt else None), put(shapes.tail, None))


def write(tier: HostTier, rows: HostWrite | None) -> HostTier:
    """Write new units into the tail, one slice for each unit of each row. A donated tail is changed in place."""
    if rows is None:
        return tier
    tail = tier.tail
    assert tail is not None
    assert rows.start is not None
    # XLA shifts a slice that reaches past the end onto the units before it. So each slice has one unit.
    start = rows.start if rows.valid is None else jnp.where(rows.valid, rows.start, tail.array.shape[2] - 1)
    data = rows.data.astype(tail.array.dtype)
    data = to_host(data) if tail.memory == "pinned_host" else data
    array = tail.array
    for row, unit in itertools.product(range(array.shape[0]), range(data.shape[2])):
        one = lax.dynamic_slice(data, (row, 0, unit, 0), (1, data.shape[1], 1, data.shape[3]))
        array = lax.dynamic_update_slice(array, one, (row, 0, start[row, unit], 0))
    return tier.replace(tail=HostArray(array, tail.memory))


def fetch(spec: CacheSpec, tier: HostTier, selection: Selection, layout: HostLayout) -> Fetched:
    """Bring the selected units to the device, rebuilding their keys meanwhile.

    Args:
        spec: the layer whose rows these are.
        tier: its host tier.
        selection: what to bring.
        layout: how the tier is laid out.

    Returns:
        Fetched; its ids and valid are the selection's, valid repeated for each token of a unit.
    """
    shape = (spec.batch, layout.heads, selection.ids.shape[2])
    ids = jnp.broadcast_to(selection.ids, shape)
    valid = jnp.repeat(selection.valid, layout.unit, axis=2)
    kernel = selection.rebuild is not None and selection.rebuild.codec.compiled
    if spec.fetch == "zero_copy" and tier.prompt is not None and kernel:
        with jax.named_scope("fetch"):
            return Fetched(*fetch_by_kernel(spec, tier, selection, ids, layout.bits), valid, selection.ids)
    with jax.named_scope("fetch"):
        rows = gather(tier, ids, (layout.units, layout.tail_units))
    keys = None
    if selection.rebuild is not None:
        with jax.named_scope("rebuild"):
            if spec.fetch != "resident":
                # Rebuild only when the ids have left for the host. Otherwise the host's work overlaps with nothing.
                ids, _ = lax.optimization_barrier((ids, to_host(ids)))
            keys = selection.rebuild.keys(ids).astype(spec.dtype)
        # Without this barrier the scheduler waits for the rows before it rebuilds the keys.
        keys, rows = lax.optimization_barrier((keys, rows))
    if layout.bits is not None:
        scaled = split_rows(rows, layout.unit, spec.dtype)
        rows = dequantise_rows(scaled, layout.bits, spec.dtype).reshape(*shape, layout.unit * spec.head_dim)
    if selection.kept is not None:
        rows = jnp.where(selection.kept.stay[..., None], selection.kept.rows, rows)
    rows = rows.reshape(*shape, layout.planes, layout.unit, spec.head_dim)
    planes = [
        rows[:, :, :, plane].reshape(*shape[:2], shape[2] * layout.unit, spec.head_dim)
        for plane in range(layout.planes)
    ]
    keys = planes[0] if layout.planes == 2 else keys
    return Fetched(keys, planes[-1], valid, selection.ids)


def fetch_by_kernel(
    spec: CacheSpec, tier: HostTier, selection: Selection, ids: Array, bits: int | None
) -> tuple[Array, Array]:
    """Keys and values [B, heads, n * unit, d] by the kernel that reads host memory itself; `bits` as in HostLayout."""
    rebuild, kept = selection.rebuild, selection.kept
    assert rebuild is not None
    assert tier.prompt is not None
    tail = tier.tail.array if tier.tail else None
    values = HostRows(tier.prompt.array, tail, bits, spec.dtype if bits else None)
    with jax.named_scope("rebuild"):
        keys = ChosenKeys(
            rebuild.left,
            ids=ids,
            inverse=rebuild.inverse,
            tail=rebuild.tail,
            tail_unit=rebuild.tail_unit,
            **rebuild.codec.operands(rebuild.right),
        )
        return fetch_reconstruct(values, keys, KeptRows(kept.rows, kept.stay) if kept else None)


def fetched_bytes(spec: CacheSpec, selection: Selection, layout: HostLayout) -> int:
    """Bytes that a fetch moves from the host for one row of the batch: all selected units, valid or not.

    It is 0 where `missed_quanta` counts the bytes instead.
    """
    if spec.fetch == "resident" or selection.kept is not None:
        return 0
    return layout.heads * selection.ids.shape[2] * unit_bytes(spec, layout)


def missed_quanta(spec: CacheSpec, selection: Selection, layout: HostLayout) -> Array | int:
    """What a fetch moves for each row where units on the device are left out, uint32 [B] in FETCH_QUANTUM bytes."""
    if selection.kept is None:
        return 0
    missed = (~selection.kept.stay).sum(axis=(1, 2), dtype=jnp.uint32)
    unit = unit_bytes(spec, layout)
    # The product is computed in two parts, because as one it may exceed 32 bits.
    return missed // FETCH_QUANTUM * unit + missed % FETCH_QUANTUM * unit // FETCH_QUANTUM


def unit_bytes(spec: CacheSpec, layout: HostLayout) -> int:
    """Bytes of one unit of one head."""
    if layout.bits is not None:
        return row_bytes(layout.unit, spec.head_dim, layout.bits, spec.dtype)
    return layout.planes * layout.unit * spec.head_dim * jnp.dtype(spec.dtype).itemsize


def gather(tier: HostTier, ids: Array, units: tuple[int, ...]) -> Array:
    """The units ids [B, heads, n] of a tier, on the device: [B, heads, n, width]. Ids are clipped.

    Args:
        tier: the rows.
        ids: numbers of units; those of the tail follow those of the prompt.
        units: how many units the prompt and the tail have, 0 for a part that is absent.
    """
    sources = [part for part in (tier.prompt, tier.tail) if part is not None]
    pick = functools.partial(gather_units, units=tuple(filter(None, units)))
    arrays = [source.array for source in sources]
    if sources[0].memory == "device":
        return pick(ids, *arrays)
    # The host chooses between prompt and tail, so that each row travels once.
    return jax.device_put(on_host(pick)(to_host(ids), *arrays), Space.Device)


def gather_units(ids: Array, *arrays: Array, units: tuple[int, ...]) -> Array:
    """Units ids [B, heads, n] of arrays [B, heads, U, width] joined, each cut to its number in `units`."""
    first, rows = 0, None
    for array, count in zip(arrays, units, strict=True):
        inside = jnp.clip(ids - first, 0, max(count - 1, 0))
        picked = jnp.take_along_axis(array, inside[..., None], axis=2, mode="clip")
        rows = picked if rows is None else jnp.where((ids >= first)[..., None], picked, rows)
        first += count
    assert rows is not None
    return rows


def to_host(x: Array) -> Array:
    """x in host memory, inside jit."""
    return jax.device_put(x, Space.Host)
