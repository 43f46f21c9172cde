"""Keys before RoPE without loss: the baseline of all other codes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.ops.layout import to_chunks
from jshadow.policies.shadowkv.key_codecs.base import KeyCode, KeyCodec, Sizes, Spread


@dataclasses.dataclass(frozen=True)
class ExactCodec(KeyCodec):
    """Store the keys themselves. left is [B, h_kv, n, c * d] in the model's dtype, and right is None."""

    name = "exact"
    joint = False

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return a `left` with the shape of the keys in chunks, and no `right`."""
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
        """Cut the keys into chunks."""
        real = jnp.arange(k_pre.shape[1]) < lengths[:, None]
        chunks = to_chunks(jnp.where(real[..., None, None], k_pre, 0), units, chunk)
        return KeyCode(chunks.reshape(*chunks.shape[:3], -1), None)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        """Return the keys unchanged."""
        return k_pre

    def expand(self, rows: Array, right: Any) -> Array:
        """Return the keys in float32."""
        return rows.astype(jnp.float32)

    def products(self, sizes: Sizes) -> int:
        """Return 0, since keys are not multiplied."""
        return 0

    def expand_bytes(self, sizes: Sizes) -> int:
        """Count the left row."""
        return sizes.dim * jnp.dtype(sizes.dtype).itemsize

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Return 0, since keys are not multiplied."""
        return 0

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count a copy of the keys with zeros for padding, and a copy in chunks."""
        return 2 * tokens * sizes.columns * jnp.dtype(sizes.dtype).itemsize
