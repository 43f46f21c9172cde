"""The arrays that append_rows reads, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape


class NewTokens(NamedTuple):
    """The queries, keys and values of T new tokens in each row, and where keys and values are written.

    Attributes:
        q: queries before RoPE [B, T, h_q, d].
        k: keys before RoPE [B, T, h_kv, d], in the dtype of q.
        v: values [B, T, h_kv, d], in the dtype of q.
        cos, sin: float32 [B, T, rotary_dim / 2], cosines and sines of the RoPE angles of each token. The first
            rotary_dim columns of queries and keys are rotated. rotary_dim is at most d.
        slots: int32 [B, T], the slot of each token, at least 0. Two valid tokens of a row have different slots.
        valid: bool [B, T]. The key and the value of a token that is False are not written.
        first: int32 [B]. If it is given, the slot of a token is `slots` less `first` times the op's `unit`. Then no
            other kernel is needed to compute slots from positions.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cos: jax.Array
    sin: jax.Array
    slots: jax.Array
    valid: jax.Array
    first: jax.Array | None = None


def check(k: jax.Array, v: jax.Array, new: NewTokens) -> None:
    """Check the shapes and dtypes of the buffers k and v and of the new tokens.

    Raises:
        ValueError: one of them is wrong.
    """
    expect_shape("k", k, ("B", "h_kv", "W", "d"))
    expect_dtype("k", k, jnp.floating)
    expect_shape("v", v, k.shape)
    expect_dtype("v", v, k.dtype)
    batch, heads, _, dim = k.shape
    expect_shape("new.q", new.q, (batch, "T", "h_q", dim))
    expect_dtype("new.q", new.q, jnp.floating)
    tokens = new.q.shape[:2]
    expect_groups(new.q.shape[2], heads)
    for name, x in (("k", new.k), ("v", new.v)):
        expect_shape(f"new.{name}", x, (*tokens, heads, dim))
        expect_dtype(f"new.{name}", x, new.q.dtype)
    expect_shape("new.cos", new.cos, (*tokens, "rotary_dim / 2"))
    expect_shape("new.sin", new.sin, new.cos.shape)
    for name, table in (("cos", new.cos), ("sin", new.sin)):
        expect_dtype(f"new.{name}", table, jnp.float32)
    if 2 * new.cos.shape[2] > dim:
        raise ValueError(f"new.cos must have at most {dim // 2} columns, half of a key's, got {new.cos.shape[2]}")
    expect_shape("new.slots", new.slots, tokens)
    expect_dtype("new.slots", new.slots, jnp.int32)
    expect_shape("new.valid", new.valid, tokens)
    expect_dtype("new.valid", new.valid, jnp.bool_)
    if new.first is not None:
        expect_shape("new.first", new.first, tokens[:1])
        expect_dtype("new.first", new.first, jnp.int32)
