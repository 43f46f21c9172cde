"""The arrays that keys are rebuilt from, and the checks of their shapes and dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.bits import Profile, packed_width, whole_bytes

ARRAYS = ("left", "right", "ids", "inverse", "tail", "tail_unit", "mean")


@functools.partial(jax.tree_util.register_dataclass, data_fields=list(ARRAYS), meta_fields=["profile"])
@dataclasses.dataclass(frozen=True)
class ChosenKeys:
    """The compressed keys of a prompt in U chunks of c tokens, and the ids of k selected chunks of each KV head.

    There are two forms:

    - Low-rank factors (no profile): a token has r numbers in `left`, and its key is these numbers times `right`.
    - Packed codes (with a profile): a token has w bytes in `left`, where w is the packed width of the profile, in the
      layout of `pallas_kernels.bits`. A code q of b bits stands for q + 1/2 - 2**(b - 1), which every model dtype
      represents exactly. The key is the product of these numbers with `right`, plus `mean`. The rows of `right` hold
      the steps of the codes.

    Attributes:
        left: floating [B, U, c * r], or uint8 [B, U, c * w]. The tokens of a chunk are contiguous.
        right: floating [B, h_kv, r, d].
        ids: int32 [B, h_kv, k], the selected chunks. They are clipped to 0 .. U - 1, or to 0 .. U + W - 1 with a tail.
        inverse: float32 [rot / 2], the RoPE angle per position of each rotated pair. rot is at most d.
        tail: rows of W chunks after the prompt, [B, W, c * r] or [B, W, c * w]. Id U + i means row i of the tail.
        tail_unit: int32 [B], the index in the sequence of the chunk in row 0 of the tail.
        mean: [B, h_kv, d], only with a profile. Its dtype is that of `right` and of the rebuilt keys.
        profile: how many of a token's r numbers have 8, 4 and 2 bits.
    """

    left: jax.Array
    right: jax.Array
    ids: jax.Array
    inverse: jax.Array
    tail: jax.Array | None = None
    tail_unit: jax.Array | None = None
    mean: jax.Array | None = None
    profile: Profile | None = None

    @property
    def width(self) -> int:
        """Number of elements of `left` that belong to one token: numbers, or bytes if packed."""
        return self.right.shape[2] if self.profile is None else packed_width(self.profile)

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk."""
        return self.left.shape[-1] // self.width

    @property
    def dim(self) -> int:
        """Width of a head."""
        return self.right.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the rebuilt keys."""
        return self.left.dtype if self.mean is None else self.mean.dtype

    @property
    def rows(self) -> tuple[jax.Array, ...]:
        """The arrays that hold left rows: `left`, and the tail if there is one."""
        return (self.left,) if self.tail is None else (self.left, self.tail)

    @property
    def multiplied(self) -> tuple[jax.Array, ...]:
        """The floating arrays that the kernel multiplies without unpacking them."""
        if self.profile is not None:
            return (self.right,)
        return (self.left, self.right, *self.rows[1:])

    @property
    def packed(self) -> tuple[jax.Array, ...]:
        """The arrays of packed bytes, which are empty without a profile."""
        return () if self.profile is None else self.rows

    @property
    def units(self) -> int:
        """Number of chunks, including those of the tail."""
        return sum(rows.shape[-2] for rows in self.rows)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the rebuilt keys."""
        batch, heads, count = self.ids.shape
        return batch, heads, count * self.chunk, self.dim


def check(keys: ChosenKeys) -> None:
    """Check the shapes, the dtypes and the profile.

    Raises:
        ValueError: one of them is wrong, or one of several fields that belong together is missing.
    """
    if keys.profile is not None:
        check_codes(keys)
        return
    left, right = keys.left, keys.right
    if keys.mean is not None:
        raise ValueError("mean and profile belong together, got no profile")
    expect_shape("left", left, ("B", "U", "c * r"))
    expect_shape("right", right, (left.shape[0], "h_kv", "r", "d"))
    width, rank = left.shape[2], right.shape[2]
    if rank < 1 or width < 1 or width % rank:
        raise ValueError(f"left's rows must be a multiple of the rank {rank}, got {width} columns")
    for name, x in (("left", left), ("right", right)):
        expect_dtype(name, x, jnp.floating)
    check_places(keys, right.shape[1])


def check_codes(keys: ChosenKeys) -> None:
    """Check keys that are packed codes.

    Raises:
        ValueError: a shape, a dtype or the profile is wrong, or mean is missing.
    """
    left, right, mean, profile = keys.left, keys.right, keys.mean, keys.profile
    if mean is None or profile is None:
        raise ValueError("mean and profile belong together, got a profile without mean")
    if not whole_bytes(profile):
        raise ValueError(f"profile must be numbers in 8, 4 and 2 bits that fill whole bytes, got {profile}")
    expect_shape("left", left, ("B", "U", "c * w"))
    expect_shape("mean", mean, (left.shape[0], "h_kv", "d"))
    batch, heads, dim = mean.shape
    expect_shape("right", right, (batch, heads, sum(profile), dim))
    expect_dtype("right", right, mean.dtype)
    if left.shape[-1] < 1 or left.shape[-1] % keys.width:
        raise ValueError(f"left's rows must be a multiple of {keys.width} bytes, got {left.shape[-1]}")
    for name, x, kind in (("left", left, jnp.uint8), ("mean", mean, jnp.floating)):
        expect_dtype(name, x, kind)
    check_places(keys, heads)


def check_places(keys: ChosenKeys, heads: int) -> None:
    """Check the ids, the angles and the tail. The other arrays must be checked before.

    Raises:
        ValueError: a shape or a dtype is wrong, or tail or tail_unit is missing.
    """
    left, ids, inverse, tail, tail_unit = keys.left, keys.ids, keys.inverse, keys.tail, keys.tail_unit
    expect_shape("ids", ids, (left.shape[0], heads, "k"))
    expect_shape("inverse", inverse, ("rot / 2",))
    if not 1 <= inverse.shape[0] <= keys.dim // 2:
        raise ValueError(
            f"inverse must have 1 to {keys.dim // 2} angles for heads {keys.dim} wide, got {inverse.shape[0]}"
        )
    expect_dtype("inverse", inverse, jnp.float32)
    expect_dtype("ids", ids, jnp.int32)
    if (tail is None) != (tail_unit is None):
        raise ValueError("tail and tail_unit belong together, got one of them")
    if tail is not None and tail_unit is not None:
        expect_shape("tail", tail, (left.shape[0], "W", left.shape[2]))
        expect_dtype("tail", tail, left.dtype)
        expect_shape("tail_unit", tail_unit, (left.shape[0],))
        expect_dtype("tail_unit", tail_unit, jnp.int32)
    if keys.units < 1:
        raise ValueError(f"left must have at least one chunk, got shape {list(left.shape)}")
