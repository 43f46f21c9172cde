"""What a policy's hooks do on a device that has a part of a prompt's units: the axis `sp` of a mesh.

Without such a mesh, each function does what one device does with all units.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece, attend
from jshadow.ops.split import attend_split


def is_split(spec: CacheSpec) -> bool:
    """Return whether a device has a part of the units only."""
    return spec.shards is not None and spec.shards.sp > 1


def heads_axis(spec: CacheSpec) -> str | None:
    """Return the axis of the mesh that splits the heads, or None without a mesh."""
    return None if spec.shards is None else "tp"


def parts_of(spec: CacheSpec, count: int) -> int:
    """Return how many of `count` entries a device stores."""
    return spec.shards.units(count) if spec.shards is not None else count


def each_of(spec: CacheSpec, count: int) -> int:
    """Return `count`, the number of entries that every device has for the units that it selects itself."""
    return spec.shards.each(count) if spec.shards is not None else count


def own_units(spec: CacheSpec, x: Array, count: int, axis: int = 2) -> Array:
    """Return this device's `count` entries of an array that has all entries along `axis`."""
    return spec.shards.own(x, axis, count) if spec.shards is not None else x


def own_count(spec: CacheSpec, count: Array, size: int) -> Array:
    """Return how many of the first `count` entries this device has, which stores `size` of them."""
    return spec.shards.own_count(count, size) if spec.shards is not None else count


def first_own(spec: CacheSpec, size: int) -> Array | int:
    """Return the number of the first entry of this device, which stores `size` of them."""
    return lax.axis_index("sp") * size if is_split(spec) else 0


def own_slots(spec: CacheSpec, slots: Array, count: int) -> Array:
    """Return the slots of tokens on this device, of `count` slots of all devices. Others are past its last slot."""
    if not is_split(spec):
        return slots
    size = parts_of(spec, count)
    own = slots - first_own(spec, size)
    return jnp.where((own >= 0) & (own < size), own, size)


def on_first(spec: CacheSpec, x: Any) -> Any:
    """Return counts or a mask for rows that every device has. Only the first device attends to them."""
    if not is_split(spec):
        return x
    assert spec.shards is not None
    return jnp.where(spec.shards.is_first(), x, jnp.zeros_like(x))


def most_of_all(spec: CacheSpec, x: Array) -> Array:
    """Return the maximum of an array over all devices that have a part of the units."""
    return lax.pmax(x, "sp") if is_split(spec) else x


def attend_parts(spec: CacheSpec, q: Array, pieces: list[Piece]) -> Array:
    """Compute softmax attention over the pieces of all devices, [B, T, h_q, d]; see `attend`."""
    return attend_split(q, pieces, spec.scale, "sp") if is_split(spec) else attend(q, pieces, spec.scale)
