"""The base of the codes of single heads. Each token has one row of bytes for each head."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.ops.layout import to_chunks, token_slice
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, KeyCode, KeyCodec, Sizes, Spread
from jshadow.policies.shadowkv.key_codecs.blocks import new_tokens, put_block
from pallas_kernels.bits import pack_codes, unpack_bytes


class PerHeadCodec(KeyCodec):
    """A code whose left rows are those of `project`. left is uint8 [B, h_kv, n, c * w].

    It has no GPU kernel. It ignores `weights`, because its errors are not steered. `spread` is always None, because
    only joint codes are spread over devices.
    """

    joint = False

    @abc.abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Return w, the bytes of a row, for heads of width `dim`."""

    def shared(self, k_pre: Array, lengths: Array) -> Any:
        """Return the shared part `right` of a prompt's code, by default None. The arguments are those of `encode`."""
        return None

    def shared_shapes(self, batch: int, sizes: Sizes) -> Any:
        """Return the shapes of `shared`."""
        return None

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """Return the shape of the rows, and the shapes of the shared part."""
        left: Any = jax.ShapeDtypeStruct((batch, sizes.heads, units, chunk * self.row_bytes(sizes.dim)), jnp.uint8)
        return KeyCode(left, self.shared_shapes(batch, sizes))

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        """Compute the shared part, then code the keys block by block."""
        batch, length, heads, dim = k_pre.shape
        right, block = self.shared(k_pre, lengths), min(BLOCK, length)

        def code(index: Array, left: Array) -> Array:
            start = jnp.minimum(index * block, length - block)
            rows = self.project(token_slice(k_pre, start, block), right)
            new = new_tokens(lengths, index, start, block)[..., None, None]
            return put_block(left, jnp.where(new, rows, jnp.uint8(0)), index, start)

        left = jnp.zeros((batch, length, heads, self.row_bytes(dim)), jnp.uint8)
        chunks = to_chunks(lax.fori_loop(0, -(-length // block), code, left), units, chunk)
        return KeyCode(chunks.reshape(*chunks.shape[:3], -1), right)

    def expand_bytes(self, sizes: Sizes) -> int:
        """Count the left row, a byte for each code, and two float32 copies of the key."""
        return self.row_bytes(sizes.dim) + sizes.dim * (1 + 2 * 4)

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count two copies of the left rows. Count a block's float32 keys twice, and its codes."""
        rows = 2 * tokens * sizes.heads * self.row_bytes(sizes.dim)
        return rows + block * sizes.columns * (2 * 4 + 1)


def pack_planes(codes: Array, bits: int) -> Array:
    """Pack uint8 codes [..., d] of 2, 3 or 4 bits into bytes [..., d * bits / 8].

    Codes of 3 bits are packed in two parts: their lower two bits, then their highest bit.
    """
    if bits != 3:
        return pack_codes(codes, bits)
    return jnp.concatenate([pack_codes(codes & jnp.uint8(3), 2), pack_codes(codes >> jnp.uint8(2), 1)], axis=-1)


def unpack_planes(packed: Array, bits: int) -> Array:
    """Undo `pack_planes`."""
    if bits != 3:
        return unpack_bytes(packed, bits)
    cut = packed.shape[-1] * 2 // 3
    return unpack_bytes(packed[..., :cut], 2) | unpack_bytes(packed[..., cut:], 1) << jnp.uint8(2)
