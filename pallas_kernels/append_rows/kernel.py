"""The Triton kernel that appends tokens. One program handles one KV head of one token, with the queries of the head.

The buffers are operands and results at once, so all other slots stay as they are. The grid is (KV heads, tokens,
batch).

The kernel reads queries, keys and values from one array, as a model's merged projection writes them. XLA simplifies
the concatenation of three slices of one product to the product itself. So the arrays are not copied.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.append_rows.operands import NewTokens
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.tiles import can_do, iota, spans


class Joined(NamedTuple):
    """The fields of NewTokens, with one array for queries, keys and values.

    Attributes:
        heads: [B, T, h_q + 2 h_kv, d]: the queries, then the keys, then the values.
        cos, sin, slots, valid, first: as in NewTokens.
    """

    heads: Any
    cos: Any
    sin: Any
    slots: Any
    valid: Any
    first: Any


def append_rows_kernel(k, v, new, *out, factor, unit):  # type: ignore[no-untyped-def]
    """One program: rotate the queries and the key of one KV head and one token, and write the key and the value.

    `out` are the queries, keys and values. k and the keys are the same buffer, and so are v and the values. Nothing is
    read from k and v.
    """
    q_out, k_out, v_out = out
    h, t, b = (pl.program_id(axis) for axis in range(3))
    kv_heads, queries, dim = k.shape[1], q_out.shape[2], k.shape[3]
    group = queries // kv_heads
    member = iota(0, 1 << (group - 1).bit_length())[:, None]
    slot = pltriton.load(new.slots.at[b, t])
    if new.first is not None:
        slot -= pltriton.load(new.first.at[b]) * unit
    written = pltriton.load(new.valid.at[b, t]) & (slot >= 0) & (slot < k.shape[2])
    rows = ((q_out, h * group + member, member < group), (k_out, queries + h, written))

    def load(head: jax.Array, column: jax.Array, mask: jax.Array) -> jax.Array:
        return pltriton.load(new.heads.at[b, t, head, column], mask=mask, other=0.0)

    def store(target: Any, head: jax.Array, column: jax.Array, mask: jax.Array, row: jax.Array) -> None:
        place = target.at[b, t, head, column] if target is q_out else target.at[b, h, slot, column]
        pltriton.store(place, row.astype(target.dtype), mask=mask)

    half = new.cos.shape[2]
    for start, width in spans(half):
        column = iota(start, width)[None]
        inside = column < half
        cos, sin = (pltriton.load(x.at[b, t, column], mask=inside, other=0.0) for x in (new.cos, new.sin))
        for target, head, there in rows:
            mask = there & inside
            left, right = (load(head, at, mask).astype(jnp.float32) for at in (column, half + column))
            by = factor if target is q_out else 1.0
            x, y = (cos, sin) if by == 1 else (cos * by, sin * by)
            store(target, head, column, mask, (left * x - right * y).astype(new.heads.dtype))
            store(target, head, half + column, mask, (right * x + left * y).astype(new.heads.dtype))
    for first, parts in ((2 * half, rows), (0, [(v_out, queries + kv_heads + h, written)])):
        for start, width in spans(dim - first):
            column = first + iota(start, width)[None]
            for target, head, there in parts:
                mask = there & (column < dim)
                store(target, head, column, mask, load(head, column, mask))


@functools.partial(jax.jit, static_argnames=("factor", "unit", "interpret"))
def append_rows(
    k: jax.Array, v: jax.Array, new: NewTokens, factor: float, unit: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.append_rows`.

    Raises:
        NotImplementedError: heads are wider than 256, an array is empty, or a dtype is not float32, bfloat16 or
            float16.
    """
    batch, tokens, heads, dim = new.k.shape
    can_do("append_rows", dim, k, new.q)
    # The reshapes let XLA see that the slices of a product are put together again.
    flat = [x.reshape(batch, tokens, -1) for x in (new.q, new.k, new.v)]
    joined = Joined(jnp.concatenate(flat, axis=2).reshape(batch, tokens, -1, dim), *new[3:])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = (k, v, joined)
    written = bytes_of(new.q) + 2 * new.k.size * k.dtype.itemsize
    rotated = (new.q.shape[2] + heads) * new.cos.size
    queries, keys, values = pl.pallas_call(
        functools.partial(append_rows_kernel, factor=factor, unit=unit),
        grid=(heads, tokens, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 3,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (new.q, k, v)],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        cost_estimate=estimate(flops=6 * rotated, moved=bytes_of(joined) + written),
        input_output_aliases={0: 1, 1: 2},
        interpret=interpret,
        name="append_rows",
    )(*operands)
    return queries, keys, values
