"""Published codes of single heads, which lose to ShadowKV's own, as a plugin: codes of keys from outside the library.

    jshadow eval MODEL --policies shadowkv:keys=published_codes.RotationCode:keys.bits=3     # in this folder

A code has two parts. A `KeyCodec` has pure functions of arrays. A record of settings, a subclass of `Keys`, has a name
and makes the codec. Nothing in the library names either. Each code takes only the part of the published method that
concerns stored keys, and codes keys before RoPE, as all key codes do.
"""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import to_chunks, token_slice
from jshadow.policies import check_choice
from jshadow.policies.shadowkv import Keys
from jshadow.policies.shadowkv.key_codecs import KeyCode, KeyCodec, Sizes
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, EXACT, Spread, new_tokens, put_block
from pallas_kernels.bits import pack_codes, unpack_bytes

# The base of both


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


# Random rotation (TurboQuant)

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
    """Keys in a random orthogonal basis, with the best levels for Gaussian numbers (TurboQuant, arXiv 2504.19874).

    This is the paper's quantizer of least squared error: the key of a head is divided by its length and rotated. Then
    its numbers are nearly Gaussian, whatever the prompt is, and each is rounded to the nearest level of Lloyd and Max.
    The paper's second stage is left out. It spends one of the bits on the signs of a random projection of the error
    (QJL), so that products with queries are unbiased. The paper codes keys after RoPE.

    A row has d codes, then the length of the key. right is None.

    Attributes:
        bits: bits of a coordinate, 2 or 3. They must fill whole bytes in each part of `pack_planes`.
    """

    bits: int

    name = "rotation"

    def row_bytes(self, dim: int) -> int:
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
        return sizes.dim

    def encode_flops(self, sizes: Sizes, tokens: int) -> int:
        return 2 * tokens * sizes.columns * sizes.dim


# Channels (KVQuant)


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
    """Keys quantized channel by channel (KVQuant, arXiv 2401.18079, sections 3.1 and 3.2).

    A channel is one number of a head's keys. Its codes are evenly spaced between its smallest and its largest value in
    the prompt. The paper's other parts are left out: levels that are not evenly spaced (nuq), outliers of 1 % that are
    stored apart, a first token in full precision, and ranges from calibration texts. A row has d codes. right is a
    `Ranges`.

    Attributes:
        bits: bits of a number, 2 or 4.
    """

    bits: int

    name = "channel"

    def row_bytes(self, dim: int) -> int:
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
        return 1


# Settings


@dataclasses.dataclass(frozen=True)
class HeadCode(Keys):
    """Keys stored in a code of single heads.

    Attributes:
        bits: bits of a number of a key: 2 or 3 with `RotationCode`, 2 or 4 with `ChannelCode`.

    Class attributes:
        multiples: the choices of `bits`, each with the number of which head_dim must be a multiple.
    """

    bits: int = 2

    multiples: ClassVar[dict[int, int]] = {}

    def resolve(self, policy: str, rank: Any, config: ModelConfig) -> tuple[Self, None]:
        """Check the bits, that no rank is given, and that the codes of a key fill whole bytes."""
        self.check_no_rank(policy, rank)
        check_choice(f"{policy}.keys", "bits", self.bits, tuple(self.multiples))
        multiple = self.multiples[self.bits]
        if config.head_dim % multiple:
            raise ConfigError(
                f"{policy}.keys={self.name!r} with keys.bits={self.bits} must have a head_dim that is a multiple of "
                f"{multiple}, got {config.head_dim}"
            )
        return dataclasses.replace(self, bits=int(self.bits)), None


@dataclasses.dataclass(frozen=True)
class RotationCode(HeadCode):
    """Keys stored in a fixed random basis of each head, with 2 or 3 `bits`; see `RotationCodec`."""

    name = "rotation"
    multiples = {2: 4, 3: 8}  # noqa: RUF012, the base has its type

    def codec(self, rank: int | None) -> KeyCodec:
        return RotationCodec(self.bits)


@dataclasses.dataclass(frozen=True)
class ChannelCode(HeadCode):
    """Keys quantized channel by channel, with 2 or 4 `bits`; see `ChannelCodec`."""

    name = "channel"
    multiples = {2: 4, 4: 2}  # noqa: RUF012, the base has its type

    def codec(self, rank: int | None) -> KeyCodec:
        return ChannelCodec(self.bits)
