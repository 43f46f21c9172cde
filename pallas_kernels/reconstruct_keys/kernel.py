"""The Triton kernel that rebuilds keys from low-rank factors or packed codes.

The grid is (blocks of tokens, KV heads, batch), where the tokens are the k * c tokens of the selected chunks. A program
gathers the left rows of its tokens, multiplies them by `right` and rotates the result, all in registers. A tile of
packed bytes is loaded once and shifted once for each place. Each product sums over only 16 columns of the left rows, so
that the tiles leave registers for more programs on a multiprocessor.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.bits import parts_of
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.tiles import LEAST, blocks, can_do, dot, iota, spans, warps
from pallas_kernels.unpack import cos_sin, middle_numbers, multiply_add

Columns = list[tuple[jax.Array, jax.Array]]  # for each tile of keys: its head columns [1, n], and whether each exists


class Tokens(NamedTuple):
    """The tokens of one program, as a table [m, n]. Each field is an int32 or bool array that broadcasts to it.

    If a program holds whole chunks, column j of the table holds the tokens of chunk j. A thread then holds many tokens
    of few chunks, and looks up few chunks. Otherwise the table has one row.

    Attributes:
        place: index of the token in the result, [m, n].
        there: False past the last token.
        within: index of the token in its chunk.
        unit: row of `left`, or 0 if the chunk is in the tail.
        later: whether the chunk is in the tail.
        tail_row: row of the tail, or 0 if the chunk is not in the tail.
        position: position of the token in the sequence, [m, n].
    """

    place: jax.Array
    there: jax.Array
    within: jax.Array
    unit: jax.Array
    later: jax.Array
    tail_row: jax.Array
    position: jax.Array


def tokens_of(keys: Any, b: jax.Array, h: jax.Array, first: jax.Array, count: int, kept: Any = None) -> Tokens:
    """Look up tokens first .. first + count - 1 of head h in batch row b.

    Args:
        keys: the kernel's refs, as ChosenKeys.
        b: index in the batch.
        h: index of the KV head.
        first: index of the first token.
        count: number of tokens.
        kept: None: the tokens are those of all k ids in turn, and so is the result. Otherwise the kernel's refs, as
            KeptRows of fetch_reconstruct. The tokens are then those of the missed chunks, in their places of the cache.
    """
    chunk, units, selected = keys.chunk, keys.left.shape[-2], keys.ids.shape[2]
    if count % chunk == 0:
        slot = lax.div(first, jnp.int32(chunk)) + iota(0, count // chunk)[None]
        within = iota(0, chunk)[:, None]
    else:
        index = iota(first, count)[None]
        slot, within = lax.div(index, jnp.int32(chunk)), lax.rem(index, jnp.int32(chunk))
    there = slot < selected
    row = slot
    if kept is not None:
        slot = pltriton.load(kept.missed.at[b, h, slot], mask=there, other=selected)
        there = slot < selected
        row = pltriton.load(kept.places.at[b, h, slot], mask=there, other=kept.keys.shape[2] // chunk)
    ids = pltriton.load(keys.ids.at[b, h, slot], mask=there, other=0)
    ids = jnp.minimum(jnp.maximum(ids, 0), keys.units - 1)
    later = ids >= units
    tail_row = jnp.where(later, ids - units, 0)
    unit = jnp.where(later, 0, ids)
    source = unit
    if keys.tail_unit is not None:
        source = jnp.where(later, tail_row + pltriton.load(keys.tail_unit.at[b]), ids)
    return Tokens(row * chunk + within, there, within, unit, later, tail_row, source * chunk + within)


def store_keys(keys: Any, out: Any, tokens: Tokens, b: jax.Array, h: jax.Array, interpret: bool) -> None:
    """Rebuild the keys of the tokens, rotate them and write them to `out`, a ref [B, h_kv, tokens, d].

    `interpret` is as in `pallas_kernels.unpack`.

    RoPE mixes column j of the first half with column j of the second half. A tile holds both, so that one product
    computes them. It is then split between them.
    """
    dim, half = keys.dim, keys.inverse.shape[0]
    pairs = spans(half)
    columns = [paired(start, width, half) for start, width in pairs]
    columns += [
        (iota(2 * half + start, width)[None], iota(2 * half + start, width)[None] < dim)
        for start, width in spans(dim - 2 * half)
    ]
    if keys.profile is None:
        tiles = factor_tiles(keys, tokens, columns, b, h)
    else:
        tiles = code_tiles(keys, tokens, columns, b, h, interpret)
    there, place = tokens.there[..., None], tokens.place[..., None]
    tiles = [tile.reshape(*tokens.position.shape, -1) for tile in tiles]

    def write(column: jax.Array, inside: jax.Array, value: jax.Array) -> None:
        pltriton.store(out.at[b, h, place, column], value.astype(out.dtype), mask=there & inside)

    for (start, width), tile in zip(pairs, tiles, strict=False):
        column = iota(start, width)[None, None]
        inside = column < half
        inverse = pltriton.load(keys.inverse.at[column], mask=inside, other=0.0)
        angle = tokens.position[..., None].astype(jnp.float32) * inverse
        cos, sin = cos_sin(angle, out.dtype, interpret)
        first, second = lax.split(tile, (width, width), axis=2)
        write(column, inside, multiply_add(first, cos, -second * sin, interpret))
        write(half + column, inside, multiply_add(second, cos, first * sin, interpret))
    for (column, inside), tile in zip(columns[len(pairs) :], tiles[len(pairs) :], strict=True):
        write(column[None], inside[None], tile)


def paired(start: int, width: int, half: int) -> tuple[jax.Array, jax.Array]:
    """Return the columns of a tile of pairs, [1, 2 * width]: those from `start`, then their partners in RoPE."""
    column = iota(start, 2 * width)[None]
    if width == half:
        return column, column < 2 * half
    later = iota(0, 2 * width)[None] >= width
    return jnp.where(later, column + (half - width), column), jnp.where(later, column - width, column) < half


# Keys before RoPE: one float32 tile for each block of columns. `keys` holds the kernel's refs.


def factor_tiles(keys: Any, tokens: Tokens, columns: Columns, b: jax.Array, h: jax.Array) -> list[jax.Array]:
    """Multiply the left rows of the tokens by `right`. Return one tile for each entry of `columns`."""
    rank, count = keys.right.shape[2], tokens.position.size
    out = [jnp.zeros((count, column.shape[1]), jnp.float32) for column, _ in columns]
    for start, width in spans(rank, LEAST):
        r = iota(start, width)
        rows = load_left(keys, tokens, r, r < rank, b)
        for part, (column, exists) in enumerate(columns):
            mask = (r < rank)[:, None] & exists
            out[part] += dot(rows, pltriton.load(keys.right.at[b, h, r[:, None], column], mask=mask, other=0.0))
    return out


def code_tiles(
    keys: Any, tokens: Tokens, columns: Columns, b: jax.Array, h: jax.Array, interpret: bool
) -> list[jax.Array]:
    """Multiply the values of the tokens' codes by `right`, and add the mean. Return one tile for each of `columns`."""
    means = [pltriton.load(keys.mean.at[b, h, column], mask=exists, other=0.0) for column, exists in columns]
    out = [jnp.broadcast_to(mean.astype(jnp.float32), (tokens.position.size, mean.shape[1])) for mean in means]
    for part in parts_of(keys.profile):
        for start, width in spans(part.size, LEAST):
            byte = iota(start, width)
            inside = byte < part.size
            packed = load_left(keys, tokens, part.byte + byte, inside, b)
            for place in range(8 // part.bits):
                r = part.column + place * part.size + byte
                numbers = middle_numbers(packed, place, part.bits, keys.right.dtype, interpret)
                for tile, (column, exists) in enumerate(columns):
                    mask = inside[:, None] & exists
                    basis = pltriton.load(keys.right.at[b, h, r[:, None], column], mask=mask, other=0.0)
                    out[tile] += dot(numbers, basis)
    return out


def load_left(keys: Any, tokens: Tokens, column: jax.Array, inside: jax.Array, b: jax.Array) -> jax.Array:
    """Load elements of the tokens' left rows, from the prompt or from the tail.

    Args:
        keys: the kernel's refs, as ChosenKeys.
        tokens: the tokens of the program.
        column: indices of the elements in the row of a token, int32 [n].
        inside: which of these indices are valid, bool [n].
        b: index in the batch.

    Returns:
        The elements [tokens, n]. Invalid elements are 0.
    """
    at, there, later = tokens.within[..., None] * keys.width + column, tokens.there[..., None], tokens.later[..., None]
    other = jnp.zeros((), keys.left.dtype)
    rows = pltriton.load(keys.left.at[b, tokens.unit[..., None], at], mask=there & ~later & inside, other=other)
    if keys.tail is not None:
        tail = keys.tail.at[b, tokens.tail_row[..., None], at]
        rows += pltriton.load(tail, mask=there & later & inside, other=other)
    return rows.reshape(tokens.position.size, -1)


# The call


def reconstruct_keys_kernel(keys, out, *, count, interpret):  # type: ignore[no-untyped-def]
    """One program: rebuild the keys [count, d] of `count` tokens of one KV head."""
    j, h, b = (pl.program_id(axis) for axis in range(3))
    store_keys(keys, out, tokens_of(keys, b, h, j * count, count), b, h, interpret)


@functools.partial(jax.jit, static_argnames=("interpret",))
def reconstruct_keys(keys: ChosenKeys, interpret: bool) -> jax.Array:
    """See `pallas_kernels.reconstruct_keys`.

    Raises:
        NotImplementedError: heads are wider than 256, an array is empty, or a dtype is not float32, bfloat16 or
            float16.
    """
    can_do("reconstruct_keys", keys.dim, *keys.multiplied, packed=keys.packed)
    batch, heads, tokens, _ = keys.out_shape
    anywhere, count = pl.BlockSpec(memory_space=pl.ANY), block_of_tokens(keys, 64)
    return pl.pallas_call(
        functools.partial(reconstruct_keys_kernel, count=count, interpret=interpret),
        grid=(blocks(tokens, count), heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, keys)],
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(keys.out_shape, keys.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=warps_of(keys), num_stages=2),
        cost_estimate=estimate(**cost_of(keys)),
        interpret=interpret,
        name="reconstruct_keys",
    )(keys)


