"""Codes of a prompt's keys before RoPE (`KeyCodec`), and how selected chunks are rebuilt from them.

A code has two parts, like ShadowKV's factors: `left` has a row for every token, a chunk's rows side by side, and
`right` is what all rows share. Sizes: B rows of the batch, S tokens, n chunks of c tokens, h_kv heads of width d. A
codec that mixes heads has one left row a token, [B, n, c * w]; another has one a token and head, [B, h_kv, n, c * w].
"""

import abc
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

import pallas_kernels
from jshadow.cache.records import Rebuild
from jshadow.ops.rope import cos_sin, rotate

BLOCK = 2048  # tokens of which a float32 copy exists at once
EXACT = lax.Precision.HIGHEST  # TF32 products would bend a basis


class KeyCode(struct.PyTreeNode):
    """The code of a prompt's keys.

    Attributes:
        left: [B, n, c * w] or [B, h_kv, n, c * w]; zeros for padding.
        right: a tree of arrays with rows of the batch first, or None.
    """

    left: Array
    right: Any


class Sizes(NamedTuple):
    """Attributes: heads: KV heads h_kv; dim: their width d; dtype: name of the model's."""

    heads: int
    dim: int
    dtype: str

    @property
    def columns(self) -> int:
        """Numbers of a token's key."""
        return self.heads * self.dim


