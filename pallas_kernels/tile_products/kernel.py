"""The Triton kernel that multiplies a tile of rows by one matrix of a stack.

The grid is (blocks of columns, tiles, parts of the sum). A program walks over its part of the matrix' rows in blocks of
equal size, so that Triton loads the next blocks while it multiplies one. If a step has few tiles, as in decoding, the
sum is cut into parts, so that enough programs read at once. XLA adds the parts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.tile_products.operands import FP8, Stack, Tiles
from pallas_kernels.tiles import LEAST, blocks, can_do, dot, iota, power_of_two
from pallas_kernels.unpack import affine_numbers, fp8_numbers

MOST_HEIGHT = 128  # rows of a tile
PROGRAMS = 528  # four for each multiprocessor of an H100: the sum is cut if there are fewer
WIDE = 8192  # columns of all tiles from which few rows have wide blocks
LEAST_STEPS = 2  # of a part of the sum


class Plan(NamedTuple):
    """Static sizes of one program.

    Attributes:
        height: rows of a tile, a power of two.
        width: columns of a block.
        depth: rows of the matrix that are multiplied at once, or half of them if their codes are packed.
        half: bytes of a group of packed codes in a column, else 0.
        steps: blocks of rows of a program.
        fp8: whether the kernel's bytes are numbers of fp8.
        interpret: whether JAX's interpreter runs the program.
    """

    height: int
    width: int
    depth: int
    half: int
    steps: int
    fp8: bool
    interpret: bool


class Place(NamedTuple):
    """What a program multiplies.

    Attributes:
        matrix: index in the stack.
        row: the rows, int32 [height, 1], and which of them exist.
        column: the columns, int32 [width], and which of them exist.
    """

    matrix: jax.Array
    row: tuple[jax.Array, jax.Array]
    column: tuple[jax.Array, jax.Array]


def tile_products_kernel(x, stack, tiles, out, *, plan):  # type: ignore[no-untyped-def]
    """One program: multiply the rows of a tile by a block of columns, over one part of the sum.

    The refs are those of `pallas_kernels.tile_products`. `out` is [parts, N, F].
    """
    j, tile, part = (pl.program_id(axis) for axis in range(3))
    first, end = (pltriton.load(ref.at[tile]) for ref in (tiles.first, tiles.end))

    @pl.when(first < end)
    def _() -> None:
        row, column = iota(first, plan.height), iota(j * plan.width, plan.width)
        place = Place(
            pltriton.load(tiles.matrix.at[tile]), (row[:, None], (row < end)[:, None]), (column, column < out.shape[2])
        )
        add = packed_step if plan.half else plain_step

        def step(index: jax.Array, total: jax.Array) -> jax.Array:
            return total + add(x, stack, place, part * plan.steps + index, plan)

        total = lax.fori_loop(0, plan.steps, step, jnp.zeros((plan.height, plan.width), jnp.float32))
        if stack.scale is not None and not plan.half:
            factors = pltriton.load(stack.scale.at[place.matrix, column], mask=place.column[1], other=0.0)
            total *= factors.astype(jnp.float32)[None]
        mask = place.row[1] & place.column[1][None]
        pltriton.store(out.at[part, place.row[0], place.column[0][None]], total.astype(out.dtype), mask=mask)


def plain_step(x: Any, stack: Any, place: Place, index: jax.Array, plan: Plan) -> jax.Array:
    """Return the product with block number `index` of the matrix' rows, float32 [height, width]."""
    at, (row, real), (column, inside) = iota(index * plan.depth, plan.depth), place.row, place.column
    there = at < x.shape[1]
    left = pltriton.load(x.at[row, at[None]], mask=real & there[None], other=0.0)
    mask = there[:, None] & inside[None]
    right = pltriton.load(stack.kernel.at[place.matrix, at[:, None], column[None]], mask=mask, other=0)
    right = fp8_numbers(right, x.dtype, plan.interpret) if plan.fp8 else right.astype(x.dtype)
    return dot(left, right)


