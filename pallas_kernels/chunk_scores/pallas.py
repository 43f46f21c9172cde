"""Scores of chunks by a Triton kernel that reads every landmark once, for all queries of its KV head."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.tiles import MASKED, blocks, can_do, dot, group_rows, iota, row_block, summed, warps


def chunk_logits_kernel(q, landmarks, candidates, logits, top, total, *, scale, rows, block):  # type: ignore[no-untyped-def]
    """One program: the logits of `rows` query rows and `block` landmarks, their maxima and sums of exponentials."""
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    row, column = iota(i * rows, rows), iota(j * block, block)
    row_there, column_there = row < q.shape[2], column < landmarks.shape[2]
    candidate = pltriton.load(candidates.at[b, h, column], mask=column_there, other=False)
    product = jnp.zeros((rows, block), jnp.float32)
    for start, width in summed(q.shape[3], q, landmarks):
        d = iota(start, width)
        there = (d < q.shape[3])[None]
        left = pltriton.load(q.at[b, h, row[:, None], d[None]], mask=row_there[:, None] & there, other=0.0)
        right = pltriton.load(
            landmarks.at[b, h, column[:, None], d[None]], mask=column_there[:, None] & there, other=0.0
        )
        product += dot(left, right, transposed=True)
    product = jnp.where(candidate[None], product * scale, MASKED)
    peak = product.max(axis=1)
    weight = jnp.where(candidate[None], jnp.exp(product - peak[:, None]), 0.0)
    pltriton.store(logits.at[b, h, row[:, None], column[None]], product, mask=row_there[:, None] & column_there[None])
    pltriton.store(top.at[b, h, j, row], peak, mask=row_there)
    pltriton.store(total.at[b, h, j, row], weight.sum(axis=1), mask=row_there)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def chunk_scores(q: jax.Array, landmarks: jax.Array, candidates: jax.Array, scale: float, interpret: bool) -> jax.Array:
    """See `pallas_kernels.chunk_scores`.

    Raises:
        NotImplementedError: heads wider than 256, an empty array, an unusual dtype.
    """
    can_do("chunk_scores", q.shape[3], q, landmarks)
    batch, kv_heads, count = candidates.shape
    queries = group_rows(q, kv_heads)
    height, rows = queries.shape[2], row_block(queries.shape[2], q, landmarks)
    block = 128 if queries.dtype == landmarks.dtype != jnp.float32 else 64  # float32 tiles fill the registers sooner
    parts = blocks(count, block)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    logits, top, total = pl.pallas_call(
        functools.partial(chunk_logits_kernel, scale=scale, rows=rows, block=block),
        grid=(parts, blocks(height, rows), kv_heads, batch),
        in_specs=[anywhere] * 3,
        out_specs=[anywhere] * 3,
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((batch, kv_heads, height, count), *[(batch, kv_heads, parts, height)] * 2)
        ],
        compiler_params=pltriton.CompilerParams(num_warps=warps(q.shape[3], q, landmarks), num_stages=1),
        interpret=interpret,
        name="chunk_logits",
    )(queries, landmarks, candidates)
    peak = top.max(axis=2)
    mass = (total * jnp.exp(top - peak[:, :, None])).sum(axis=2)
    mass = jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)[..., None]
    scores = (jnp.exp(logits - peak[..., None]) / mass).reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(candidates[:, :, None], scores, -1.0)
