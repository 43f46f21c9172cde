"""Keys before RoPE, quantized channel by channel (KVQuant, arXiv 2401.18079, sections 3.1 and 3.2).

A channel is one number of a head's keys. Its codes are evenly spaced between its smallest and its largest value in the
prompt. The paper's other parts are left out. These are levels that are not evenly spaced (nuq), outliers of 1 % that
are stored apart, and a first token in full precision. The paper takes the range of a channel from calibration texts.
Here it is that of the prompt.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.policies.shadowkv.key_codecs.base import Sizes
from jshadow.policies.shadowkv.key_codecs.per_head import PerHeadCodec, pack_planes, unpack_planes


class Ranges(struct.PyTreeNode):
    """The ranges of a prompt's channels.

    Attributes:
        least: the smallest value of each channel, float32 [B, h_kv, d].
        step: the distance of two levels, float32 [B, h_kv, d]; 0 for a constant channel.
    """

    least: Array
    step: Array


@dataclasses.dataclass(frozen=True)
class ChannelCodec(PerHeadCodec):
    """Evenly spaced codes of each channel. A row has d codes. right is a `Ranges`.

    Attributes:
        bits: bits of a number, 2 or 4.
    """

    bits: int

    name = "channel"

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of d codes."""
        return dim * self.bits // 8

    def shared(self, k_pre: Array, lengths: Array) -> Ranges:
        """Return the range of each channel over the real tokens. It is 0 to 0 for an empty row."""
        real = (jnp.arange(k_pre.shape[1]) < lengths[:, None])[..., None, None]
        least = jnp.where(real, k_pre, jnp.inf).min(axis=1).astype(jnp.float32)
        most = jnp.where(real, k_pre, -jnp.inf).max(axis=1).astype(jnp.float32)
        some = (lengths > 0)[:, None, None]
        step = (most - least) / (2**self.bits - 1)
        return Ranges(jnp.where(some, least, 0), jnp.where(some, step, 0))

    def shared_shapes(self, batch: int, sizes: Sizes) -> Ranges:
        """Return the shapes of the two arrays."""
        each: Any = jax.ShapeDtypeStruct((batch, sizes.heads, sizes.dim), jnp.float32)
        return Ranges(each, each)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        """Round keys to the nearest level. Later keys out of the prompt's range are clipped to it."""
        least, step = right.least[:, None], right.step[:, None]
        codes = jnp.round((k_pre.astype(jnp.float32) - least) / jnp.where(step > 0, step, 1))
        codes = jnp.where(step > 0, jnp.clip(codes, 0, 2**self.bits - 1), 0)
        return pack_planes(codes.astype(jnp.uint8), self.bits)

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the codes by the steps, and add the smallest values."""
        codes = unpack_planes(rows, self.bits).astype(jnp.float32)
        return codes * right.step[:, :, None] + right.least[:, :, None]

    def products(self, sizes: Sizes) -> int:
        """Return 1: a number is multiplied by its step."""
        return 1

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Return 0, since there is no matrix product."""
        return 0
