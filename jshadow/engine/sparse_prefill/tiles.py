"""Attention of a piece of queries over the keys that were chosen for each head, tile by tile in XLA.

The work grows with the number of chosen keys, not with the length of the prompt. A tile has M queries and M keys.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.estimate import block_means
from jshadow.engine.sparse_prefill.lines import HeadSizes, Lines, best_blocks, strip_blocks
from jshadow.ops.attention import MASKED
from jshadow.policies.prefill_attention import PrefillPiece

GATHERED = 512  # number of keys that are gathered for each head at once


class Chosen(struct.PyTreeNode):
    """The keys that the heads of a layer attend to, and the tiles that were computed so far.

    Attributes:
        lines: the chosen columns and diagonals. None if no head has them, or if attention is exact.
        sizes: the sizes of each head. None if no head is block-sparse, or if attention is exact.
        tiles: number of tiles that each head needed, int32 [B, h_q]. M gathered columns count as one tile.
        ran: number of tiles that were computed for each head, int32 []. All heads compute as many as the head that
            needs most. On a GPU, each head computes only the tiles that it needs, and this counts the largest number.
    """

    lines: Lines | None
    sizes: HeadSizes | None
    tiles: Array
    ran: Array


class Softmax(NamedTuple):
    """The state of an online softmax, which has not seen all keys yet. All fields are float32.

    Attributes:
        top: largest score of each query so far.
        total: sum of exp(score - top).
        out: sum of the values, weighted with exp(score - top).
    """

    top: Float[Array, "B h_q M"]
    total: Float[Array, "B h_q M"]
    out: Float[Array, "B h_q M d"]

    def fold(
        self, scores: Float[Array, "B h_q M N"], seen: Bool[Array, "#B #h_q #M N"], v: Float[Array, "B h_q N d"]
    ) -> "Softmax":
        """Return the softmax after N more keys, of which only those in `seen` count."""
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(self.top, scores.max(-1))
        weight, shrink = jnp.exp(scores - top[..., None]), jnp.exp(self.top - top)
        part = jnp.einsum("bhqn,bhnd->bhqd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Softmax(top, self.total * shrink + weight.sum(-1), self.out * shrink[..., None] + part)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the attention is cut into tiles.

    Attributes:
        scale: factor by which the scores are multiplied.
        block: M. A tile has M queries and M keys.
        most_blocks: static upper bound of `HeadSizes.blocks`. It is 0 if no head uses key blocks.
        implementation: "auto" is the kernel on a GPU and `attend_tiles` elsewhere. See `pallas_kernels.choose`.
    """

    scale: float
    block: int
    most_blocks: int = 0
    implementation: str = "auto"


class BlockList(NamedTuple):
    """The key blocks that one query block attends to.

    Attributes:
        ids: numbers of the key blocks, int32.
        counts: how many of the first ids are valid, int32.
    """

    ids: Int[Array, "B h_q W"]
    counts: Int[Array, "B h_q"]


def attend_tiles(
    piece: PrefillPiece, prompt: PromptKV, chosen: Chosen, tiling: Tiling
) -> tuple[Float[Array, "B P h_q d"], Chosen]:
    """Compute causal attention of a piece of queries over the chosen keys. Each key counts once.

    Args:
        piece: a whole number of blocks of queries. The position of the first is a multiple of the block size.
        prompt: keys and values, at least up to the piece's last token, in whole blocks. Later tokens are ignored.
        chosen: the result of `SparsePrefill.begin`, or of this function for the piece before.
        tiling: sizes of the tiles.

    Returns:
        The output in the dtype of the queries, and `chosen` with the tiles of this piece added to its counts.
    """
    q, first, block = piece.q_post, piece.first, tiling.block
    batch, length, heads, dim = q.shape
    count = length // block
    assert count * block == length, f"{length} queries are no blocks of {block}"
    means = piece_means(piece, prompt, tiling)
    tiles = q.reshape(batch, count, block, heads, dim).transpose(1, 0, 3, 2, 4)

    def one(args: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array]:
        index, tile, mean = args
        tile_means = None if means is None or mean is None else (mean, means[1])
        return attend_block(tile, first // block + index, tile_means, prompt, chosen, tiling)

    out, needed, ran = lax.map(one, (jnp.arange(count, dtype=jnp.int32), tiles, None if means is None else means[0]))
    out = out.transpose(1, 0, 3, 2, 4).reshape(q.shape).astype(q.dtype)
    return out, chosen.replace(tiles=chosen.tiles + needed.sum(0), ran=chosen.ran + ran.sum())


def piece_means(piece: PrefillPiece, prompt: PromptKV, tiling: Tiling) -> tuple[Array, Array] | None:
    """Return the mean query of each query block of a piece [n, B, h_q, d], and the mean key of each key block.

    The mean keys are [B, h_kv, S / M, d]. The result is None if no head is block-sparse.
    """
    if not tiling.most_blocks:
        return None
    q_means = block_means(piece.q_post, prompt.lengths, piece.first, tiling.block)
    return q_means.transpose(2, 0, 1, 3), block_means(prompt.k_post, prompt.lengths, 0, tiling.block)


def attend_block(
    q: Float[Array, "B h_q M d"],
    index: Int[Array, ""],
    means: tuple[Array, Array] | None,
    prompt: PromptKV,
    chosen: Chosen,
    tiling: Tiling,
) -> tuple[Float[Array, "B h_q M d"], Int[Array, "B h_q"], Int[Array, ""]]:
    """Compute attention of one query block: over its key blocks, and then over the columns outside of these blocks.

    Args:
        q: the queries of the block.
        index: number of the block.
        means: the mean query of the block [B, h_q, d], and the mean keys of all key blocks [B, h_kv, n, d]. None if no
            head is block-sparse.
        prompt, chosen, tiling: as in `attend_tiles`.

    Returns:
        The float32 output, the number of tiles that each head needed, and the number that was computed for each head.
    """
    block = q.shape[2]
    blocks = key_blocks(chosen, index, means, tiling.most_blocks)
    state, counts = Softmax(jnp.full(q.shape[:3], MASKED), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape)), blocks.counts
    state, ran = fold_blocks(state, q, index, prompt, blocks, chosen, tiling.scale)
    if chosen.lines is not None:
        listed, more = open_columns(chosen.lines, index, block)
        state, extra = fold_columns(state, q, prompt, listed, more, tiling.scale)
        counts, ran = counts - (-more // block), ran + extra
    return state.out / state.total[..., None], counts, ran


def key_blocks(chosen: Chosen, index: Int[Array, ""], means: tuple[Array, Array] | None, most_blocks: int) -> BlockList:
    """Return the key blocks that each head attends to from query block `index`. `means` is as in `attend_block`."""
    if means is None or chosen.sizes is None:
        assert chosen.lines is not None
        return BlockList(*strip_blocks(chosen.lines, index))
    ids, counts = best_blocks(*means, index, chosen.sizes.blocks, most_blocks)
    if chosen.lines is None:
        return BlockList(ids, counts)
    near, near_counts = strip_blocks(chosen.lines, index)
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, near.shape[2] - most_blocks)))
    whole = chosen.sizes.blocks > 0
    return BlockList(jnp.where(whole[:, None], ids, near), jnp.where(whole, counts, near_counts))


