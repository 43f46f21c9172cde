"""The Triton kernel that rebuilds keys from low-rank factors or packed codes.

The grid is (blocks of tokens, KV heads, batch), where the tokens are the k * c tokens of the selected chunks. A program
gathers the left rows of its tokens, multiplies them by `right` and rotates the result, all in registers. A tile of
packed bytes is loaded once and shifted once for each place. Each product sums over few columns of the left rows, so
that the tiles leave registers for more programs on a multiprocessor.

The products run in a loop, because Triton overlaps loads with products only in a loop: while one block of the rows is
multiplied, the copies of the next ones to shared memory are under way. Without it, each product waits for its own
loads. Copies have 4 to 16 bytes, so the bytes of a token's part should begin and end at multiples of 16.

Each place has its own product. One product of the codes in all places of a byte, joined as neighbors, is wrong on a
GPU: the compiler puts the codes of two tokens into a register that should hold two codes of one token.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.bits import Part, parts_of
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.tiles import LEAST, blocks, can_do, dot, iota, spans
from pallas_kernels.unpack import cos_sin, middle_numbers, multiply_add

# For each tile of keys: its head columns [1, n], and whether each exists, or None if all do.
Columns = list[tuple[jax.Array, jax.Array | None]]

Tiles = tuple[jax.Array, ...]  # float32, one for each entry of Columns


class Form(NamedTuple):
    """How a kernel divides its work. It decides the speed, and the order in which the products are added.

    Attributes:
        tokens: number of tokens of a program, a power of two.
        warps: number of warps of a program.
        width: number of elements of a left row that one step of the loop multiplies, a power of two of at least 16.
        stages: how many steps have their loads under way at once.
    """

    tokens: int
    warps: int
    width: int = LEAST
    stages: int = 3


class Block(NamedTuple):
    """Some neighboring elements of the left rows.

    Attributes:
        first: index of the first element.
        width: number of elements.
        size: number of elements that exist, or None if all of the block do.
    """

    first: jax.Array | int
    width: int
    size: int | None

    @property
    def elements(self) -> jax.Array:
        """The indices of the elements, int32 [width]."""
        return iota(self.first, self.width)

    def inside(self, index: jax.Array) -> jax.Array | None:
        """Return which elements exist at these indices of the block, or None if all do."""
        return None if self.size is None else index < self.size


class Tokens(NamedTuple):
    """The tokens of one program, as a table [m, n]. Each field is an int32 or bool array that broadcasts to it.

    If a program holds whole chunks, column j of the table holds the tokens of chunk j. A thread then holds many tokens
    of few chunks, and looks up few chunks. In a table by chunks, row j holds the tokens of chunk j instead, so that
    neighboring threads load neighboring tokens. If a program does not hold whole chunks, the table has one row.

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


