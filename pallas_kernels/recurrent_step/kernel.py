"""The Triton kernel of recurrent_step. One program handles some columns of the state of one value head of one row.

The columns of S [d_k, d_v] do not depend on each other. A program reads its columns once, and writes them only if
pending tokens are folded into them. What the new token reads, it reads from the old S and from all pending tokens, so
the fold changes no output. The grid is (blocks of columns, value heads, batch).

All programs of a key head convolve its query and key. The first of them writes them. It writes to slots that no program
reads: the slot of the new token holds no pending token, and no input that the convolution sees.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.recurrent_step.operands import HeldRows, NextToken
from pallas_kernels.tiles import DTYPES, LEAST, iota

BLOCK = 64  # columns of a program
WARPS = 4
MOST_SLOTS = 64  # of the ring of pending tokens
MOST_DIM = 256


class Joined(NamedTuple):
    """The fields of NextToken without the axis of tokens, and with one array for the inputs of the convolution.

    Attributes:
        inputs: [B, 2 n_k d_k + n_v d_v]: of the queries, then of the keys, then of the values.
        gates: [B, 2 n_v]: log_decay, then beta.
        q_taps, k_taps, v_taps, skip, lengths, folded, folds: as in NextToken.
        valid: [B].
    """

    inputs: Any
    gates: Any
    q_taps: Any
    k_taps: Any
    v_taps: Any
    skip: Any
    lengths: Any
    folded: Any
    folds: Any
    valid: Any


class Program(NamedTuple):
    """What one program handles.

    Attributes:
        row, head, key_head: its row, its value head, and the key head of it.
        keys: int32 [d_k], all columns of a key.
        values: int32 [columns], its columns of a value.
        length: number of tokens of the row before the new one.
        of_key, of_value: bool [d_k] and [columns], whether it writes the new token's key and value.
    """

    row: jax.Array
    head: jax.Array
    key_head: jax.Array
    keys: jax.Array
    values: jax.Array
    length: jax.Array
    of_key: jax.Array
    of_value: jax.Array


class Ring(NamedTuple):
    """The pending tokens of a value head.

    Attributes:
        position: int32 [R], the position of the token of each slot.
        log_decay: float32 [R], 0 for slots without a pending token.
        k: float32 [d_k, R], 0 for the same slots.
        u: float32 [R, columns], 0 for the same slots.
    """

    position: jax.Array
    log_decay: jax.Array
    k: jax.Array
    u: jax.Array

    @classmethod
    def load(cls, held: Any, at: Program, first: jax.Array) -> "Ring":
        """Load the tokens from position `first` on. `held` are refs, as HeldRows."""
        slots, last = held.k.shape[1], at.length - 1
        slot = iota(0, slots)
        position = last - lax.rem(last + slots - slot, jnp.int32(slots))
        pending = position >= first
        return cls(
            position,
            pltriton.load(held.log_decay.at[at.row, slot, at.head], mask=pending, other=0.0),
            pltriton.load(held.k.at[at.row, slot[None], at.key_head, at.keys[:, None]], mask=pending[None], other=0.0),
            pltriton.load(held.u.at[at.row, slot[:, None], at.head, at.values[None]], mask=pending[:, None], other=0.0),
        )

    def decayed(self) -> tuple[jax.Array, jax.Array]:
        """Return the decay since the fold, and u [R, columns] decayed since its token.

        Each sum of logarithms adds its own terms.
        """
        later = self.position[:, None] > self.position[None]
        since = jnp.exp(jnp.where(later, self.log_decay[:, None], 0.0).sum(axis=0))
        return jnp.exp(self.log_decay.sum(axis=0)), since[:, None] * self.u


def convolve(ring: Any, taps: Any, x: jax.Array, place: tuple[Any, ...], biases: bool) -> jax.Array:
    """Convolve columns x of the new token, and apply silu. `place` are a row's number and length, a head and columns.

    The token's slot of the ring is not read.
    """
    (row, length, head, column), count, slots = place, taps.shape[0] - biases, ring.shape[1]

    def tap(number: int) -> jax.Array:
        return pltriton.load(taps.at[jnp.full_like(column, number), head, column]).astype(jnp.float32)

    total = tap(count) if biases else jnp.zeros(column.shape, jnp.float32)
    for number in range(count - 1):
        seen = length - count + 1 + number
        before = ring.at[row, lax.rem(seen + slots, jnp.int32(slots)), head, column]
        value = pltriton.load(before, mask=jnp.full(column.shape, seen >= 0), other=0.0)
        total += value.astype(jnp.float32) * tap(number)
    total += x.astype(jnp.float32) * tap(count - 1)
    total = total.astype(x.dtype).astype(jnp.float32)
    return (total / (1 + jnp.exp(-total))).astype(x.dtype).astype(jnp.float32)


def token_of(held: Any, after: Any, new: Joined, at: Program, biases: bool) -> list[jax.Array]:
    """Return the new token's query [d_k], key [d_k] and value [columns] after the convolution, float32.

    Its inputs are written to their rings. `held` and `after` are refs, as HeldRows.
    """
    key_heads, key_dim = held.k.shape[2:]
    parts, first = [], 0
    of_key, of_value = (at.key_head, at.keys, at.of_key), (at.head, at.values, at.of_value)
    fields = zip(held[4:], after[4:], (new.q_taps, new.k_taps, new.v_taps), (of_key, of_key, of_value), strict=True)
    for ring, target, taps, (head, column, mask) in fields:
        x = pltriton.load(new.inputs.at[at.row, first + head * ring.shape[3] + column])
        parts.append(convolve(ring, taps, x, (at.row, at.length, head, column), biases))
        slot = lax.rem(at.length, jnp.int32(ring.shape[1]))
        pltriton.store(target.at[at.row, slot, head, column], x, mask=mask)
        first += key_heads * key_dim
    return parts


def recurrent_step_kernel(held, new, *out, biases, corrects, block):  # type: ignore[no-untyped-def]
    """One program: the new token of one row, for `block` columns of the state of one value head.

    `out` are the fields of HeldRows, in the buffers of `held`, and the outputs float32 [B, n_v, d_v].
    """
    j, h, b = (pl.program_id(axis) for axis in range(3))
    after, outputs = HeldRows(*out[:-1]), out[-1]
    (_, slots, key_heads, key_dim), value_heads = held.k.shape, held.u.shape[2]
    group = value_heads // key_heads
    keys, values, key = iota(0, key_dim), iota(j * block, block), lax.div(h, jnp.int32(group))
    length, folded, folds, valid = (pltriton.load(x.at[b]) for x in (new.lengths, new.folded, new.folds, new.valid))
    first_block = valid & (j == 0)
    of_key, of_value = jnp.full(keys.shape, first_block & (h == key * group)), jnp.full(values.shape, valid)
    at = Program(b, h, key, keys, values, length, of_key, of_value)
    place = b, h, keys[:, None], values[None]
    state = pltriton.load(held.state.at[place])
    ring = Ring.load(held, at, folded - folds)
    q, k, v = token_of(held, after, new, at, biases)
    if corrects:
        q, k = (x * lax.rsqrt((x * x).sum(axis=0) + 1e-6) for x in (q, k))
        q *= key_dim**-0.5
    log_decay, beta = (pltriton.load(new.gates.at[b, column]) for column in (h, value_heads + h))
    since_fold, u = ring.decayed()
    decay = jnp.exp(log_decay)

    def read(x: jax.Array) -> jax.Array:
        """Return what x [d_k] reads from the tokens before, decayed to the new token."""
        of_ring = ((ring.k * x[:, None]).sum(axis=0)[:, None] * u).sum(axis=0)
        return decay * (since_fold * (state * x[:, None]).sum(axis=0) + of_ring)

    added = beta * (v - read(k)) if corrects else beta * v
    result = read(q) + (q * k).sum(axis=0) * added
    if new.skip is not None:
        result += pltriton.load(new.skip.at[h]).astype(jnp.float32) * v
    pltriton.store(outputs.at[b, h, values], result)
    slot = lax.rem(length, jnp.int32(slots))
    pltriton.store(after.k.at[b, slot, key, keys], k, mask=of_key)
    pltriton.store(after.u.at[b, slot, h, values], added, mask=of_value)
    pltriton.store(after.log_decay.at[b, slot, h], log_decay, mask=first_block)

    def fold(token: jax.Array, state: jax.Array) -> jax.Array:
        """Add a pending token to S."""
        slot = lax.rem(token, jnp.int32(slots))
        places = held.log_decay.at[b, slot, h], held.k.at[b, slot, key, keys], held.u.at[b, slot, h, values]
        decay, k, u = map(pltriton.load, places)
        return jnp.exp(decay) * state + k[:, None] * u[None]

    @pl.when(folds > 0)
    def _write() -> None:
        pltriton.store(after.state.at[place], lax.fori_loop(folded - folds, folded, fold, state))


@functools.partial(jax.jit, static_argnames=("biases", "corrects", "interpret"))
def recurrent_step(
    held: HeldRows, new: NextToken, biases: bool, corrects: bool, interpret: bool
) -> tuple[jax.Array, HeldRows]:
    """See `pallas_kernels.recurrent_step`.

    Raises:
        NotImplementedError: a width or the number of slots is not a power of two from 16 on, a width is more than 256,
            the ring has more than 64 slots, or a dtype is not float32, bfloat16 or float16.
    """
    (batch, value_heads, key_dim, value_dim), slots = held.state.shape, held.k.shape[1]
    limits = ("keys", key_dim, MOST_DIM), ("values", value_dim, MOST_DIM), ("slots", slots, MOST_SLOTS)
    for what, size, most in limits:
        if size & (size - 1) or not LEAST <= size <= most:
            raise NotImplementedError(
                f"recurrent_step: the kernel takes powers of two from {LEAST} to {most} for {what}, got {size}"
            )
    for x in (new.q, new.q_taps, new.skip):
        if x is not None and x.dtype not in DTYPES:
            raise NotImplementedError(f"recurrent_step: the kernel takes float32, bfloat16 and float16, got {x.dtype}")
    # XLA makes the inputs, which are slices of one product, by one kernel, and the gates by another.
    inputs = jnp.concatenate([x.reshape(batch, -1) for x in new[:3]], axis=1)
    gates = jnp.concatenate([new.log_decay, new.beta], axis=2)[:, 0]
    joined = Joined(inputs, gates, *new[5:-1], new.valid[:, 0])
    operands, block = (held, joined), min(BLOCK, value_dim)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    outputs = jax.ShapeDtypeStruct((batch, value_heads, value_dim), jnp.float32)
    # S is written each time that half the slots are folded.
    written = 2 * bytes_of(held.state) // slots
    moved = bytes_of((held[:4], inputs, outputs, new.q_taps, new.k_taps, new.v_taps)) + written
    *after, result = pl.pallas_call(
        functools.partial(recurrent_step_kernel, biases=biases, corrects=corrects, block=block),
        grid=(value_dim // block, value_heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * (len(held) + 1),
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held), outputs],
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        cost_estimate=estimate(flops=(4 + 2) * held.state.size, moved=moved),
        input_output_aliases={index: index for index in range(len(held))},
        interpret=interpret,
        name="recurrent_step",
    )(*operands)
    return result[:, None], HeldRows(*after)
