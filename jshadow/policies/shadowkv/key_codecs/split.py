"""Key codes on a mesh whose devices each have a part of the heads and of the left rows.

A joint code has one left row for all heads of a token. If the heads are split, each device has the left rows of some
chunks. While a prompt is coded, the devices exchange its keys once: each gives away the tokens of its heads and gets
all heads of its tokens. The Gram matrix is the sum of those of the devices. In a step, each device names the chunks
that its heads select, and one reduce-scatter of rows and zeros brings every head its rows. The sum of a row and zeros
is that row, so no number changes.

The functions run inside `jax.shard_map`. B rows, S tokens, n chunks of c tokens, h_kv KV heads of width d.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import Rebuild
from jshadow.cache.spec import Shards
from jshadow.ops.layout import fit_tokens
from jshadow.ops.rope import cos_sin, rotate
from jshadow.policies.shadowkv.key_codecs.base import KeyCode, KeyCodec, Spread
from jshadow.policies.shadowkv.key_codecs.left_rows import by_head, rows_at


@dataclasses.dataclass(frozen=True)
class Parts:
    """The sizes of a code whose parts lie on several devices. It is static under jit.

    Attributes:
        shards: the mesh.
        units: number of chunks of the prompt.
        own: number of chunks whose left rows a device has.
        chunk: tokens in a chunk.
    """

    shards: Shards
    units: int
    own: int
    chunk: int

    def keys(self, rebuild: Rebuild, ids: Array) -> Array:
        """Rebuild the keys after RoPE of selected units, as `KeyCodec.reconstruct` does.

        Args:
            rebuild: the code of the keys.
            ids: units int32 [B, heads, k]. An id of `units` + j is unit j of the tail.
        """
        chunk, tail = self.chunk, rebuild.tail
        ids = jnp.clip(ids, 0, self.units + (0 if tail is None else tail.shape[-2]) - 1)
        rows = self.rows(rebuild, ids)
        batch, heads, count = ids.shape
        keys = rebuild.codec.expand(rows.reshape(batch, heads, count * chunk, rows.shape[3] // chunk), rebuild.right)
        place = ids
        if rebuild.tail_unit is not None:
            place = jnp.where(ids < self.units, place, ids - self.units + rebuild.tail_unit[:, None, None])
        positions = (place[..., None] * chunk + jnp.arange(chunk)).reshape(keys.shape[:3])
        rotated: Array = rotate(keys, *cos_sin(positions, rebuild.inverse))
        return rotated

    def rows(self, rebuild: Rebuild, ids: Array) -> Array:
        """Return the left rows of the units `ids` [B, heads, k, w], which other devices of `tp` may have."""
        left = by_head(rebuild.left)
        if self.shards.splits_left and rebuild.codec.joint:
            asked = lax.all_gather(ids, "tp", axis=1, tiled=True)
            own = asked - lax.axis_index("tp") * self.own
            here = (own >= 0) & (own < self.own) & (asked < self.units)
            rows: Any = jnp.where(here[..., None], rows_at(left, own), 0)
            with jax.named_scope("left_rows"):
                rows = lax.psum_scatter(rows, "tp", scatter_dimension=1, tiled=True)
        else:
            rows = rows_at(left, ids)
        if rebuild.tail is None:
            return rows
        return jnp.where((ids >= self.units)[..., None], rows_at(by_head(rebuild.tail), ids - self.units), rows)


def encode_parts(
    codec: KeyCodec, k_pre: Array, lengths: Array, weights: Array | None, parts: Parts, losses: bool
) -> tuple[KeyCode, Array | None]:
    """Code a prompt whose heads are split over `tp`. Each device codes the tokens of some chunks.

    Args:
        codec: a joint codec.
        k_pre: keys before RoPE of this device's heads, padded on the right [B, S, h_kv / tp, d].
        lengths: number of tokens of each row, int32 [B].
        weights: as in `KeyCodec.encode`, of this device's heads.
        parts: the sizes.
        losses: whether to measure the coding errors.

    Returns:
        The code: left has this device's chunks, right has this device's heads. And `KeyCodec.losses` of all chunks for
        this device's heads [B, h_kv / tp, n], or None.
    """
    shards, own = parts.shards, parts.own * parts.chunk
    place, part = lax.axis_index("tp"), fit_tokens(k_pre, shards.tp * own)
    keys = lax.all_to_all(part, "tp", split_axis=1, concat_axis=2, tiled=True)
    every = None if weights is None else lax.all_gather(weights, "tp", axis=1, tiled=True)
    mine = jnp.clip(lengths - place * own, 0, own)
    code = codec.encode(keys, mine, parts.own, parts.chunk, every, Spread("tp", lengths))
    lost = None
    if losses:
        lost = codec.losses(code, keys, parts.chunk, every)
        lost = lax.all_to_all(lost, "tp", split_axis=1, concat_axis=2, tiled=True)
    left = code.left
    if not shards.splits_left:
        left = lax.all_gather(left, "tp", axis=1, tiled=True)
    heads = k_pre.shape[2]
    first = place * heads

    def own_heads(x: Array) -> Array:
        has_heads = x.ndim > 2 and x.shape[1] == heads * shards.tp
        return lax.dynamic_slice_in_dim(x, first, heads, axis=1) if has_heads else x

    return KeyCode(left, jax.tree.map(own_heads, code.right)), lost
