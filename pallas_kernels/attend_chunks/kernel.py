"""The Triton kernel that rebuilds keys, rotates them and attends to them, all in registers.

The grid is (blocks of tokens, KV heads, batch), as in `pallas_kernels.reconstruct_keys`. The keys of a program's tokens
go from the registers, in which they were rotated, into the product with the queries. Packed values are read where they
lie, and are unpacked for the product with the weights. Each program writes the sum of its weighted values, the sum of
its weights, and its largest score. XLA then joins the programs of a head.

A product needs 16 rows, so up to 16 query heads of a KV head cost the same.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.fetch_reconstruct.kernel import cost_of_fetch, load_values
from pallas_kernels.fetch_reconstruct.operands import HostRows
from pallas_kernels.reconstruct_keys.kernel import Form, form_of, load_some, rotated_tiles, tokens_of
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.tiles import LEAST, LOG2_E, MASKED, blocks, can_do, dot, group_rows, iota, spans
from pallas_kernels.unpack import exp2, scaled_numbers


def attend_chunks_kernel(q, values, keys, *results, scale, form, interpret):  # type: ignore[no-untyped-def]
    """One program: attend to `form.tokens` tokens of one KV head.

    Args:
        q: the query rows of each KV head [B, h_kv, R, d].
        values: the refs of HostRows.
        keys: the refs of ChosenKeys.
        results: three refs of float32: sums of weighted values [B, h_kv, programs, R, d], sums of weights, and largest
            scores times log2(e), both [B, h_kv, programs, R].
        scale: factor of the scores.
        form: the form of the kernel.
        interpret: as in `pallas_kernels.unpack`.
    """
    (out, total, top), (j, h, b) = results, (pl.program_id(axis) for axis in range(3))
    count, dim, row = form.tokens, keys.dim, iota(0, LEAST)
    asked = row < q.shape[2]
    tokens = tokens_of(keys, b, h, j * count, count)
    scores = jnp.zeros((count, LEAST), jnp.float32)
    for column, inside, tile in rotated_tiles(keys, tokens, b, h, form, interpret):
        column = column[0]
        mask = asked[None] if inside is None else asked[None] & inside[0][:, None]
        mask = jnp.broadcast_to(mask, (column.size, LEAST))
        queries = load_some(q, (b, h, row[None], column[:, None]), mask)
        flat = tile.astype(keys.dtype).reshape(count, -1)
        if inside is not None:
            flat = jnp.where(inside, flat, jnp.zeros((), flat.dtype))
        scores += dot(flat, queries)
    there = jnp.broadcast_to(tokens.there, tokens.position.shape).reshape(count)[:, None]
    scores = jnp.where(there, scores * (scale * LOG2_E), MASKED)
    largest = scores.max(axis=0)
    weights = jnp.where(there, exp2(scores - largest[None], interpret), 0.0)
    tiles, scales = load_values(values, keys, tokens, b, h)
    width, turned = values.token_width(dim), weights.astype(values.value_dtype).T
    for (start, block), words in zip(spans(width), tiles, strict=True):
        for place in range(values.places):
            value = words
            if scales is not None:
                value = scaled_numbers(words, place, values.bits, scales, values.value_dtype, interpret)
            column, end = iota(start, block)[None], min(width, dim - place * width)
            mask = jnp.broadcast_to(asked[:, None] & (column < end), (LEAST, block))
            at = out.at[b, h, j, row[:, None], place * width + column]
            pltriton.store(at, dot(turned, value.reshape(count, block)), mask=mask)
    pltriton.store(total.at[b, h, j, row], weights.sum(axis=0), mask=asked)
    pltriton.store(top.at[b, h, j, row], largest, mask=asked)


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "form"))
def attend_chunks(
    q: jax.Array, values: HostRows, keys: ChosenKeys, scale: float, interpret: bool, form: Form | None = None
) -> jax.Array:
    """See `pallas_kernels.attend_chunks`. If `form` is None, it is that of `form_of`, but with twice the tokens.

    Raises:
        NotImplementedError: heads are wider than 256, a KV head has more than 16 query heads, an array is empty, or a
            dtype is not float32, bfloat16 or float16.
    """
    sources = tuple(x for x in (values.prompt, values.tail) if x is not None)
    floating, packed = (sources, keys.packed) if values.bits is None else ((), (*keys.packed, *sources))
    can_do("attend_chunks", keys.dim, q, *keys.multiplied, *floating, packed=packed)
    batch, heads, tokens, dim = keys.out_shape
    rows = group_rows(q, heads)
    if rows.shape[2] > LEAST:
        raise NotImplementedError(f"attend_chunks: the kernel takes up to {LEAST} queries a head, got {rows.shape[2]}")
    if form is None:
        form = form_of(keys)
        form = form._replace(tokens=2 * form.tokens)
    anywhere, count = pl.BlockSpec(memory_space=pl.ANY), blocks(tokens, form.tokens)
    lead = (batch, heads, count, rows.shape[2])
    operands = rows, values, keys
    out, total, top = pl.pallas_call(
        functools.partial(attend_chunks_kernel, scale=scale, form=form, interpret=interpret),
        grid=(count, heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 3,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*lead, dim), lead, lead)],
        compiler_params=pltriton.CompilerParams(num_warps=form.warps, num_stages=form.stages),
        cost_estimate=cost_of_fetch(values, None, keys),
        interpret=interpret,
        name="attend_chunks",
    )(*operands)
    share = jnp.exp2(top - top.max(axis=2, keepdims=True))
    summed = (out * share[..., None]).sum(axis=2) / (total * share).sum(axis=2)[..., None]
    return summed.reshape(q.shape).astype(q.dtype)
