"""Where the values lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.reconstruct_keys.factors import Factors


class Values(NamedTuple):
    """The operands of a fetch; those that a caller does not use are None.

    Attributes:
        prompt: [B, h_kv, U, c * d], in host memory.
        tail: values of the chunks in the factors' tail [B, h_kv, W', c * d], W' >= W, in host memory.
        kept: the result of a fetch before, on the device [B, h_kv, k, c * d].
        stay: bool [B, h_kv, k]: what kept has there is right.
    """

    prompt: jax.Array
    tail: jax.Array | None = None
    kept: jax.Array | None = None
    stay: jax.Array | None = None


def check(values: Values, factors: Factors) -> None:
    """Check shapes and dtypes against those of the factors, which are right.

    Raises:
        ValueError: one is wrong.
    """
    prompt, tail, kept, stay = values
    batch, heads, _ = factors.ids.shape
    width = factors.chunk * factors.right.shape[3]
    expect_shape("values", prompt, (batch, heads, factors.left.shape[1], width))
    expect_dtype("values", prompt, jnp.floating)
    if (tail is None) != (factors.tail is None):
        raise ValueError("values_tail and tail belong together, got one of them")
    if tail is not None and factors.tail is not None:
        expect_shape("values_tail", tail, (batch, heads, "W'", width))
        expect_dtype("values_tail", tail, prompt.dtype)
        if tail.shape[2] < factors.tail.shape[1]:
            raise ValueError(f"values_tail must have the {factors.tail.shape[1]} chunks of tail, got {tail.shape[2]}")
    if (kept is None) != (stay is None):
        raise ValueError("kept and stay belong together, got one of them")
    if kept is not None and stay is not None:
        expect_shape("kept", kept, (*factors.ids.shape, width))
        expect_dtype("kept", kept, prompt.dtype)
        expect_shape("stay", stay, factors.ids.shape)
        expect_dtype("stay", stay, jnp.bool_)
