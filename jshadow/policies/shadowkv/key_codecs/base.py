"""Codes of a prompt's keys before RoPE (`KeyCodec`), how chunks are rebuilt from them, and codes split over devices.

A code has two parts, like the two factors of low-rank keys. `left` has a row of w numbers for every token; the rows of
a chunk are side by side. `right` is shared by all tokens. Some codecs code all heads of a token together: their left is
[B, n, c * w]. The others have a row for each token and head: their left is [B, h_kv, n, c * w].

Sizes: B rows of the batch, S tokens, n chunks of c tokens, h_kv KV heads of width d.

Example: B = 1, 2 KV heads of width 64, 3 chunks of 8 tokens. With low rank 16, left is [1, 3, 128] and right is
[1, 2, 16, 64]. With exact keys, left is [1, 2, 3, 512] and right is None.
"""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

import pallas_kernels
from jshadow.cache.records import Rebuild
from jshadow.cache.spec import CacheSpec, Shards
from jshadow.ops.layout import fit_tokens, token_slice
from jshadow.ops.rope import cos_sin, rotate


def squared_error(
    keys: Float[Array, "B h_kv *n d"], real: Float[Array, "B h_kv *n d"], weights: Float[Array, "B h_kv d"] | None
) -> Float[Array, "B h_kv *n"]:
    """Return the squared distance of rebuilt keys from the real keys, both times weights.

    The result is the same before and after RoPE, because RoPE rotates pairs of numbers that have equal weights.
    """
    off = keys.astype(jnp.float32) - real.astype(jnp.float32)
    if weights is not None:
        off *= jnp.expand_dims(weights, tuple(range(2, off.ndim - 1)))
    return (off**2).sum(axis=-1)


def by_head(left: Shaped[Array, "..."]) -> Shaped[Array, "B heads n w"]:
    """Return left rows with an axis of heads. Its size is 1 if the heads of a token are coded together."""
    return left if left.ndim == 4 else left[:, None]


