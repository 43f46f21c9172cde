"""Values read straight from pinned host memory by the Triton kernel that rebuilds the keys (zero copy).

XLA hands a pinned host operand to a kernel as it is, and under unified addressing the kernel's loads cross the bus.
They are issued first, so that they are under way while the same program gathers, multiplies and rotates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys.factors import Factors
from pallas_kernels.reconstruct_keys.pallas import Tokens, block_of_tokens, store_keys, tokens_of
from pallas_kernels.tiles import blocks, can_do, iota, spans, warps


def fetch_reconstruct_kernel(values, factors, keys, rows, *, count):  # type: ignore[no-untyped-def]
    """One program: `count` tokens of one KV head. Where values.kept is there, rows is the same buffer."""
    j, h, b = (pl.program_id(axis) for axis in range(3))
    tokens = tokens_of(factors, b, h, j * count, count)
    dim = factors.right.shape[3]
    missed = tokens.there
    if values.stay is not None:
        missed &= ~pltriton.load(values.stay.at[b, h, tokens.slot], mask=tokens.there, other=True)
    fetched = [load_missed(values, tokens, missed, b, h, start, width, dim) for start, width in spans(dim)]
    store_keys(factors, keys, tokens, b, h)
    for (start, width), value in zip(spans(dim), fetched, strict=True):
        column = iota(start, width)[None]
        mask = missed[:, None] & (column < dim)
        pltriton.store(rows.at[b, h, tokens.place[:, None], column], value, mask=mask)


def load_missed(
    values: Any, tokens: Tokens, missed: jax.Array, b: jax.Array, h: jax.Array, start: int, width: int, dim: int
) -> jax.Array:
    """Columns start .. start + width - 1 of the tokens' values, from the host; a masked lane reads nothing."""
    column = iota(start, width)[None]
    at, inside = tokens.within[:, None] * dim + column, missed[:, None] & (column < dim)
    if values.tail is None:
        return pltriton.load(values.prompt.at[b, h, tokens.unit[:, None], at], mask=inside, other=0.0)
    later = tokens.later[:, None]
    early = pltriton.load(values.prompt.at[b, h, tokens.unit[:, None], at], mask=inside & ~later, other=0.0)
    late = pltriton.load(values.tail.at[b, h, tokens.tail_row[:, None], at], mask=inside & later, other=0.0)
    return jnp.where(later, late, early)


@functools.partial(jax.jit, static_argnames=("interpret",))
def fetch_reconstruct(values: Values, factors: Factors, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.fetch_reconstruct`.

    Raises:
        NotImplementedError: heads wider than 256, an empty array, an unusual dtype.
    """
    sources = [x for x in (values.prompt, values.tail, values.kept, factors.tail) if x is not None]
    can_do("fetch_reconstruct", factors.right.shape[3], factors.left, factors.right, *sources)
    batch, heads, tokens, _ = factors.out_shape
    anywhere, count = pl.BlockSpec(memory_space=pl.ANY), block_of_tokens(factors, 32)
    if values.kept is not None:
        values = values._replace(kept=values.kept.reshape(factors.out_shape))  # the shape of the result it becomes
    operands = (values, factors)
    aliases = {} if values.kept is None else {len(jax.tree.leaves(values[:2])): 1}
    keys, rows = pl.pallas_call(
        functools.partial(fetch_reconstruct_kernel, count=count),
        grid=(blocks(tokens, count), heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 2,
        out_shape=[jax.ShapeDtypeStruct(factors.out_shape, x.dtype) for x in (factors.left, values.prompt)],
        compiler_params=pltriton.CompilerParams(
            num_warps=warps(factors.right.shape[3], factors.left, factors.right), num_stages=2
        ),
        input_output_aliases=aliases,
        interpret=interpret,
        name="fetch_reconstruct",
    )(*operands)
    return keys, rows
