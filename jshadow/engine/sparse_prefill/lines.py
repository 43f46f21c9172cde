"""The choice of keys for each query head in a sparse prefill.

A head attends to columns and diagonals. A column is a key to which all later queries attend. A diagonal is a distance:
each query attends to the key at that distance before it.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from jshadow.ops.layout import top_k


class HeadSizes(struct.PyTreeNode):
    """How many keys each query head attends to. All fields are int32 [h_q].

    They are arrays, so that all layers can share one compiled program.

    Attributes:
        columns: number of columns.
        diagonals: number of diagonals.
        by_position: 1: the head takes the first columns and the nearest diagonals (A-shape). 0: it takes those with the
            largest attention sums.
    """

    columns: Array
    diagonals: Array
    by_position: Array

    @classmethod
    def equal(cls, heads: int, columns: int, diagonals: int, by_position: bool = False) -> "HeadSizes":
        """Return the same sizes for all heads."""
        return cls(*(jnp.full(heads, value, jnp.int32) for value in (columns, diagonals, int(by_position))))


class Lines(struct.PyTreeNode):
    """The chosen columns and diagonals of each head. The S tokens form n blocks of M tokens.

    The block at distance D from a query block is D blocks before it.

    Attributes:
        columns: the chosen keys in rising order, padded with S, int32 [B, h_q, most].
        in_column: the same as a mask of all keys, bool [B, h_q, n, M].
        near: a mask of the chosen diagonals, bool [B, h_q, n, 2M]. Entry D has the 2M distances from (D - 1) * M on.
            They include all distances between a query block and the key block at distance D.
        strips: the block distances D at which a diagonal is chosen, in rising order, padded with n, int32 [B, h_q, n].
        touched: the same as a mask of all D, bool [B, h_q, n].
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
    """Choose the columns or the diagonals of each head: the indices of its `counts` largest sums.

    Args:
        sums: attention sums by column or by diagonal. In a tie, the lower index is chosen first.
        counts: how many indices a head chooses, at most `most`.
        by_position: 1: the head chooses the lowest indices instead.
        lengths: number of real tokens of each row. Only indices below it are chosen.
        forced: how many of the lowest indices are chosen before all others.
        most: static upper bound of counts.

    Returns:
        The chosen indices in rising order, padded with S, and a mask of them.
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
    """Return Lines from the results of `choose` for columns, and the mask of `choose` for diagonals.

    `block` is M. It must divide S.
    """
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
    """Return the key blocks that have keys on a chosen diagonal of query block `index`, and their number.

    The nearest block is first. Only the first blocks of each list count, as many as the number says.
    """
    blocks = index - lines.strips
    return jnp.maximum(blocks, 0), (blocks >= 0).sum(-1).astype(jnp.int32)
