"""Values of chosen chunks brought from host memory while the same kernel rebuilds their keys."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.codes import Profile
from pallas_kernels.fetch_reconstruct import pallas, reference, rows
from pallas_kernels.fetch_reconstruct.packed_rows import Packed
from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys.operands import keys_of


def fetch_reconstruct(
    values: jax.Array, left: jax.Array, right: jax.Array | None, ids: jax.Array, inverse: jax.Array, *,
    kept: jax.Array | None = None, stay: jax.Array | None = None, tail: jax.Array | None = None,
    tail_unit: jax.Array | None = None, values_tail: jax.Array | None = None, mean: jax.Array | None = None,
    step: jax.Array | None = None, profile: Profile | None = None, value_bits: int | None = None,
    value_dtype: jax.typing.DTypeLike | None = None, implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Keys as by `reconstruct_keys`, and the values of the same chunks.

    `values` and `values_tail` may lie in pinned host memory; neither is ever copied as a whole, "interpret" aside. The
    kernel reads from them only the chunks that do not stay; "xla" moves all k. Where kept is donated, the kernel writes
    into it: rows that stay are not touched.

    With value_bits, values are uint8 [B, h_kv, U, c * (d * bits / 8 + s)]: the two's complement codes of a chunk's
    tokens as `pallas_kernels.codes` packs them, then the scale of each in s bytes, float32 where value_dtype is, else
    float16. They travel so; a value is its code times its scale in float32, rounded to value_dtype.

    Args:
        values: [B, h_kv, U, c * d], or rows of bytes; one chunk contiguous.
        left: [B, U, c * r], or codes.
        right: [B, h_kv, r, d], or None.
        ids: int32 [B, h_kv, k], clipped to 0 .. U - 1, or to 0 .. U + W - 1 with a tail.
        inverse: angle per position of each rotated pair, float32 [rot / 2].
        kept: the result of a fetch before [B, h_kv, k, c * d], in the dtype of this one's.
        stay: bool [B, h_kv, k]: the values of chunk k are what kept has there, or nobody asks for them.
        tail: left rows of later chunks, W of them, see `reconstruct_keys`.
        tail_unit: int32 [B].
        values_tail: values of the later chunks, W' >= W of them, as `values` are.
        mean, step, profile: of codes, see `reconstruct_keys`.
        value_bits: 8 or 4; None: values are numbers.
        value_dtype: of the values, with value_bits alone.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        keys as by `reconstruct_keys` and values [B, h_kv, k * c, d] in theirs or value_dtype, both on the device.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    factors = keys_of(left, right, ids, inverse, tail, tail_unit, mean, step, profile)
    if (value_bits is None) != (value_dtype is None):
        raise ValueError("value_bits and value_dtype belong together, got one of them")
    packed = None
    if value_bits is not None and value_dtype is not None:
        packed = Packed(value_bits, jnp.dtype(value_dtype).name)
    source = Values(values, values_tail, kept, stay)
    rows.check(source, factors, packed)
    if ids.shape[2] == 0:
        return jnp.zeros(factors.out_shape, factors.dtype), jnp.zeros(factors.out_shape, value_dtype or values.dtype)
    keys, fetched = run(
        implementation,
        functools.partial(pallas.fetch_reconstruct, packed=packed),
        functools.partial(reference.fetch_reconstruct, packed=packed),
        source, factors,
    )  # fmt: skip
    return keys, fetched
