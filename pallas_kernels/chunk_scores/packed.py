"""The Triton kernel that scores chunks by packed landmarks, with the tensor cores' products of 8-bit integers.

**Products.** Codes of 8 bits are multiplied as they are. A code of 4 bits becomes an 8-bit integer by one shift and one
mask. A query row becomes fixed point: if its largest number is below 2**e, each number q becomes the whole number
q * 2**(30 - e), rounded. This changes a number by at most 2**-30 of the row's largest number. Each whole number is
split into four digits to base 256, between -128 and 127. The digits of a row are four columns of one matrix. Its
products with the landmarks are exact, and so are their sums. Products of float32 numbers would be less exact.

**Tiles.** A program walks over tiles of 128 chunks. The axes of a tile follow the matrix instructions of a GPU. There,
a group of four lanes shares rows of the left operand. The same lanes get these rows of the result. Each of four warps
has eight such groups. So the axes of a tile are [4 warps, 8 groups, 4 chunks], and neighboring chunks belong to the
same group of lanes. Codes and products then stay in the registers of their lane. In the result, each lane of a group
has all digits of one query row of four.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.chunk_scores.finish import joined
from pallas_kernels.tiles import LOG2_E, MASKED, blocks, iota
from pallas_kernels.unpack import exp2, nearest, shifted_numbers

DIGITS = 4  # of a number in fixed point
LANES = 4  # of a group
BLOCK = 128  # chunks of a tile
ROWS = 16  # most query rows of a program
STEPS = 8  # most tiles that a program walks over
PROGRAMS = 2_048  # a program walks over several tiles only if at least this many programs remain
LEAST_PEAK = MASKED / 10  # the maximum before any chunk; exp2(MASKED - LEAST_PEAK) is 0


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        scale: factor by which the products are multiplied.
        rows: number of query rows, a multiple of 4.
        steps: number of tiles of chunks.
        bits: bits of a landmark's codes, 8 or 4.
        interpret: whether JAX's interpreter runs the program.
    """

    scale: float
    rows: int
    steps: int
    bits: int
    interpret: bool = False

    @property
    def block(self) -> int:
        """Number of chunks of the program."""
        return self.steps * BLOCK


class Place(NamedTuple):
    """Rows of one KV head.

    Attributes:
        b: index in the batch.
        h: index of the KV head.
        number: int32, indices of the rows.
    """

    b: jax.Array
    h: jax.Array
    number: jax.Array


class Queries(NamedTuple):
    """The query rows of a program.

    Attributes:
        number: int32 [4] or [rows / 4, 4], indices of the rows. There is one axis if the program has four rows.
        there: bool, False past the last row. The shape is that of `number`, as for the next two.
        unit: float32, the logit of a product of 1 in fixed point if the scale of the landmark is 1.
        half_square: float32, (scale * |q|)**2 / 2, the logit of a spread of 1.
        digits: int8 matrices [4 * rows, width], one for each span and place of a landmark's bytes.
    """

    number: jax.Array
    there: jax.Array
    unit: jax.Array
    half_square: jax.Array
    digits: list[jax.Array]


