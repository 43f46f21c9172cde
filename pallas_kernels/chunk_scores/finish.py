"""The Triton kernel that completes the softmax over all programs that scored chunks.

Those programs write a number for each query row and chunk: a logit, or a mass relative to the largest logit of its
program. They also write the maximum and the sum of each program. The grid here is (blocks of chunks, queries, KV heads,
batch). A program joins the maxima and sums, and writes the largest share of each chunk among the query heads of the KV
head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.tiles import MASKED, blocks, iota, power_of_two

BLOCK = 1_024  # chunks of a program
STATISTICS = 16_384  # most numbers of a tile of maxima that a program holds


def finish_kernel(partial, candidates, out, *, group, width, logits):  # type: ignore[no-untyped-def]
    """One program: compute the scores of a block of chunks for one query.

    Args:
        partial: three refs. `numbers` is float32 [B, h_kv, R, n], logits or masses of query rows and chunks. `top` is
            float32 [B, h_kv, programs, R], the largest logit of each program. `total` has the same shape, and holds
            the sum of exp(logit - top) of each program.
        candidates: bool [B, h_kv, n].
        out: float32 [B, h_kv, T, n].
        group: number of query heads of a KV head.
        width: number of chunks that a program scored.
        logits: whether `numbers` are logits.
    """
    numbers, top, total = partial
    j, t, h, b = (pl.program_id(axis) for axis in range(4))
    head = iota(0, 1 << (group - 1).bit_length())
    row, row_there = t * group + head, head < group
    program = iota(0, power_of_two(top.shape[2]))
    there = (program < top.shape[2])[:, None] & row_there[None]
    at = (b, h, program[:, None], row[None])
    peaks = pltriton.load(top.at[at], mask=there, other=MASKED)
    peak = peaks.max(axis=0)
    sums = pltriton.load(total.at[at], mask=there, other=0.0) * jnp.exp(peaks - peak[None])
    mass = jnp.maximum(sums.sum(axis=0), jnp.finfo(jnp.float32).tiny)[:, None]
    chunk = iota(j * BLOCK, BLOCK)
    inside = chunk < numbers.shape[3]
    both = row_there[:, None] & inside[None]
    number = pltriton.load(numbers.at[b, h, row[:, None], chunk[None]], mask=both, other=MASKED if logits else 0.0)
    if logits:
        share = jnp.exp(number - peak[:, None]) / mass
    else:
        scored = lax.div(chunk, jnp.int32(width))
        own = pltriton.load(top.at[b, h, scored[None], row[:, None]], mask=both, other=MASKED)
        share = number * (jnp.exp(own - peak[:, None]) / mass)
    candidate = pltriton.load(candidates.at[b, h, chunk], mask=inside, other=False)
    score = jnp.where(row_there[:, None], share, 0.0).max(axis=0)
    pltriton.store(out.at[b, h, t, chunk], jnp.where(candidate, score, -1.0), mask=inside)


def finish(
    partial: tuple[jax.Array, jax.Array, jax.Array],
    candidates: jax.Array,
    group: int,
    width: int,
    *,
    logits: bool,
    interpret: bool,
) -> jax.Array:
    """Return the scores of chunks, float32 [B, h_kv, T, n], from the results of all programs.

    The arguments are those of `finish_kernel`; `partial` is (numbers, top, total).

    Raises:
        NotImplementedError: the maxima of all programs do not fit into the registers of one program.
    """
    numbers, top, _ = partial
    batch, heads, rows, count = numbers.shape
    if power_of_two(top.shape[2]) * (1 << (group - 1).bit_length()) > STATISTICS:
        raise NotImplementedError(f"chunk_scores: the kernel takes fewer chunks than {count} for {group} query heads")
    anywhere, result = (
        pl.BlockSpec(memory_space=pl.ANY),
        jax.ShapeDtypeStruct((batch, heads, rows // group, count), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(finish_kernel, group=group, width=width, logits=logits),
        grid=(blocks(count, BLOCK), rows // group, heads, batch),
        in_specs=[(anywhere,) * 3, anywhere],
        out_specs=anywhere,
        out_shape=result,
        cost_estimate=estimate(
            flops=3 * numbers.size, moved=bytes_of((partial, candidates, result)), exponentials=numbers.size
        ),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="finish_scores",
    )(partial, candidates)
