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
from jshadow.engine.sparse_prefill.lines import Lines
from jshadow.ops.attention import MASKED
from jshadow.ops.layout import KeyLists
from jshadow.policies.prefill_attention import PrefillPiece

GATHERED = 256  # number of keys that a head gathers at once


class Chosen(struct.PyTreeNode):
    """The keys that the heads of a layer attend to, and the tiles that were computed so far.

    Attributes:
        lines: the chosen columns and diagonals. None if attention is exact.
        tiles: number of tiles that each head needed, int32 [B, h_q]. M gathered columns count as one tile.
        ran: number of tiles that each head computed, int32 [B, h_q]. In XLA, a head computes whole turns of GATHERED
            keys.
    """

    lines: Lines | None
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
        implementation: "auto" is the kernel on a GPU and `attend_tiles` elsewhere. See `pallas_kernels.choose`.
    """

    scale: float
    block: int
    implementation: str = "auto"


class Head(NamedTuple):
    """One query head of one row.

    Attributes:
        row: index in the batch.
        number: number of the query head.
        kv: number of its KV head.
        slants: for each distance of a key block from a query block, which keys of it lie on a chosen diagonal of each
            query.
        in_column: which keys of each key block are chosen columns.
    """

    row: Int[Array, ""]
    number: Int[Array, ""]
    kv: Int[Array, ""]
    slants: Bool[Array, "n M M"]
    in_column: Bool[Array, "n M"]


def attend_tiles(
    piece: PrefillPiece, prompt: PromptKV, chosen: Chosen, lists: KeyLists, tiling: Tiling
) -> tuple[Float[Array, "B P h_q d"], Chosen]:
    """Compute causal attention of a piece of queries over the chosen keys. Each key counts once.

    Args:
        piece: n blocks of queries. The position of the first is a multiple of the block size.
        prompt: keys and values, at least up to the piece's last token, in whole blocks. Later tokens are ignored.
        chosen: the result of `SparsePrefill.begin`, or of this function for the piece before.
        lists: the result of `piece_lists`.
        tiling: sizes of the tiles.

    Returns:
        The output in the dtype of the queries, and `chosen` with the tiles of this piece added to its counts.
    """
    q, first, block = piece.q_post, piece.first, tiling.block
    batch, length, heads, dim = q.shape
    group, count, lines = heads // prompt.k_post.shape[2], length // block, chosen.lines
    assert lines is not None

    def flat(x: Array) -> Array:
        return x.reshape(batch * heads, *x.shape[2:])

    def of_head(args: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array]:
        number, tiles, listed = args
        head = head_of(lines, number // heads, number % heads, group)

        def of_block(args: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array]:
            place, tile, (ids, visited, columns, singles) = args
            state = Softmax(jnp.full(block, MASKED), jnp.zeros(block), jnp.zeros((block, dim)))
            state, ran = fold_blocks(state, head, (place, tile), prompt, (ids, visited), tiling.scale)
            state, more = fold_columns(state, head, tile, prompt, (columns, singles), tiling.scale)
            return state.out / state.total[:, None], ran + more

        out, ran = lax.map(of_block, (first // block + jnp.arange(count, dtype=jnp.int32), tiles, listed))
        return out, ran.sum()

    tiles = q.reshape(batch, count, block, heads, dim).transpose(0, 3, 1, 2, 4)
    listed = tuple(map(flat, (lists.blocks, lists.block_counts, lists.columns, lists.column_counts)))
    out, ran = lax.map(of_head, (jnp.arange(batch * heads), flat(tiles), listed))
    out = out.reshape(tiles.shape).transpose(0, 2, 3, 1, 4).reshape(q.shape).astype(q.dtype)
    needed = tiles_needed(lists, block)
    return out, chosen.replace(tiles=chosen.tiles + needed, ran=chosen.ran + ran.reshape(batch, heads))


def tiles_needed(lists: KeyLists, block: int) -> Int[Array, "B h_q"]:
    """Return the number of tiles that each head needs: key blocks, and columns in groups of `block`."""
    return (lists.block_counts - (-lists.column_counts // block)).sum(2)


def head_of(lines: Lines, row: Int[Array, ""], number: Int[Array, ""], group: int) -> Head:
    """Return one query head. `group` is the number of query heads of a KV head."""
    return Head(row, number, number // group, slanted(lines.near[row, number]), lines.in_column[row, number])


def fold_blocks(
    state: Softmax, head: Head, tile: tuple[Array, Array], prompt: PromptKV, blocks: tuple[Array, Array], scale: float
) -> tuple[Softmax, Array]:
    """Add the listed key blocks to the softmax of a query block. Return it, and the number of tiles that were computed.

    `tile` has the number of the query block and its queries [M, d]. `blocks` has the list, and how many of it count.
    """
    (place, q), (ids, visited) = tile, blocks
    block = q.shape[0]
    several = min(max(1, GATHERED // block), ids.shape[0])
    ids = jnp.pad(ids, (0, -ids.shape[0] % several))
    query, key = place * block + jnp.arange(block)[:, None], jnp.arange(block)

    def step(turn: Array, state: Softmax) -> Softmax:
        some = lax.dynamic_slice_in_dim(ids, turn * several, several)
        seen = []
        for index, one in enumerate(some):
            pairs = (one * block + key <= query) & (turn * several + index < visited)
            seen.append(pairs & (head.slants[jnp.maximum(place - one, 0)] | head.in_column[one]))
        k_rows, v_rows = (rows_of(x, head, some, block) for x in (prompt.k_post, prompt.v))
        scores = jnp.matmul(q, k_rows.T, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, jnp.concatenate(seen, axis=1), v_rows)

    turns = -(-visited // several)
    return lax.fori_loop(0, turns, step, state), turns * several


def rows_of(x: Float[Array, "B S h_kv d"], head: Head, blocks: Int[Array, " G"], block: int) -> Float[Array, "N d"]:
    """Return the rows of some key blocks, in their order. Slices of whole blocks copy faster than a gather of rows."""
    dim = x.shape[3]
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
    state: Softmax, head: Head, q: Float[Array, "M d"], prompt: PromptKV, columns: tuple[Array, Array], scale: float
) -> tuple[Softmax, Array]:
    """Add single keys to the softmax of a query block. Return it, and the number of tiles that were computed.

    `columns` is the list of keys [most], and how many of the first ones count.
    """
    (listed, count), block = columns, q.shape[0]
    several = min(max(GATHERED // block, 1) * block, -(-listed.shape[0] // block) * block)
    listed = jnp.pad(listed, (0, -listed.shape[0] % several))

    def step(turn: Array, state: Softmax) -> Softmax:
        some = lax.dynamic_slice_in_dim(listed, turn * several, several)
        seen = (turn * several + jnp.arange(several) < count)[None]
        k_rows, v_rows = (x.at[head.row, some, head.kv].get(mode="clip") for x in (prompt.k_post, prompt.v))
        scores = jnp.matmul(q, k_rows.T, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen, v_rows)

    turns = -(-count // several)
    return lax.fori_loop(0, turns, step, state), turns * (several // block)