def tile_of(scale: float, bits: int, sizes: tuple[int, int, int], interpret: bool) -> Tile:
    """Return the sizes of a program for (pairs of a request and a KV head, query rows, chunks)."""
    heads, rows, count = sizes
    height = min(ROWS, max(LANES, 1 << (rows - 1).bit_length()))
    tiles = heads * blocks(rows, height) * blocks(count, BLOCK)
    return Tile(scale, height, max(1, min(STEPS, tiles // PROGRAMS)), bits, interpret)


def packed_logits_kernel(q, chunks, logits, top, total, *, tile):  # type: ignore[no-untyped-def]
    """One program: compute the logits of `tile.rows` query rows and of the chunks of `tile.steps` tiles.

    Arguments and results are those of `chunk_logits_kernel`. The landmarks are packed.
    """
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    queries = fixed_point(q, Place(b, h, iota(i * tile.rows, tile.rows)), chunks.landmarks.shape[3], tile)
    across = (..., None, None, None, slice(None))  # the rows beside the axes [warp, group, chunk]

    def step(index: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        warp, group, chunk = (iota(0, size) for size in (4, 8, 4))
        number = j * tile.block + index * BLOCK + 32 * warp[:, None, None] + 4 * group[None, :, None] + chunk
        logit = chunk_logits(queries, chunks, Place(b, h, number), tile)
        row, there, at = jnp.broadcast_arrays(queries.number[across], queries.there[across], number[..., None])
        pltriton.store(logits.at[b, h, row, at], logit, mask=there & (at < logits.shape[3]))
        peak, mass = carry
        higher = jnp.maximum(peak, logit.max(axis=-2))
        weight = exp2(logit - higher[..., None, :], tile.interpret)
        return higher, mass * exp2(peak - higher, tile.interpret) + weight.sum(axis=-2)

    shape = (*queries.number.shape[:-1], 4, 8, LANES)
    carry = (jnp.full(shape, LEAST_PEAK, jnp.float32), jnp.zeros(shape, jnp.float32))
    peak, mass = lax.fori_loop(0, tile.steps, step, carry) if tile.steps > 1 else step(0, carry)
    highest = peak.max(axis=-2).max(axis=-2)
    mass = (mass * exp2(peak - highest[..., None, None, :], tile.interpret)).sum(axis=-2).sum(axis=-2)
    for ref, value in ((top, highest), (total, mass)):
        pltriton.store(ref.at[b, h, j, queries.number], value, mask=queries.there)


# Queries in fixed point


def fixed_point(q: Any, place: Place, size: int, tile: Tile) -> Queries:
    """Load query rows and turn them into digits.

    Args:
        q: ref of the queries, [B, h_kv, R, d].
        place: the rows, int32 [rows].
        size: bytes of a landmark.
    """
    b, h, row = place
    loaded = []
    for start, width in spans_of(size):
        byte = iota(start, width)
        mask = (row < q.shape[2])[:, None] & (byte < size)[None]
        for part in range(8 // tile.bits):
            at = q.at[b, h, row[:, None], (part * size + byte)[None]]
            loaded.append(pltriton.load(at, mask=mask, other=0.0).astype(jnp.float32))
    largest = functools.reduce(jnp.maximum, [jnp.abs(x) for x in loaded]).max(axis=1)
    square = functools.reduce(jnp.add, [x * x for x in loaded]).sum(axis=1)
    # The largest number is below 2**exponent. Numbers below 2**-120 are rounded to 0.
    exponent = jnp.clip((lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 126, -90, 128)
    up, down = two_to(30 - exponent), two_to(exponent - 30)
    number, unit, half_square = (
        x if tile.rows == LANES else x.reshape(tile.rows // LANES, LANES)
        for x in (
            row,
            down * (tile.scale * LOG2_E * 2.0 ** (tile.bits - 8)),
            square * (tile.scale**2 / 2 * LOG2_E),
        )
    )
    digits = [digits_of(nearest(x * up[:, None], tile.interpret)) for x in loaded]
    return Queries(number, number < q.shape[2], unit, half_square, digits)


def spans_of(size: int) -> list[tuple[int, int]]:
    """Return (start, width) of each span of a landmark's bytes. All spans have the same width."""
    width = 32 if size <= 32 else 64
    return [(start, width) for start in range(0, size, width)]


def two_to(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent as float32. The exponents are int32 between -126 and 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def digits_of(numbers: jax.Array) -> jax.Array:
    """Split whole numbers into digits to base 256, which are columns of the matrix product.

    In the result, a lane has two neighboring columns of each eight. In this order of the columns, they are the digits
    of one query row of each four.

    Args:
        numbers: int32 [rows, width], between -2**30 and 2**30.

    Returns:
        int8 [4 * rows, width]. The axes of the columns are [rows / 4, upper or lower digits, 4 rows, 2 digits]. The
        numbers of a column are in the order of `operand`.
    """
    height, width = numbers.shape
    # Adding 128 to each of the three lower digits makes them unsigned bytes. Flipping the highest bit of a byte
    # subtracts 128 again.
    numbers = (numbers + 0x00808080) ^ 0x00808080
    each = [(numbers >> 8 * digit).astype(jnp.int8) for digit in range(DIGITS)]
    digits = jnp.stack([jnp.stack(each[:2], axis=2), jnp.stack(each[2:], axis=2)], axis=3)
    digits = digits.reshape(height // LANES, LANES, LANES, width // 16, 4, 2, 2)
    return digits.transpose(0, 6, 1, 5, 3, 2, 4).reshape(DIGITS * height, width)


# Logits


def chunk_logits(queries: Queries, chunks: Any, place: Place, tile: Tile) -> jax.Array:
    """Return the logits of a tile of chunks, float32 [..., warp, group, chunk, 4].

    The first and the last axis are those of the rows in `queries`.

    Args:
        queries: the query rows.
        chunks: the kernel's refs, as Chunks.
        place: the chunks, int32 [warp, group, chunk].
    """
    b, h, number = place
    at = by_lane(number)
    candidate = pltriton.load(chunks.candidates.at[b, h, at], mask=at < chunks.candidates.shape[2], other=False)
    each = []
    for part in range(chunks.parts):
        logit = landmark_logits(queries, chunks, Place(b, h, number * chunks.parts + part), tile)
        each.append(jnp.where(candidate, logit, MASKED))
    return joined(each, tile.interpret)


def landmark_logits(queries: Queries, chunks: Any, place: Place, tile: Tile) -> jax.Array:
    """Return the logits of a tile of landmarks. The arguments are those of `chunk_logits`; `place` has landmarks."""
    b, h, number = place
    at = by_lane(number)
    there, zeros = at < chunks.landmarks.shape[2], jnp.zeros_like(at)
    scale = pltriton.load(chunks.scale.at[b, h, at, zeros], mask=there, other=0.0).astype(jnp.float32)
    unit, half_square = (x[..., None, None, None, :] for x in (queries.unit, queries.half_square))
    logit = products(queries, chunks, place, tile) * (scale * unit)
    if chunks.spread is None:
        return logit
    spread = pltriton.load(chunks.spread.at[b, h, at, zeros], mask=there, other=0.0).astype(jnp.float32)
    return logit + spread * spread * half_square


def products(queries: Queries, chunks: Any, place: Place, tile: Tile) -> jax.Array:
    """Return the products of the query rows in fixed point with a tile of landmarks, as rounded to float32.

    Landmarks leave the second-level cache first, because nothing reads them again. The logits, which the next kernel
    reads, then stay there. Arguments and axes are those of `landmark_logits`. Products of 4-bit codes are 16 times as
    large.
    """
    b, h, number = place
    rows = number.transpose(2, 0, 1)[..., None, None]  # [chunk, warp, group, 1, 1]
    size, digits = chunks.landmarks.shape[3], iter(queries.digits)
    total = jnp.zeros((BLOCK, DIGITS * tile.rows), jnp.int32)
    for start, width in spans_of(size):
        share = width // LANES  # bytes that a lane loads
        byte = (start + share * iota(0, LANES)[:, None] + iota(0, share)[None])[None, None, None]
        mask = (rows < chunks.landmarks.shape[2]) & (byte < size)
        packed = pltriton.load(chunks.landmarks.at[b, h, rows, byte], mask=mask, other=0, eviction_policy="evict_first")
        for part in range(8 // tile.bits):
            numbers = operand(shifted_numbers(packed, part, tile.bits, tile.interpret))
            contract = (((1,), (1,)), ((), ()))
            total += lax.dot_general(numbers, next(digits), contract, preferred_element_type=jnp.int32)
    # From the axes of `operand` and `digits_of` to those of a tile. The last two axes are the digits.
    total = total.reshape(2, 4, 2, 8, tile.rows // LANES, 2, LANES, 2).transpose(4, 1, 3, 0, 2, 6, 5, 7)
    total = total.reshape(*queries.number.shape[:-1], 4, 8, 4, LANES, 2, 2)
    # Pairs of digits are joined as int32, and are below 2**31: 256 products of a code and a digit are at most 2**22.
    pairs = (total << 8 * last_of(iota(0, 2), total.ndim)).sum(axis=-1, dtype=jnp.int32).astype(jnp.float32)
    return (pairs * last_of(two_to(16 * iota(0, 2)), pairs.ndim)).sum(axis=-1)


def last_of(x: jax.Array, axes: int) -> jax.Array:
    """Return a vector as the last of several axes."""
    return x[(None,) * (axes - 1)]


def by_lane(number: jax.Array) -> jax.Array:
    """Repeat indices [warp, group, chunk] for each lane of a group: [warp, group, chunk, 4].

    The lanes load the same numbers in the same instruction, which moves each number once.
    """
    return jnp.broadcast_to(number[..., None], (*number.shape, LANES))


def operand(numbers: jax.Array) -> jax.Array:
    """Return numbers of a tile as the left operand of the matrix product, int8 [128, width].

    Rows and columns are in such an order that each number stays in its lane. The axes of the rows are
    [chunk / 2, warp, chunk % 2, group]. The axes of the columns are [width / 16, 4 lanes, 4 numbers].

    Args:
        numbers: int8 [chunk, warp, group, 4 lanes, width / 4].
    """
    share = numbers.shape[4]
    numbers = numbers.reshape(2, 2, 4, 8, LANES, share // 4, 4).transpose(0, 2, 1, 3, 5, 4, 6)
    return numbers.reshape(BLOCK, LANES * share)
