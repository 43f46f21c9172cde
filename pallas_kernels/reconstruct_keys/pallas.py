"""Keys rebuilt from low-rank factors or packed codes by a Triton kernel: gather, product and rotation without a trip
to memory."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.reconstruct_keys.code_tiles import code_tiles
from pallas_kernels.reconstruct_keys.codes import Codes
from pallas_kernels.reconstruct_keys.operands import Keys
from pallas_kernels.rotation import cos_sin_of
from pallas_kernels.tiles import LEAST, blocks, can_do, dot, iota, spans, summed, warps


class Tokens(NamedTuple):
    """The tokens of one program, each an int32 or bool vector; chunks of any size, for a token knows its own.

    Attributes:
        place: among the k * c tokens.
        there: False past the last token.
        slot: which of the k ids.
        within: place in the chunk.
        unit: row of left, 0 where later.
        later: whether the chunk is in the tail.
        tail_row: row of the tail, 0 where not later.
        position: in the sequence.
    """

    place: jax.Array
    there: jax.Array
    slot: jax.Array
    within: jax.Array
    unit: jax.Array
    later: jax.Array
    tail_row: jax.Array
    position: jax.Array


def tokens_of(factors: Any, b: jax.Array, h: jax.Array, first: jax.Array, count: int) -> Tokens:
    """Tokens first .. first + count - 1 of head h in row b; factors holds the kernel's refs."""
    chunk, units = factors.chunk, factors.left.shape[-2]
    place = iota(first, count)
    there = place < factors.ids.shape[2] * chunk
    slot, within = lax.div(place, jnp.int32(chunk)), lax.rem(place, jnp.int32(chunk))
    ids = pltriton.load(factors.ids.at[b, h, slot], mask=there, other=0)
    ids = jnp.minimum(jnp.maximum(ids, 0), factors.units - 1)
    later = ids >= units
    tail_row = jnp.where(later, ids - units, 0)
    unit = jnp.where(later, 0, ids)
    source = unit
    if factors.tail_unit is not None:
        source = jnp.where(later, tail_row + pltriton.load(factors.tail_unit.at[b]), ids)
    return Tokens(place, there, slot, within, unit, later, tail_row, source * chunk + within)


def store_keys(factors: Any, keys: Any, tokens: Tokens, b: jax.Array, h: jax.Array) -> None:
    """Rebuild the tokens' keys and write them; the halves that RoPE mixes are blocks of their own."""
    dim, half = factors.dim, factors.inverse.shape[0]
    columns = [(start, width, half) for start, width in spans(half)]
    columns += [(half + start, width, 2 * half) for start, width in spans(half)]
    columns += [(2 * half + start, width, dim) for start, width in spans(dim - 2 * half)]
    places = [(iota(start, width)[None], iota(start, width)[None] < end) for start, width, end in columns]
    rebuilt = code_tiles if isinstance(factors, Codes) else products
    product = rebuilt(factors, tokens, places, b, h)

    there, row = tokens.there[:, None], tokens.place[:, None]

    def write(part: int, value: jax.Array) -> None:
        column, inside = places[part]
        pltriton.store(keys.at[b, h, row, column], value.astype(keys.dtype), mask=there & inside)

    pairs = len(spans(half))
    for part in range(pairs):
        column, inside = places[part]
        inverse = pltriton.load(factors.inverse.at[column], mask=inside, other=0.0)
        cos, sin = cos_sin_of(tokens.position[:, None].astype(jnp.float32) * inverse)
        first, second = product[part], product[pairs + part]
        write(part, first * cos - second * sin)
        write(pairs + part, second * cos + first * sin)
    for part in range(2 * pairs, len(places)):
        write(part, product[part])


def products(
    factors: Any, tokens: Tokens, places: list[tuple[jax.Array, jax.Array]], b: jax.Array, h: jax.Array
) -> list[jax.Array]:
    """Left rows of the tokens times the columns of right, a float32 tile a place."""
    rank, count = factors.right.shape[2], tokens.place.shape[0]
    out = [jnp.zeros((count, column.shape[1]), jnp.float32) for column, _ in places]
    there, later = tokens.there[:, None], tokens.later[:, None]
    for start, width in summed(rank, factors.left, factors.right):
        r = iota(start, width)
        at, inside = tokens.within[:, None] * rank + r[None], (r < rank)[None]
        unit = tokens.unit[:, None]
        rows = pltriton.load(factors.left.at[b, unit, at], mask=there & ~later & inside, other=0.0)
        if factors.tail is not None:
            unit = tokens.tail_row[:, None]
            rows += pltriton.load(factors.tail.at[b, unit, at], mask=there & later & inside, other=0.0)
        for part, (column, wanted) in enumerate(places):
            mask = (r < rank)[:, None] & wanted
            out[part] += dot(rows, pltriton.load(factors.right.at[b, h, r[:, None], column], mask=mask, other=0.0))
    return out


def reconstruct_keys_kernel(factors, keys, *, count):  # type: ignore[no-untyped-def]
    """One program: `count` tokens of one KV head."""
    j, h, b = (pl.program_id(axis) for axis in range(3))
    store_keys(factors, keys, tokens_of(factors, b, h, j * count, count), b, h)


@functools.partial(jax.jit, static_argnames=("interpret",))
def reconstruct_keys(factors: Keys, interpret: bool) -> jax.Array:
    """See `pallas_kernels.reconstruct_keys`.

    Raises:
        NotImplementedError: heads wider than 256, an empty array, an unusual dtype.
    """
    can_do("reconstruct_keys", factors.dim, *factors.factors, packed=factors.packed)
    batch, heads, tokens, _ = factors.out_shape
    anywhere, count = pl.BlockSpec(memory_space=pl.ANY), block_of_tokens(factors, 64)
    return pl.pallas_call(
        functools.partial(reconstruct_keys_kernel, count=count),
        grid=(blocks(tokens, count), heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, factors)],
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(factors.out_shape, factors.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=warps_of(factors), num_stages=2),
        interpret=interpret,
        name="reconstruct_keys",
    )(factors)


def block_of_tokens(factors: Keys, most: int) -> int:
    """Tokens of one program: fewer where float32 tiles or wide heads would fill the registers, more where the basis is
    large, for each program reads it as a whole."""
    if any(x.dtype == jnp.float32 for x in factors.factors):
        most //= 2
    if factors.dim > 128:
        most //= 2
    return max(LEAST, 2 * most if wide_basis(factors) else most)


def warps_of(factors: Keys) -> int:
    """Warps of one program."""
    return 8 if wide_basis(factors) else warps(factors.dim, *factors.factors)


def wide_basis(factors: Keys) -> bool:
    """Whether keys are rebuilt from packed coefficients: the bits of a low rank, of four times as many columns."""
    return isinstance(factors, Codes) and factors.right is not None
