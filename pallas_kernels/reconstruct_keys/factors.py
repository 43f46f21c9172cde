"""What keys are rebuilt from, and which chunk an id means."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape


class Factors(NamedTuple):
    """The operands of a reconstruction; without a tail, the last two are None.

    Attributes:
        left: [B, U, c * r], one chunk contiguous.
        right: [B, h_kv, r, d].
        ids: int32 [B, h_kv, k].
        inverse: angle per position of each rotated pair, float32 [rot / 2].
        tail: left rows of later chunks [B, W, c * r], with ids from U on.
        tail_unit: chunk of the sequence at the front of the tail, int32 [B].
    """

    left: jax.Array
    right: jax.Array
    ids: jax.Array
    inverse: jax.Array
    tail: jax.Array | None = None
    tail_unit: jax.Array | None = None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.left.shape[2] // self.right.shape[2]

    @property
    def dim(self) -> int:
        """Width of a head."""
        return self.right.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the keys."""
        return self.left.dtype

    @property
    def factors(self) -> tuple[jax.Array, ...]:
        """The arrays that are multiplied."""
        return (self.left, self.right) if self.tail is None else (self.left, self.right, self.tail)

    @property
    def packed(self) -> tuple[jax.Array, ...]:
        """Arrays of bytes: none."""
        return ()

    @property
    def units(self) -> int:
        """How many chunks an id may mean, the tail's included."""
        return self.left.shape[1] + (self.tail.shape[1] if self.tail is not None else 0)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the keys."""
        batch, heads, count = self.ids.shape
        return batch, heads, count * self.chunk, self.right.shape[3]


def check(factors: Factors) -> None:
    """Check shapes and dtypes.

    Raises:
        ValueError: one is wrong.
    """
    left, right = factors.left, factors.right
    expect_shape("left", left, ("B", "U", "c * r"))
    expect_shape("right", right, (left.shape[0], "h_kv", "r", "d"))
    width, rank = left.shape[2], right.shape[2]
    if rank < 1 or width < 1 or width % rank:
        raise ValueError(f"left's rows must be a multiple of the rank {rank}, got {width} columns")
    for name, x in (("left", left), ("right", right)):
        expect_dtype(name, x, jnp.floating)
    check_places(factors, right.shape[1], (left.shape[0], "W", width))


def check_places(factors: Any, heads: int, tail_shape: tuple[int | str, ...]) -> None:
    """Check ids, angles and the tail of `Factors` or `Codes`.

    Raises:
        ValueError: one is wrong.
    """
    left, ids, inverse, tail, tail_unit = (
        getattr(factors, name) for name in ("left", "ids", "inverse", "tail", "tail_unit")
    )
    expect_shape("ids", ids, (left.shape[0], heads, "k"))
    expect_shape("inverse", inverse, ("rot / 2",))
    if not 1 <= inverse.shape[0] <= factors.dim // 2:
        raise ValueError(
            f"inverse must have 1 to {factors.dim // 2} angles for heads {factors.dim} wide, got {inverse.shape[0]}"
        )
    expect_dtype("inverse", inverse, jnp.float32)
    expect_dtype("ids", ids, jnp.int32)
    if (tail is None) != (tail_unit is None):
        raise ValueError("tail and tail_unit belong together, got one of them")
    if tail is not None:
        expect_shape("tail", tail, tail_shape)
        expect_dtype("tail", tail, left.dtype)
        expect_shape("tail_unit", tail_unit, (left.shape[0],))
        expect_dtype("tail_unit", tail_unit, jnp.int32)
    if factors.units < 1:
        raise ValueError(f"left must have at least one chunk, got shape {list(left.shape)}")