def tokens_of(
    keys: Any, b: jax.Array, h: jax.Array, first: jax.Array, count: int, kept: Any = None, by_chunks: bool = False
) -> Tokens:
    """Look up tokens first .. first + count - 1 of head h in batch row b.

    Args:
        keys: the kernel's refs, as ChosenKeys.
        b: index in the batch.
        h: index of the KV head.
        first: index of the first token.
        count: number of tokens.
        kept: None: the tokens are those of all k ids in turn, and so is the result. Otherwise the kernel's refs, as
            KeptRows of fetch_reconstruct. The tokens are then those of the missed chunks, in their places of the cache.
        by_chunks: whether the rows of the table are the chunks, if the program holds whole chunks.
    """
    chunk, units, selected = keys.chunk, keys.left.shape[-2], keys.ids.shape[2]
    if count % chunk == 0:
        across, along = (1, 0) if by_chunks else (0, 1)
        slot = jnp.expand_dims(lax.div(first, jnp.int32(chunk)) + iota(0, count // chunk), across)
        within = jnp.expand_dims(iota(0, chunk), along)
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


def store_keys(keys: Any, out: Any, tokens: Tokens, b: jax.Array, h: jax.Array, form: Form, interpret: bool) -> None:
    """Rebuild the keys of the tokens, rotate them and write them to `out`, a ref [B, h_kv, tokens, d].

    `interpret` is as in `pallas_kernels.unpack`.
    """
    there, place = tokens.there[..., None], tokens.place[..., None]
    for column, inside, tile in rotated_tiles(keys, tokens, b, h, form, interpret):
        at = out.at[b, h, place, column[None]]
        mask = both(there, None if inside is None else inside[None])
        pltriton.store(at, tile.astype(out.dtype), mask=mask)


def rotated_tiles(
    keys: Any, tokens: Tokens, b: jax.Array, h: jax.Array, form: Form, interpret: bool
) -> Iterator[tuple[jax.Array, jax.Array | None, jax.Array]]:
    """Rebuild the keys of the tokens and rotate them.

    RoPE mixes column j of the first half with column j of the second half. A tile holds both, so that one product
    computes them. It is then split between them.

    Yields:
        For some columns at a time: the columns of the head [1, n], which of them exist (or None if all do), and the
        keys, float32 [the shape of the table of tokens, n].
    """
    dim, half = keys.dim, keys.inverse.shape[0]
    pairs = spans(half)
    columns: Columns = [paired(start, width, half) for start, width in pairs]
    for start, width in spans(dim - 2 * half):
        column = iota(2 * half + start, width)[None]
        columns.append((column, inside_of(column, 2 * half + start + width, dim)))
    work = Work(keys, tokens, columns, b, h, form, interpret)
    tiles = factor_tiles(work) if keys.profile is None else code_tiles(work)
    tiles = tuple(tile.reshape(*tokens.position.shape, -1) for tile in tiles)
    for (start, width), tile in zip(pairs, tiles, strict=False):
        column = iota(start, width)[None]
        inside = inside_of(column, start + width, half)
        inverse = load_some(keys.inverse, (column[None],), None if inside is None else inside[None])
        angle = tokens.position[..., None].astype(jnp.float32) * inverse
        cos, sin = cos_sin(angle, keys.dtype, interpret)
        first, second = lax.split(tile, (width, width), axis=2)
        yield column, inside, multiply_add(first, cos, -second * sin, interpret)
        yield half + column, inside, multiply_add(second, cos, first * sin, interpret)
    for (column, inside), tile in zip(columns[len(pairs) :], tiles[len(pairs) :], strict=True):
        yield column, inside, tile


def paired(start: int, width: int, half: int) -> tuple[jax.Array, jax.Array | None]:
    """Return the columns of a tile of pairs, [1, 2 * width]: those from `start`, then their partners in RoPE.

    Also return which of them exist, or None if all do.
    """
    column = iota(start, 2 * width)[None]
    if width == half:
        return column, None
    later = iota(0, 2 * width)[None] >= width
    first = jnp.where(later, column - width, column)
    return jnp.where(later, column + (half - width), column), inside_of(first, start + width, half)


def inside_of(index: jax.Array, end: int, size: int) -> jax.Array | None:
    """Return which indices below `end` are also below `size`, or None if all are."""
    return None if end <= size else index < size


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """Return where both masks are True. None is a mask that is True everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def load_some(ref: Any, index: tuple[jax.Array, ...], mask: jax.Array | None) -> jax.Array:
    """Load the elements of a ref at some indices. Those outside of the mask are 0."""
    if mask is None:
        return pltriton.load(ref.at[index])
    return pltriton.load(ref.at[index], mask=mask, other=np.zeros((), ref.dtype))


# Keys before RoPE: one float32 tile for each block of columns. `keys` holds the kernel's refs.


class Work(NamedTuple):
    """The keys that a program rebuilds, before RoPE.

    Attributes:
        keys: the kernel's refs, as ChosenKeys.
        tokens: the tokens of the program.
        columns: the columns of each tile of keys.
        b: index in the batch.
        h: index of the KV head.
        form: the form of the kernel.
        interpret: as in `pallas_kernels.unpack`.
    """

    keys: Any
    tokens: Tokens
    columns: Columns
    b: jax.Array
    h: jax.Array
    form: Form
    interpret: bool


def factor_tiles(work: Work) -> Tiles:
    """Multiply the left rows of the tokens by `right`. Return one tile for each entry of `work.columns`."""

    def step(block: Block, out: Tiles) -> Tiles:
        r, inside = block.elements, block.inside(block.elements)
        return add_products(work, load_left(work.keys, work.tokens, r, inside, work.b), r, inside, out)

    shapes = [(work.tokens.position.size, column.shape[1]) for column, _ in work.columns]
    return summed_up(
        work.keys.right.shape[2], work.form.width, step, tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    )


def code_tiles(work: Work) -> Tiles:
    """Multiply the values of the tokens' codes by `right`, and add the mean. Return one tile for each entry."""
    keys, count = work.keys, work.tokens.position.size
    means = [
        load_some(keys.mean, (work.b, work.h, column), exists).astype(jnp.float32) for column, exists in work.columns
    ]
    tiles = tuple(jnp.broadcast_to(mean, (count, mean.shape[1])) for mean in means)
    for part in parts_of(keys.profile):
        tiles = summed_up(part.size, work.form.width, functools.partial(add_codes, work, part), tiles)
    return tiles


def add_codes(work: Work, part: Part, block: Block, out: Tiles) -> Tiles:
    """Add the products of the codes in a block of the bytes of a part of the profile, and `right`, to the tiles."""
    byte, kind = block.elements, work.keys.right.dtype
    packed = load_left(work.keys, work.tokens, part.byte + byte, block.inside(byte), work.b)
    for place in range(8 // part.bits):
        numbers = middle_numbers(packed, place, part.bits, kind, work.interpret)
        r = part.column + place * part.size + byte
        out = add_products(work, numbers, r, block.inside(byte), out)
    return out


def add_products(work: Work, numbers: jax.Array, r: jax.Array, inside: jax.Array | None, out: Tiles) -> Tiles:
    """Add the products of numbers [tokens, n] and the rows `r` [n] of `right` that are `inside` to the tiles."""
    rights = []
    for column, exists in work.columns:
        mask = both(None if inside is None else inside[:, None], exists)
        if mask is not None:
            mask = jnp.broadcast_to(mask, (r.size, column.size))
        rights.append(load_some(work.keys.right, (work.b, work.h, r[:, None], column), mask))
    return tuple(tile + dot(numbers, right) for tile, right in zip(out, rights, strict=True))


def summed_up(size: int, width: int, step: Callable[..., Tiles], tiles: Tiles) -> Tiles:
    """Call `step` with the elements below `size` in blocks, each with what `step` made of the blocks before.

    Args:
        size: number of elements of the left rows.
        width: width of the blocks.
        step: maps a block and tiles to new tiles.
        tiles: the first tiles.
    """
    whole = size // width
    if whole > 1:
        tiles = lax.fori_loop(
            np.int32(0), np.int32(whole), lambda index, tiles: step(Block(index * width, width, None), tiles), tiles
        )
    elif whole:
        tiles = step(Block(0, width, None), tiles)
    first = whole * width
    for start, block in spans(size - first, width):
        end = first + start + block
        tiles = step(Block(first + start, block, None if end <= size else size), tiles)
    return tiles


def load_left(keys: Any, tokens: Tokens, column: jax.Array, inside: jax.Array | None, b: jax.Array) -> jax.Array:
    """Load elements of the tokens' left rows, from the prompt or from the tail.

    Args:
        keys: the kernel's refs, as ChosenKeys.
        tokens: the tokens of the program.
        column: indices of the elements in the row of a token, int32 [n].
        inside: which of these indices are valid, bool [n], or None if all are.
        b: index in the batch.

    Returns:
        The elements [tokens, n]. Invalid elements are 0.
    """
    at, there, later = tokens.within[..., None] * keys.width + column, tokens.there[..., None], tokens.later[..., None]
    early = there if keys.tail is None else there & ~later
    rows = load_some(keys.left, (b, tokens.unit[..., None], at), both(early, inside))
    if keys.tail is not None:
        rows += load_some(keys.tail, (b, tokens.tail_row[..., None], at), both(there & later, inside))
    return rows.reshape(tokens.position.size, -1)


# The call


def reconstruct_keys_kernel(keys, out, *, form, interpret):  # type: ignore[no-untyped-def]
    """One program: rebuild the keys [form.tokens, d] of some tokens of one KV head."""
    j, h, b = (pl.program_id(axis) for axis in range(3))
    store_keys(keys, out, tokens_of(keys, b, h, j * form.tokens, form.tokens), b, h, form, interpret)


@functools.partial(jax.jit, static_argnames=("interpret", "form"))
def reconstruct_keys(keys: ChosenKeys, interpret: bool, form: Form | None = None) -> jax.Array:
    """See `pallas_kernels.reconstruct_keys`. If `form` is None, it is `form_of(keys)`.

    Raises:
        NotImplementedError: heads are wider than 256, an array is empty, or a dtype is not float32, bfloat16 or
            float16.
    """
    can_do("reconstruct_keys", keys.dim, *keys.multiplied, packed=keys.packed)
    form = form or form_of(keys)
    batch, heads, tokens, _ = keys.out_shape
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(reconstruct_keys_kernel, form=form, interpret=interpret),
        grid=(blocks(tokens, form.tokens), heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, keys)],
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(keys.out_shape, keys.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=form.warps, num_stages=form.stages),
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


def form_of(keys: ChosenKeys) -> Form:
    """Return the form of a kernel that rebuilds keys.

    It was the fastest of those that ran on an H200 (docs/benchmarks/gpu.md). Wide heads need more warps and fewer
    stages, so that tiles fit into registers and shared memory. Products of float32 do not use the tensor cores, and
    hold their operands in registers.
    """
    single = any(x.dtype == jnp.float32 for x in keys.multiplied)
    if single or keys.dim > 128:
        return Form(32 if single else 64, 8, stages=2)
    return Form(64, 4)
