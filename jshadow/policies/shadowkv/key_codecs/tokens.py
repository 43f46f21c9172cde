"""Keys of 4 bits with a scale for each token and head, after the mean key of the prompt is subtracted.

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
from jshadow.ops.packing import Scaled, dequantize_rows, quantize_rows, scale_dtype
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, KeyCode, KeyCodec, Sizes, Spread
from jshadow.policies.shadowkv.key_codecs.prompt_keys import PromptKeys

BITS = 4


@dataclasses.dataclass(frozen=True)
class TokenCodec(KeyCodec):
    """Rounded keys. right is the prompt's mean key [B, h_kv, d] in the model's dtype.

    left is uint8 [B, h_kv, n, c * w]. The row of a token has d / 2 bytes of codes and the bytes of its scale, so w is
    d / 2 + 2, or d / 2 + 4 for a model in float32. d must be even.
    """

    name = "int4"
    joint = False

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return the shapes of the rows and of the mean key."""
        left: Any = jax.ShapeDtypeStruct((batch, sizes.heads, units, chunk * row_bytes(sizes)), jnp.uint8)
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
        rows = quantize_rows(off, BITS, k_pre.dtype)
        scale = lax.bitcast_convert_type(rows.scale, jnp.uint8)
        return jnp.concatenate([rows.codes, scale.reshape(*rows.codes.shape[:-1], scale.shape[-1])], axis=-1)

    def expand(self, rows: Array, right: Any) -> Array:
        """Multiply the codes by their scales, and add the mean key."""
        width = right.shape[2] * BITS // 8
        kind = scale_dtype(right.dtype)
        scale = rows[..., width:].reshape(*rows.shape[:-1], 1, jnp.dtype(kind).itemsize)
        scaled = Scaled(rows[..., :width], lax.bitcast_convert_type(scale, kind))
        return dequantize_rows(scaled, BITS, jnp.float32) + right.astype(jnp.float32)[:, :, None]

    def products(self, sizes: Sizes) -> int:
        """Return 0, since keys are not products of matrices."""
        return 0

    def expand_bytes(self, sizes: Sizes) -> int:
        """Count the row, and the codes in 8 bits."""
        return row_bytes(sizes) + sizes.dim

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Return 0, since there is no matrix product."""
        return 0

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count the keys minus their mean in float32, their codes in 8 bits, and two copies of the rows."""
        return tokens * sizes.heads * (sizes.dim * (2 * 4 + 1) + 2 * row_bytes(sizes))


def row_bytes(sizes: Sizes) -> int:
    """Return the bytes of the row of one token and head."""
    return sizes.dim * BITS // 8 + jnp.dtype(scale_dtype(jnp.dtype(sizes.dtype))).itemsize
