"""Where the values lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.fetch_reconstruct.packed_rows import Packed
from pallas_kernels.reconstruct_keys.operands import Keys


class Values(NamedTuple):
    """The operands of a fetch; those that a caller does not use are None.

    Attributes:
        prompt: [B, h_kv, U, c * d], in host memory; or rows of bytes, see `Packed`.
        tail: values of the chunks in the factors' tail [B, h_kv, W', c * d], W' >= W, likewise.
        kept: the result of a fetch before, on the device [B, h_kv, k, c * d].
        stay: bool [B, h_kv, k]: what kept has there is right.
    """

    prompt: jax.Array
    tail: jax.Array | None = None
    kept: jax.Array | None = None
    stay: jax.Array | None = None


def check(values: Values, factors: Keys, packed: Packed | None = None) -> None:
    """Check shapes and dtypes against those of the factors, which are right.

    Raises:
        ValueError: one is wrong.
    """
    prompt, tail, kept, stay = values
    batch, heads, _ = factors.ids.shape
    width, stored, kind = factors.chunk * factors.dim, factors.chunk * factors.dim, prompt.dtype
    if packed is not None:
        if packed.bits not in (8, 4) or packed.bits * factors.dim % 8:
            raise ValueError(f"value_bits must be 8 or 4 and fill whole bytes of {factors.dim}, got {packed.bits}")
        stored, kind = packed.row_bytes(factors.chunk, factors.dim), jnp.dtype(packed.dtype)
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"value_dtype must be floating, got {packed.dtype}")
    expect_shape("values", prompt, (batch, heads, factors.left.shape[-2], stored))
    expect_dtype("values", prompt, jnp.floating if packed is None else jnp.uint8)
    if (tail is None) != (factors.tail is None):
        raise ValueError("values_tail and tail belong together, got one of them")
    if tail is not None and factors.tail is not None:
        expect_shape("values_tail", tail, (batch, heads, "W'", stored))
        expect_dtype("values_tail", tail, prompt.dtype)
        if tail.shape[2] < factors.tail.shape[-2]:
            raise ValueError(f"values_tail must have the {factors.tail.shape[-2]} chunks of tail, got {tail.shape[2]}")
    if (kept is None) != (stay is None):
        raise ValueError("kept and stay belong together, got one of them")
    if kept is not None and stay is not None:
        expect_shape("kept", kept, (*factors.ids.shape, width))
        expect_dtype("kept", kept, kind)
        expect_shape("stay", stay, factors.ids.shape)
        expect_dtype("stay", stay, jnp.bool_)
