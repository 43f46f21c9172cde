"""prefill, extend and decode_step: the steps that make and change a KV state.

Two layers of functions. The public ones take Params, check their arguments, and keep compiled programs; the cores
(`step`, `extend_steps`, `generate_steps`) are plain traceable functions of weights, config and state, for a user's
own jit, scan or vmap. A core cannot raise on a value: a row that is given an impossible token or has no room left
gets NaN logits.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.checks import (
    check_ids,
    check_logits,
    check_piece,
    check_room,
    check_sampling,
    check_state,
    check_stop,
    check_tokens,
)
from jshadow.engine.prefill import Logits
from jshadow.engine.prefill import prefill as prefill
from jshadow.engine.prefill import prefill_many as prefill_many
from jshadow.engine.sampling import Sampler, sample
from jshadow.engine.step import COMPILER_OPTIONS as COMPILER_OPTIONS
from jshadow.engine.step import step_writes, turn_piece
from jshadow.errors import PromptError
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import fit_tokens
from jshadow.planner.bytes import abstract_state as abstract_state
from jshadow.policies import Policy


def step(
    weights: dict, config: ModelConfig, token: Array, state: KVState, active: Array | None = None
) -> tuple[Array, KVState]:
    """Traceable core of `decode_step`: no checks, no compilation of its own."""
    reads, writes = state.split()
    new = jnp.ones_like(state.lengths) if active is None else active.astype(jnp.int32)
    out, writes = step_writes(weights, config, token[:, None], new, reads, writes)
    return out, state.join(writes)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def _step(
    weights: dict, token: Array, reads: Reads, writes: Writes, active: Array, *, config: ModelConfig
) -> tuple[Array, Writes]:
    return step_writes(weights, config, token[:, None], active.astype(jnp.int32), reads, writes)


def decode_step(
    params: Any, token: Any, state: KVState, policy: Policy | None = None, *, active: Any = None
) -> tuple[Array, KVState]:
    """Feed one token to each row. Consumes the state (fork it first to keep it).

    Args:
        params: the Params that made the state.
        token: int32 [B].
        state: from prefill, extend or decode_step.
        policy: None, or the policy that made the state.
        active: bool [B]; rows that are False neither change nor get meaningful logits. None: all.

    Returns:
        float32 logits [B, V], and the new state.

    Raises:
        PromptError: a token id out of range, or misshaped tokens.
        CapacityError: a row has no room for another token.
        StateMismatch: the state was consumed, or belongs to another model or policy.
    """
    check_state(params, state, policy)
    batch = state.batch
    token = check_ids(params.config, token, (batch,), "token")
    active = np.ones(batch, bool) if active is None else np.asarray(active, bool)
    if active.shape != (batch,):
        raise PromptError(f"active must have shape ({batch},), got {active.shape}")
    check_room(state, active.astype(np.int64))
    reads, writes = state.split()
    out, writes = _step(
        params.weights, jnp.asarray(token), reads, writes, jnp.asarray(active), config=params.config
    )  # fmt: skip
    return out, state.join(writes)


# Many tokens


def extend_steps(
    weights: dict, config: ModelConfig, tokens: Array, lengths: Array, state: KVState, logits: Logits = "last"
) -> tuple[Any, KVState]:
    """Traceable core of `extend`."""
    reads, writes = state.split()
    out, writes = _scan_tokens(weights, config, tokens, lengths, reads, writes, logits)
    return out, state.join(writes)


def _scan_tokens(
    weights: dict, config: ModelConfig, tokens: Array, lengths: Array, reads: Reads, writes: Writes,
    want: Logits,
) -> tuple[Any, Writes]:  # fmt: skip
    """Piece after piece of as many tokens as every layer's policy takes at once."""
    batch, count = tokens.shape
    size = turn_piece(reads, count)
    pieces = -(-count // size)
    real = jnp.arange(pieces * size) < lengths[:, None]
    tokens = jnp.where(real, fit_tokens(tokens, pieces * size), 0)  # padding may be anything
    # A step tells of its own piece; those behind one with an impossible token have read what it left.
    wrong = jnp.cumsum(real & ((tokens < 0) | (tokens >= config.vocab_size)), axis=1) > 0
    tokens, wrong = (x.reshape(batch, pieces, size).swapaxes(0, 1) for x in (tokens, wrong))

    def body(carry: tuple[Writes, Array], xs: tuple[Array, Array, Array]) -> tuple[tuple[Writes, Array], Any]:
        writes, last = carry
        piece, after, index = xs
        new = jnp.clip(lengths - index * size, 0, size)
        out, writes = step_writes(weights, config, piece, new, reads, writes, every=want != "last")
        out = jnp.where(after[:, 0].reshape(-1, *[1] * (out.ndim - 1)), jnp.nan, out)
        if want == "last":
            return (writes, jnp.where((new > 0)[:, None], out, last)), None
        return (writes, last), out if want == "all" else want(out)  # type: ignore[operator]

    shape = (batch, config.vocab_size) if want == "last" else (0,)
    start = (writes, jnp.zeros(shape, jnp.float32))
    (writes, last), outs = lax.scan(body, start, (tokens, wrong, jnp.arange(pieces)))
    if want == "last":
        return last, writes
    # [pieces, B, size, ...] -> [B, count, ...]
    return jax.tree.map(
        lambda part: part.swapaxes(0, 1).reshape(batch, pieces * size, *part.shape[3:])[:, :count], outs
    ), writes  # fmt: skip


@functools.partial(
    jax.jit, static_argnames=("config", "want"), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS
)
def _extend(
    weights: dict, tokens: Array, lengths: Array, reads: Reads, writes: Writes, *, config: ModelConfig, want: Logits,
) -> tuple[Any, Writes]:  # fmt: skip
    return _scan_tokens(weights, config, tokens, lengths, reads, writes, want)


def extend(
    params: Any, tokens: Any, lengths: Any, state: KVState, policy: Policy | None = None, *, logits: Logits = "last"
) -> tuple[Any, KVState]:
    """Feed several tokens to each row. Consumes the state.

    They pass the model in pieces of the policy's `extend_piece`; each query selects for itself, so that the result is
    that of as many decode steps (but with `ShadowKV(quirks=Quirks(turn_selection="shared"))`).

    Args:
        params: the Params that made the state.
        tokens: int32 [B, T], right padded.
        lengths: int32 [B], new tokens of each row; 0 leaves a row unchanged.
        state: from prefill, extend or decode_step.
        policy: None, or the policy that made the state.
        logits: as in `prefill`; "last" is 0 for a row without new tokens.

    Returns:
        float32 logits, and the new state.

    Raises:
        PromptError, CapacityError, StateMismatch: as in `decode_step`.
    """
    check_state(params, state, policy)
    check_logits(logits)
    tokens, lengths = check_tokens(params.config, tokens, lengths, least=0, batch=state.batch)
    check_room(state, lengths.astype(np.int64))
    reads, writes = state.split()
    out, writes = _extend(
        params.weights, jnp.asarray(tokens), jnp.asarray(lengths), reads, writes, config=params.config,
        want=logits,
    )  # fmt: skip
    return out, state.join(writes)


def generate_steps(
    weights: dict, config: ModelConfig, token: Array, state: KVState, n: int, sampler: Sampler, key: Array,
    stop: tuple[int, ...] = (), active: Array | None = None,
) -> tuple[Array, KVState]:  # fmt: skip
    """Traceable core of `decode_steps`; -1 also where a row is given an impossible token or has no room left."""
    reads, writes = state.split()
    active = jnp.ones_like(state.lengths, bool) if active is None else active

    def body(carry: tuple[Writes, Array, Array], index: Array) -> tuple[tuple[Writes, Array, Array], Array]:
        writes, token, active = carry
        out, writes = step_writes(weights, config, token[:, None], active.astype(jnp.int32), reads, writes)
        new = jnp.where(jnp.isnan(out).all(axis=1), -1, sample(sampler, out, jax.random.fold_in(key, index)))
        emitted = jnp.where(active, new, -1)
        ended = functools.reduce(jnp.logical_or, [new == s for s in stop], jnp.zeros_like(active))
        return (writes, jnp.where(active, new, token), active & ~ended), emitted

    (writes, _, _), tokens = lax.scan(body, (writes, token, active), jnp.arange(n))
    return tokens.T, state.join(writes)


@functools.partial(
    jax.jit,
    static_argnames=("config", "n", "sampler", "stop"),
    donate_argnames=("writes",),
    compiler_options=COMPILER_OPTIONS,
)
def _generate_steps(
    weights: dict, token: Array, reads: Reads, writes: Writes, key: Array, *, config: ModelConfig, n: int,
    sampler: Sampler, stop: tuple[int, ...],
) -> tuple[Array, Writes]:  # fmt: skip
    tokens, state = generate_steps(weights, config, token, KVState.of(reads, writes), n, sampler, key, stop)
    return tokens, state.split()[1]


def decode_steps(
    params: Any, token: Any, state: KVState, n: int, *, sampler: Sampler | None = None, seed: int = 0,
    stop: Sequence[int] | None = None,
) -> tuple[Array, KVState]:  # fmt: skip
    """Generate n tokens in one compiled scan: feed `token`, sample the next, feed it. Consumes the state.

    Args:
        params: the Params that made the state.
        token: int32 [B], the first token to feed.
        state: from prefill, extend or decode_step.
        n: steps.
        sampler: None: greedy.
        seed: of the sampler.
        stop: token ids after which a row feeds and emits nothing more.

    Returns:
        New tokens int32 [B, n], -1 after a row's stop token; and the new state.

    Raises:
        PromptError, CapacityError, StateMismatch: as in `decode_step`.
        ConfigError: n below 1, not a sampler or a seed, or stop is not of token ids.
    """
    check_state(params, state, None)
    check_piece("n", n)
    check_sampling(sampler, seed)
    ends = check_stop(stop)
    token = check_ids(params.config, token, (state.batch,), "token")
    check_room(state, np.full(state.batch, n, np.int64))
    reads, writes = state.split()
    tokens, writes = _generate_steps(
        params.weights, jnp.asarray(token), reads, writes, jax.random.key(seed), config=params.config, n=n,
        sampler=sampler or Sampler(), stop=ends,
    )  # fmt: skip
    return tokens, state.join(writes)
