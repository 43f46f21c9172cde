"""Scores of chunks that have several landmarks, landmarks of few bits, or landmarks with a spread, by a Triton kernel.

Each landmark is read once, for all queries of its KV head. Where `pallas` writes a logit a landmark, this writes the
mass of a chunk beside the largest logit of its program, which is what the softmax over all programs still needs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.codes import code_at, signed
from pallas_kernels.tiles import LEAST, MASKED, blocks, can_do, dot, group_rows, iota, row_block, spans, warps

MOST_PARTS = 16  # landmarks of a chunk: a tile of logits each


def chunk_masses_kernel(  # type: ignore[no-untyped-def]
    q, landmarks, candidates, scales, spreads, masses, top, total, *, scale, rows, block, bits
):  # fmt: skip
    """One program: `rows` query rows and all landmarks of `block` chunks."""
    j, i, h, b = (pl.program_id(axis) for axis in range(4))
    row, chunk = iota(i * rows, rows), iota(j * block, block)
    row_there, chunk_there = row < q.shape[2], chunk < candidates.shape[2]
    candidate = pltriton.load(candidates.at[b, h, chunk], mask=chunk_there, other=False)[None]
    queries = query_tiles(q, landmarks, row, row_there, b, h, bits)
    parts, logits = landmarks.shape[2] // candidates.shape[2], []
    for part in range(parts):
        number = chunk * parts + part
        product = scale * products(queries, landmarks, scales, number, chunk_there, b, h, bits)
        if spreads is not None:
            product += half_variance(queries, spreads, number, chunk_there, b, h, scale)
        logits.append(jnp.where(candidate, product, MASKED))
    peak = functools.reduce(jnp.maximum, [tile.max(axis=1) for tile in logits])
    mass = sum(jnp.where(candidate, jnp.exp(tile - peak[:, None]), 0.0) for tile in logits)
    assert not isinstance(mass, int)
    pltriton.store(masses.at[b, h, row[:, None], chunk[None]], mass, mask=row_there[:, None] & chunk_there[None])
    pltriton.store(top.at[b, h, j, row], peak, mask=row_there)
    pltriton.store(total.at[b, h, j, row], mass.sum(axis=1), mask=row_there)


def places_of(bits: int | None) -> int:
    """Numbers in a byte, or the one in an element."""
    return 1 if bits is None else 8 // bits


def columns_of(landmarks: Any, *arrays: Any) -> tuple[tuple[int, int], ...]:
    """The elements of a landmark in tiles, each of which is multiplied with as many columns of q for every place."""
    return spans(landmarks.shape[3], 32 if any(x.dtype == jnp.float32 for x in arrays) else 64)


def query_tiles(
    q: Any, landmarks: Any, row: jax.Array, there: jax.Array, b: jax.Array, h: jax.Array, bits: int | None
) -> list[list[jax.Array]]:
    """Query columns that meet each tile of elements of a landmark, place by place."""
    size, found = landmarks.shape[3], []
    for start, width in columns_of(landmarks, q, landmarks):
        at = iota(start, width)
        mask = there[:, None] & (at < size)[None]
        found.append([
            pltriton.load(q.at[b, h, row[:, None], (place * size + at)[None]], mask=mask, other=0.0)
            for place in range(places_of(bits))
        ])  # fmt: skip
    return found


def products(
    queries: list[list[jax.Array]], landmarks: Any, scales: Any, number: jax.Array, there: jax.Array, b: jax.Array,
    h: jax.Array, bits: int | None,
) -> jax.Array:  # fmt: skip
    """Float32 products of the query rows with landmarks [n]."""
    size, out = landmarks.shape[3], jnp.zeros((queries[0][0].shape[0], number.shape[0]), jnp.float32)
    spanned = columns_of(landmarks, queries[0][0], landmarks)
    for (start, width), tiles in zip(spanned, queries, strict=True):
        at = iota(start, width)
        mask = there[:, None] & (at < size)[None]
        other = 0.0 if bits is None else 0
        rows = pltriton.load(landmarks.at[b, h, number[:, None], at[None]], mask=mask, other=other)
        if bits is None:
            out += dot(tiles[0], rows, transposed=True)
            continue
        packed = lax.convert_element_type(rows, jnp.int32)
        for place, tile in enumerate(tiles):
            out += dot(tile, signed(code_at(packed, place, bits), bits).astype(tile.dtype), transposed=True)
    if scales is not None:
        step = pltriton.load(scales.at[b, h, number, jnp.zeros_like(number)], mask=there, other=0.0)
        out *= step.astype(jnp.float32)[None]
    return out


def half_variance(
    queries: list[list[jax.Array]], spreads: Any, number: jax.Array, there: jax.Array, b: jax.Array, h: jax.Array,
    scale: float,
) -> jax.Array:  # fmt: skip
    """Half the variance of the scaled products of the query rows with the keys behind landmarks [n]."""
    squares = [(tile.astype(jnp.float32) ** 2).sum(axis=1) for tiles in queries for tile in tiles]
    length = functools.reduce(jnp.add, squares) * (scale**2 / 2)
    spread = pltriton.load(spreads.at[b, h, number, jnp.zeros_like(number)], mask=there, other=0.0)
    return length[:, None] * (spread.astype(jnp.float32) ** 2)[None]


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def chunk_scores(
    q: jax.Array, landmarks: jax.Array, candidates: jax.Array, landmark_scale: jax.Array | None,
    spread: jax.Array | None, scale: float, interpret: bool,
) -> jax.Array:  # fmt: skip
    """See `pallas_kernels.chunk_scores`.

    Raises:
        NotImplementedError: heads wider than 256, many landmarks a chunk, an empty array, an unusual dtype.
    """
    batch, kv_heads, count = candidates.shape
    parts, bits = landmarks.shape[2] // count, None
    if parts > MOST_PARTS:
        raise NotImplementedError(f"chunk_scores: the kernel takes up to {MOST_PARTS} landmarks a chunk, got {parts}")
    if landmark_scale is None:
        can_do("chunk_scores", q.shape[3], q, landmarks)
        multiplied: tuple[jax.Array, ...] = (q, landmarks)
    else:
        bits, multiplied = 8 * landmarks.shape[3] // q.shape[3], (q,)
        can_do("chunk_scores", q.shape[3], q, landmark_scale, packed=(landmarks,))
    queries = group_rows(q, kv_heads)
    height, rows = queries.shape[2], row_block(queries.shape[2], *multiplied)
    most = 128 if all(x.dtype != jnp.float32 for x in multiplied) else 64
    block = max(LEAST, 1 << ((most // parts).bit_length() - 1)) if parts < most else LEAST
    programs = blocks(count, block)
    operands = (queries, landmarks, candidates, landmark_scale, spread)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    masses, top, total = pl.pallas_call(
        functools.partial(chunk_masses_kernel, scale=scale, rows=rows, block=block, bits=bits),
        grid=(programs, blocks(height, rows), kv_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 3,
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((batch, kv_heads, height, count), *[(batch, kv_heads, programs, height)] * 2)
        ],
        compiler_params=pltriton.CompilerParams(num_warps=warps(q.shape[3], *multiplied), num_stages=1),
        interpret=interpret,
        name="chunk_masses",
    )(*operands)
    share = jnp.exp(top - top.max(axis=2, keepdims=True))
    whole = jnp.maximum((total * share).sum(axis=2, keepdims=True), jnp.finfo(jnp.float32).tiny)
    share = jnp.repeat((share / whole).swapaxes(2, 3), block, axis=3)[..., :count]
    scores = (masses * share).reshape(batch, kv_heads, q.shape[1], -1, count).max(axis=3)
    return jnp.where(candidates[:, :, None], scores, -1.0)
