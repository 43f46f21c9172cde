"""Estimates of what a prompt's queries attend to, from the attention of the last queries."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jshadow.ops.attention import MASKED, group_queries

KEY_TILE = 512  # number of keys whose scores are in memory at once


def line_sums(
    q_tail: Float[Array, "B w h_q d"], k: Float[Array, "B S h_kv d"], lengths: Int[Array, " B"], scale: float
) -> tuple[Float[Array, "B h_q S"], Float[Array, "B h_q S"]]:
    """Sum the attention probabilities of each row's last w real queries by column and by diagonal.

    A column is a key. A diagonal is a distance from query to key. Each tile of scores is computed twice: once for the
    log-sum-exps, and once for the sums. The probabilities have no attention sink of the model, as in MInference.

    Args:
        lengths: number of real tokens of each row, int32 [B].

    Returns:
        The sums by key and the sums by distance, both float32 [B, h_q, S]. Padding has 0.
    """
    batch, w, q_heads, _ = q_tail.shape
    tokens, tile = k.shape[1], min(KEY_TILE, k.shape[1])
    count = -(-tokens // tile)
    grouped = group_queries(q_tail, k.shape[2])
    query = lengths[:, None] - w + jnp.arange(w)

    def scores_of(index: Array) -> tuple[Array, Array]:
        """Return the first key of a tile, and its scores [B, h_q, w, K]. Keys of the previous tile are masked."""
        start = jnp.minimum(index * tile, tokens - tile)
        key = start + jnp.arange(tile)
        k_tile = lax.dynamic_slice_in_dim(k, start, tile, axis=1)
        scores = jnp.einsum("bhgtd,bshd->bhgts", grouped, k_tile, preferred_element_type=jnp.float32) * scale
        seen = (key >= index * tile) & (key <= query[..., None])
        return start, jnp.where(seen[:, None], scores.reshape(batch, q_heads, w, tile), MASKED)

    def add_exponentials(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = carry
        _, scores = scores_of(index)
        new_top = jnp.maximum(top, scores.max(-1))
        return new_top, total * jnp.exp(top - new_top) + jnp.exp(scores - new_top[..., None]).sum(-1)

    shape = (batch, q_heads, w)
    top, total = lax.fori_loop(0, count, add_exponentials, (jnp.full(shape, MASKED), jnp.zeros(shape)))
    real = (query >= 0)[:, None]

    def add_sums(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        columns, slants = sums
        start, scores = scores_of(index)
        weight = jnp.where(scores > MASKED / 2, jnp.exp(scores - top[..., None]) / total[..., None], 0)
        weight = jnp.where(real[..., None], weight, 0)
        # Shift each row one place further to the right than the row below it, so that a diagonal becomes a column.
        rows = jnp.pad(weight[:, :, ::-1], ((0, 0), (0, 0), (0, 0), (0, w))).reshape(batch, q_heads, -1)
        slanted = rows[..., :-w].reshape(batch, q_heads, w, tile + w - 1).sum(2)
        return _add_at(columns, weight.sum(2), start), _add_at(slants, slanted, start)

    zeros = jnp.zeros((batch, q_heads, tokens + w - 1))
    columns, slants = lax.fori_loop(0, count, add_sums, (zeros[..., :tokens], zeros))
    back = (lengths[:, None] - 1 - jnp.arange(tokens))[:, None]
    diagonals = jnp.take_along_axis(slants, jnp.maximum(back, 0), axis=2, mode="clip")
    return columns, jnp.where(back >= 0, diagonals, 0)


def _add_at(whole: Array, part: Array, start: Array) -> Array:
    """Return whole [B, h, n] with part [B, h, m] added at start .. start + m - 1 of the last axis."""
    old = lax.dynamic_slice_in_dim(whole, start, part.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(whole, old + part, start, axis=2)