class KeyCodec(abc.ABC):
    """Pure functions of arrays with static settings. The rows of a batch may differ in length.

    Class attributes:
        name: as the settings name it, `ShadowKV.keys.name`.
        compiled: `pallas_kernels` has a GPU kernel that rebuilds keys from this code, and one that fetches values
            meanwhile. Both take `operands`.
    """

    name = ""
    compiled = False

    @abc.abstractmethod
    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """The code of so many chunks as ShapeDtypeStructs."""

    @abc.abstractmethod
    def encode(
        self,
        k_pre: Float[Array, "B S h_kv d"],
        lengths: Int[Array, " B"],
        units: int,
        chunk: int,
        weights: Float[Array, "B h_kv d"] | None = None,
    ) -> KeyCode:
        """Code the first `units` chunks of a right-padded prompt, by statistics of all of its tokens.

        Args:
            k_pre: keys before RoPE [B, S, h_kv, d].
            lengths: real tokens of each row, int32 [B].
            units: chunks to keep; those past the prompt are zero.
            chunk: tokens of a chunk.
            weights: what an error in each number of a key counts, float32 [B, h_kv, d]. A codec that can choose what
                to lose loses the least of keys times these. None: all count alike.
        """

    @abc.abstractmethod
    def project(
        self, k_pre: Float[Array, "B T h_kv d"], right: Any, weights: Float[Array, "B h_kv d"] | None = None
    ) -> Shaped[Array, "B T heads w"]:
        """Left rows [B, T, 1 or h_kv, w] of later tokens, by the prompt's `right` and weights (section 7.1)."""

    @abc.abstractmethod
    def expand(self, rows: Shaped[Array, "B heads t w"], right: Any) -> Float[Array, "B h_kv t d"]:
        """Keys before RoPE of left rows [B, 1 or h_kv, t, w]: float32 [B, h_kv, t, d]."""

    @abc.abstractmethod
    def products(self, sizes: Sizes) -> int:
        """Multiplications for each number of a rebuilt key."""

    @abc.abstractmethod
    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Bytes of `encode`'s temporaries for a row of so many tokens, of which `block` are float32 at a time."""

    @abc.abstractmethod
    def expand_bytes(self, sizes: Sizes) -> int:
        """Bytes of the temporaries that rebuild one token of one KV head, without the key itself."""

    # The same for all codecs

    def operands(self, right: Any) -> dict[str, Any]:
        """What the kernels take beside left: `right` and more of the fields of `pallas_kernels.ChosenKeys`."""
        raise NotImplementedError(f"{self.name} has no kernel")

    def decode(
        self, code: KeyCode, ids: Int[Array, "B h_kv k"], chunk: int, tail: Array | None = None
    ) -> Float[Array, "B h_kv tokens d"]:
        """Keys before RoPE of chosen chunks.

        Args:
            code: from `encode`, of n chunks.
            ids: int32 [B, h_kv, k]; clipped. Ids from n on are chunks of the tail.
            chunk: tokens of a chunk.
            tail: left rows of later chunks, as `KeyCode.left`.

        Returns:
            float32 [B, h_kv, k * chunk, d].
        """
        batch, heads, count = ids.shape
        rows = chosen_rows(code.left, tail, ids)
        return self.expand(rows.reshape(batch, heads, count * chunk, rows.shape[3] // chunk), code.right)

    def losses(
        self,
        code: KeyCode,
        k_pre: Float[Array, "B S h_kv d"],
        chunk: int,
        weights: Float[Array, "B h_kv d"] | None = None,
        block: int = BLOCK,
    ) -> Float[Array, "B h_kv n"]:
        """The largest squared error of a rebuilt key of each chunk.

        Args:
            code: from `encode`, of n chunks.
            k_pre: the keys it was made of [B, S, h_kv, d].
            chunk: tokens of a chunk.
            weights: as `encode` had them; errors are those of keys times these.
            block: tokens rebuilt at once, if a chunk is no larger.

        Returns:
            float32 [B, h_kv, n]; 0 for chunks past S, and any number for chunks with padding.
        """
        batch, length, heads = k_pre.shape[:3]
        units = code.left.shape[-2]
        there = min(units, length // chunk)
        lost = jnp.zeros((batch, heads, units), jnp.float32)
        if there == 0:
            return lost
        count = min(there, max(1, block // chunk))

        def rebuild(index: Array, lost: Array) -> Array:
            first = jnp.minimum(index * count, there - count)  # an overlap is written twice, with the same numbers
            keys = lax.dynamic_slice_in_dim(k_pre, first * chunk, count * chunk, axis=1).swapaxes(1, 2)
            ids = jnp.broadcast_to(first + jnp.arange(count), (batch, heads, count))
            errors = squared_error(self.decode(code, ids, chunk), keys, weights)
            errors = errors.reshape(batch, heads, count, chunk).max(axis=3)
            return lax.dynamic_update_slice_in_dim(lost, errors, first, axis=2)

        return lax.fori_loop(0, -(-there // count), rebuild, lost)

    def reconstruct(self, rebuild: Rebuild, ids: Int[Array, "B h_kv k"]) -> Float[Array, "B h_kv tokens d"]:
        """Keys after RoPE of selected units, each at its place in the sequence. On a GPU the code's kernel does it.

        Returns:
            [B, h_kv, k * unit, d], float32 or in the model's dtype.
        """
        if self.compiled:
            chosen = pallas_kernels.ChosenKeys(
                rebuild.left,
                ids=ids,
                inverse=rebuild.inverse,
                tail=rebuild.tail,
                tail_unit=rebuild.tail_unit,
                **self.operands(rebuild.right),
            )
            return pallas_kernels.reconstruct_keys(chosen)
        units, chunk, tail = rebuild.left.shape[-2], rebuild.unit, rebuild.tail
        ids = jnp.clip(ids, 0, units + (tail.shape[-2] if tail is not None else 0) - 1)
        keys = self.decode(KeyCode(rebuild.left, rebuild.right), ids, chunk, tail)
        place = ids
        if rebuild.tail_unit is not None:
            place = jnp.where(ids < units, ids, ids - units + rebuild.tail_unit[:, None, None])
        positions = (place[..., None] * chunk + jnp.arange(chunk)).reshape(keys.shape[:3])
        return rotate(keys, *cos_sin(positions, rebuild.inverse))

    def losses_bytes(self, sizes: Sizes, block: int) -> int:
        """Bytes of `losses`' temporaries for a row, `block` tokens at a time."""
        item = jnp.dtype(sizes.dtype).itemsize
        return block * sizes.heads * (self.expand_bytes(sizes) + sizes.dim * (item + 3 * 4))

    def empty(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """A code of zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes(batch, units, chunk, sizes))

    def nbytes(self, units: int, chunk: int, sizes: Sizes) -> int:
        """Bytes of one row's code of so many chunks."""
        leaves = jax.tree.leaves(self.shapes(1, units, chunk, sizes))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def read_bytes(self, sizes: Sizes) -> int:
        """Bytes of a token's left row that one KV head reads."""
        left = self.shapes(1, 1, 1, sizes).left
        return int(left.shape[-1]) * left.dtype.itemsize


def squared_error(
    keys: Float[Array, "B h_kv *n d"], real: Float[Array, "B h_kv *n d"], weights: Float[Array, "B h_kv d"] | None
) -> Float[Array, "B h_kv *n"]:
    """Squared distance of keys from the real ones, both times weights. It is the same before and after RoPE."""
    off = keys.astype(jnp.float32) - real.astype(jnp.float32)
    if weights is not None:
        off *= jnp.expand_dims(weights, tuple(range(2, off.ndim - 1)))
    return (off**2).sum(axis=-1)


def by_head(left: Shaped[Array, "..."]) -> Shaped[Array, "B heads n w"]:
    """Left rows with an axis of heads, which has size 1 if a row is of all heads together."""
    return left if left.ndim == 4 else left[:, None]


def by_token(left: Shaped[Array, "..."], chunk: int) -> Shaped[Array, "B heads tokens w"]:
    """Left rows of chunks as one row a token, [B, 1 or h_kv, n * chunk, w]."""
    left = by_head(left)
    return left.reshape(*left.shape[:2], left.shape[2] * chunk, left.shape[3] // chunk)


def chosen_rows(
    left: Shaped[Array, "..."], tail: Shaped[Array, "..."] | None, ids: Int[Array, "B h_kv k"]
) -> Shaped[Array, "B h_kv k w"]:
    """Left rows of chunks ids [B, h_kv, k]. Ids past the chunks of `left` are chunks of the tail."""
    first = by_head(left)
    units = first.shape[2]
    if tail is None:
        return rows_at(first, ids)
    later = rows_at(by_head(tail), ids - units)
    return later if units == 0 else jnp.where((ids >= units)[..., None], later, rows_at(first, ids))


def rows_at(source: Shaped[Array, "B heads n w"], ids: Int[Array, "B h_kv k"]) -> Shaped[Array, "B h_kv k w"]:
    """Rows of source [B, 1 or h_kv, n, w]; ids are clipped."""
    return jnp.take_along_axis(source, ids[..., None], axis=2, mode="clip")


# A prompt is read in blocks of tokens, so that a float32 copy of all of it never exists.


def token_block(
    k_pre: Array, lengths: Array, index: Array, block: int, weights: Array | None = None
) -> tuple[Array, Array]:
    """One block of a prompt's keys, times weights, with all heads side by side.

    The last block begins early, so that it is as long as the others. Tokens that the block before it has too are zero,
    and so is padding: every token counts once.

    Args:
        k_pre: keys before RoPE [B, S, h_kv, d].
        lengths: tokens of each row, int32 [B].
        index: number of the block.
        block: tokens of a block, at most S.
        weights: float32 [B, h_kv, d], or None.

    Returns:
        float32 rows [B, block, h_kv * d], and the number of the block's first token.
    """
    batch, length, heads, dim = k_pre.shape
    start = jnp.minimum(index * block, length - block)
    rows = lax.dynamic_slice_in_dim(k_pre, start, block, axis=1).reshape(batch, block, heads * dim)
    new = new_tokens(lengths, index, start, block)
    rows = rows.astype(jnp.float32)
    if weights is not None:
        rows *= weights.reshape(batch, 1, -1)
    return jnp.where(new[..., None], rows, 0.0), start


def new_tokens(lengths: Array, index: Array, start: Array, block: int) -> Array:
    """Which tokens of a block are real and were not in the block before it, bool [B, block]."""
    token = start + jnp.arange(block)
    return (token >= index * block) & (token < lengths[:, None])


def put_block(buffer: Array, new: Array, index: Array, start: Array) -> Array:
    """A buffer [B, S, ...] with one block's rows. Tokens that the block before has written stay as they are."""
    block = new.shape[1]
    old = lax.dynamic_slice_in_dim(buffer, start, block, axis=1)
    written = (start + jnp.arange(block) < index * block).reshape(block, *[1] * (buffer.ndim - 2))
    return lax.dynamic_update_slice_in_dim(buffer, jnp.where(written, old, new), start, axis=1)
