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
from pallas_kernels.recurrent_step.operands import Held, NewToken
from pallas_kernels.tiles import DTYPES, LEAST, iota

BLOCK = 64  # columns of a program
WARPS = 4
MOST_SLOTS = 64  # of the ring of pending tokens
MOST_DIM = 256


class Joined(NamedTuple):
    """The fields of NewToken without the axis of tokens, and with one array for the inputs of the convolution.

    Attributes:
        inputs: [B, 2 n_k d_k + n_v d_v]: of the queries, then of the keys, then of the values.
        gates: [B, 2 n_v]: log_decay, then beta.
        q_taps, k_taps, v_taps, skip, lengths, folded, folds: as in NewToken.
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

    def decayed(self) -> tuple[jax.Array, jax.Array]:
        """Return the decay since the fold, and u [R, columns] decayed since its token.

        Each sum of logarithms adds its own terms.
        """
        later = self.position[:, None] > self.position[None]
        since = jnp.exp(jnp.where(later, self.log_decay[:, None], 0.0).sum(axis=0))
        return jnp.exp(self.log_decay.sum(axis=0)), since[:, None] * self.u


def tap_value(kernel: Any, head: jax.Array, at: jax.Array, tap: int) -> jax.Array:
    """Load one tap of the convolution of some columns of a head, as float32."""
    return pltriton.load(kernel.at[jnp.full_like(at, tap), head, at]).astype(jnp.float32)


def recurrent_step_kernel(held, new, *out, biases, corrects, block):  # type: ignore[no-untyped-def]
    """One program: the new token of one row, for `block` columns of the state of one value head.

    `out` are the fields of Held, in the buffers of `held`, and the outputs float32 [B, n_v, d_v].
    """
    j, h, b = (pl.program_id(axis) for axis in range(3))
    after, outputs = Held(*out[:-1]), out[-1]
    (_, slots, key_heads, key_dim), (_, _, value_heads, value_dim) = held.k.shape, held.u.shape
    group = value_heads // key_heads
    key = lax.div(h, jnp.int32(group))
    row, column = iota(0, key_dim), iota(j * block, block)
    length, folded, folds = (pltriton.load(x.at[b]) for x in (new.lengths, new.folded, new.folds))
    written = pltriton.load(new.valid.at[b])
    place = b, h, row[:, None], column[None]
    state = pltriton.load(held.state.at[place])

    slot = iota(0, slots)
    position = length - 1 - lax.rem(length - 1 + slots - slot, jnp.int32(slots))
    pending = position >= folded - folds
    ring = Ring(
        position,
        pltriton.load(held.log_decay.at[b, slot, h], mask=pending, other=0.0),
        pltriton.load(held.k.at[b, slot[None], key, row[:, None]], mask=pending[None], other=0.0),
        pltriton.load(held.u.at[b, slot[:, None], h, column[None]], mask=pending[:, None], other=0.0),
    )

    def convolved(first: int, part: tuple[Any, Any, Any], head: jax.Array, at: jax.Array, mask: jax.Array) -> jax.Array:
        """Convolve one head of an input, and write the new input. `first` is the column where these inputs begin."""
        before, target, kernel = part
        taps, places, dim = kernel.shape[0] - biases, before.shape[1], before.shape[3]
        x = pltriton.load(new.inputs.at[b, first + head * dim + at])
        tap_of = functools.partial(tap_value, kernel, head, at)
        total = tap_of(taps) if biases else jnp.zeros(at.shape, jnp.float32)
        for tap in range(taps):
            seen = length - taps + 1 + tap
            there = jnp.full(at.shape, seen >= 0)
            from_ring = before.at[b, lax.rem(seen + places, jnp.int32(places)), head, at]
            value = x if tap == taps - 1 else pltriton.load(from_ring, mask=there, other=0.0)
            total += value.astype(jnp.float32) * tap_of(tap)
        pltriton.store(target.at[b, lax.rem(length, jnp.int32(places)), head, at], x, mask=mask)
        total = total.astype(x.dtype).astype(jnp.float32)
        return (total / (1 + jnp.exp(-total))).astype(x.dtype).astype(jnp.float32)

    one = (jnp.int32(0) == j) & (h == key * group) & written
    of_key, of_value = jnp.full(row.shape, one), jnp.full(column.shape, written)
    width = key_heads * key_dim
    q = convolved(0, (held.q_inputs, after.q_inputs, new.q_taps), key, row, of_key)
    k = convolved(width, (held.k_inputs, after.k_inputs, new.k_taps), key, row, of_key)
    v = convolved(2 * width, (held.v_inputs, after.v_inputs, new.v_taps), h, column, of_value)
    if corrects:
        q, k = (x * lax.rsqrt((x * x).sum(axis=0) + 1e-6) for x in (q, k))
        q *= key_dim**-0.5

    log_decay, beta = (pltriton.load(new.gates.at[b, at]) for at in (h, value_heads + h))
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
    pltriton.store(outputs.at[b, h, column], result)
    target = lax.rem(length, jnp.int32(slots))
    pltriton.store(after.k.at[b, target, key, row], k, mask=of_key)
    pltriton.store(after.u.at[b, target, h, column], added, mask=of_value)
    pltriton.store(after.log_decay.at[b, target, h], log_decay, mask=(jnp.int32(0) == j) & written)

    def fold(token: jax.Array, state: jax.Array) -> jax.Array:
        """Add a pending token to S."""
        at = lax.rem(token, jnp.int32(slots))
        decay, k, u = (
            pltriton.load(x)
            for x in (held.log_decay.at[b, at, h], held.k.at[b, at, key, row], held.u.at[b, at, h, column])
        )
        return jnp.exp(decay) * state + k[:, None] * u[None]

    @pl.when(folds > 0)
    def _write() -> None:
        pltriton.store(after.state.at[place], lax.fori_loop(folded - folds, folded, fold, state))


@functools.partial(jax.jit, static_argnames=("biases", "corrects", "interpret"))
def recurrent_step(held: Held, new: NewToken, biases: bool, corrects: bool, interpret: bool) -> tuple[jax.Array, Held]:
    """See `pallas_kernels.recurrent_step`.

    Raises:
        NotImplementedError: a width or the number of slots is not a power of two from 16 on, a width is more than 256,
            the ring has more than 64 slots, or a dtype is not float32, bfloat16 or float16.
    """
    (batch, value_heads, key_dim, value_dim), slots = held.state.shape, held.k.shape[1]
    for what, size, most in (
        ("keys", key_dim, MOST_DIM),
        ("values", value_dim, MOST_DIM),
        ("slots", slots, MOST_SLOTS),
    ):
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
    moved = bytes_of((held.state, inputs, outputs, new.q_taps, new.k_taps, new.v_taps)) + bytes_of(held[1:4])
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
    return result[:, None], Held(*after)
