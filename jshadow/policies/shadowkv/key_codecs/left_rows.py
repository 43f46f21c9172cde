"""The left rows of a key code: their axes, and those of chosen chunks; and the error of rebuilt keys.

Sizes: B rows of the batch, n chunks of c tokens, h_kv KV heads of width d, w numbers in the left row of a token.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped


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
