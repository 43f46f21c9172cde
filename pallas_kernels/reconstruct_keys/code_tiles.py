"""Tiles of keys out of packed codes, inside a kernel: a tile of bytes is read once and shifted once for each place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.codes import code_at, middle, parts_of
from pallas_kernels.tiles import dot, iota, spans

Places = list[tuple[jax.Array, jax.Array]]  # head columns [1, n] of a tile, and which of them there are


def code_tiles(codes: Any, tokens: Any, places: Places, b: jax.Array, h: jax.Array) -> list[jax.Array]:
    """The tokens' keys before RoPE, a float32 tile a place; codes holds the kernel's refs."""
    tiles = channels if codes.right is None else coefficients
    made = tiles(codes, tokens, places, b, h)
    means = [pltriton.load(codes.mean.at[b, h, column], mask=inside, other=0.0) for column, inside in places]
    return [tile + mean.astype(jnp.float32) for tile, mean in zip(made, means, strict=True)]


def coefficients(codes: Any, tokens: Any, places: Places, b: jax.Array, h: jax.Array) -> list[jax.Array]:
    """Coefficients of the tokens times the columns of right."""
    out = [jnp.zeros((tokens.place.shape[0], column.shape[1]), jnp.float32) for column, _ in places]
    most = 32 if codes.right.dtype == jnp.float32 else 64  # as `tiles.summed`
    for part in parts_of(codes.profile):
        for start, width in spans(part.size, most):
            byte = iota(start, width)
            inside = byte < part.size
            packed = load_bytes(codes, tokens, part.byte + byte[None], inside[None], b, h)
            for place in range(8 // part.bits):
                r = part.column + place * part.size + byte
                step = pltriton.load(codes.step.at[b, r], mask=inside, other=0.0)  # 0 past the end: no coefficient
                found = middle(code_at(packed, place, part.bits), part.bits) * step[None]
                found = found.astype(codes.right.dtype)
                for tile, (column, wanted) in enumerate(places):
                    mask = inside[:, None] & wanted
                    basis = pltriton.load(codes.right.at[b, h, r[:, None], column], mask=mask, other=0.0)
                    out[tile] += dot(found, basis)
    return out


def channels(codes: Any, tokens: Any, places: Places, b: jax.Array, h: jax.Array) -> list[jax.Array]:
    """Channels in four bits: byte j of a head has the columns j and d / 2 + j."""
    out, size = [], codes.mean.shape[2] // 2
    for column, wanted in places:
        high = column >= size
        packed = load_bytes(codes, tokens, jnp.where(high, column - size, column), wanted, b, h)
        code = jnp.where(high, code_at(packed, 1, 4), code_at(packed, 0, 4))
        step = pltriton.load(codes.step.at[b, h, column], mask=wanted, other=0.0)
        out.append(middle(code, 4) * step)
    return out


def load_bytes(
    codes: Any, tokens: Any, byte: jax.Array, inside: jax.Array, b: jax.Array, h: jax.Array
) -> jax.Array:  # fmt: skip
    """Bytes [1, n] of the tokens' rows, of the prompt or of the tail, int32 [tokens, n]; 0 where there are none."""
    at, there, later = tokens.within[:, None] * codes.width + byte, tokens.there[:, None], tokens.later[:, None]

    def load(source: Any, unit: jax.Array, mask: jax.Array) -> jax.Array:
        lead = (b, h) if len(source.shape) == 4 else (b,)
        rows = pltriton.load(source.at[(*lead, unit[:, None], at)], mask=mask & inside, other=0)
        return lax.convert_element_type(rows, jnp.int32)

    rows = load(codes.left, tokens.unit, there & ~later)
    return rows if codes.tail is None else rows | load(codes.tail, tokens.tail_row, there & later)
