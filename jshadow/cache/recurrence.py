"""What a recurrent layer of a hybrid model holds of each row, and how tokens are read into it.

The layer is a gated DeltaNet (arXiv 2412.06464, section 3): see `jshadow/ops/delta_rule.py`, and `models/delta.py` for
its weights. B rows, T new tokens, n_k, n_v heads of keys and values, d_k, d_v their widths.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.models.config import DeltaNet
from jshadow.models.transformer import Heads
from jshadow.ops.convolution import convolve, ring_inputs, ring_write
from jshadow.ops.delta_rule import Recent, Tokens, folded_all, masked, normalized, scan_chunks, step

RECENT = 16  # newest tokens that a row can give back


class Recurrence(NamedTuple):
    """What a recurrent layer holds of each row.

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


def empty(batch: int, sizes: DeltaNet, dtype: Any) -> Recurrence:
    """Return the record of a layer that has read no tokens."""
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)

    def zeros(*shape: int, dtype: Any = jnp.float32) -> Array:
        return jnp.zeros((batch, *shape), dtype)

    recent = Recent(zeros(RECENT, *keys), zeros(RECENT, *values), zeros(RECENT, sizes.value_heads))
    slots = RECENT + sizes.taps - 1
    q, k, v = (zeros(slots, *shape, dtype=dtype) for shape in (keys, keys, values))
    state = zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return Recurrence(state, recent, zeros(dtype=jnp.int32), (q, k, v))


class NewTokens(NamedTuple):
    """The projections of T new tokens; see `models.transformer.Heads`.

    Attributes:
        heads: the inputs of the convolution.
        gates: the logarithm of the decay, and the strength of the update.
        taps: the kernels of the convolution.
        lengths: number of tokens of each row before these, int32 [B].
        valid: which tokens are real, bool [B, T]. In each row, they come first.
    """

    heads: tuple[Array, Array, Array]
    gates: tuple[Array, Array]
    taps: tuple[Array, Array, Array]
    lengths: Array
    valid: Array

    @classmethod
    def of(cls, heads: Heads, lengths: Array, valid: Array) -> "NewTokens":
        """Return the tokens whose projections are `heads`."""
        assert heads.gates is not None
        assert heads.taps is not None
        return cls((heads.q_pre, heads.k_pre, heads.v), heads.gates, heads.taps, lengths, valid)


def _convolved(held: Recurrence, new: NewTokens) -> tuple[Tokens, tuple[Array, Array, Array]]:
    """Return the new tokens after the convolution, and the inputs of the convolution that are held after them."""
    parts, inputs = [], []
    for x, ring, taps in zip(new.heads, held.inputs, new.taps, strict=True):
        flat, rows = (one.reshape(*one.shape[:2], -1) for one in (x, ring))
        kernel = taps.reshape(len(taps), -1)
        out = convolve(flat, ring_inputs(rows, new.lengths, len(kernel)), kernel)
        parts.append(jax.nn.silu(out).reshape(x.shape))
        inputs.append(ring_write(rows, flat, new.lengths, new.valid).reshape(ring.shape))
    q, k, v = parts
    scale = q.shape[-1] ** -0.5
    tokens = Tokens(normalized(q) * scale, normalized(k), v.astype(jnp.float32), *new.gates)
    return tokens, (inputs[0], inputs[1], inputs[2])


def read_tokens(held: Recurrence, new: NewTokens) -> tuple[Array, Recurrence]:
    """Read any number of tokens into the state, which cannot be given back.

    Return the outputs [B, T, n_v, d_v], float32. A row without a valid token keeps all its arrays with the same bits.
    """
    tokens, inputs = _convolved(held, new)
    count = new.valid.sum(axis=1, dtype=jnp.int32)
    before, after = (jnp.where(count > 0, length, held.folded) for length in (new.lengths, new.lengths + count))
    state = folded_all(held.state, held.recent, held.folded, before)
    out, state = scan_chunks(state, masked(tokens, new.valid))
    return out, Recurrence(state, held.recent, after, inputs)


def step_tokens(held: Recurrence, new: NewTokens) -> tuple[Array, Recurrence]:
    """Read up to RECENT tokens, which a row can give back. Return the outputs [B, T, n_v, d_v], float32."""
    tokens, inputs = _convolved(held, new)
    out, state, recent, folded = step(held.state, held.recent, held.folded, new.lengths, tokens, new.valid)
    return out, Recurrence(state, recent, folded, inputs)


def read_text(heads: Heads, sizes: DeltaNet) -> Array:
    """Return the outputs [B, T, n_v, d_v] of a whole text without padding."""
    batch, count = heads.v.shape[:2]
    new = NewTokens.of(heads, jnp.zeros(batch, jnp.int32), jnp.ones((batch, count), bool))
    return read_tokens(empty(batch, sizes, heads.v.dtype), new)[0].astype(heads.v.dtype)
