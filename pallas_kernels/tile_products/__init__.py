"""The op that multiplies tiles of rows by one matrix of a stack each, plain or packed."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.tile_products import kernel, reference
from pallas_kernels.tile_products.operands import Stack as Stack
from pallas_kernels.tile_products.operands import Tiles as Tiles
from pallas_kernels.tile_products.operands import check


def tile_products(
    x: jax.Array,
    stack: Stack,
    tiles: Tiles,
    *,
    height: int,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Multiply tiles of rows by matrices of a stack. Sums are float32.

    With one matrix and few rows, this is the product of a decode step. With the rows of a prompt sorted by expert, it
    is the grouped product of a mixture of experts (MegaBlocks, arXiv 2211.15841). Each tile reads the numbers of its
    matrix once.

    Args:
        x: rows, floating [N, D].
        stack: E matrices [D, F]. Numbers of 4 bits are rounded to x's dtype when they are unpacked.
        tiles: the rows of each tile, and its matrix.
        height: most rows of a tile.
        dtype: of the result. None: that of x.

    Returns:
        [N, F]. Rows in no tile may have any value.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check(x, stack, tiles, height)
    options = {"height": height, "dtype": jnp.dtype(dtype or x.dtype)}
    multiply, plain = (functools.partial(op.tile_products, **options) for op in (kernel, reference))
    out: jax.Array = run(implementation, multiply, plain, x, stack, tiles)
    return out
