"""Keys in a random orthogonal basis, with the levels that are best for Gaussian numbers (TurboQuant, arXiv 2504.19874).

This is the paper's quantizer of least squared error: the key of a head is divided by its length and rotated. Then its
numbers are nearly Gaussian, whatever the prompt is, and each is rounded to the nearest level of Lloyd and Max. The
length is stored beside the codes. The paper's second stage is left out. It spends one of the bits on the signs of a
random projection of the error (QJL), so that products with queries are unbiased. The paper codes keys after RoPE; here
keys are coded before RoPE, as all key codes are.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.policies.shadowkv.key_codecs.base import EXACT, Sizes
from jshadow.policies.shadowkv.key_codecs.per_head import PerHeadCodec, pack_planes, unpack_planes

# The positive levels of Lloyd's method for Gaussian numbers of variance 1, as in table I of Max, "Quantizing for
# minimum distortion", 1960, with two more digits.
LEVELS = {2: (0.452780, 1.510418), 3: (0.245094, 0.756005, 1.343909, 2.151946)}
NORM = 2  # bytes of a key's length, a bfloat16 number: its range is that of float32


def levels(bits: int) -> np.ndarray:
    """Return the levels of a code of `bits` bits, rising, float32 [2**bits]."""
    positive = np.array(LEVELS[bits], np.float32)
    return np.concatenate([-positive[::-1], positive])


@functools.cache
def rotation(dim: int) -> np.ndarray:
    """Return the orthogonal matrix [dim, dim] by which all keys are rotated, float32. It is the same in every process.

    It is distributed uniformly (Mezzadri, "How to generate random matrices from the classical compact groups", 2007).
    """
    # A saved state is read with this matrix. NumPy promises that the numbers of RandomState never change.
    turn, upper = np.linalg.qr(np.random.RandomState(0).standard_normal((dim, dim)))
    return (turn * np.sign(np.diag(upper))).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RotationCodec(PerHeadCodec):
    """Rounded coordinates of rotated keys. A row has d codes, then the length of the key. right is None.

    Attributes:
        bits: bits of a coordinate, 2 or 3. They must fill whole bytes in each part of `pack_planes`.
    """

    bits: int

    name = "rotation"

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of d codes and of the length."""
        return dim * self.bits // 8 + NORM

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        """Rotate keys, and round each number to its nearest level."""
        keys, dim = k_pre.astype(jnp.float32), k_pre.shape[-1]
        norm = jnp.sqrt((keys**2).sum(axis=-1, keepdims=True))
        turned = jnp.einsum("bthd,de->bthe", keys / jnp.where(norm > 0, norm, 1), rotation(dim), precision=EXACT)
        every = levels(self.bits)
        codes = jnp.searchsorted(jnp.asarray((every[1:] + every[:-1]) / 2), turned * dim**0.5, method="compare_all")
        length = lax.bitcast_convert_type(norm.astype(jnp.bfloat16), jnp.uint8)[..., 0, :]
        return jnp.concatenate([pack_planes(codes.astype(jnp.uint8), self.bits), length], axis=-1)

    def expand(self, rows: Array, right: Any) -> Array:
        """Rotate the levels back, and multiply them by the length."""
        codes = unpack_planes(rows[..., :-NORM], self.bits)
        norm = lax.bitcast_convert_type(rows[..., -NORM:], jnp.bfloat16)[..., None].astype(jnp.float32)
        turned, dim = jnp.asarray(levels(self.bits))[codes], codes.shape[-1]
        return jnp.einsum("bhte,de->bhtd", turned, rotation(dim), precision=EXACT) * (norm / dim**0.5)

    def products(self, sizes: Sizes) -> int:
        """Return the width of a head."""
        return sizes.dim

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        """Count the rotation of all keys."""
        return 2 * tokens * sizes.columns * sizes.dim
