"""The state of KIVI, and the writes to its codes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.ops.attention import Piece
from jshadow.ops.layout import write_rows
from jshadow.ops.packing import Packed


class Quantized(struct.PyTreeNode):
    """Quantized keys and values. R is `KIVI.residual`, g is `KIVI.group`, and w is the number of words in a group.

    Example: B = 1, 2 heads of width 64, 3 blocks of R = 128 tokens, g = 32 and 2 bits. A group has 64 bits, so w = 2,
    and the words of the keys are uint32 [1, 2, 3, 4, 64, 2]. Entry [0, h, u, j, c] holds channel c of the keys of
    tokens 128u + 32j to 128u + 32j + 31.

    Attributes:
        keys: words uint32 [B, h_kv, blocks, R / g, d, w]; scale and zero [B, h_kv, blocks, R / g, d].
        values: words uint32 [B, h_kv, tokens, d / g, w]; scale and zero [B, h_kv, tokens, d / g].
    """

    keys: Packed
    values: Packed


class KiviFrozen(struct.PyTreeNode):
    """The quantized part of the prompt.

    Attributes:
        quantized: the keys of the prompt's whole blocks, and all values but the last R. Unused entries are zeros.
        lengths: tokens of the prompt, int32 [B].
    """

    quantized: Quantized
    lengths: Array


class KiviLive(struct.PyTreeNode):
    """The part that decoding changes.

    Attributes:
        later: blocks of keys and values that were quantized after the prompt. Entry 0 is the first one that was not
            quantized with the prompt.
        recent: a ring buffer of the newest tokens' exact keys after RoPE and values [B, h_kv, R, d]. The token at
            position p is in slot p % R.
    """

    later: Quantized
    recent: KeyValues


class Part(NamedTuple):
    """Some of the tokens that a layer holds, ready for attention.

    Attributes:
        k, v: keys and values [B, h_kv, n, d] in the model's dtype, dequantized where they were quantized.
        positions: positions of the tokens, int32 [B, n].
        seen: which entries are real tokens that no other part contains, bool [B, n].
        quantized: whether the keys, or the keys and the values, were quantized.
    """

    k: Array
    v: Array
    positions: Array
    seen: Array
    quantized: bool

    def piece(self, seen: Array) -> Piece:
        """Return the part as a Piece for attention. The mask `seen` is bool [B, n] or [B, h_kv, n]."""
        return Piece(self.k, self.v, seen[:, None, None] if seen.ndim == 2 else seen[:, :, None])


def put(old: Packed, new: Packed, place: Array, valid: Array) -> Packed:
    """Write one entry of each row into an array of entries.

    Args:
        old: the entries [B, h, n, ...].
        new: the new entry of each row [B, h, 1, ...].
        place: index of the entry to replace, int32 [B, 1].
        valid: which rows are written, bool [B, 1].
    """

    def one(old: Array, new: Array) -> Array:
        batch, heads, count = old.shape[:3]
        if count == 0:
            return old
        rows = new.reshape(batch, heads, 1, -1).swapaxes(1, 2)
        return write_rows(old.reshape(batch, heads, count, -1), rows, place, valid).reshape(old.shape)

    return jax.tree.map(one, old, new)


def cut(packed: Packed, count: Array) -> Packed:
    """Replace the entries of [B, h, n, ...] by zeros, except the first `count` [B] of each row."""

    def one(x: Array) -> Array:
        there = jnp.arange(x.shape[2]) < count[:, None]
        return jnp.where(there.reshape(there.shape[0], 1, -1, *[1] * (x.ndim - 3)), x, 0).astype(x.dtype)

    return jax.tree.map(one, packed)
