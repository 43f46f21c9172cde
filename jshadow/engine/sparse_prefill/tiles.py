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

GATHERED = 256  # number of keys that a head gathers at once


class Chosen(struct.PyTreeNode):
    """The keys that the heads of a layer attend to, and the tiles that were computed so far.

    Attributes:
        lines: the chosen columns and diagonals. None if no head has them, or if attention is exact.
        sizes: the sizes of each head. None if no head is block-sparse, or if attention is exact.
        tiles: number of tiles that each head needed, int32 [B, h_q]. M gathered columns count as one tile.
        ran: number of tiles that each head computed, int32 [B, h_q]. In XLA, a head computes whole turns of GATHERED
            keys.
    """

    lines: Lines | None
    sizes: HeadSizes | None
    tiles: Array
    ran: Array


class Softmax(NamedTuple):
    """The state of an online softmax of one head, which has not seen all keys yet. All fields are float32.

    Attributes:
        top: largest score of each query so far.
        total: sum of exp(score - top).
        out: sum of the values, weighted with exp(score - top).
    """

    top: Float[Array, " M"]
    total: Float[Array, " M"]
    out: Float[Array, "M d"]

    def fold(self, scores: Float[Array, "M N"], seen: Bool[Array, "#M N"], v: Float[Array, "N d"]) -> "Softmax":
        """Return the softmax after N more keys, of which only those in `seen` count."""
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(self.top, scores.max(-1))
        weight, shrink = jnp.exp(scores - top[:, None]), jnp.exp(self.top - top)
        part = jnp.matmul(weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Softmax(top, self.total * shrink + weight.sum(-1), self.out * shrink[:, None] + part)


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

    ids: Int[Array, "*head W"]
    counts: Int[Array, "*head"]


class Head(NamedTuple):
    """The queries of one query block and head.

    Attributes:
        q: the queries.
        place: number of the query block.
        row: index in the batch.
        number: number of the query head.
        kv: number of its KV head.
    """

    q: Float[Array, "M d"]
    place: Int[Array, ""]
    row: Int[Array, ""]
    number: Int[Array, ""]
    kv: Int[Array, ""]


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
    return out, chosen.replace(tiles=chosen.tiles + needed.sum(0), ran=chosen.ran + ran.sum(0))


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
) -> tuple[Float[Array, "B h_q M d"], Int[Array, "B h_q"], Int[Array, "B h_q"]]:
    """Compute attention of one query block: over its key blocks, and then over the columns outside of these blocks.

    Args:
        q: the queries of the block.
        index: number of the block.
        means: the mean query of the block [B, h_q, d], and the mean keys of all key blocks [B, h_kv, n, d]. None if no
            head is block-sparse.
        prompt, chosen, tiling: as in `attend_tiles`.

    Returns:
        The float32 output, and the numbers of tiles that each head needed and computed, both int32 [B, h_q].
    """
    batch, heads, block, dim = q.shape
    group = heads // prompt.k_post.shape[2]
    blocks, counts = key_blocks(chosen, index, means, tiling.most_blocks)
    needed, columns = counts, None
    if chosen.lines is not None:
        columns = open_columns(chosen.lines, index, block)
        needed = counts - (-columns[1] // block)

    def one(args: tuple[Array, Array, Array, Array, tuple[Array, Array] | None]) -> tuple[Array, Array]:
        number, tile, ids, count, singles = args
        head = Head(tile, index, number // heads, number % heads, number % heads // group)
        state = Softmax(jnp.full(block, MASKED), jnp.zeros(block), jnp.zeros((block, dim)))
        state, ran = fold_blocks(state, head, prompt, BlockList(ids, count), chosen, tiling.scale)
        if singles is not None:
            state, more = fold_columns(state, head, prompt, singles, tiling.scale)
            ran += more
        return state.out / state.total[:, None], ran

    def flat(x: Array) -> Array:
        return x.reshape(batch * heads, *x.shape[2:])

    numbers = jnp.arange(batch * heads)
    columns = None if columns is None else (flat(columns[0]), flat(columns[1]))
    out, ran = lax.map(one, (numbers, flat(q), flat(blocks), flat(counts), columns))
    return out.reshape(q.shape), needed, ran.reshape(batch, heads)


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
    state: Softmax, head: Head, prompt: PromptKV, blocks: BlockList, chosen: Chosen, scale: float
) -> tuple[Softmax, Array]:
    """Add the listed key blocks to the softmax of a head. Return it, and the number of tiles that were computed.

    A block-sparse head attends to all keys of its blocks. Other heads attend to keys on a chosen diagonal or column.
    """
    block = head.q.shape[0]
    several = min(max(1, GATHERED // block), blocks.ids.shape[0])
    ids = jnp.pad(blocks.ids, (0, -blocks.ids.shape[0] % several))
    query, key = head.place * block + jnp.arange(block)[:, None, None], jnp.arange(block)

    def step(turn: Array, state: Softmax) -> Softmax:
        some = lax.dynamic_slice_in_dim(ids, turn * several, several)
        counted = (turn * several + jnp.arange(several) < blocks.counts)[:, None]
        seen = (some[:, None] * block + key <= query) & counted  # [M, G, M]
        if chosen.lines is not None:
            near = chosen.lines.near[head.row, head.number, jnp.maximum(head.place - some, 0)]
            on_line = slanted(near).swapaxes(0, 1) | chosen.lines.in_column[head.row, head.number, some]
            if chosen.sizes is not None:
                on_line |= chosen.sizes.blocks[head.number] > 0
            seen &= on_line
        k_rows, v_rows = (rows_of(x, head, some) for x in (prompt.k_post, prompt.v))
        scores = jnp.matmul(head.q, k_rows.T, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen.reshape(block, -1), v_rows)

    turns = -(-blocks.counts // several)
    return lax.fori_loop(0, turns, step, state), turns * several


def rows_of(x: Float[Array, "B S h_kv d"], head: Head, blocks: Int[Array, " G"]) -> Float[Array, "N d"]:
    """Return the rows of some key blocks, in their order. Slices of whole blocks copy faster than a gather of rows."""
    block, dim = head.q.shape
    parts = [lax.dynamic_slice(x, (head.row, one * block, head.kv, 0), (1, block, 1, dim)) for one in blocks]
    return jnp.concatenate([part.reshape(block, dim) for part in parts])


def slanted(near: Bool[Array, "G M2"]) -> Bool[Array, "G M M"]:
    """Return entry M + i - j of each row for query i and key j of a block. M2 is 2M.

    Rows that are repeated and cut one entry shorter shift by one from query to query. A gather would take longer.
    """
    count, double = near.shape
    block = double // 2
    back = jnp.roll(near[:, ::-1], block + 1, axis=1)  # entry x is near[M - x], modulo 2M
    rows = jnp.broadcast_to(back[:, None], (count, block, double)).reshape(count, -1)
    return rows[:, : block * (double - 1)].reshape(count, block, double - 1)[..., :block]


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
    state: Softmax, head: Head, prompt: PromptKV, columns: tuple[Array, Array], scale: float
) -> tuple[Softmax, Array]:
    """Add single keys to the softmax of a head. Return it, and the number of tiles that were computed.

    `columns` is the list of keys [most], and how many of the first ones count.
    """
    (listed, count), block = columns, head.q.shape[0]
    several = min(max(GATHERED // block, 1) * block, -(-listed.shape[0] // block) * block)
    listed = jnp.pad(listed, (0, -listed.shape[0] % several))

    def step(turn: Array, state: Softmax) -> Softmax:
        some = lax.dynamic_slice_in_dim(listed, turn * several, several)
        seen = (turn * several + jnp.arange(several) < count)[None]
        k_rows, v_rows = (x.at[head.row, some, head.kv].get(mode="clip") for x in (prompt.k_post, prompt.v))
        scores = jnp.matmul(head.q, k_rows.T, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen, v_rows)

    turns = -(-count // several)
    return lax.fori_loop(0, turns, step, state), turns * (several // block)