def by_token(left: Shaped[Array, "..."], chunk: int) -> Shaped[Array, "B heads tokens w"]:
    """Reshape the left rows of chunks to one row for each token [B, 1 or h_kv, n * chunk, w]."""
    left = by_head(left)
    return left.reshape(*left.shape[:2], left.shape[2] * chunk, left.shape[3] // chunk)


def chosen_rows(
    left: Shaped[Array, "..."], tail: Shaped[Array, "..."] | None, ids: Int[Array, "B h_kv k"]
) -> Shaped[Array, "B h_kv k w"]:
    """Gather the rows of the chunks `ids`. If `left` has n chunks, an id of n + j is chunk j of the tail."""
    first = by_head(left)
    units = first.shape[2]
    if tail is None:
        return rows_at(first, ids)
    later = rows_at(by_head(tail), ids - units)
    return later if units == 0 else jnp.where((ids >= units)[..., None], later, rows_at(first, ids))


def rows_at(source: Shaped[Array, "B heads n w"], ids: Int[Array, "B h_kv k"]) -> Shaped[Array, "B h_kv k w"]:
    """Gather rows of `source` [B, 1 or h_kv, n, w]. Ids out of range are clipped."""
    return jnp.take_along_axis(source, ids[..., None], axis=2, mode="clip")


BLOCK = 16_384  # number of tokens that have a float32 copy at once; a GPU takes about 40 launches a block
_PASS_LAUNCHES = 6  # about how many kernels a GPU launches for a block of a pass over the prompt
EXACT = lax.Precision.HIGHEST  # products in TF32 would make a basis inaccurate


class KeyCode(struct.PyTreeNode):
    """The code of a prompt's keys.

    Attributes:
        left: the left rows [B, n, c * w] or [B, h_kv, n, c * w]; zeros for padding.
        right: the shared part, a pytree of arrays in which axis 0 is the row of the batch, or None.
    """

    left: Array
    right: Any


class Sizes(NamedTuple):
    """The sizes of a layer's keys.

    Attributes:
        heads: number of KV heads h_kv.
        dim: width d of a head.
        dtype: name of the model's dtype.
    """

    heads: int
    dim: int
    dtype: str

    @classmethod
    def of(cls, spec: CacheSpec) -> "Sizes":
        """Return the sizes of a layer; on a mesh, those of one device."""
        return cls(spec.kv_heads, spec.head_dim, spec.dtype)

    @property
    def columns(self) -> int:
        """Number of key columns: the numbers in a token's key, h_kv * d."""
        return self.heads * self.dim


class Spread(NamedTuple):
    """The devices over which the tokens of a prompt are spread while they are coded; see `Parts`.

    Attributes:
        axis: the axis of the mesh. Sums over it are sums over all tokens.
        lengths: number of tokens of each row on all devices, int32 [B].
    """

    axis: str
    lengths: Array


class KeyCodec(abc.ABC):
    """A code of keys: pure functions of arrays, with static settings. The rows of a batch may differ in length.

    Class attributes:
        name: the name of the code's settings record, `ShadowKV.keys.name`.
        joint: whether the heads of a token are coded together, so that `left` serves all heads.
        compiled: whether `pallas_kernels` has a GPU kernel that rebuilds keys from this code, and one that also fetches
            values. Both take `operands`.
        from_values: whether keys are made from the fetched values (`ValueCodec.keys_of`). `encode` then also takes the
            values of the prompt.
    """

    name = ""
    joint = True
    compiled = False
    from_values = False

    @abc.abstractmethod
    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return the shapes and dtypes of the code of `units` chunks, as ShapeDtypeStructs."""

    @abc.abstractmethod
    def encode(
        self,
        k_pre: Float[Array, "B S h_kv d"],
        lengths: Int[Array, " B"],
        units: int,
        chunk: int,
        weights: Float[Array, "B h_kv d"] | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        """Code the first `units` chunks of a prompt. Statistics are computed over all tokens of the prompt.

        Args:
            k_pre: keys before RoPE, padded on the right.
            lengths: real tokens of each row.
            units: number of chunks to code. Those after the end of the prompt are zero.
            chunk: tokens in a chunk.
            weights: weights on the errors of a key's numbers. A lossy codec minimizes the error of keys times these
                weights. None: all errors count equally.
            spread: None, or the devices that have the other tokens of the prompt. `k_pre`, `lengths` and `left` are
                then those of this device, and `right` is the same on all. Inside shard_map only.
        """

    @abc.abstractmethod
    def project(
        self,
        k_pre: Float[Array, "B T h_kv d"],
        right: Any,
        weights: Float[Array, "B h_kv d"] | None = None,
        axis: str | None = None,
    ) -> Shaped[Array, "B T heads w"]:
        """Return the left rows of later tokens (section 7.1), with the shared part of the prompt's code.

        `weights` are those that `encode` had. `axis` is the axis of a mesh that splits the heads, inside shard_map.
        """

    @abc.abstractmethod
    def expand(self, rows: Shaped[Array, "B heads t w"], right: Any) -> Float[Array, "B h_kv t d"]:
        """Rebuild keys before RoPE, float32 [B, h_kv, t, d], from left rows [B, 1 or h_kv, t, w]."""

    def products(self, sizes: Sizes) -> int:
        """Return the number of multiplications for each number of a rebuilt key."""
        return 0

    @abc.abstractmethod
    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Return the bytes of the temporaries of `encode` for one row of `tokens` tokens.

        `block` is the number of tokens that have a float32 copy at once.
        """

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Return the operations of the matrix products of `encode` on a GPU, for one row of `tokens` tokens."""
        return 0

    @abc.abstractmethod
    def expand_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the temporaries that rebuild one token of one KV head, without the rebuilt key."""

    # Common to all codecs

    def operands(self, right: Any) -> dict[str, Any]:
        """Return the fields of `pallas_kernels.ChosenKeys` that come from `right` and from the settings of the code."""
        raise NotImplementedError(f"{self.name} has no kernel")

    def decode(
        self, code: KeyCode, ids: Int[Array, "B h_kv k"], chunk: int, tail: Array | None = None
    ) -> Float[Array, "B h_kv tokens d"]:
        """Rebuild the keys before RoPE of chosen chunks, float32.

        `tail` has the left rows of later chunks. If the code has n chunks, an id of n + j is chunk j of the tail. Ids
        out of range are clipped.
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
        """Measure the largest squared error of a rebuilt key in each chunk, with `block` tokens at once.

        `code`, `k_pre` and `weights` are those of `encode`. The result is 0 for chunks after position S, and arbitrary
        for chunks with padding.
        """
        batch, length, heads = k_pre.shape[:3]
        units = code.left.shape[-2]
        there = min(units, length // chunk)
        lost = jnp.zeros((batch, heads, units), jnp.float32)
        if there == 0:
            return lost
        count = min(there, max(1, block // chunk))

        def rebuild(index: Array, lost: Array) -> Array:
            first = jnp.minimum(index * count, there - count)  # overlapping chunks are written twice with equal results
            keys = token_slice(k_pre, first * chunk, count * chunk).swapaxes(1, 2)
            ids = jnp.broadcast_to(first + jnp.arange(count), (batch, heads, count))
            errors = squared_error(self.decode(code, ids, chunk), keys, weights)
            errors = errors.reshape(batch, heads, count, chunk).max(axis=3)
            return lax.dynamic_update_slice_in_dim(lost, errors, first, axis=2)

        return lax.fori_loop(0, -(-there // count), rebuild, lost)

    def reconstruct(self, rebuild: Rebuild, ids: Int[Array, "B h_kv k"]) -> Float[Array, "B h_kv tokens d"]:
        """Rebuild the keys after RoPE of selected units, each at its position, in float32 or in the model's dtype.

        If the code has a GPU kernel (`compiled`), `pallas_kernels` rebuilds them.
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
        return self.rotated(rebuild, ids, self.decode(KeyCode(rebuild.left, rebuild.right), ids, chunk, tail))

    def rotated(
        self, rebuild: Rebuild, ids: Int[Array, "B h_kv k"], keys: Float[Array, "B h_kv tokens d"]
    ) -> Float[Array, "B h_kv tokens d"]:
        """Rotate the keys before RoPE of units to their positions."""
        units, place = rebuild.left.shape[-2], ids
        if rebuild.tail_unit is not None:
            place = jnp.where(ids < units, ids, ids - units + rebuild.tail_unit[:, None, None])
        positions = (place[..., None] * rebuild.unit + jnp.arange(rebuild.unit)).reshape(keys.shape[:3])
        return rotate(keys, *cos_sin(positions, rebuild.inverse))

    def encode_launches(self, sizes: Sizes, tokens: int) -> int:
        """Return about how many kernels `encode` launches on a GPU. By default it passes twice over the prompt."""
        return pass_launches(2, tokens)

    def losses_bytes(self, sizes: Sizes, block: int) -> int:
        """Return the bytes of the temporaries of `losses` for one row, with `block` tokens at once."""
        item = jnp.dtype(sizes.dtype).itemsize
        return block * sizes.heads * (self.expand_bytes(sizes) + sizes.dim * (item + 3 * 4))

    def empty(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return a code of `units` chunks in which all numbers are zero."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes(batch, units, chunk, sizes))

    def nbytes(self, units: int, chunk: int, sizes: Sizes) -> int:
        """Return the bytes of one row's code of `units` chunks."""
        leaves = jax.tree.leaves(self.shapes(1, units, chunk, sizes))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def read_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the left row that one KV head reads to rebuild a token."""
        left = self.shapes(1, 1, 1, sizes).left
        return int(left.shape[-1]) * left.dtype.itemsize


def pass_launches(passes: int, tokens: int) -> int:
    """Return about how many kernels a GPU launches for `passes` passes over a prompt of `tokens` tokens."""
    return _PASS_LAUNCHES * passes * -(-tokens // BLOCK)


def token_block(k_pre: Array, lengths: Array, index: Array, block: int) -> tuple[Array, Array]:
    """Return one block of a prompt's keys, with all heads side by side [B, block, h_kv * d], and its first position.

    All blocks have the same size, so the last one overlaps the previous one. Tokens that the previous block contains
    are zero, and so is padding. So every token is counted once.
    """
    batch, length, heads, dim = k_pre.shape
    start = jnp.minimum(index * block, length - block)
    rows = token_slice(k_pre, start, block).reshape(batch, block, heads * dim)
    new = new_tokens(lengths, index, start, block)
    return jnp.where(new[..., None], rows, jnp.zeros((), rows.dtype)), start


def new_tokens(lengths: Array, index: Array, start: Array, block: int) -> Array:
    """Return which tokens of a block are real and are not in the previous block, bool [B, block]."""
    token = start + jnp.arange(block)
    return (token >= index * block) & (token < lengths[:, None])


def put_block(buffer: Array, new: Array, index: Array, start: Array) -> Array:
    """Write one block's rows into a buffer [B, S, ...]. Tokens that the previous block has written are not changed."""
    block = new.shape[1]
    old = lax.dynamic_slice_in_dim(buffer, start, block, axis=1)
    written = (start + jnp.arange(block) < index * block).reshape(block, *[1] * (buffer.ndim - 2))
    return lax.dynamic_update_slice_in_dim(buffer, jnp.where(written, old, new), start, axis=1)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The sizes of a code whose parts lie on several devices. It is static under jit.

    A joint code has one left row for all heads of a token. If the heads are split, each device has the left rows of
    some chunks. While a prompt is coded, the devices exchange its keys once: each gives away the tokens of its heads
    and gets all heads of its tokens. The Gram matrix is the sum of those of the devices. In a step, each device names
    the chunks that its heads select, and one reduce-scatter of rows and zeros brings every head its rows. The sum of
    a row and zeros is that row, so no number changes. All of this runs inside `jax.shard_map`.

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

        `ids` is int32 [B, heads, k]. An id of `units` + j is unit j of the tail.
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
    """Code a prompt whose heads are split over `tp`, with a joint codec. Each device codes the tokens of some chunks.

    `k_pre` and `weights` are those of this device's heads. In the code, left has this device's chunks, and right has
    this device's heads. With `losses`, also return `KeyCodec.losses` of all chunks for this device's heads.
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
