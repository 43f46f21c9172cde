"""Selection and attention over rows of which each device of a mesh has a part. The functions run inside shard_map."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jshadow.ops.attention import MASKED, Piece, group_queries
from jshadow.ops.layout import top_k


def best_of_all(scores: Float[Array, "*n"], count: int, axis: str) -> Float[Array, "*n"]:
    """Return the scores, with -1 for those that are not among the `count` best of all devices; see `among_best`."""
    return jnp.where(among_best(scores, count, axis), scores, -1.0)


def among_best(scores: Float[Array, "*n"], count: int, axis: str) -> Bool[Array, "*n"]:
    """Return which scores of this device are among the `count` best of all devices.

    Each device offers its best. All devices see these scores, and choose the same ones. Of equal scores, those of the
    first device are chosen, and on a device the first, so the choice is that of one device with all scores.

    Args:
        scores: the scores of this device, along the last axis.
        count: number of scores to choose.
        axis: the axis of the mesh.
    """
    most = min(count, scores.shape[-1])
    order = top_k(scores, most)
    offered = jnp.take_along_axis(scores, order, axis=-1)
    every = lax.all_gather(offered, axis, axis=offered.ndim - 1, tiled=True)
    taken = top_k(every, min(count, every.shape[-1]))
    # Of a device's own scores, which fall, the first ones are chosen.
    mine = (taken // most == lax.axis_index(axis)).sum(axis=-1, keepdims=True)
    return jnp.put_along_axis(jnp.zeros(scores.shape, bool), order, jnp.arange(most) < mine, axis=-1, inplace=False)


def attend_split(
    q: Float[Array, "B T h_q d"], pieces: list[Piece], scale: float, axis: str
) -> Float[Array, "B T h_q d"]:
    """Compute softmax attention over the union of the pieces of all devices along a mesh's `axis`.

    The arguments are those of `attend`. Each device attends to its own rows. The results are merged by their
    log-sum-exps: one maximum and one sum travel for each query.
    """
    tops, sums, outs = zip(*(piece_sums(q, piece, scale) for piece in pieces), strict=True)
    top = lax.pmax(jnp.max(jnp.stack(tops), axis=0), axis)
    shares = [jnp.exp(own - top) for own in tops]
    total = sum(part * share for part, share in zip(sums, shares, strict=True))
    out = sum(part * share[..., None] for part, share in zip(outs, shares, strict=True))
    both = lax.psum(jnp.concatenate([out, total[..., None]], axis=-1), axis)
    out, total = both[..., :-1], both[..., -1:]
    out = out / jnp.where(total > 0, total, 1)
    batch, heads, group, count, width = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * group, width).astype(q.dtype)


def piece_sums(q: Float[Array, "B T h_q d"], piece: Piece, scale: float) -> tuple[Array, Array, Array]:
    """Return the largest score, the sum of weights and the weighted sum of values of one piece.

    They are float32 [B, h_kv, group, T], the same, and [B, h_kv, group, T, d]. The largest score is at least MASKED.
    """
    k, v, valid = piece.k, piece.v, piece.valid
    width = q.shape[-1]
    if piece.places is not None:
        at = piece.places[..., None]
        k, v = (jnp.take_along_axis(x, at, axis=2, mode="clip") for x in (k, v))
        each = k.shape[3] // width
        k, v = (x.reshape(*x.shape[:2], -1, width) for x in (k, v))
        valid = valid * each
    grouped = group_queries(q, k.shape[1])
    rows = k.shape[-2]
    if valid.dtype != jnp.int32:
        valid = jnp.repeat(valid, rows // valid.shape[-1], axis=-1)
    seen = jnp.arange(rows) < valid if valid.dtype == jnp.int32 else valid
    tokens = "bhtnd" if k.ndim == 5 else "bhnd"
    scores = jnp.einsum(f"bhgtd,{tokens}->bhgtn", grouped, k, preferred_element_type=jnp.float32) * scale
    seen = seen[:, :, None]
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, axis=-1, initial=MASKED)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    out = jnp.einsum(f"bhgtn,{tokens}->bhgtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return top, weights.sum(axis=-1), out
