"""The Triton kernel that completes the softmax over all programs that scored chunks.

Those programs write the logit of each query row and chunk, and their own maxima and sums. The grid here is (blocks of
chunks, queries, KV heads, batch). A program joins the maxima and sums, and writes the largest share of each chunk among
the query heads of the KV head. All logits are multiplied by log2(e).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.tiles import MASKED, blocks, iota, power_of_two
from pallas_kernels.unpack import exp2, log2

BLOCK = 1_024  # chunks of a program
STATISTICS = 16_384  # most numbers of a tile of maxima that a program holds


def joined(each: list[jax.Array], interpret: bool) -> jax.Array:
    """Return the logits of chunks from those of their landmarks: the logarithm of the sum of their masses.

    Args:
        each: float32 logits, one array for each landmark of a chunk. Chunks that are not candidates have MASKED, and
            keep it: a sum of masses changes such a number by less than its precision.
    """
    if len(each) == 1:
        return each[0]
    highest = functools.reduce(jnp.maximum, each)
    mass = functools.reduce(jnp.add, [exp2(logit - highest, interpret) for logit in each])
    return highest + log2(mass, interpret)


def finish_kernel(partial, candidates, out, *, group, interpret):  # type: ignore[no-untyped-def]
    """One program: compute the scores of a block of chunks for one query.

    Args:
        partial: three refs. `logits` is float32 [B, h_kv, R, n]. `top` is float32 [B, h_kv, programs, R], the largest
            logit of each program. `total` has the same shape, and holds the sum of exp2(logit - top) of each program.
        candidates: bool [B, h_kv, n].
        out: float32 [B, h_kv, T, n].
        group: number of query heads of a KV head.
    """
    logits, top, total = partial
    j, t, h, b = (pl.program_id(axis) for axis in range(4))
    head = iota(0, 1 << (group - 1).bit_length())
    row, row_there = t * group + head, head < group
    program = iota(0, power_of_two(top.shape[2]))
    there = (program < top.shape[2])[:, None] & row_there[None]
    at = (b, h, program[:, None], row[None])
    peaks = pltriton.load(top.at[at], mask=there, other=MASKED)
    peak = peaks.max(axis=0)
    sums = pltriton.load(total.at[at], mask=there, other=0.0) * exp2(peaks - peak[None], interpret)
    share = jnp.where(row_there, 1.0 / jnp.maximum(sums.sum(axis=0), jnp.finfo(jnp.float32).tiny), 0.0)
    chunk = iota(j * BLOCK, BLOCK)
    inside = chunk < logits.shape[3]
    both = row_there[:, None] & inside[None]
    logit = pltriton.load(logits.at[b, h, row[:, None], chunk[None]], mask=both, other=MASKED)
    candidate = pltriton.load(candidates.at[b, h, chunk], mask=inside, other=False)
    score = (exp2(logit - peak[:, None], interpret) * share[:, None]).max(axis=0)
    pltriton.store(out.at[b, h, t, chunk], jnp.where(candidate, score, -1.0), mask=inside)


def finish(
    partial: tuple[jax.Array, jax.Array, jax.Array], candidates: jax.Array, group: int, *, interpret: bool
) -> jax.Array:
    """Return the scores of chunks, float32 [B, h_kv, T, n], from the results of all programs.

    The arguments are those of `finish_kernel`; `partial` is (logits, top, total).

    Raises:
        NotImplementedError: the maxima of all programs do not fit into the registers of one program.
    """
    logits, top, _ = partial
    batch, heads, rows, count = logits.shape
    if power_of_two(top.shape[2]) * (1 << (group - 1).bit_length()) > STATISTICS:
        raise NotImplementedError(f"chunk_scores: the kernel takes fewer chunks than {count} for {group} query heads")
    anywhere, result = (
        pl.BlockSpec(memory_space=pl.ANY),
        jax.ShapeDtypeStruct((batch, heads, rows // group, count), jnp.float32),
    )
    return pl.pallas_call(
        functools.partial(finish_kernel, group=group, interpret=interpret),
        grid=(blocks(count, BLOCK), rows // group, heads, batch),
        in_specs=[(anywhere,) * 3, anywhere],
        out_specs=anywhere,
        out_shape=result,
        cost_estimate=estimate(
            flops=3 * logits.size, moved=bytes_of((partial, candidates, result)), exponentials=logits.size
        ),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="finish_scores",
    )(partial, candidates)
