"""Keys of 4 or 6 bits with a scale for each token and head, after the mean key of the prompt is subtracted.

The code needs no basis, so it represents keys that differ from those of the prompt equally well. ShadowKV+ stores the
keys of generated tokens in it. Rows of low precision with a scale of their own are common (KIVI, arXiv 2402.02750, has
them for values). Keys have a few large numbers that are about the same in every token. They would decide the scale, so
their mean is subtracted. On SmolLM2-135M this leaves a tenth of the squared error.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.ops.layout import fit_tokens
from jshadow.ops.packing import rounded_rows, scale_dtype
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, KeyCode, KeyCodec, Sizes, Spread
from jshadow.policies.shadowkv.key_codecs.prompt_keys import PromptKeys
from pallas_kernels.bits import pack_codes, signed, unpack_bytes

TOKEN_BITS = {4: (4,), 6: (4, 2)}  # bits of a number -> the parts into which its bits are split, the lowest first


@dataclasses.dataclass(frozen=True)
class TokenCodec(KeyCodec):
    """Rounded keys. right is the prompt's mean key [B, h_kv, d] in the model's dtype.

    left is uint8 [B, h_kv, n, c * w]. The row of a token has d * bits / 8 bytes of codes and the bytes of its scale: 2,
    or 4 for a model in float32. d must be even, and a multiple of 4 for 6 bits.

    Attributes:
        bits: bits of a number, 4 or 6.
    """

    bits: int

    name = "tokens"
    joint = False

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return the shapes of the rows and of the mean key."""
        left: Any = jax.ShapeDtypeStruct((batch, sizes.heads, units, chunk * self.row_bytes(sizes)), jnp.uint8)
        return KeyCode(left, jax.ShapeDtypeStruct((batch, sizes.heads, sizes.dim), jnp.dtype(sizes.dtype)))

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        """Compute the mean key, and round the keys of all chunks. Weights change nothing."""
        batch, length, heads, _ = k_pre.shape
        mean = PromptKeys(k_pre, lengths, min(BLOCK, length), spread=spread).mean_key()
        keys = fit_tokens(k_pre, units * chunk)
        real = jnp.arange(units * chunk) < lengths[:, None]
        rows = jnp.where(real[..., None, None], self.project(keys, mean), 0).swapaxes(1, 2)
        return KeyCode(rows.reshape(batch, heads, units, chunk * rows.shape[3]), mean)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        """Round the keys, minus the prompt's mean key."""
        off = k_pre.astype(jnp.float32) - right.astype(jnp.float32)[:, None]
        numbers, scale = rounded_rows(off, self.bits, k_pre.dtype)
        codes = lax.bitcast_convert_type(numbers, jnp.uint8)
        parts, first = [], 0
        for bits in TOKEN_BITS[self.bits]:
            parts.append(pack_codes(codes >> jnp.uint8(first) & jnp.uint8(2**bits - 1), bits))
            first += bits
        packed = lax.bitcast_convert_type(scale, jnp.uint8)
        return jnp.concatenate([*parts, packed.reshape(*codes.shape[:-1], packed.shape[-1])], axis=-1)

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the codes by their scales, and add the mean key."""
        dim, first, byte, codes = right.shape[2], 0, 0, jnp.uint8(0)
        for bits in TOKEN_BITS[self.bits]:
            end = byte + dim * bits // 8
            codes |= unpack_bytes(rows[..., byte:end], bits) << jnp.uint8(first)
            first, byte = first + bits, end
        kind = scale_dtype(right.dtype)
        packed = rows[..., byte:].reshape(*rows.shape[:-1], 1, jnp.dtype(kind).itemsize)
        scale = lax.bitcast_convert_type(packed, kind).astype(jnp.float32)
        return signed(codes, self.bits).astype(jnp.float32) * scale + right.astype(jnp.float32)[:, :, None]

    def products(self, sizes: Sizes) -> int:
        """Return 0, since keys are not products of matrices."""
        return 0

    def expand_bytes(self, sizes: Sizes) -> int:
        """Count the row, and the codes in 8 bits."""
        return self.row_bytes(sizes) + sizes.dim

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Return 0, since there is no matrix product."""
        return 0

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count the keys minus their mean in float32, their codes in 8 bits, and two copies of the rows."""
        return tokens * sizes.heads * (sizes.dim * (2 * 4 + 1) + 2 * self.row_bytes(sizes))

    def row_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the row of one token and head."""
        return sizes.dim * self.bits // 8 + jnp.dtype(scale_dtype(jnp.dtype(sizes.dtype))).itemsize
