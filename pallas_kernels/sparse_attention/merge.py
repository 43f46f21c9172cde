"""The Triton kernel that joins the partial results of the programs that share the rows of a head."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.sparse_attention.query_rows import queries_of
from pallas_kernels.tiles import MASKED, blocks, iota

MERGED = 8_192  # most numbers of a tile of partial outputs that a program of `merge_kernel` holds


def padded(size: int) -> int:
    """Return the smallest power of two that is at least `size`. No tile here is multiplied, so it may be below 16."""
    return 1 << (size - 1).bit_length()


def merge_kernel(partial, top, total, out, *, group, rows, width):  # type: ignore[no-untyped-def]
    """One program: join the partial results of a block of query rows, for `width` columns of a head.

    The refs are those that `attention_kernel` wrote, and `out` is [B, T, h_q, d].
    """
    at_rows, splits = queries_of(out, group, rows), top.shape[2]
    d = iota(pl.program_id(0) * width, width)
    split = iota(0, padded(splits))
    there = (split < splits)[:, None] & at_rows.there[None]
    at = (at_rows.b, at_rows.h, split[:, None], at_rows.row[None])
    peaks = pltriton.load(top.at[at], mask=there, other=MASKED)
    weight = jnp.exp(peaks - peaks.max(axis=0)[None])
    mass = (pltriton.load(total.at[at], mask=there, other=0.0) * weight).sum(axis=0)
    inside = (d < out.shape[3])[None]
    parts = pltriton.load(
        partial.at[at_rows.b, at_rows.h, split[:, None, None], at_rows.row[None, :, None], d[None, None]],
        mask=there[:, :, None] & inside[None],
        other=0.0,
    )
    joined = (parts * weight[:, :, None]).sum(axis=0) / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[:, None]
    place = out.at[at_rows.b, at_rows.query[:, None], at_rows.head[:, None], d[None]]
    pltriton.store(place, joined.astype(out.dtype), mask=at_rows.there[:, None] & inside)


def merged(q: jax.Array, group: int, partial: tuple[jax.Array, ...], interpret: bool) -> jax.Array:
    """Return the attention of queries q from the partial results of all splits."""
    batch, _, heads, dim = q.shape
    splits, height = partial[1].shape[2:]
    rows = min(16, padded(height))
    width = max(1, min(padded(dim), MERGED // (padded(splits) * rows)))
    anywhere, result = pl.BlockSpec(memory_space=pl.ANY), jax.ShapeDtypeStruct(q.shape, q.dtype)
    return pl.pallas_call(
        functools.partial(merge_kernel, group=group, rows=rows, width=width),
        grid=(blocks(dim, width), blocks(height, rows), heads // group, batch),
        in_specs=[anywhere] * 3,
        out_specs=anywhere,
        out_shape=result,
        cost_estimate=estimate(flops=2 * partial[0].size, moved=bytes_of((partial, result))),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(*partial)