def packed_step(x: Any, stack: Any, place: Place, index: jax.Array, plan: Plan) -> jax.Array:
    """Return the product with block number `index` of the packed rows, float32 [height, width]."""
    (row, real), (column, inside), half = place.row, place.column, plan.half
    span = power_of_two(half)
    count = plan.depth // span
    group, byte = iota(index * count, count), iota(0, span)
    there = (group < stack.scale.shape[1])[:, None] & (byte < half)[None]
    at = [place.matrix, (group[:, None] * half + byte[None])[..., None], column[None, None]]
    packed = pltriton.load(stack.kernel.at[tuple(at)], mask=there[..., None] & inside, other=0)
    at[1], mask = group[:, None, None], (group < stack.scale.shape[1])[:, None, None] & inside
    scale, zero = (pltriton.load(ref.at[tuple(at)], mask=mask, other=0.0) for ref in (stack.scale, stack.zero))
    # The same rows of x, without the axis of groups
    flat = iota(0, plan.depth)
    group, byte = index * count + lax.div(flat, jnp.int32(span)), lax.rem(flat, jnp.int32(span))
    there = ((group < stack.scale.shape[1]) & (byte < half))[None]
    total = jnp.zeros((plan.height, plan.width), jnp.float32)
    for part in range(2):
        left = pltriton.load(x.at[row, ((2 * group + part) * half + byte)[None]], mask=real & there, other=0.0)
        right = affine_numbers(packed, part, scale, zero, x.dtype, plan.interpret)
        total += dot(left, right.reshape(plan.depth, plan.width))
    return total


@functools.partial(jax.jit, static_argnames=("height", "dtype", "interpret"))
def tile_products(
    x: jax.Array, stack: Stack, tiles: Tiles, height: int, dtype: jnp.dtype, interpret: bool
) -> jax.Array:
    """See `pallas_kernels.tile_products`.

    Raises:
        NotImplementedError: a tile has more than 128 rows, a group more than 256, an array is empty, or a dtype is not
            float32, bfloat16 or float16.
    """
    if height > MOST_HEIGHT:
        raise NotImplementedError(f"tile_products: the kernel takes tiles of up to {MOST_HEIGHT} rows, got {height}")
    floats = [x, *(part for part in stack[1:] if part is not None)]
    codes = stack.kernel.dtype in (jnp.int8, jnp.uint8, FP8)
    can_do("tile_products", 1, *floats, *(() if codes else (stack.kernel,)), packed=(stack.kernel, *tiles))
    half = 0 if stack.zero is None else stack.kernel.shape[1] // stack.zero.shape[1]
    if half > 128:
        raise NotImplementedError(f"tile_products: the kernel takes groups of up to 256 rows, got {2 * half}")
    fp8 = stack.kernel.dtype == FP8
    if fp8:
        stack = stack._replace(kernel=lax.bitcast_convert_type(stack.kernel, jnp.uint8))
    plan, parts = plan_of(x, stack, len(tiles.matrix), height, (half, fp8, interpret))
    features, anywhere = stack.kernel.shape[2], pl.BlockSpec(memory_space=pl.ANY)
    operands = (x, stack, tiles)
    matrices = bytes_of(stack) * min(len(tiles.matrix), len(stack.kernel)) // len(stack.kernel)
    moved = matrices + bytes_of((x, tiles)) + 4 * parts * len(x) * features
    out = pl.pallas_call(
        functools.partial(tile_products_kernel, plan=plan),
        grid=(blocks(features, plan.width), len(tiles.matrix), parts),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct((parts, len(x), features), dtype if parts == 1 else jnp.float32),
        cost_estimate=estimate(flops=2 * x.size * features, moved=moved),
        compiler_params=pltriton.CompilerParams(num_warps=8 if plan.height > 64 else 4, num_stages=3),
        interpret=interpret,
        name="tile_products",
    )(*operands)
    return out[0] if parts == 1 else out.sum(axis=0).astype(dtype)


def plan_of(x: jax.Array, stack: Stack, tiles: int, height: int, rest: tuple[int, bool, bool]) -> tuple[Plan, int]:
    """Return the sizes of a program, and the number of parts of the sum. `rest` is `half`, `fp8` and `interpret`."""
    half, fp8, interpret = rest
    rows, features = stack.kernel.shape[1:]
    wide = x.dtype == jnp.float32
    tall = max(LEAST, 1 << (height - 1).bit_length())
    # Few rows leave registers for a wide block of codes, which takes fewer instructions for each.
    large = tall > 64 or (tall == LEAST and stack.kernel.dtype.itemsize == 1 and features * tiles >= WIDE)
    width = min(power_of_two(features), 32 if wide else 128 if large else 64)
    depth = min(power_of_two(rows), LEAST if wide else 64)
    count = blocks(rows, depth)
    if half:
        span = power_of_two(half)
        depth = max(depth, span)
        count = blocks(rows // half, depth // span)
    programs = blocks(features, width) * tiles
    parts = max(1, min(PROGRAMS // programs, count // LEAST_STEPS))
    return Plan(tall, width, depth, half, blocks(count, parts), fp8, interpret), parts
