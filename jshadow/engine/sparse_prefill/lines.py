"""Which keys a query head attends to in a sparse prefill: columns and diagonals, or key blocks of each query block."""

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from jshadow.ops.layout import top_k


class HeadSizes(struct.PyTreeNode):
    """How many keys each query head attends to, all int32 [h_q]. As arrays, they let all layers share one program.

    Attributes:
        columns: columns of a head.
        diagonals: diagonals of a head.
        by_position: 1: the first columns and the nearest diagonals (A-shape); 0: those with the largest mass.
        blocks: key blocks for each query block; 0: the head has columns and diagonals instead.
    """

    columns: Array
    diagonals: Array
    by_position: Array
    blocks: Array

    @classmethod
    def equal(
        cls, heads: int, columns: int = 0, diagonals: int = 0, by_position: bool = False, blocks: int = 0
    ) -> "HeadSizes":
        """The same sizes for all heads."""
        return cls(*(jnp.full(heads, value, jnp.int32) for value in (columns, diagonals, int(by_position), blocks)))


class Lines(struct.PyTreeNode):
    """Chosen columns and diagonals of each head, cut in blocks of M keys; the S tokens are n blocks.

    Attributes:
        columns: chosen keys, rising, then S; int32 [B, h_q, most].
        in_column: the same as a mask [B, h_q, n, M].
        near: whether a diagonal is chosen, for the 2M distances from (D - 1) * M on, which hold all those between a
            query block and the block D before it; [B, h_q, n, 2M].
        strips: the D for which a diagonal is chosen, rising, then n; int32 [B, h_q, n].
        touched: the same as a mask [B, h_q, n].
    """

    columns: Int[Array, "B h_q most"]
    in_column: Bool[Array, "B h_q n M"]
    near: Bool[Array, "B h_q n M2"]
    strips: Int[Array, "B h_q n"]
    touched: Bool[Array, "B h_q n"]


def choose(
    sums: Float[Array, "B h_q S"],
    counts: Int[Array, " h_q"],
    by_position: Int[Array, " h_q"],
    lengths: Int[Array, " B"],
    *,
    forced: int,
    most: int,
) -> tuple[Int[Array, "B h_q {most}"], Bool[Array, "B h_q S"]]:
    """The indices of each head's `counts` largest sums. The first `forced` indices come before all others.

    Args:
        sums: by column, or by diagonal; the lower index is first in a tie.
        counts: how many a head chooses, at most `most`.
        by_position: 1: the head chooses the lowest indices instead.
        lengths: real tokens of each row; no index from there on is chosen.
        forced: how many of the lowest indices count as the largest sums.
        most: static maximum of counts.

    Returns:
        The chosen indices in rising order, then S; and a mask of them.
    """
    batch, heads, tokens = sums.shape
    index = jnp.arange(tokens)
    score = jnp.where(by_position[:, None] > 0, -index.astype(jnp.float32), sums)
    score = jnp.where(index < forced, jnp.inf, score)
    score = jnp.where(index < lengths[:, None, None], score, -jnp.inf)
    best = top_k(score, most)
    valid = (jnp.arange(most) < counts[:, None]) & (best < lengths[:, None, None])
    chosen = jnp.sort(jnp.where(valid, best, tokens), axis=-1)
    row, head = jnp.ogrid[:batch, :heads]
    mask = jnp.zeros(sums.shape, bool).at[row[..., None], head[..., None], chosen].set(True, mode="drop")
    return chosen, mask


def make_lines(
    columns: Int[Array, "B h_q most"], in_column: Bool[Array, "B h_q S"], diagonals: Bool[Array, "B h_q S"], block: int
) -> Lines:
    """Lines from the chosen columns (rising, then S; and as a mask) and the mask of chosen diagonals."""
    batch, heads, tokens = diagonals.shape
    count = tokens // block
    assert count * block == tokens, f"{tokens} tokens are no blocks of {block}"
    cut = diagonals.reshape(batch, heads, count, block)
    before = jnp.pad(cut, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    near = jnp.concatenate([before, cut], axis=3)
    touched = near[..., 1:].any(-1)  # distances of at least (D - 1) * M + 1: the farthest pair of two neighbors
    strips = jnp.sort(jnp.where(touched, jnp.arange(count), count), axis=-1)
    return Lines(columns, in_column.reshape(batch, heads, count, block), near, strips, touched)


def strip_blocks(lines: Lines, index: Int[Array, ""]) -> tuple[Int[Array, "B h_q n"], Int[Array, "B h_q"]]:
    """The key blocks that query block `index` shares a chosen diagonal with, nearest first, and how many they are."""
    blocks = index - lines.strips
    return jnp.maximum(blocks, 0), (blocks >= 0).sum(-1).astype(jnp.int32)


def best_blocks(
    q_mean: Float[Array, "B h_q d"],
    k_mean: Float[Array, "B h_kv n d"],
    index: Int[Array, ""],
    counts: Int[Array, " h_q"],
    most: int,
) -> tuple[Int[Array, "B h_q {most}"], Int[Array, "B h_q"]]:
    """The key blocks whose mean key has the largest product with the mean query, best first, and their number.

    A query block's own key block is always the first, because otherwise a query might see no key.
    """
    batch, heads, dim = q_mean.shape
    grouped = q_mean.reshape(batch, k_mean.shape[1], -1, dim)
    scores = jnp.einsum("bhgd,bhnd->bhgn", grouped, k_mean).reshape(batch, heads, -1)
    block = jnp.arange(k_mean.shape[2])
    scores = jnp.where(block < index, scores, jnp.where(block == index, jnp.inf, -jnp.inf))
    there = jnp.minimum(counts, index + 1)
    return top_k(scores, most), jnp.broadcast_to(there, (batch, heads)).astype(jnp.int32)
