"""Values of few bits as they lie in host memory: a chunk is one row of bytes, the codes of all its tokens, then a scale
for each.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codes import code_at, signed, unpack_signed
from pallas_kernels.tiles import iota


class Packed(NamedTuple):
    """What rows of bytes stand for.

    Attributes:
        bits: of a number: 8 or 4, two's complement, as `pallas_kernels.codes` packs them.
        dtype: of the values, by name. A scale has its bytes: float32, or float16 beside shorter ones.
    """

    bits: int
    dtype: str

    @property
    def scale_dtype(self) -> Any:
        """Dtype of a scale."""
        return jnp.dtype(jnp.float32 if jnp.dtype(self.dtype).itemsize == 4 else jnp.float16)

    def token_bytes(self, dim: int) -> int:
        """Bytes of a token's codes."""
        return dim * self.bits // 8

    def row_bytes(self, chunk: int, dim: int) -> int:
        """Bytes of a chunk."""
        return chunk * (self.token_bytes(dim) + int(self.scale_dtype.itemsize))


def dequantised(rows: jax.Array, chunk: int, dim: int, packed: Packed) -> jax.Array:
    """Values [..., c * d] of rows of bytes [..., w], by XLA."""
    cut, lead = chunk * packed.token_bytes(dim), rows.shape[:-1]
    scales = lax.bitcast_convert_type(rows[..., cut:].reshape(*lead, chunk, -1), packed.scale_dtype)
    codes = unpack_signed(rows[..., :cut].reshape(*lead, chunk, -1), packed.bits)
    values = codes.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]
    return values.astype(packed.dtype).reshape(*lead, chunk * dim)


# In a kernel


def scale_places(within: jax.Array, chunk: int, dim: int, packed: Packed) -> jax.Array:
    """Where in a row the bytes of tokens' scales lie, int32 [tokens, bytes of a scale]."""
    size = int(packed.scale_dtype.itemsize)
    return chunk * packed.token_bytes(dim) + within[:, None] * size + iota(0, size)[None]


def scales_of(tile: jax.Array, packed: Packed) -> jax.Array:
    """Float32 scales [tokens] of their bytes [tokens, n], the first the lowest."""
    places = lax.convert_element_type(tile, jnp.int32) << (8 * iota(0, tile.shape[1]))[None]
    number = places.sum(axis=1, dtype=jnp.int32)  # of disjoint bits
    if packed.scale_dtype == jnp.float16:
        number = lax.convert_element_type(number, jnp.uint16)
    return lax.bitcast_convert_type(number, packed.scale_dtype).astype(jnp.float32)


def values_at(tile: jax.Array, place: int, scales: jax.Array, packed: Packed) -> jax.Array:
    """Values in one place of bytes [tokens, n]."""
    codes = signed(code_at(lax.convert_element_type(tile, jnp.int32), place, packed.bits), packed.bits)
    return (codes.astype(jnp.float32) * scales[:, None]).astype(packed.dtype)
