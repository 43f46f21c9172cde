"""The host tier: place the rows of a prompt, write new rows, fetch selected rows.

Only this module and `jshadow.cache.rows`, which moves rows from state to state, move these rows.

B is the number of rows. There are three fetch modes:

- "resident" keeps the rows on the device. It is the reference: the other modes must give equal results. On an NVIDIA
  GPU, one kernel unpacks rows of few bits while it rebuilds keys.
- "device_put" keeps the rows in pinned host memory. Inside the compiled step, the indices are sent to the host, the
  host gathers the rows, and `jax.device_put` sends them back while the device rebuilds the keys. XLA can overlap the
  transfer with the rebuilding, because the two meet only at an optimization barrier.
- "zero_copy" also keeps the rows in pinned host memory. On an NVIDIA GPU, one kernel reads them from there while it
  rebuilds the keys. It skips units that are on the device from the previous step. Settings without such a kernel are
  refused. On other backends, and if no keys are rebuilt, the rows are fetched as with "device_put".

Inside jit on a GPU, only these operations on host arrays are safe: device_put of a whole array, dynamic_slice,
dynamic_update_slice, a function under compute_on("device_host"), and a kernel of this project. Therefore this module
does not index, reshape or scatter host arrays.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from jshadow.cache.records import Fetched, HostArray, HostTier, HostWrite, Selection
from jshadow.cache.spec import CacheSpec, HostLayout, Shards, whole_shape
from jshadow.errors import ConfigError
from jshadow.ops.layout import write_rows
from jshadow.ops.packing import dequantize_chunks, row_words
from pallas_kernels import ChosenKeys, HostRows, KeptRows, fetch_reconstruct, on_host, put_missed


@jax.custom_batching.custom_vmap
def _write_units(array: Array, data: Array, start: Array) -> Array:
    """Write units [B, heads, n, width] into an array [B, heads, U, width], at the places `start`, int32 [B, n]."""
    for row, unit in itertools.product(range(array.shape[0]), range(data.shape[2])):
        one = lax.dynamic_slice(data, (row, 0, unit, 0), (1, data.shape[1], 1, data.shape[3]))
        array = lax.dynamic_update_slice(array, one, (row, 0, start[row, unit], 0))
    return array


@_write_units.def_vmap
def _write_units_of_many(size: int, batched: list[bool], array: Array, data: Array, start: Array) -> tuple[Array, bool]:
    """Run `_write_units` on arrays with one more axis at the front. By itself, vmap would scatter to a host array."""
    assert all(batched), "the tail, the new units and their places belong to a row"
    rows = itertools.product(range(size), range(array.shape[1]), range(data.shape[3]))
    for many, row, unit in rows:
        one = lax.dynamic_slice(data, (many, row, 0, unit, 0), (1, 1, data.shape[2], 1, data.shape[4]))
        array = lax.dynamic_update_slice(array, one, (many, row, 0, start[many, row, unit], 0))
    return array, True


Space = jax.memory.Space
FETCH_MODES = ("resident", "device_put", "zero_copy")


def check_fetch(fetch: str) -> None:
    """Raise ConfigError unless `fetch` is "auto" or a fetch mode. No backend is started."""
    if not isinstance(fetch, str) or fetch not in ("auto", *FETCH_MODES):
        raise ConfigError(f"fetch must be 'auto' or one of {FETCH_MODES}, got {fetch!r}")


def resolve_fetch(fetch: str) -> str:
    """Return the fetch mode of a setting if it follows without the sizes of the arrays.

    "auto" is "resident" on a CPU, where host and device memory are the same memory. On an accelerator it stays "auto",
    and `jshadow.planner.machine.fetch_here` chooses the mode by the sizes of the batch and of the memories.

    Raises:
        ConfigError: `fetch` is neither "auto" nor a fetch mode.
    """
    check_fetch(fetch)
    return "resident" if fetch == "auto" and jax.default_backend() == "cpu" else fetch


def _memory_of(fetch: str) -> str:
    """Return the memory kind in which a fetch mode keeps the rows: "device" or "pinned_host"."""
    return "device" if fetch == "resident" else "pinned_host"


def keeps(fetch: str, backend: str) -> bool:
    """Return whether keys and values of units that stay selected remain on the device: `CacheSpec.keep`.

    With "zero_copy" they do, so that their values need no transfer. With "resident" they do on a GPU, where the kernel
    rebuilds only the keys of other units. On a CPU, where all keys are rebuilt in one product, this would save nothing.
    With "device_put" the host gathers all units in any case.

    Args:
        fetch: a fetch mode.
        backend: name of the backend, as `jax.default_backend()` returns it.
    """
    return fetch == "zero_copy" or (fetch == "resident" and backend == "gpu")


def tier_shapes(layout: HostLayout | None, spec: CacheSpec) -> HostTier:
    """Return the host tier of a layer with ShapeDtypeStructs in place of arrays. Nothing is allocated.

    Raises:
        ConfigError: the fetch mode is "zero_copy" on a GPU, and there is no kernel for the policy's settings.
    """
    if layout is None:
        return HostTier()
    if spec.fetch == "zero_copy" and jax.default_backend() == "gpu":
        layout.check_kernel(spec.policy.name)
    shape = (spec.head_dim * layout.planes * layout.unit, jnp.dtype(spec.dtype))
    if layout.bits is not None:
        shape = (unit_bytes(spec, layout) // 2, jnp.dtype(jnp.uint16))

    def part(units: int) -> HostArray | None:
        if units == 0:
            return None
        array = jax.ShapeDtypeStruct((spec.batch, layout.heads, units, shape[0]), shape[1])
        return HostArray(array, _memory_of(spec.fetch))

    # The tail has one extra unit at its end. In host memory, `write` writes the units that are not valid there.
    return HostTier(part(layout.units), part(layout.tail_units + 1 if layout.tail_units else 0))


def host_bytes(specs: tuple[CacheSpec, ...]) -> int:
    """Return the bytes that the layers with these specs keep in host memory."""
    tiers = [tier_shapes(spec.policy.host_layout(spec), spec) for spec in specs]
    parts = [part for tier in tiers for part in (tier.prompt, tier.tail) if part is not None]
    return sum(part.array.size * part.array.dtype.itemsize for part in parts if part.memory == "pinned_host")


def write(tier: HostTier, rows: HostWrite | None) -> HostTier:
    """Return the tier with new units written into its tail. If the tail is donated, they are written in place.

    In host memory, each unit of each row is written as a separate slice. In device memory, all are written at once.
    """
    if rows is None:
        return tier
    tail = tier.tail
    assert tail is not None
    assert rows.start is not None
    data = rows.data.astype(tail.array.dtype)
    if tail.memory != "pinned_host":
        valid = jnp.ones(rows.start.shape, bool) if rows.valid is None else rows.valid
        return tier.replace(tail=HostArray(write_rows(tail.array, data.swapaxes(1, 2), rows.start, valid), tail.memory))
    # If a slice reaches past the end, XLA shifts it back, and it would overwrite earlier units. So a slice is one unit.
    start = rows.start if rows.valid is None else jnp.where(rows.valid, rows.start, tail.array.shape[2] - 1)
    return tier.replace(tail=HostArray(_write_units(tail.array, to_host(data), start), tail.memory))


def fetch(spec: CacheSpec, tier: HostTier, selection: Selection, layout: HostLayout) -> Fetched:
    """Copy the selected units to the device. If the selection has a `rebuild`, rebuild their keys at the same time.

    Args:
        spec: the layer that the rows belong to.
        tier: the layer's host tier.
        selection: the units to fetch.
        layout: the layout of the tier.

    Returns:
        The keys and values of the units. `ids` and `valid` are those of the selection.
    """
    ids = jnp.broadcast_to(selection.ids, (spec.batch, layout.heads, selection.ids.shape[2]))

    by_kernel = functools.partial(_fetch_by_kernel, spec, layout)
    by_gather = functools.partial(_fetch_by_gather, spec, layout)
    keys: Array | None
    rebuild = selection.rebuild
    kernel = rebuild is not None and rebuild.in_kernel and tier.prompt is not None
    if kernel and spec.fetch == "zero_copy":
        keys, values = by_kernel(tier, selection, ids)
    elif kernel and spec.fetch == "resident" and (spec.keep or layout.bits is not None):
        # On a GPU, one kernel unpacks the values and rebuilds the keys. Without it, XLA needs four more kernels.
        keys, values = lax.platform_dependent(tier, selection, ids, cuda=by_kernel, default=by_gather)
    else:
        keys, values = by_gather(tier, selection, ids)
    places = selection.kept.places if selection.kept else None
    count = selection.counts[0] if selection.counts else None
    return Fetched(keys, values, selection.valid, selection.ids, places, count)


def _fetch_by_gather(
    spec: CacheSpec, layout: HostLayout, tier: HostTier, selection: Selection, ids: Array
) -> tuple[Array | None, Array]:
    """Return keys and values as `Fetched` has them. XLA gathers all units and rebuilds keys at the same time.

    The arguments are those of `fetch`; `ids` are the selection's, broadcast to int32 [B, heads, n].
    """
    shape = ids.shape
    with jax.named_scope("fetch"):
        rows = gather(tier, ids, (layout.units, layout.tail_units))
    keys, late = None, selection.rebuild is not None and selection.rebuild.codec.from_values
    if selection.rebuild is not None and not late:
        with jax.named_scope("rebuild"):
            if spec.fetch != "resident":
                # Start rebuilding only after the ids were sent to the host. Otherwise XLA may rebuild the keys first,
                # and the host's gather overlaps with nothing.
                ids, _ = lax.optimization_barrier((ids, to_host(ids)))
            keys = selection.rebuild.keys(ids).astype(spec.dtype)
        # Without this barrier, XLA's scheduler waits for the rows before it rebuilds the keys.
        keys, rows = lax.optimization_barrier((keys, rows))
    if layout.bits is not None:
        rows = dequantize_chunks(rows, layout.unit, spec.head_dim, layout.bits, spec.dtype)
    rows = rows.reshape(*shape, layout.planes, layout.unit, spec.head_dim)
    planes = [
        rows[:, :, :, plane].reshape(*shape[:2], shape[2] * layout.unit, spec.head_dim)
        for plane in range(layout.planes)
    ]
    keys, values = planes[0] if layout.planes == 2 else keys, planes[-1]
    if selection.rebuild is not None and late:
        with jax.named_scope("rebuild"):
            keys = selection.rebuild.keys(ids, values).astype(spec.dtype)
    if (kept := selection.kept) is not None:
        assert keys is not None
        keys, values = (
            put_missed(old, kept.places, kept.missed, new) for old, new in ((kept.keys, keys), (kept.values, values))
        )
    return keys, values


def _fetch_by_kernel(
    spec: CacheSpec, layout: HostLayout, tier: HostTier, selection: Selection, ids: Array
) -> tuple[Array, Array]:
    """Return what `_fetch_by_gather` returns, from the kernel that reads the rows where they are stored.

    The selection must have a `rebuild`.
    """
    rebuild, kept, bits = selection.rebuild, selection.kept, layout.bits
    assert rebuild is not None
    assert tier.prompt is not None
    tail = tier.tail.array if tier.tail else None
    values = HostRows(tier.prompt.array, tail, bits, spec.dtype if bits else None)
    with jax.named_scope("fetch"), jax.named_scope("rebuild"):
        keys = ChosenKeys(
            rebuild.left,
            ids=ids,
            inverse=rebuild.inverse,
            tail=rebuild.tail,
            tail_unit=rebuild.tail_unit,
            **rebuild.codec.operands(rebuild.right),
        )
        return fetch_reconstruct(
            values, keys, KeptRows(kept.values, kept.keys, kept.places, kept.missed) if kept else None
        )


def unit_bytes(spec: CacheSpec, layout: HostLayout) -> int:
    """Return the bytes of one unit of one head in the host tier."""
    if layout.bits is not None:
        return 2 * row_words(layout.unit, spec.head_dim, layout.bits, spec.dtype)
    return layout.planes * layout.unit * spec.head_dim * jnp.dtype(spec.dtype).itemsize


def gather(tier: HostTier, ids: Array, units: tuple[int, ...]) -> Array:
    """Gather units of a tier and copy them to the device.

    Args:
        ids: numbers of units, int32 [B, heads, n], as in `Selection`. Ids out of range are clipped.

    Returns:
        [B, heads, n, width], where width is the last axis of the tier's arrays.
    """
    sources = [part for part in (tier.prompt, tier.tail) if part is not None]
    pick = functools.partial(_gather_units, units=tuple(filter(None, units)))
    arrays = [source.array for source in sources]
    if sources[0].memory == "device":
        return pick(ids, *arrays)
    # The host chooses between prompt and tail. If the device chose, a row of each would have to be copied to it.
    return jax.device_put(on_host(pick)(to_host(ids), *arrays), Space.Device)


def _gather_units(ids: Array, *arrays: Array, units: tuple[int, ...]) -> Array:
    """Gather units from several arrays as if they were concatenated along the axis of units.

    Args:
        ids: numbers of units in the concatenation, int32 [B, heads, n]. Ids out of range are clipped.
        arrays: [B, heads, U, width] each.
        units: the number of leading units of each array that the concatenation contains.
    """
    first, rows = 0, None
    for array, count in zip(arrays, units, strict=True):
        inside = jnp.clip(ids - first, 0, max(count - 1, 0))
        picked = jnp.take_along_axis(array, inside[..., None], axis=2, mode="clip")
        rows = picked if rows is None else jnp.where((ids >= first)[..., None], picked, rows)
        first += count
    assert rows is not None
    return rows


def to_host(x: Array) -> Array:
    """Copy x to host memory, inside jit."""
    return jax.device_put(x, Space.Host)


def place(layout: HostLayout | None, spec: CacheSpec, prompt: HostWrite | None) -> HostTier:
    """Start to copy a layer's prompt rows to the host tier, and return without waiting. The tail is filled with zeros.

    Args:
        layout: the layer's layout, or None if the layer offloads nothing.
        prompt: the rows of the prompt. None: zeros.
    """
    shapes = tier_shapes(layout, spec)
    if spec.shards is not None:
        return _place_on_devices(spec.shards, shapes, prompt)
    sharding = SingleDeviceSharding(jax.local_devices()[0], memory_kind=_memory_of(spec.fetch))

    def put(shape: HostArray | None, data: Array | np.ndarray | None) -> HostArray | None:
        if shape is None:
            return None
        if shape.memory == "device" and isinstance(data, Array):
            return HostArray(data, shape.memory)
        if data is None:
            data = np.zeros(shape.array.shape, shape.array.dtype)  # NumPy, so that no device memory is used
        return HostArray(jax.device_put(data, sharding), shape.memory)

    return HostTier(put(shapes.prompt, prompt.data if prompt else None), put(shapes.tail, None))


def moved(tier: HostTier, fetch: str) -> HostTier:
    """Start to copy a tier to the memory of a fetch mode, and return without waiting.

    An array that lies in this memory already is shared and not copied.
    """

    def put(part: HostArray | None) -> HostArray | None:
        memory = _memory_of(fetch)
        if part is None or part.memory == memory:
            return part
        return HostArray(jax.device_put(part.array, part.array.sharding.with_memory_kind(memory)), memory)

    return HostTier(put(tier.prompt), put(tier.tail))


def _place_on_devices(shards: Shards, shapes: HostTier, prompt: HostWrite | None) -> HostTier:
    """Do what `place` does on a mesh. `shapes` is the tier of one device, with ShapeDtypeStructs."""

    def put(shape: HostArray | None, data: Array | None, split: PartitionSpec) -> HostArray | None:
        if shape is None:
            return None
        sharding = shards.sharding(split, shape.memory)
        if data is not None:
            return HostArray(jax.device_put(data, sharding), shape.memory)
        whole, one = whole_shape(shards, split, shape.array.shape), shape.array
        zeros = jax.make_array_from_callback(whole, sharding, lambda _: np.zeros(one.shape, one.dtype))
        return HostArray(zeros, shape.memory)

    rows = shards.spec("data", "tp")
    return HostTier(put(shapes.prompt, prompt.data if prompt else None, rows), put(shapes.tail, None, rows))
