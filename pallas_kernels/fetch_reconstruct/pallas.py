"""Values read straight from pinned host memory by the Triton kernel that rebuilds the keys (zero copy).

XLA hands a pinned host operand to a kernel as it is, and under unified addressing the kernel's loads cross the bus.
They are issued first, so that they are under way while the same program gathers, multiplies and rotates. Rows of few
bits cross it as they are, and become numbers where they are stored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.fetch_reconstruct.packed_rows import Packed, scale_places, scales_of, values_at
from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys.operands import Keys
from pallas_kernels.reconstruct_keys.pallas import Tokens, block_of_tokens, store_keys, tokens_of, warps_of
from pallas_kernels.tiles import blocks, can_do, iota, spans


def fetch_reconstruct_kernel(values, factors, keys, rows, *, count, packed):  # type: ignore[no-untyped-def]
    """One program: `count` tokens of one KV head. Where values.kept is there, rows is the same buffer."""
    j, h, b = (pl.program_id(axis) for axis in range(3))
    tokens = tokens_of(factors, b, h, j * count, count)
    dim, scales = factors.dim, None
    missed = tokens.there
    if values.stay is not None:
        missed &= ~pltriton.load(values.stay.at[b, h, tokens.slot], mask=tokens.there, other=True)
    width = dim if packed is None else packed.token_bytes(dim)
    fetched = []
    for start, block in spans(width):
        column = iota(start, block)[None]
        at = tokens.within[:, None] * width + column
        fetched.append(load_missed(values, tokens, missed, b, h, at, column < width))
    if packed is not None:
        at = scale_places(tokens.within, factors.chunk, dim, packed)
        scales = load_missed(values, tokens, missed, b, h, at, at >= 0)
    store_keys(factors, keys, tokens, b, h)
    if packed is not None:
        scales = scales_of(scales, packed)
    for (start, block), tile in zip(spans(width), fetched, strict=True):
        column = iota(start, block)[None]
        for place in range(dim // width):
            value = tile if packed is None else values_at(tile, place, scales, packed)
            at = rows.at[b, h, tokens.place[:, None], place * width + column]
            pltriton.store(at, value, mask=missed[:, None] & (column < width))


def load_missed(
    values: Any, tokens: Tokens, missed: jax.Array, b: jax.Array, h: jax.Array, at: jax.Array, inside: jax.Array
) -> jax.Array:
    """Elements `at` [tokens, n] of the tokens' rows, from the host; a masked lane reads nothing."""
    inside, other = missed[:, None] & inside, 0.0 if jnp.issubdtype(values.prompt.dtype, jnp.floating) else 0
    if values.tail is None:
        return pltriton.load(values.prompt.at[b, h, tokens.unit[:, None], at], mask=inside, other=other)
    later = tokens.later[:, None]
    early = pltriton.load(values.prompt.at[b, h, tokens.unit[:, None], at], mask=inside & ~later, other=other)
    late = pltriton.load(values.tail.at[b, h, tokens.tail_row[:, None], at], mask=inside & later, other=other)
    return jnp.where(later, late, early)


@functools.partial(jax.jit, static_argnames=("packed", "interpret"))
def fetch_reconstruct(
    values: Values, factors: Keys, interpret: bool, packed: Packed | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.fetch_reconstruct`.

    Raises:
        NotImplementedError: heads wider than 256, an empty array, an unusual dtype.
    """
    sources = tuple(x for x in (values.prompt, values.tail) if x is not None)
    wide = () if values.kept is None else (values.kept,)
    if packed is None:
        can_do("fetch_reconstruct", factors.dim, *factors.factors, *sources, *wide, packed=factors.packed)
    else:
        can_do("fetch_reconstruct", factors.dim, *factors.factors, *wide, packed=(*factors.packed, *sources))
    batch, heads, tokens, _ = factors.out_shape
    anywhere, count = pl.BlockSpec(memory_space=pl.ANY), block_of_tokens(factors, 32)
    if values.kept is not None:
        values = values._replace(kept=values.kept.reshape(factors.out_shape))  # the shape of the result it becomes
    operands = (values, factors)
    aliases = {} if values.kept is None else {len(jax.tree.leaves(values[:2])): 1}
    kinds = (factors.dtype, values.prompt.dtype if packed is None else jnp.dtype(packed.dtype))
    keys, rows = pl.pallas_call(
        functools.partial(fetch_reconstruct_kernel, count=count, packed=packed),
        grid=(blocks(tokens, count), heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 2,
        out_shape=[jax.ShapeDtypeStruct(factors.out_shape, kind) for kind in kinds],
        compiler_params=pltriton.CompilerParams(num_warps=warps_of(factors), num_stages=2),
        input_output_aliases=aliases,
        interpret=interpret,
        name="fetch_reconstruct",
    )(*operands)
    return keys, rows