def cost_of(keys: ChosenKeys) -> dict[str, int]:
    """Return the operations and bytes of rebuilding keys, as keyword arguments of `estimate`."""
    batch, heads, tokens, dim = keys.out_shape
    rows = batch * heads * tokens
    shared = bytes_of((keys.right, keys.ids, keys.inverse, keys.tail_unit, keys.mean))
    moved = rows * (keys.width * keys.left.dtype.itemsize + dim * jnp.dtype(keys.dtype).itemsize)
    return {"flops": 2 * rows * keys.right.shape[2] * dim, "moved": moved + shared}


def block_of_tokens(keys: ChosenKeys, most: int) -> int:
    """Return the number of tokens of one program, which is `most` by default.

    It is smaller for float32 tiles and wide heads, which take more registers. It is larger for packed codes, because
    each program reads the whole matrix `right`, which is then large.
    """
    if any(x.dtype == jnp.float32 for x in keys.multiplied):
        most //= 2
    if keys.dim > 128:
        most //= 2
    return max(LEAST, 2 * most if has_large_basis(keys) else most)


def warps_of(keys: ChosenKeys) -> int:
    """Return the number of warps of one program."""
    return 8 if has_large_basis(keys) else warps(keys.dim, *keys.multiplied)


def has_large_basis(keys: ChosenKeys) -> bool:
    """Whether keys are packed codes. For the same bytes, `right` then has about four times as many rows."""
    return keys.profile is not None
