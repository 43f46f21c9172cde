"""What a recurrent layer of a hybrid model holds of each row, and how tokens are read into it.

The state follows the gated delta rule, or without its correction the rule of Mamba-2: see `jshadow/ops/delta_rule.py`.
A short convolution has no state. `models/recurrent.py` has the weights of the layer. B rows, T new tokens, n_k, n_v
heads of keys and values, d_k, d_v their widths.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import StepKV
from jshadow.models.config import Recurrent
from jshadow.models.transformer import Heads
from jshadow.ops.convolution import convolve, ring_inputs, ring_write
from jshadow.ops.delta_rule import Recent, Tokens, folded_all, kept_from, masked, normalized, scan_chunks, step
from jshadow.ops.layout import run
from pallas_kernels import HeldRows, NextToken, recurrent_step

RECENT = 16  # newest tokens that a row can give back


class Recurrence(NamedTuple):
    """The record that a recurrent layer with a state has of each row.

    Attributes:
        state: the state of each value head after the first `folded` tokens, float32 [B, n_v, d_k, d_v].
        recent: the tokens after these.
        folded: number of tokens in `state`, int32 [B].
        inputs: the newest inputs of the convolution, in the model's dtype: of queries and keys [B, R, n_k, d_k], and of
            values [B, R, n_v, d_v]. The input at position p is in slot p % R.
    """

    state: Array
    recent: Recent
    folded: Array
    inputs: tuple[Array, Array, Array]


class NewestInputs(NamedTuple):
    """The record that a short convolution has of each row.

    Attributes:
        inputs: the newest inputs of the convolution, in the model's dtype, [B, R, n_v, d_v]. The input at position p is
            in slot p % R.
    """

    inputs: Array


Held = Recurrence | NewestInputs


def empty(batch: int, sizes: Recurrent, dtype: Any) -> Held:
    """Return the record of a layer that has read no tokens."""
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)

    def zeros(*shape: int, dtype: Any = jnp.float32) -> Array:
        return jnp.zeros((batch, *shape), dtype)

    slots = RECENT + sizes.taps - 1
    if not sizes.has_state:
        return NewestInputs(zeros(slots, *values, dtype=dtype))
    pending = 2 * RECENT  # RECENT tokens are folded at once, and so many stay
    recent = Recent(zeros(pending, *keys), zeros(pending, *values), zeros(pending, sizes.value_heads))
    q, k, v = (zeros(slots, *shape, dtype=dtype) for shape in (keys, keys, values))
    state = zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return Recurrence(state, recent, zeros(dtype=jnp.int32), (q, k, v))


def row_bytes(sizes: Recurrent, itemsize: int) -> int:
    """Return the bytes of one row of a layer's record. `itemsize` is the bytes of a number of the model's dtype."""
    record = jax.eval_shape(lambda: empty(1, sizes, {2: jnp.bfloat16, 4: jnp.float32}[itemsize]))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(record))


class RecurrentTokens(struct.PyTreeNode):
    """The projections of T new tokens; see `models.transformer.Heads`.

    Attributes:
        heads, gates, taps, skip: the projections, as in Heads.
        lengths: number of tokens of each row before these, int32 [B].
        valid: which tokens are real, bool [B, T]. In each row, they come first.
        sizes: heads, widths and kind of the layer.
    """

    heads: tuple[Array, Array, Array]
    gates: tuple[Array, Array] | None
    taps: tuple[Array, ...]
    skip: Array | None
    lengths: Array
    valid: Array
    sizes: Recurrent = struct.field(pytree_node=False)

    @classmethod
    def of(cls, heads: Heads | StepKV, sizes: Recurrent, lengths: Array, valid: Array) -> "RecurrentTokens":
        """Return the tokens whose projections are `heads`."""
        assert heads.taps is not None
        return cls((heads.q_pre, heads.k_pre, heads.v), heads.gates, heads.taps, heads.skip, lengths, valid, sizes)


def _convolved(held: Recurrence, new: RecurrentTokens) -> tuple[Tokens, tuple[Array, Array, Array]]:
    """Return the new tokens after the convolution, and the inputs of the convolution that are held after them."""
    assert new.gates is not None
    each = (_through(new, *one) for one in zip(new.heads, held.inputs, new.taps, strict=True))
    parts, inputs = zip(*each, strict=True)
    q, k, v = (jax.nn.silu(part).astype(jnp.float32) for part in parts)
    if new.sizes.corrects:
        q, k = normalized(q) * q.shape[-1] ** -0.5, normalized(k)
    return Tokens(q, k, v, *new.gates), inputs


def _through(new: RecurrentTokens, x: Array, ring: Array, taps: Array) -> tuple[Array, Array]:
    """Return the convolution of inputs x [B, T, n, d], and the ring of the newest inputs [B, R, n, d] after them."""
    count = new.sizes.taps
    flat, rows, kernel = (one.reshape(*one.shape[:-2], -1) for one in (x, ring, taps))
    bias = kernel[count] if new.sizes.tap_biases else None
    out = convolve(flat, ring_inputs(rows, new.lengths, count), kernel[:count], bias)
    return out.reshape(x.shape), ring_write(rows, flat, new.lengths, new.valid).reshape(ring.shape)


def _between_gates(held: NewestInputs, new: RecurrentTokens) -> tuple[Array, NewestInputs]:
    """Return the outputs [B, T, n_v, d_v] of a short convolution, in the model's dtype, and what it holds then."""
    q, k, v = new.heads
    out, inputs = _through(new, k * v, held.inputs, new.taps[0])
    return q * out, NewestInputs(inputs)