def fold_blocks(
    state: Softmax, q: Array, index: Array, prompt: PromptKV, blocks: BlockList, chosen: Chosen, scale: float
) -> tuple[Softmax, Array]:
    """Add the listed key blocks to the softmax. Return it, and the number of tiles that were computed for each head.

    A block-sparse head attends to all keys of its blocks. Other heads attend to keys on a chosen diagonal or column.
    """
    batch, heads, block, dim = q.shape
    ids, counts = blocks
    kv_heads, several = prompt.k_post.shape[2], min(max(1, GATHERED // block), ids.shape[2])
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    k, v = (x.reshape(batch, -1, block, kv_heads, dim) for x in (prompt.k_post, prompt.v))
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, -ids.shape[2] % several)))
    query, key = jnp.arange(block)[:, None], jnp.arange(block)

    def step(turn: Array, state: Softmax) -> Softmax:
        some = lax.dynamic_slice_in_dim(ids, turn * several, several, axis=2)
        counted = (turn * several + jnp.arange(several) < counts[..., None])[:, :, None, :, None]
        seen = (some[:, :, None, :, None] * block + key <= (index * block + query)[:, None]) & counted
        if chosen.lines is not None:
            near = chosen.lines.near[row, head, jnp.maximum(index - some, 0)]  # [B, h_q, G, 2M]
            on_line = near[..., block + query - key] | chosen.lines.in_column[row, head, some][..., None, :]
            if chosen.sizes is not None:
                on_line |= (chosen.sizes.blocks > 0)[:, None, None, None]
            seen &= on_line.swapaxes(2, 3)
        k_rows, v_rows = (x[row, some, :, head // (heads // kv_heads)].reshape(batch, heads, -1, dim) for x in (k, v))
        scores = jnp.einsum("bhqd,bhnd->bhqn", q, k_rows, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen.reshape(*seen.shape[:3], -1), v_rows)

    turns = -(-counts.max() // several)
    return lax.fori_loop(0, turns, step, state), turns * several


def open_columns(
    lines: Lines, index: Int[Array, ""], block: int
) -> tuple[Int[Array, "B h_q most"], Int[Array, "B h_q"]]:
    """Return the chosen columns that lie before query block `index` and outside of its key blocks, and their number.

    They are in rising order, padded with S. The columns inside of key blocks are attended to with these blocks. The
    query block's own block is one of these, so no causal mask is needed here.
    """
    back = index - lines.columns // block
    near = jnp.take_along_axis(lines.touched, jnp.clip(back, 0, lines.touched.shape[2] - 1), axis=2)
    single = (back > 0) & ~near
    past = lines.touched.shape[2] * block
    return jnp.sort(jnp.where(single, lines.columns, past), axis=-1), single.sum(-1).astype(jnp.int32)


def fold_columns(
    state: Softmax, q: Array, prompt: PromptKV, listed: Array, counts: Array, scale: float
) -> tuple[Softmax, Array]:
    """Add single keys to the softmax: the first `counts` [B, h_q] of the keys `listed` [B, h_q, most].

    Return the softmax, and the number of tiles that were computed for each head.
    """
    k, v = prompt.k_post, prompt.v
    batch, heads, block, _ = q.shape
    several = min(max(GATHERED // block, 1) * block, -(-listed.shape[2] // block) * block)
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    head = head // (heads // k.shape[2])
    listed = jnp.pad(listed, ((0, 0), (0, 0), (0, -listed.shape[2] % several)))

    def step(turn: Array, state: Softmax) -> Softmax:
        some = lax.dynamic_slice_in_dim(listed, turn * several, several, axis=2)
        seen = (turn * several + jnp.arange(several) < counts[..., None])[:, :, None]
        k_rows, v_rows = (x.at[row, some, head].get(mode="clip") for x in (k, v))
        scores = jnp.einsum("bhqd,bhnd->bhqn", q, k_rows, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen, v_rows)

    turns = -(-counts.max() // several)
    return lax.fori_loop(0, turns, step, state), turns * (several // block)
