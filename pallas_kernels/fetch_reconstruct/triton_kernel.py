"""The kernel of `fetch_reconstruct` in Triton itself: only `triton_twin` imports this, and triton, when it is used."""

import triton
import triton.language as tl

from pallas_kernels import rotation

# A Triton function may read such globals alone.
TURN_0, TURN_1, TURN_2, TURN_3 = map(tl.constexpr, rotation.TURN)
QUARTER_0, QUARTER_1 = map(tl.constexpr, rotation.QUARTER)
SIN_0, SIN_1, SIN_2 = map(tl.constexpr, rotation.SIN)
COS_0, COS_1, COS_2 = map(tl.constexpr, rotation.COS)


@triton.jit
def cos_sin_of(angle):  # type: ignore[no-untyped-def]
    """As `rotation.cos_sin_of`."""
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    angle = (((angle - turns * TURN_0) - turns * TURN_1) - turns * TURN_2) - turns * TURN_3
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    angle = (angle - quarter * QUARTER_0) - quarter * QUARTER_1
    square = angle * angle
    sin = angle + angle * square * (SIN_0 + square * (SIN_1 + square * SIN_2))
    cos = 1 - 0.5 * square + square * square * (COS_0 + square * (COS_1 + square * COS_2))
    odd, half = tl.abs(quarter) == 1, tl.abs(quarter) == 2
    first, second = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    first = tl.where(half | (quarter == 1), -first, first)
    return first, tl.where(half | (quarter == -1), -second, second)


@triton.jit
def fetch_reconstruct_kernel(  # type: ignore[no-untyped-def]
    values, left, right, ids, inverse, kept, stay, tail, tail_unit, values_tail, keys, rows,
    HEADS: tl.constexpr, UNITS: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, KEPT: tl.constexpr, TAIL: tl.constexpr,
    VALUES_TAIL: tl.constexpr, TOKENS: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one KV head. KEPT: kept is there, as the buffer of rows. TAIL: its rows, or 0."""
    # 64 bits from here on: what these multiply may pass 2**31 elements.
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * HEADS + h
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < COUNT * CHUNK
    chosen, within = token // CHUNK, token % CHUNK
    unit = tl.load(ids + head * COUNT + chosen, mask=there, other=0)
    unit = tl.minimum(tl.maximum(unit, 0), UNITS + TAIL - 1)
    later = unit >= UNITS
    tail_row = tl.where(later, unit - UNITS, 0)
    source = unit
    if TAIL > 0:
        source = tl.where(later, tail_row + tl.load(tail_unit + b), unit)
    position = source * CHUNK + within
    unit = tl.where(later, 0, unit).to(tl.int64)
    tail_row = tail_row.to(tl.int64)

    # The host first: its loads are under way while the keys are rebuilt.
    missed = there
    if KEPT:
        missed = there & (tl.load(stay + head * COUNT + chosen, mask=there, other=1) == 0)
    d = tl.arange(0, DIM_BLOCK)
    inside = (d < DIM)[None, :]
    at = within[:, None] * DIM + d[None, :]
    early = (missed & (unit >= 0) & (later == 0))[:, None] & inside
    value = tl.load(values + (head * UNITS + unit)[:, None] * (CHUNK * DIM) + at, mask=early, other=0.0)
    if TAIL > 0:
        late = (missed & later)[:, None] & inside
        from_tail = tl.load(
            values_tail + (head * VALUES_TAIL + tail_row)[:, None] * (CHUNK * DIM) + at, mask=late, other=0.0
        )
        value = tl.where(late, from_tail, value)

    column, rest = tl.arange(0, HALF_BLOCK), 2 * HALF + tl.arange(0, REST_BLOCK)
    first = tl.zeros((TOKENS, HALF_BLOCK), tl.float32)
    second = tl.zeros((TOKENS, HALF_BLOCK), tl.float32)
    third = tl.zeros((TOKENS, REST_BLOCK), tl.float32)
    for start in range(0, RANK, RANK_BLOCK):
        r = start + tl.arange(0, RANK_BLOCK)
        in_row = within[:, None] * RANK + r[None, :]
        mask = (there & (later == 0))[:, None] & (r < RANK)[None, :]
        part = tl.load(left + (b * UNITS + unit)[:, None] * (CHUNK * RANK) + in_row, mask=mask, other=0.0)
        if TAIL > 0:
            mask = (there & later)[:, None] & (r < RANK)[None, :]
            part += tl.load(tail + (b * TAIL + tail_row)[:, None] * (CHUNK * RANK) + in_row, mask=mask, other=0.0)
        basis = right + (head * RANK + r)[:, None] * DIM
        mask = (r < RANK)[:, None] & (column < HALF)[None, :]
        one = tl.load(basis + column[None, :], mask=mask, other=0.0)
        first = tl.dot(part, one, first, input_precision="ieee")
        one = tl.load(basis + HALF + column[None, :], mask=mask, other=0.0)
        second = tl.dot(part, one, second, input_precision="ieee")
        if 2 * HALF < DIM:
            mask = (r < RANK)[:, None] & (rest < DIM)[None, :]
            one = tl.load(basis + rest[None, :], mask=mask, other=0.0)
            third = tl.dot(part, one, third, input_precision="ieee")
    mask = there[:, None] & (column < HALF)[None, :]
    c, s = cos_sin_of(
        position.to(tl.float32)[:, None] * tl.load(inverse + column, mask=column < HALF, other=0.0)[None, :]
    )
    out = (head * (COUNT * CHUNK) + token)[:, None] * DIM
    kind = keys.dtype.element_ty
    tl.store(keys + out + column[None, :], (first * c - second * s).to(kind), mask=mask)
    tl.store(keys + out + HALF + column[None, :], (second * c + first * s).to(kind), mask=mask)
    if 2 * HALF < DIM:
        tl.store(keys + out + rest[None, :], third.to(kind), mask=there[:, None] & (rest < DIM)[None, :])

    tl.store(rows + out + d[None, :], value, mask=missed[:, None] & inside)
