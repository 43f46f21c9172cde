"""Attention of a piece of queries over what each head chose, tile by tile: the work follows what was chosen, not S."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jshadow.engine.sparse_prefill.estimate import block_means
from jshadow.engine.sparse_prefill.lines import HeadSizes, Lines, best_blocks, strip_blocks
from jshadow.ops.attention import MASKED

GATHERED = 512  # keys that are gathered for each head at once


class Chosen(struct.PyTreeNode):
    """What the heads of a layer attend to, and what that took so far.

    Attributes:
        lines: columns and diagonals; None where no head has them.
        sizes: of each head; None where no head is block sparse.
        tiles: tiles of M x M scores that each head needed, int32 [B, h_q]; M gathered columns are one.
        ran: tiles that were computed for each head, int32 []: heads run in step, the one that needs most decides.
    """

    lines: Lines | None
    sizes: HeadSizes | None
    tiles: Array
    ran: Array


class Softmax(NamedTuple):
    """A softmax that has not seen all keys yet: largest score and sum [B, h_q, M], weighted values [B, h_q, M, d]."""

    top: Float[Array, "B h_q M"]
    total: Float[Array, "B h_q M"]
    out: Float[Array, "B h_q M d"]

    def fold(
        self, scores: Float[Array, "B h_q M N"], seen: Bool[Array, "#B #h_q #M N"], v: Float[Array, "B h_q N d"]
    ) -> "Softmax":
        """With N more keys, of which `seen` count."""
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(self.top, scores.max(-1))
        weight, shrink = jnp.exp(scores - top[..., None]), jnp.exp(self.top - top)
        part = jnp.einsum("bhqn,bhnd->bhqd", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Softmax(top, self.total * shrink + weight.sum(-1), self.out * shrink[..., None] + part)


def attend_chosen(
    q: Float[Array, "B P h_q d"], k: Float[Array, "B S h_kv d"], v: Float[Array, "B S h_kv d"],
    lengths: Int[Array, "B"], first: Int[Array, ""] | int, chosen: Chosen, *, scale: float, block: int,
    most_blocks: int = 0,
) -> tuple[Float[Array, "B P h_q d"], Chosen]:  # fmt: skip
    """Causal attention of a piece of queries over the chosen keys; each key counts once.

    Args:
        q: after RoPE, of positions first .. first + P - 1; whole blocks.
        k, v: of the prompt at least up to there, whole blocks; what lies behind is not looked at.
        lengths: real tokens.
        first: a multiple of block.
        chosen: from before.
        scale: factor on the scores.
        block: M, queries and keys of a tile.
        most_blocks: static maximum of `chosen.sizes.blocks`; 0: no head is block sparse.

    Returns:
        The output in q's dtype, and `chosen` with what was counted.
    """
    batch, length, heads, dim = q.shape
    count = length // block
    assert count * block == length, f"{length} queries are no blocks of {block}"
    means = None
    if most_blocks:
        q_means = block_means(q, lengths, first, block).transpose(2, 0, 1, 3)
        means = (q_means, block_means(k, lengths, 0, block))
    tiles = q.reshape(batch, count, block, heads, dim).transpose(1, 0, 3, 2, 4)
    run = functools.partial(attend_block, k=k, v=v, chosen=chosen, scale=scale, most_blocks=most_blocks)

    def one(args: tuple[Array, Array, Array | None]) -> tuple[Array, Array, Array]:
        index, tile, mean = args
        known = None if means is None or mean is None else (mean, means[1])
        return run(tile, first // block + index, means=known)

    out, needed, ran = lax.map(one, (jnp.arange(count, dtype=jnp.int32), tiles, None if means is None else means[0]))
    out = out.transpose(1, 0, 3, 2, 4).reshape(q.shape).astype(q.dtype)
    return out, chosen.replace(tiles=chosen.tiles + needed.sum(0), ran=chosen.ran + ran.sum())


def attend_block(
    q: Float[Array, "B h_q M d"], index: Int[Array, ""], *, k: Array, v: Array, chosen: Chosen, scale: float,
    most_blocks: int, means: tuple[Array, Array] | None,
) -> tuple[Float[Array, "B h_q M d"], Int[Array, "B h_q"], Int[Array, ""]]:  # fmt: skip
    """One query block: first its key blocks, then the columns that lie in none of them.

    Returns:
        Float32 output, tiles that each head needed, tiles that were computed for each.
    """
    block = q.shape[2]
    ids, counts = key_blocks(chosen, index, means, most_blocks)
    state = Softmax(jnp.full(q.shape[:3], MASKED), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape))
    state, ran = fold_blocks(state, q, index, k, v, ids, counts, chosen, scale)
    if chosen.lines is not None:
        listed, more = open_columns(chosen.lines, index, block)
        state, extra = fold_columns(state, q, k, v, listed, more, scale)
        counts, ran = counts - (-more // block), ran + extra
    return state.out / state.total[..., None], counts, ran


def key_blocks(
    chosen: Chosen, index: Int[Array, ""], means: tuple[Array, Array] | None, most_blocks: int
) -> tuple[Int[Array, "B h_q W"], Int[Array, "B h_q"]]:
    """The key blocks of a query block [B, h_q, W], and how many of them count."""
    if means is None or chosen.sizes is None:
        assert chosen.lines is not None
        return strip_blocks(chosen.lines, index)
    ids, counts = best_blocks(*means, index, chosen.sizes.blocks, most_blocks)
    if chosen.lines is None:
        return ids, counts
    near, near_counts = strip_blocks(chosen.lines, index)
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, near.shape[2] - most_blocks)))
    whole = chosen.sizes.blocks > 0
    return jnp.where(whole[:, None], ids, near), jnp.where(whole, counts, near_counts)


def fold_blocks(
    state: Softmax, q: Array, index: Array, k: Array, v: Array, ids: Array, counts: Array, chosen: Chosen, scale: float
) -> tuple[Softmax, Array]:
    """With the listed key blocks: what is on a chosen diagonal or column, or all of them for a block-sparse head."""
    batch, heads, block, dim = q.shape
    kv_heads, several = k.shape[2], min(max(1, GATHERED // block), ids.shape[2])
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    k, v = (x.reshape(batch, -1, block, kv_heads, dim) for x in (k, v))
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, -ids.shape[2] % several)))
    query, key = jnp.arange(block)[:, None], jnp.arange(block)

    def step(turn: Array, state: Softmax) -> Softmax:
        own = lax.dynamic_slice_in_dim(ids, turn * several, several, axis=2)
        counted = (turn * several + jnp.arange(several) < counts[..., None])[:, :, None, :, None]
        seen = (own[:, :, None, :, None] * block + key <= (index * block + query)[:, None]) & counted
        if chosen.lines is not None:
            near = chosen.lines.near[row, head, jnp.maximum(index - own, 0)]  # [B, h_q, G, 2M]
            on_line = near[..., block + query - key] | chosen.lines.in_column[row, head, own][..., None, :]
            if chosen.sizes is not None:
                on_line |= (chosen.sizes.blocks > 0)[:, None, None, None]
            seen &= on_line.swapaxes(2, 3)
        k_rows, v_rows = (x[row, own, :, head // (heads // kv_heads)].reshape(batch, heads, -1, dim) for x in (k, v))
        scores = jnp.einsum("bhqd,bhnd->bhqn", q, k_rows, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen.reshape(*seen.shape[:3], -1), v_rows)

    turns = -(-counts.max() // several)
    return lax.fori_loop(0, turns, step, state), turns * several


def open_columns(
    lines: Lines, index: Int[Array, ""], block: int
) -> tuple[Int[Array, "B h_q most"], Int[Array, "B h_q"]]:
    """The chosen columns before a query block that lie in none of its key blocks, first, and how many they are.

    The others are seen with their blocks. A query block's own block is among these, so no mask is needed here.
    """
    back = index - lines.columns // block
    near = jnp.take_along_axis(lines.touched, jnp.clip(back, 0, lines.touched.shape[2] - 1), axis=2)
    own = (back > 0) & ~near
    past = lines.touched.shape[2] * block
    return jnp.sort(jnp.where(own, lines.columns, past), axis=-1), own.sum(-1).astype(jnp.int32)


def fold_columns(
    state: Softmax, q: Array, k: Array, v: Array, listed: Array, counts: Array, scale: float
) -> tuple[Softmax, Array]:
    """With single keys: the first `counts` [B, h_q] of those listed [B, h_q, most]."""
    batch, heads, block, _ = q.shape
    several = min(max(GATHERED // block, 1) * block, -(-listed.shape[2] // block) * block)
    row, head, _ = jnp.ogrid[:batch, :heads, :1]
    head = head // (heads // k.shape[2])
    listed = jnp.pad(listed, ((0, 0), (0, 0), (0, -listed.shape[2] % several)))

    def step(turn: Array, state: Softmax) -> Softmax:
        own = lax.dynamic_slice_in_dim(listed, turn * several, several, axis=2)
        seen = (turn * several + jnp.arange(several) < counts[..., None])[:, :, None]
        k_rows, v_rows = (x.at[row, own, head].get(mode="clip") for x in (k, v))
        scores = jnp.einsum("bhqd,bhnd->bhqn", q, k_rows, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen, v_rows)

    turns = -(-counts.max() // several)
    return lax.fori_loop(0, turns, step, state), turns * (several // block)
