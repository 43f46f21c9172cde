"""Codes of single heads: exact keys, the baseline of all other codes, and keys of 4 or 6 bits for later tokens.

`TokenCodec` needs no basis, so it represents keys that differ from those of the prompt equally well. ShadowKV+ stores
the keys of generated tokens in it. Rows of low precision with a scale of their own are common (KIVI, arXiv 2402.02750,
has them for values). Here they are relative to the mean and the spread of the prompt's keys.

Keys have a few large numbers that are about the same in every token. They would decide the scale, so their mean is
subtracted. On SmolLM2-135M this leaves a tenth of the squared error. Other numbers vary more from token to token than
the rest. They would decide the scale too. So each number is divided by a unit. The unit is the square root of the
number's standard deviation in the prompt. Division by the standard deviation itself has about the same error, and a
larger one after a short prompt. The units leave two thirds of the squared error.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float

from jshadow.ops.layout import fit_tokens, to_chunks
from jshadow.ops.packing import rounded_rows, scale_dtype
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, KeyCode, KeyCodec, Sizes, Spread
from jshadow.policies.shadowkv.key_codecs.lowrank import PromptKeys
from pallas_kernels.bits import pack_codes, signed, unpack_bytes


@dataclasses.dataclass(frozen=True)
class ExactCodec(KeyCodec):
    """Store the keys themselves. left is [B, h_kv, n, c * d] in the model's dtype, and right is None."""

    name = "exact"
    joint = False

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        shape = (batch, sizes.heads, units, chunk * sizes.dim)
        left: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(sizes.dtype))
        return KeyCode(left, None)

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        real = jnp.arange(k_pre.shape[1]) < lengths[:, None]
        chunks = to_chunks(jnp.where(real[..., None, None], k_pre, 0), units, chunk)
        return KeyCode(chunks.reshape(*chunks.shape[:3], -1), None)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        return k_pre

    def expand(self, rows: Array, right: Any) -> Array:
        return rows.astype(jnp.float32)

    def expand_bytes(self, sizes: Sizes) -> int:
        return sizes.dim * jnp.dtype(sizes.dtype).itemsize

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count a copy of the keys with zeros for padding, and a copy in chunks."""
        return 2 * tokens * sizes.columns * jnp.dtype(sizes.dtype).itemsize


_LEAST_VARIANCE = 0.1  # share of a head's mean variance that is added to each variance: short prompts estimate it badly
_TOKEN_BITS = {4: (4,), 6: (4, 2)}  # bits of a number -> the parts into which its bits are split, the lowest first


class Units(struct.PyTreeNode):
    """The shared part of the code. The numbers that are rounded are (key - mean) / unit.

    Attributes:
        mean: the prompt's mean key [B, h_kv, d] in the model's dtype.
        unit: positive numbers [B, h_kv, d] in the model's dtype.
    """

    mean: Array
    unit: Array


def units_of(variance: Float[Array, "B h_kv d"]) -> Float[Array, "B h_kv d"]:
    """Return the square roots of the standard deviations, or 1 in a head that does not vary."""
    level = variance.mean(axis=2, keepdims=True)
    return jnp.where(level > 0, (variance + _LEAST_VARIANCE * level) ** 0.25, 1)


@dataclasses.dataclass(frozen=True)
class TokenCodec(KeyCodec):
    """Rounded keys. right is a `Units`.

    left is uint8 [B, h_kv, n, c * w]. The row of a token has d * bits / 8 bytes of codes and the bytes of its scale: 2,
    or 4 for a model in float32. d must be even, and a multiple of 4 for 6 bits.

    Attributes:
        bits: bits of a number, 4 or 6.
    """

    bits: int

    name = "tokens"
    joint = False

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        left: Any = jax.ShapeDtypeStruct((batch, sizes.heads, units, chunk * self.row_bytes(sizes)), jnp.uint8)
        each: Any = jax.ShapeDtypeStruct((batch, sizes.heads, sizes.dim), jnp.dtype(sizes.dtype))
        return KeyCode(left, Units(each, each))

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        batch, length, heads, _ = k_pre.shape
        prompt = PromptKeys(k_pre, lengths, min(BLOCK, length), spread=spread)
        mean = prompt.mean_key()
        right = Units(mean, units_of(prompt.variance(mean)).astype(k_pre.dtype))
        keys = fit_tokens(k_pre, units * chunk)
        real = jnp.arange(units * chunk) < lengths[:, None]
        rows = jnp.where(real[..., None, None], self.project(keys, right), 0).swapaxes(1, 2)
        return KeyCode(rows.reshape(batch, heads, units, chunk * rows.shape[3]), right)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        mean, unit = (x.astype(jnp.float32)[:, None] for x in (right.mean, right.unit))
        off = (k_pre.astype(jnp.float32) - mean) / jnp.where(unit > 0, unit, 1)  # 0: a row without a prompt
        numbers, scale = rounded_rows(off, self.bits, k_pre.dtype)
        codes = lax.bitcast_convert_type(numbers, jnp.uint8)
        parts, first = [], 0
        for bits in _TOKEN_BITS[self.bits]:
            parts.append(pack_codes(codes >> jnp.uint8(first) & jnp.uint8(2**bits - 1), bits))
            first += bits
        packed = lax.bitcast_convert_type(scale, jnp.uint8)
        return jnp.concatenate([*parts, packed.reshape(*codes.shape[:-1], packed.shape[-1])], axis=-1)

    def expand(self, rows: Array, right: Any) -> Array:
        dim, first, byte, codes = right.mean.shape[2], 0, 0, jnp.uint8(0)
        for bits in _TOKEN_BITS[self.bits]:
            end = byte + dim * bits // 8
            codes |= unpack_bytes(rows[..., byte:end], bits) << jnp.uint8(first)
            first, byte = first + bits, end
        kind = scale_dtype(right.mean.dtype)
        packed = rows[..., byte:].reshape(*rows.shape[:-1], 1, jnp.dtype(kind).itemsize)
        scale = lax.bitcast_convert_type(packed, kind).astype(jnp.float32)
        mean, unit = (x.astype(jnp.float32)[:, :, None] for x in (right.mean, right.unit))
        return signed(codes, self.bits).astype(jnp.float32) * scale * unit + mean

    def expand_bytes(self, sizes: Sizes) -> int:
        return self.row_bytes(sizes) + sizes.dim

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count the keys minus their mean in float32, their codes in 8 bits, and two copies of the rows."""
        return tokens * sizes.heads * (sizes.dim * (2 * 4 + 1) + 2 * self.row_bytes(sizes))

    def row_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the row of one token and head."""
        return sizes.dim * self.bits // 8 + jnp.dtype(scale_dtype(jnp.dtype(sizes.dtype))).itemsize
