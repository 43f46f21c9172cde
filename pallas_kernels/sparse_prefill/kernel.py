"""The Triton kernel of sparse_prefill: online softmax over listed key blocks, and then over listed single keys.

The grid is (query blocks, query heads, batch). The last query blocks have the longest lists, so they start first. A
program reads its queries once. It visits as many tiles as its lists have, and loads each number of a list just before
its tile. Wide heads and float32 need more registers, so their query blocks are shared by several programs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.sparse_prefill.operands import KeyLists, Keys
from pallas_kernels.tiles import LEAST, LOG2_E, MASKED, can_do, dot, iota, number_of, spans, warps

Carry = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]  # maximum score, sum of exponentials, tiles of outputs
MOST_BLOCK = 128  # queries of a query block


class Tile(NamedTuple):
    """Static sizes of one program.

    Attributes:
        block: M, the number of queries of a query block and of keys of a key block.
        rows: number of queries of a program. It divides M.
        width: number of keys that are loaded at once. It divides M.
    """

    block: int
    rows: int
    width: int


class Queries(NamedTuple):
    """The queries of one program.

    Attributes:
        b: index in the batch.
        h: index of the query head.
        kv: index of the KV head.
        position: int32 [rows], position of each query in the prompt.
        real: bool [rows], False for padding.
        tiles: the queries in tiles of columns [rows, n].
        columns: the number of each column of a tile, int32 [1, n], and whether it exists, bool [1, n].
    """

    b: jax.Array
    h: jax.Array
    kv: jax.Array
    position: jax.Array
    real: jax.Array
    tiles: tuple[jax.Array, ...]
    columns: tuple[tuple[jax.Array, jax.Array], ...]


def sparse_prefill_kernel(q, keys, lists, others, out, *, scale, tile):  # type: ignore[no-untyped-def]
    """One program: compute attention of some queries of a query block, of one query head, over the block's lists.

    The refs are those of `pallas_kernels.sparse_prefill`. `others` are `first` as [1], and `sinks` or None.
    """
    first, sinks = others
    heads, dim, (size, rows, width) = q.shape[2], q.shape[3], tile
    program, h, b = q.shape[1] // rows - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = iota(program * rows, rows)
    position = row + pltriton.load(first.at[jnp.int32(0)])
    real = position < pltriton.load(keys.lengths.at[b])
    columns = [(iota(start, n)[None], iota(start, n)[None] < dim) for start, n in spans(dim)]
    tiles = [pltriton.load(q.at[b, row[:, None], h, d], mask=inside, other=0.0) for d, inside in columns]
    kv = lax.div(h, jnp.int32(heads // keys.k.shape[2]))
    i = lax.div(program, jnp.int32(size // rows))
    queries = Queries(b, h, kv, position, real, tuple(tiles), tuple(columns))
    some = number_of(real) > 0  # padding visits nothing
    visited, singles = (
        jnp.where(some, pltriton.load(ref.at[b, h, i]), 0) for ref in (lists.block_counts, lists.column_counts)
    )
    parts = size // width

    def near(turn: jax.Array, carry: Carry) -> Carry:
        number = pltriton.load(lists.blocks.at[b, h, i, lax.div(turn, jnp.int32(parts))])
        key = iota(number * size + lax.rem(turn, jnp.int32(parts)) * width, width)
        return one_tile(queries, keys, key, chosen_pairs(queries, lists, key), scale, carry)

    def single(turn: jax.Array, carry: Carry) -> Carry:
        entry = iota(turn * width, width)
        at = lists.columns.at[b, h, i, entry]
        key = pltriton.load(at, mask=entry < singles, other=keys.k.shape[1])
        return one_tile(queries, keys, key, None, scale, carry)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in tiles)
    peak, mass = jnp.full((rows,), MASKED), jnp.zeros((rows,))
    if sinks is not None:
        peak = jnp.full((rows,), pltriton.load(sinks.at[h]).astype(jnp.float32) * LOG2_E)
        mass = jnp.ones((rows,))
    carry: Carry = (peak, mass, zeros)
    carry = lax.fori_loop(0, visited * parts, near, carry)
    if lists.columns.shape[3]:
        carry = lax.fori_loop(0, lax.div(singles + (width - 1), jnp.int32(width)), single, carry)
    _, mass, sums = carry
    mass = jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[:, None]
    for x, (d, inside) in zip(sums, columns, strict=True):
        pltriton.store(out.at[b, row[:, None], h, d], (x / mass).astype(out.dtype), mask=inside)


def chosen_pairs(queries: Queries, lists: Any, key: jax.Array) -> jax.Array | None:
    """Return which keys of a listed block each query attends to, bool [rows, N], or None for all of them."""
    if lists.diagonals is None:
        return None
    tokens = lists.diagonals.shape[2]
    back = queries.position[:, None] - key[None]
    inside = (back >= 0) & (back < tokens)
    slanted = pltriton.load(lists.diagonals.at[queries.b, queries.h, back], mask=inside, other=False)
    return slanted | pltriton.load(lists.in_column.at[queries.b, queries.h, key], mask=key < tokens, other=False)[None]


def one_tile(
    queries: Queries, keys: Any, key: jax.Array, chosen: jax.Array | None, scale: float, carry: Carry
) -> Carry:
    """Add keys to the running softmax of the queries.

    Args:
        queries: the queries.
        keys: the refs of Keys.
        key: positions of the keys, int32 [N]. Those from S on do not exist.
        chosen: which keys each query attends to, bool [rows, N], or None for all of them. A causal mask is added.
        carry: the running softmax. Its maximum is that of scores * log2(e).
    """
    peak, mass, parts = carry
    there = (key < keys.k.shape[1])[:, None]

    def load(ref: Any, column: tuple[jax.Array, jax.Array]) -> jax.Array:
        d, inside = column
        return pltriton.load(ref.at[queries.b, key[:, None], queries.kv, d], mask=there & inside, other=0.0)

    score = jnp.zeros((queries.position.shape[0], key.shape[0]), jnp.float32)
    for tile, column in zip(queries.tiles, queries.columns, strict=True):
        score += dot(tile, load(keys.k, column), transposed=True)
    seen = (key[None] <= queries.position[:, None]) & queries.real[:, None]
    seen = seen if chosen is None else seen & chosen
    score = jnp.where(seen, score * (scale * LOG2_E), MASKED)
    new = jnp.maximum(peak, score.max(axis=1))
    weight = jnp.where(seen, jnp.exp2(score - new[:, None]), 0.0)
    shrink = jnp.exp2(peak - new)
    short = weight.astype(keys.v.dtype)
    parts = tuple(
        part * shrink[:, None] + dot(short, load(keys.v, column))
        for part, column in zip(parts, queries.columns, strict=True)
    )
    return new, mass * shrink + weight.sum(axis=1), parts


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def sparse_prefill(
    q: jax.Array,
    keys: Keys,
    lists: KeyLists,
    first: jax.Array,
    sinks: jax.Array | None,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """See `pallas_kernels.sparse_prefill`.

    Raises:
        NotImplementedError: the query blocks do not have 16, 32, 64 or 128 queries, heads are wider than 256, an array
            is empty, or a dtype is not float32, bfloat16 or float16.
    """
    batch, length, heads, dim = q.shape
    count = lists.blocks.shape[2]
    size = length // count
    if not LEAST <= size <= MOST_BLOCK or size & (size - 1):
        raise NotImplementedError(f"sparse_prefill: the kernel takes blocks of 16, 32, 64 or 128 queries, got {size}")
    can_do("sparse_prefill", dim, q, keys.k, keys.v)
    tile = tile_of(size, dim, q, keys.k, keys.v)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # The counts are not known here. The estimate assumes that all lists are full.
    pairs = batch * heads * length * min(keys.k.shape[1], lists.blocks.shape[3] * size + lists.columns.shape[3])
    return pl.pallas_call(
        functools.partial(sparse_prefill_kernel, scale=scale, tile=tile),
        grid=(length // tile.rows, heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, (q, keys, lists, (first, sinks)))),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        cost_estimate=estimate(flops=4 * pairs * dim, moved=bytes_of((q, q, keys, lists)), exponentials=pairs),
        compiler_params=pltriton.CompilerParams(num_warps=warps(dim, q, keys.k, keys.v), num_stages=2),
        interpret=interpret,
        name="sparse_prefill",
    )(q, keys, lists, (first.reshape(1), sinks))


def tile_of(block: int, dim: int, *arrays: jax.Array) -> Tile:
    """Return the sizes of a program for query blocks of `block` queries, and heads `dim` wide."""
    if any(x.dtype == jnp.float32 for x in arrays):
        return Tile(block, min(block, 16), min(block, 32))
    return Tile(block, min(block, 64), min(block, 64 if dim <= 128 else 32))
