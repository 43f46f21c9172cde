"""Numbers of a few bits: asymmetric quantisation by groups, in 32-bit words (KIVI, arXiv 2402.02750, section 3)."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, UInt


class Packed(struct.PyTreeNode):
    """Groups of g numbers along the last axis.

    Attributes:
        words: [..., n, ceil(g * bits / 32)] uint32, the first number in the lowest bits.
        scale: [..., n], the step of a group.
        zero: [..., n], what code 0 stands for.
    """

    words: Array
    scale: Array
    zero: Array


def scale_dtype(dtype: Any) -> Any:
    """Dtype of the scales of numbers of a dtype: as exact as they are, in no more bytes."""
    return jnp.float32 if jnp.dtype(dtype).itemsize == 4 else jnp.float16


def quantise(x: Float[Array, "*n g"], bits: int) -> Packed:
    """Groups of the last axis in 2**bits steps from their least to their largest number.

    One bit is a case of its own (SpeCache, arXiv 2503.16163, equation 3): a group's two codes stand for the middles of
    its lower and upper half, not for its ends.
    """
    dtype, x = scale_dtype(x.dtype), x.astype(jnp.float32)
    least, most = x.min(axis=-1), x.max(axis=-1)
    steps = 2**bits - 1
    scale = (most - least) / (2 if bits == 1 else steps)
    zero = (3 * least + most) / 4 if bits == 1 else least
    # codes must be those of the numbers that are kept, rounded as they are
    scale, zero = scale.astype(dtype), zero.astype(dtype)
    step, start = scale.astype(jnp.float32)[..., None], zero.astype(jnp.float32)[..., None]
    if bits == 1:
        codes = x >= ((least + most) / 2)[..., None]
    else:
        codes = jnp.clip(jnp.round((x - start) / jnp.where(step > 0, step, 1)), 0, steps)
    return Packed(pack(codes.astype(jnp.uint32), bits), scale, zero)


def dequantise(packed: Packed, group: int, bits: int) -> Float[Array, "*n g"]:
    """The numbers that the codes stand for, float32 [..., n, g]."""
    codes = unpack(packed.words, group, bits).astype(jnp.float32)
    return codes * packed.scale.astype(jnp.float32)[..., None] + packed.zero.astype(jnp.float32)[..., None]


def words_of(group: int, bits: int) -> int:
    """Words that a group takes."""
    return -(-group * bits // 32)


def pack(codes: UInt[Array, "*n g"], bits: int) -> UInt[Array, "*n w"]:
    """Codes below 2**bits, side by side in 32-bit words."""
    each = 32 // bits
    group = codes.shape[-1]
    missing = -group % each
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    lanes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // each, each)
    return (lanes << (jnp.arange(each, dtype=jnp.uint32) * bits)).sum(axis=-1, dtype=jnp.uint32)


def unpack(words: UInt[Array, "*n w"], group: int, bits: int) -> UInt[Array, "*n g"]:
    """`pack` backwards."""
    each = 32 // bits
    lanes = (words[..., None] >> (jnp.arange(each, dtype=jnp.uint32) * bits)) & jnp.uint32(2**bits - 1)
    return lanes.reshape(*words.shape[:-1], words.shape[-1] * each)[..., :group]
