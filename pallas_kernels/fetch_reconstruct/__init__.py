"""Values of chosen chunks brought from host memory while the same kernel rebuilds their keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.fetch_reconstruct import pallas, reference, rows
from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys import factors as key_factors
from pallas_kernels.reconstruct_keys.factors import Factors


def fetch_reconstruct(
    values: jax.Array, left: jax.Array, right: jax.Array, ids: jax.Array, inverse: jax.Array, *,
    kept: jax.Array | None = None, stay: jax.Array | None = None, tail: jax.Array | None = None,
    tail_unit: jax.Array | None = None, values_tail: jax.Array | None = None, implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Keys as by `reconstruct_keys`, and the values of the same chunks.

    `values` and `values_tail` may lie in pinned host memory; neither is ever copied as a whole, "interpret" aside. The
    kernel reads from them only the chunks that do not stay; "xla" moves all k. Where kept is donated, the kernel writes
    into it: rows that stay are not touched.

    Args:
        values: [B, h_kv, U, c * d], one chunk contiguous.
        left: [B, U, c * r].
        right: [B, h_kv, r, d].
        ids: int32 [B, h_kv, k], clipped to 0 .. U - 1, or to 0 .. U + W - 1 with a tail.
        inverse: angle per position of each rotated pair, float32 [rot / 2].
        kept: the result of a fetch before [B, h_kv, k, c * d].
        stay: bool [B, h_kv, k]: the values of chunk k are what kept has there, or nobody asks for them.
        tail: left rows of later chunks [B, W, c * r], see `reconstruct_keys`.
        tail_unit: int32 [B].
        values_tail: values of the later chunks [B, h_kv, W', c * d], W' >= W.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        keys [B, h_kv, k * c, d] in left's dtype and values [B, h_kv, k * c, d] in theirs, both on the device.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    factors = Factors(left, right, ids, inverse, tail, tail_unit)
    source = Values(values, values_tail, kept, stay)
    key_factors.check(factors)
    rows.check(source, factors)
    if ids.shape[2] == 0:
        return jnp.zeros(factors.out_shape, left.dtype), jnp.zeros(factors.out_shape, values.dtype)
    keys, fetched = run(implementation, pallas.fetch_reconstruct, reference.fetch_reconstruct, source, factors)
    return keys, fetched
