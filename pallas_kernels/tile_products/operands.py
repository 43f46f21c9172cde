"""The arrays that tile_products reads, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape

FP8 = jnp.dtype(jnp.float8_e4m3fn)


class Stack(NamedTuple):
    """A stack of E matrices [D, F], as numbers or as codes.

    Attributes:
        kernel: floating, int8 or float8_e4m3fn [E, D, F]. Or codes of 4 bits, uint8 [E, D/2, F]: the D rows are in
            groups of g, whose g/2 bytes lie together. Byte j has the code of row j of the group in its low half, and
            that of row j + g/2 in its high half.
        scale: the factors of codes of 4 bits, floating [E, D/g, F]. For other kernels, factors of the columns, floating
            [E, F], or None.
        zero: what is added to codes of 4 bits times their factors, floating [E, D/g, F]. None for other kernels.
    """

    kernel: jax.Array
    scale: jax.Array | None = None
    zero: jax.Array | None = None


class Tiles(NamedTuple):
    """Which rows are multiplied by which matrix. No row is in two tiles. A tile whose end is its first has no rows.

    Attributes:
        matrix: the matrix of each tile, int32 [M].
        first: its first row, int32 [M].
        end: the row after its last one, int32 [M].
    """

    matrix: jax.Array
    first: jax.Array
    end: jax.Array


def check(x: jax.Array, stack: Stack, tiles: Tiles, height: int) -> None:
    """Check the shapes and dtypes.

    Raises:
        ValueError: one of them is wrong.
    """
    expect_shape("x", x, ("N", "D"))
    expect_dtype("x", x, jnp.floating)
    packed = stack.zero is not None
    rows = x.shape[1] // 2 if packed else x.shape[1]
    expect_shape("kernel", stack.kernel, ("E", rows, "F"))
    expect_dtype("kernel", stack.kernel, *((jnp.uint8,) if packed else (jnp.floating, jnp.int8)))
    count, _, features = stack.kernel.shape
    if stack.scale is None and packed:
        raise ValueError("scale must be given with zero")
    for name, part in (("scale", stack.scale), ("zero", stack.zero)):
        if part is not None:
            expect_shape(name, part, (count, "D/g", features) if packed else (count, features))
            expect_dtype(name, part, jnp.floating)
    if stack.scale is not None and stack.zero is not None:
        expect_shape("zero", stack.zero, stack.scale.shape)
        groups = stack.scale.shape[1]
        if groups < 1 or x.shape[1] % (2 * groups):
            raise ValueError(f"scale must have groups of an even number of the {x.shape[1]} rows, got {groups} groups")
    for name, part in tiles._asdict().items():
        expect_shape(name, part, tiles.matrix.shape if tiles.matrix.ndim == 1 else ("M",))
        expect_dtype(name, part, jnp.int32)
    if height < 1:
        raise ValueError(f"height must be at least 1, got {height}")
