"""A short causal depthwise convolution over tokens, and a ring buffer of its newest raw inputs.

Recurrent layers convolve each channel over the last few tokens (Mamba, arXiv 2312.00752, section 3.4). The inputs of
a row's newest tokens lie in a ring buffer [B, R, C], the input of position p in slot p % R. With R slots and a kernel
of K taps, a row can be set back by R - K + 1 tokens: only its length changes, and later writes replace the old inputs.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jshadow.errors import ConfigError
from jshadow.ops.layout import write_rows


def ring_inputs(
    ring: Float[Array, "B R C"], lengths: Int[Array, " B"], kernel_width: int
) -> Float[Array, "B context C"]:
    """Return the inputs that a kernel sees before position lengths[b] of each row b, oldest first.

    Args:
        ring: the ring buffer of raw inputs.
        lengths: number of tokens of each row, int32 [B].
        kernel_width: number of taps K.

    Returns:
        The inputs of positions lengths - K + 1 .. lengths - 1, [B, K - 1, C]. Negative positions have zeros.

    Raises:
        ConfigError: the ring has fewer than K - 1 slots.
    """
    slots, count = ring.shape[1], kernel_width - 1
    if slots < count:
        raise ConfigError(f"ring must have at least kernel_width - 1 = {count} slots, got {slots}")
    positions = (lengths[:, None] - count + jnp.arange(count))[:, :, None]
    inputs = jnp.take_along_axis(ring, positions % slots, axis=1, mode="clip")
    return jnp.where(positions >= 0, inputs, 0)


def convolve(
    x: Float[Array, "B T C"],
    before: Float[Array, "B context C"],
    kernel: Float[Array, "K C"],
    bias: Float[Array, " C"] | None = None,
) -> Float[Array, "B T C"]:
    """Convolve each channel over the tokens: output t is the sum of kernel[j] * input[t - K + 1 + j], and the bias.

    Args:
        x: the inputs of T tokens.
        before: the inputs of the K - 1 tokens before them, from `ring_inputs`.
        kernel: the taps, oldest input first. It is the transpose of a checkpoint's weight [C, 1, K].
        bias: added to the sum, or None.

    Returns:
        [B, T, C] in x's dtype. The sums are float32.

    Raises:
        ConfigError: `before` has another number of tokens than K - 1.
    """
    taps, tokens = len(kernel), x.shape[1]
    if before.shape[1] != taps - 1:
        raise ConfigError(f"before must have K - 1 = {taps - 1} tokens for kernel [{taps}, C], got {before.shape[1]}")
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    products = (inputs[:, j : j + tokens].astype(jnp.float32) * kernel[j].astype(jnp.float32) for j in range(taps))
    total = sum(products, jnp.float32(0) if bias is None else bias.astype(jnp.float32))
    return total.astype(x.dtype)


def ring_write(
    ring: Float[Array, "B R C"], x: Float[Array, "B T C"], lengths: Int[Array, " B"], valid: Bool[Array, "B T"]
) -> Float[Array, "B R C"]:
    """Write the inputs of new tokens to their slots. If a row has more than R of them, only the last R are written.

    Args:
        ring: the ring buffer of raw inputs.
        x: the raw inputs of T tokens.
        lengths: number of tokens of each row before these tokens, int32 [B].
        valid: which tokens are real. In each row, they come before all padding.

    Returns:
        The ring buffer in its dtype. All other slots have the same bits as before. A donated ring is changed in place.
    """
    slots, tokens = ring.shape[1], x.shape[1]
    token = jnp.arange(tokens)[None]
    if tokens > slots:
        token = valid.sum(axis=1, dtype=jnp.int32)[:, None] - slots + jnp.arange(slots)
        x, valid = jnp.take_along_axis(x, token[:, :, None], axis=1, mode="clip"), token >= 0
    rows = write_rows(ring[:, None], x[:, :, None], (lengths[:, None] + token) % slots, valid)
    return rows[:, 0]
