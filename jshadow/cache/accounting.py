"""Bytes of a state by part, and bytes that a fetch moves.

Bytes of a state follow from the shapes, dtypes and memory kinds of its arrays. The state may also be abstract.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import HostArray, LayerState, Selection
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.cache.state import KVState

FETCH_QUANTUM = 64  # Counters.fetched counts in units of this many bytes


class ByteCount(NamedTuple):
    """Bytes in device memory and in host memory."""

    device: int = 0
    host: int = 0

    def times(self, count: int) -> "ByteCount":
        """Return `count` times the bytes."""
        return ByteCount(count * self.device, count * self.host)


def total(sizes: Iterable[tuple[int, int]]) -> ByteCount:
    """Return the sum of bytes (device, host)."""
    sizes = list(sizes)
    return ByteCount(sum(device for device, _ in sizes), sum(host for _, host in sizes))


def leaf_bytes(leaf: Any) -> int:
    """Return the bytes of an array or of a ShapeDtypeStruct."""
    return int(leaf.size) * jnp.dtype(leaf.dtype).itemsize


def layer_nbytes(state: LayerState) -> dict[str, ByteCount]:
    """Return the bytes (device, host) of each part of a layer's state, by the name of the field.

    The rows of the host tier are named "host rows" and "host tail". In resident mode, they count as device bytes.
    """
    parts: dict[str, ByteCount] = {}
    for half in (state.frozen, state.live):
        for field in dataclasses.fields(half) if half is not None else ():
            leaves = jax.tree.leaves(getattr(half, field.name))
            if not leaves:
                continue  # the settings of the policy leave this part out
            # The frozen and the live record may have a field of the same name. Their bytes are added.
            parts[field.name] = ByteCount(parts.get(field.name, ByteCount()).device + sum(map(leaf_bytes, leaves)))
    for label, tier in (("host rows", state.host.prompt), ("host tail", state.host.tail)):
        if isinstance(tier, HostArray):
            size = leaf_bytes(tier.array)
            parts[label] = ByteCount(host=size) if tier.memory == "pinned_host" else ByteCount(size)
    return parts


def state_nbytes(state: KVState) -> dict[str, ByteCount]:
    """Return the bytes (device, host) of each part of a state, summed over layers, without lengths and counters."""
    parts: dict[str, ByteCount] = {}
    for layer in state.layers:
        for part, size in layer_nbytes(layer).items():
            parts[part] = total([parts.get(part, ByteCount()), size])
    for part, tree in (("shared", state.shared), ("fitted", state.fitted)):
        if jax.tree.leaves(tree):
            parts[part] = ByteCount(sum(map(leaf_bytes, jax.tree.leaves(tree))))
    return parts


def fetched_bytes(spec: CacheSpec, selection: Selection, layout: HostLayout) -> int:
    """Return the bytes that a fetch moves from the host for one row of the batch. All selected units count.

    The result is 0 if the rows are resident. It is also 0 if the selection has `kept` rows, which `missed_quanta`
    counts.
    """
    if spec.fetch == "resident" or selection.kept is not None:
        return 0
    return layout.heads * selection.ids.shape[2] * unit_bytes(spec, layout)


def missed_quanta(missed: Array, unit: int) -> Array:
    """Return the data of `missed` units of `unit` bytes, in units of FETCH_QUANTUM bytes, rounded down. uint32."""
    missed = missed.astype(jnp.uint32)
    # missed * unit may exceed 32 bits, so the quotient and the remainder of `missed` are multiplied separately.
    return missed // FETCH_QUANTUM * unit + missed % FETCH_QUANTUM * unit // FETCH_QUANTUM
