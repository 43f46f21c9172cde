"""The public steps as traceable functions, for a user's own jit, scan or vmap, and the pieces of a long turn.

The cores check nothing and compile nothing. Such a core cannot raise an error that depends on a value. Instead, a row
gets NaN logits if its token id is out of range or if it has no room left. B rows, T tokens of each row, V tokens in the
vocabulary.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.spec import everywhere
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.sampling import Sampler, sample_checked
from jshadow.engine.step import step_state, step_writes
from jshadow.engine.types import Logits, PrefillProgress, Progress
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import fit_tokens
from jshadow.planner.pieces import EXTEND_CHUNK, turn_tokens

LOGITS_PIECE = 256  # if `logits` is a callable, the number of tokens whose float32 logits exist at once


class Turn(NamedTuple):
    """How a turn is fed: the tokens of a piece in each row, the logits to return, and a callback for each piece."""

    size: int
    want: Logits[Any]
    progress: Progress | None = None


def chunk_for(want: Logits[Any], state: KVState, extend_chunk: int = EXTEND_CHUNK) -> int:
    """Return `extend_chunk` for `turn_tokens`, or less for a callable.

    A callable is called with the logits of at most LOGITS_PIECE tokens. If rows share a prompt half, their specs
    describe one row, so each row takes its part of the chunk.
    """
    most = min(extend_chunk, state.batch * LOGITS_PIECE) if callable(want) else extend_chunk
    return most * state.specs[0].batch // state.batch


def in_pieces(
    run: Callable[..., tuple[Any, Writes]], tokens: np.ndarray, lengths: np.ndarray, writes: Writes, turn: Turn
) -> tuple[Any, Writes]:
    """Feed tokens int32 [B, T] piece by piece, and return the logits of all pieces, joined, and the new `writes`.

    `run` feeds one piece: it maps (tokens, lengths), `writes` and `want` to logits and the new `writes`.
    """
    count, size = tokens.shape[1], turn.size
    outs: list[Any] = []
    start = time.monotonic()
    pieces = -(-count // size)
    padded = np.pad(tokens, ((0, 0), (0, pieces * size - count)))
    for index in range(pieces):
        new = np.clip(lengths - index * size, 0, size).astype(np.int32)
        piece = padded[:, index * size : (index + 1) * size]
        out, writes = run(jnp.asarray(piece), jnp.asarray(new), writes=writes, want=turn.want)
        if turn.want == "last" and outs:
            out = jnp.where((new > 0)[:, None], out, outs.pop())
        outs.append(out)
        if turn.progress is not None:
            jax.block_until_ready(out)
            told = PrefillProgress(0, 0, index + 1, pieces, (index + 1) / pieces, int(lengths.sum()))
            turn.progress(told.timed(0.0, time.monotonic() - start))
    if turn.want == "last":
        return outs[0], writes
    if pieces == 1 and size == count:
        return outs[0], writes
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1)[:, :count], *outs), writes


def step(
    weights: dict, config: ModelConfig, token: Array, state: KVState, active: Array | None = None
) -> tuple[Array, KVState]:
    """Feed one token to each row. This is the traceable core of `decode_step`.

    Args:
        weights, config: the model.
        token: the token of each row, int32 [B].
        state: the state before the step.
        active: bool [B]. Rows that are False do not change. None: all rows are active.

    Returns:
        float32 logits [B, V], and the new state.
    """
    new = jnp.ones_like(state.lengths) if active is None else active.astype(jnp.int32)
    return step_state(weights, config, token[:, None], new, state)


def extend_steps(
    weights: dict, config: ModelConfig, tokens: Array, lengths: Array, state: KVState, logits: Logits[Any] = "last"
) -> tuple[Any, KVState]:
    """Feed several tokens to each row. This is the traceable core of `extend`, with the same arguments and results.

    `weights` and `config` are the model.
    """
    reads, writes = state.split()
    turn = Turn(turn_tokens(reads, tokens.shape[1], chunk_for(logits, state)), logits)
    out, writes = scan_tokens(weights, config, tokens, lengths, reads, writes, turn)
    return out, state.join(writes)


def scan_tokens(
    weights: dict, config: ModelConfig, tokens: Array, lengths: Array, reads: Reads, writes: Writes, turn: Turn
) -> tuple[Any, Writes]:
    """Feed tokens [B, T] in pieces of `turn.size` tokens, in one scan.

    Args:
        tokens: token ids, int32 [B, T], right padded with any values.
        lengths: number of real tokens of each row, int32 [B].
        turn: the size of a piece, and which logits to return. `turn.progress` is not called.
    """
    (batch, count), size, want = tokens.shape, turn.size, turn.want
    pieces = -(-count // size)
    real = jnp.arange(pieces * size) < lengths[:, None]
    tokens = jnp.where(real, fit_tokens(tokens, pieces * size), 0)  # padding may hold any value
    wrong = jnp.cumsum(impossible := real & ((tokens < 0) | (tokens >= config.vocab_size)), axis=1) > 0
    # An impossible token may have a NaN as its value, which would spoil the tokens before it in its piece.
    tokens = jnp.where(impossible, 0, tokens)
    tokens, wrong = (x.reshape(batch, pieces, size).swapaxes(0, 1) for x in (tokens, wrong))

    def body(carry: tuple[Writes, Array], xs: tuple[Array, Array, Array]) -> tuple[tuple[Writes, Array], Any]:
        writes, last = carry
        piece, after, index = xs
        new = jnp.clip(lengths - index * size, 0, size)
        out, writes = step_writes(weights, config, piece, new, reads, writes, every=want != "last")
        out = jnp.where((after[:, -1] if want == "last" else after)[..., None], jnp.nan, out)
        if want == "last":
            return (writes, jnp.where((new > 0)[:, None], out, last)), None
        return (writes, last), out if want == "all" else want(out)

    shape = (batch, config.vocab_size) if want == "last" else (0,)
    start = (writes, jnp.zeros(shape, jnp.float32))
    (writes, last), outs = lax.scan(body, start, (tokens, wrong, jnp.arange(pieces)))
    shards = reads.specs[0].shards
    if want == "last":
        return everywhere(last, shards), writes
    # [pieces, B, size, ...] -> [B, count, ...]
    joined = jax.tree.map(
        lambda part: part.swapaxes(0, 1).reshape(batch, pieces * size, *part.shape[3:])[:, :count], outs
    )
    return everywhere(joined, shards), writes


def generate_steps(
    weights: dict,
    config: ModelConfig,
    token: Array,
    state: KVState,
    n: int,
    sampler: Sampler,
    key: Array,
    stop: tuple[int, ...] = (),
    active: Array | None = None,
) -> tuple[Array, KVState]:
    """Generate n tokens for each row. This is the traceable core of `decode_steps`.

    Args:
        weights, config: the model.
        token: the first token to feed to each row, int32 [B].
        state: the state before the steps.
        n: number of steps.
        sampler: how tokens are drawn.
        key: PRNG key. Step i draws with fold_in(key, i).
        stop: token ids that end a row.
        active: bool [B]. Rows that are False do not change. None: all rows are active.

    Returns:
        The new tokens, int32 [B, n], and the new state. A token is -1 in a row that is not active, after a row's stop
        token, if the token id that was fed is out of range, and if the row has no room left.
    """
    reads, writes = state.split()
    active = jnp.ones_like(state.lengths, bool) if active is None else active

    def body(carry: tuple[Writes, Array, Array], index: Array) -> tuple[tuple[Writes, Array, Array], Array]:
        writes, token, active = carry
        out, writes = step_writes(weights, config, token[:, None], active.astype(jnp.int32), reads, writes)
        new = sample_checked(sampler, out, jax.random.fold_in(key, index))
        emitted = jnp.where(active, new, -1)
        ended = functools.reduce(jnp.logical_or, [new == s for s in stop], jnp.zeros_like(active))
        return (writes, jnp.where(active, new, token), active & ~ended), emitted

    (writes, _, _), tokens = lax.scan(body, (writes, token, active), jnp.arange(n))
    return everywhere(tokens.T, reads.specs[0].shards), state.join(writes)
