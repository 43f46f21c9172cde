"""Keys before RoPE in four bits a number, each channel with a mean and a step of its own: no basis to turn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.ops.layout import to_chunks
from jshadow.policies.shadowkv.key_codecs.base import KeyCode, KeyCodec, Sizes
from jshadow.policies.shadowkv.key_codecs.factorise import BLOCK
from jshadow.policies.shadowkv.key_codecs.midrise import Profile, dequantise, quantise, steps
from jshadow.policies.shadowkv.key_codecs.transform import centred_block, mean_key, spread


class Channels(struct.PyTreeNode):
    """What all rows of a prompt share.

    Attributes:
        mean: of the prompt's keys [B, h_kv, d], in the model's dtype.
        step: of each channel's quantiser, float32 [B, h_kv, d].
    """

    mean: Array
    step: Array


@dataclasses.dataclass(frozen=True)
class Int4(KeyCodec):
    """left uint8 [B, h_kv, n, c * d / 2]."""

    name = "int4"
    compiled = True

    def profile(self, dim: int) -> Profile:
        """Four bits for each channel of a head."""
        return (0, dim, 0)

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Rows of bytes, and Channels."""
        left: Any = jax.ShapeDtypeStruct((batch, sizes.heads, units, chunk * sizes.dim // 2), jnp.uint8)
        channels = (batch, sizes.heads, sizes.dim)
        mean: Any = jax.ShapeDtypeStruct(channels, jnp.dtype(sizes.dtype))
        step: Any = jax.ShapeDtypeStruct(channels, jnp.float32)
        return KeyCode(left, Channels(mean, step))

    def encode(
        self, k_pre: Array, lengths: Array, units: int, chunk: int, weights: Array | None = None
    ) -> KeyCode:  # fmt: skip
        """One pass for the means, one for deviations and magnitudes, one for the codes."""
        batch, length, heads, dim = k_pre.shape
        block = min(BLOCK, length)
        mean = mean_key(k_pre, lengths, block)

        def rows_of(index: Array) -> Array:
            return centred_block(k_pre, lengths, mean, index, block)[0]

        found = spread(rows_of, lengths, -(-length // block), heads * dim)
        sigma, largest = (x.reshape(batch, heads, dim) for x in found)
        right = Channels(mean, steps(sigma, largest, self.profile(dim)))
        rows = self.project(k_pre, right)
        real = jnp.arange(length) < lengths[:, None]
        left = to_chunks(jnp.where(real[..., None, None], rows, 0), units, chunk)
        return KeyCode(left.reshape(*left.shape[:3], -1), right)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None) -> Array:
        """With the prompt's means and steps."""
        rows = k_pre.astype(jnp.float32) - right.mean.astype(jnp.float32)[:, None]
        return quantise(rows, right.step[:, None], self.profile(k_pre.shape[3]))

    def expand(self, rows: Array, right: Any) -> Array:
        """Codes times steps, and the means."""
        keys = dequantise(rows, right.step[:, :, None], self.profile(right.step.shape[2]))
        return keys + right.mean.astype(jnp.float32)[:, :, None]

    def operands(self, right: Any) -> dict[str, Any]:
        """No basis; means and steps."""
        return {"right": None, "mean": right.mean, "step": right.step, "profile": self.profile(right.mean.shape[2])}

    def products(self, sizes: Sizes) -> int:
        """One, with the step."""
        return 1

    def expand_bytes(self, sizes: Sizes) -> int:
        """The row, and codes of a byte each."""
        return sizes.dim // 2 + sizes.dim

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Float32 copies of a block and of the prompt, and its codes in its own order."""
        return sizes.columns * (3 * 4 * block + 4 * tokens + tokens)