def _skipped(out: Array, tokens: Tokens, new: RecurrentTokens) -> Array:
    """Return the outputs [B, T, n_v, d_v] with the share of the value that does not pass the state."""
    return out if new.skip is None else out + new.skip.astype(jnp.float32)[:, None] * tokens.v


def read_tokens(held: Held, new: RecurrentTokens) -> tuple[Array, Held]:
    """Read any number of tokens into the state. Return the outputs [B, T, n_v, d_v], with a state in float32.

    A row without a token keeps all its arrays with the same bits.
    """
    if isinstance(held, NewestInputs):
        return _between_gates(held, new)
    tokens, inputs = _convolved(held, new)
    reads, counts = new.valid.any(axis=1), new.valid.sum(axis=1, dtype=jnp.int32)
    state = folded_all(held.state, held.recent, held.folded, jnp.where(reads, new.lengths, held.folded))
    out, state = scan_chunks(state, masked(tokens, new.valid), corrects=new.sizes.corrects)
    folded = jnp.where(reads, new.lengths + counts, held.folded)
    return _skipped(out, tokens, new), Recurrence(state, held.recent, folded, inputs)


def step_tokens(held: Held, new: RecurrentTokens, implementation: str = "auto") -> tuple[Array, Held]:
    """Read up to RECENT tokens, which a row can give back. Return the outputs [B, T, n_v, d_v] as `read_tokens`.

    A GPU reads a single token into a state by one kernel. `implementation` is explained in `pallas_kernels.choose`.
    """
    if isinstance(held, NewestInputs):
        return _between_gates(held, new)
    return run(implementation, _step_kernel, _step_reference, held, new)


def _step_kernel(held: Recurrence, new: RecurrentTokens, interpret: bool) -> tuple[Array, Recurrence]:
    folded = kept_from(held.folded, new.lengths, new.valid, held.recent.k.shape[1])
    counts = new.lengths, folded, folded - held.folded
    assert new.gates is not None
    q_taps, k_taps, v_taps = new.taps
    token = NextToken(*new.heads, *new.gates, q_taps, k_taps, v_taps, new.skip, *counts, new.valid)
    options = {"biases": new.sizes.tap_biases, "corrects": new.sizes.corrects, "interpret": interpret}
    out, after = recurrent_step(HeldRows(held.state, *held.recent, *held.inputs), token, **options)
    return out, Recurrence(after.state, Recent(*after[1:4]), folded, after[4:])


def _step_reference(held: Recurrence, new: RecurrentTokens) -> tuple[Array, Recurrence]:
    tokens, inputs = _convolved(held, new)
    before, corrects = (held.state, held.recent, held.folded), new.sizes.corrects
    out, state, recent, folded = step(*before, new.lengths, tokens, new.valid, corrects=corrects)
    return _skipped(out, tokens, new), Recurrence(state, recent, folded, inputs)


def text_outputs(heads: Heads, sizes: Recurrent) -> Array:
    """Return the outputs [B, T, n_v, d_v] of a whole text without padding."""
    batch, count = heads.v.shape[:2]
    new = RecurrentTokens.of(heads, sizes, jnp.zeros(batch, jnp.int32), jnp.ones((batch, count), bool))
    return read_tokens(empty(batch, sizes, heads.v.dtype), new)[0].astype(heads.v.dtype)
