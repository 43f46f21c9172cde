"""Keys as codes of a few bits: of coefficients in a basis, or of the keys' own channels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.codes import Profile, packed_width
from pallas_kernels.reconstruct_keys.factors import check_places


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["left", "right", "ids", "inverse", "tail", "tail_unit", "mean", "step"], meta_fields=["profile"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Codes:
    """The operands of a reconstruction from packed codes; w bytes a token, see `pallas_kernels.codes`.

    A key is the sum of its coefficients, each the middle of its code times its column's step, times the rows of right,
    and the mean. Without right the coefficients are the key's channels, and each KV head has rows of its own.

    Attributes:
        left: uint8 [B, U, c * w], or [B, h_kv, U, c * w] without right; one chunk contiguous.
        right: [B, h_kv, r, d], or None.
        ids: int32 [B, h_kv, k].
        inverse: angle per position of each rotated pair, float32 [rot / 2].
        tail: left rows of later chunks [B, W, c * w] or [B, h_kv, W, c * w], with ids from U on.
        tail_unit: chunk of the sequence at the front of the tail, int32 [B].
        mean: [B, h_kv, d]; its dtype is that of the keys.
        step: float32 [B, r], or [B, h_kv, d] without right.
        profile: coefficients of a token in 8, 4 and 2 bits.
    """

    left: jax.Array
    right: jax.Array | None
    ids: jax.Array
    inverse: jax.Array
    tail: jax.Array | None
    tail_unit: jax.Array | None
    mean: jax.Array
    step: jax.Array
    profile: Profile

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return packed_width(self.profile)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.left.shape[-1] // self.width

    @property
    def dim(self) -> int:
        """Width of a head."""
        return self.mean.shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the keys."""
        return self.mean.dtype

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        """The floating arrays that are multiplied."""
        return (self.mean if self.right is None else self.right,)

    @property
    def packed(self) -> tuple[jax.Array, ...]:
        """The arrays of bytes."""
        return (self.left,) if self.tail is None else (self.left, self.tail)

    @property
    def units(self) -> int:
        """How many chunks an id may mean, the tail's included."""
        return self.left.shape[-2] + (self.tail.shape[-2] if self.tail is not None else 0)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys."""
        batch, heads, count = self.ids.shape
        return batch, heads, count * self.chunk, self.dim


def check_codes(codes: Codes) -> None:
    """Check shapes, dtypes and the profile.

    Raises:
        ValueError: one is wrong.
    """
    left, right, mean, step, profile = codes.left, codes.right, codes.mean, codes.step, codes.profile
    whole = len(profile) == 3 and min(profile) >= 0 and profile[1] % 2 == profile[2] % 4 == 0
    if not whole or sum(profile) < 1:
        raise ValueError(f"profile must be numbers in 8, 4 and 2 bits that fill whole bytes, got {profile}")
    lead: tuple[int | str, ...] = ("B",) if right is not None else ("B", "h_kv")
    expect_shape("left", left, (*lead, "U", "c * w"))
    expect_shape("mean", mean, (left.shape[0], "h_kv" if right is not None else left.shape[1], "d"))
    batch, heads, dim = mean.shape
    if right is not None:
        expect_shape("right", right, (batch, heads, sum(profile), dim))
        expect_dtype("right", right, mean.dtype)
        expect_shape("step", step, (batch, sum(profile)))
    else:
        if profile != (0, dim, 0):
            raise ValueError(f"profile must be (0, {dim}, 0) without right, got {profile}")
        expect_shape("step", step, (batch, heads, dim))
    if left.shape[-1] < 1 or left.shape[-1] % codes.width:
        raise ValueError(f"left's rows must be a multiple of {codes.width} bytes, got {left.shape[-1]}")
    for name, x, kind in (("left", left, jnp.uint8), ("mean", mean, jnp.floating), ("step", step, jnp.float32)):
        expect_dtype(name, x, kind)
    check_places(codes, heads, (*left.shape[:-2], "W", left.shape[-1]))
