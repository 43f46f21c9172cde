"""Exact attention of a whole prompt in one call, as cuDNN computes it on an NVIDIA GPU."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Implementation = Literal["cudnn", "xla"]


def whole_attention(
    q: Float[Array, "B S h_q d"],
    k: Float[Array, "B S h_kv d"],
    v: Float[Array, "B S h_kv d"],
    lengths: Int[Array, " B"],
    scale: float,
    window: int | None,
    implementation: Implementation,
) -> Float[Array, "B S h_q d"]:
    """Compute causal grouped-query attention of a whole prompt in one call of JAX.

    cuDNN skips what lies past the end of a row. The outputs of padded queries have no meaning.

    Args:
        q: queries after RoPE.
        k: keys after RoPE.
        v: values.
        lengths: number of real tokens of each row, int32. Rows are padded on the right.
        scale: factor by which the scores are multiplied.
        window: number of tokens that a query sees, including itself. None means all earlier tokens.
        implementation: "cudnn" is one kernel, which holds no scores in memory. "xla" holds an S x S matrix of scores
            for each head, and runs on every device.

    Returns:
        The output, in q's dtype.
    """
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        scale=scale,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=reach,
        implementation=implementation,
    )


def cudnn_attends(head_dim: int, dtype: Any, capability: tuple[int, int]) -> bool:
    """Return whether cuDNN computes attention of this head width and dtype on a GPU of this compute capability.

    These are the limits of `jax.nn.dot_product_attention`.
    """
    widest = 256 if capability >= (9, 0) else 128
    narrow = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return narrow and capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= widest


def capability_here() -> tuple[int, int] | None:
    """Return the compute capability of this process's NVIDIA GPU, or None if JAX uses another device."""
    device = jax.local_devices()[0]
    if jax.default_backend() != "gpu" or "cuda" not in device.client.platform_version:
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)
