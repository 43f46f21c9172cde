"""The functions that make and change a KV state: prefill, extend, decode_step and decode_steps.

These functions take Params, check their arguments and keep compiled programs. The module also exports their cores
(`step`, `extend_steps`, `generate_steps`), which are plain traceable functions of weights, config and state.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.agree import run_together
from jshadow.engine.checks import (
    check_ids,
    check_logits,
    check_room,
    check_sampling,
    check_state,
    check_stop,
    check_tokens,
    consuming,
    note_room,
)
from jshadow.engine.cores import Turn, chunk_for, in_pieces, scan_tokens
from jshadow.engine.cores import extend_steps as extend_steps
from jshadow.engine.cores import generate_steps as generate_steps
from jshadow.engine.cores import step as step
from jshadow.engine.prefill.whole import prefill as prefill
from jshadow.engine.prefill.whole import prefill_many as prefill_many
from jshadow.engine.sampling import Sampler, seed_key
from jshadow.engine.speculation.drafter import Drafter
from jshadow.engine.speculation.run import Drawing, speculative_steps
from jshadow.engine.step import COMPILER_OPTIONS as COMPILER_OPTIONS
from jshadow.engine.step import step_writes
from jshadow.engine.types import Joined, Logits, Progress, Tokens
from jshadow.errors import PromptError, check_integer
from jshadow.models.config import ModelConfig
from jshadow.planner.machine import abstract_state as abstract_state
from jshadow.planner.pieces import EXTEND_CHUNK, turn_tokens
from jshadow.policies import Policy
from jshadow.weights.params import Params


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def _step(
    weights: dict, token: Array, reads: Reads, writes: Writes, active: Array, *, config: ModelConfig
) -> tuple[Array, Writes]:
    return step_writes(weights, config, token[:, None], active.astype(jnp.int32), reads, writes)


def decode_step(
    params: Params, token: Tokens, state: KVState, policy: Policy | None = None, *, active: Tokens | None = None
) -> tuple[Array, KVState]:
    """Feed one token to each row, and return the logits for the next token. This consumes the state.

    To keep the state, call `fork` first.

    Args:
        params: the Params that made the state.
        token: the token of each row, int32 [B].
        state: from prefill, extend or decode_step.
        policy: None, or the policy that made the state.
        active: bool [B]. Rows that are False do not change, and their logits have no meaning. None: all rows are
            active.

    Returns:
        float32 logits [B, V], and the new state.

    Raises:
        PromptError: a token id is out of range, or the tokens have another shape.
        CapacityError: a row has no room for another token.
        StateMismatch: the state was consumed, is being consumed by another thread, or has another model or policy.
    """
    check_state(params, state, policy)
    batch = state.batch
    ids = check_ids(params.config, token, (batch,), "token")
    rows = np.ones(batch, bool) if active is None else np.asarray(active, bool)
    if rows.shape != (batch,):
        raise PromptError(f"active must have shape ({batch},), got {rows.shape}")
    room = check_room(state, rows.astype(np.int64))
    with consuming(state):
        reads, writes = state.split()
        out, writes = run_together(
            _step, params.weights, jnp.asarray(ids), reads, writes, jnp.asarray(rows), config=params.config
        )
    return out, note_room(state.join(writes), room)


# Many tokens


@functools.partial(
    jax.jit, static_argnames=("config", "want"), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS
)
def _extend(
    weights: dict,
    tokens: Array,
    lengths: Array,
    reads: Reads,
    writes: Writes,
    *,
    config: ModelConfig,
    want: Logits[Any],
) -> tuple[Any, Writes]:
    return scan_tokens(weights, config, tokens, lengths, reads, writes, Turn(tokens.shape[1], want))


def extend(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    state: KVState,
    policy: Policy | None = None,
    *,
    logits: Logits[Joined] = "last",
    extend_chunk: int = EXTEND_CHUNK,
    progress: Progress | None = None,
) -> tuple[Joined, KVState]:
    """Feed several tokens to each row, and return logits. This consumes the state.

    The tokens pass through the model in pieces (`extend_chunk`). In each layer, the policy takes a piece in blocks of
    tokens. ShadowKV attends to the turn's own tokens in one blockwise pass, and selects for blocks. Each query selects
    units separately, so the result is the same as if the tokens were fed one by one. The only exception is
    `ShadowKV(quirks=Quirks(turn_selection="shared"))`. All pieces of a turn run one compiled program, and turns of
    similar lengths share it. Policies that plan a fetch for another layer or step take small pieces.

    Args:
        params: the Params that made the state.
        tokens: token ids, int32 [B, T], right padded.
        lengths: number of new tokens of each row, int32 [B]. 0 leaves a row unchanged.
        state: from prefill, extend or decode_step.
        policy: None, or the policy that made the state.
        logits: as in `prefill`. With "last", a row without new tokens gets zeros.
        extend_chunk: number of tokens of all rows that go through a layer at once. Smaller pieces take less device
            memory, which `planner.pieces.extend_peak` computes.
        progress: called with a `PrefillProgress` after each piece.

    Returns:
        The float32 logits, or the joined results of the callable, and the new state.

    Raises:
        PromptError, CapacityError, StateMismatch: as in `decode_step`.
        ConfigError: `logits` is not one of these choices, or extend_chunk is not an integer of at least 1.
    """
    check_state(params, state, policy)
    check_logits(logits)
    check_integer("extend_chunk", extend_chunk, least=1)
    ids, counts = check_tokens(params.config, tokens, lengths, least=0, batch=state.batch)
    room = check_room(state, counts.astype(np.int64))
    with consuming(state):
        reads, writes = state.split()
        run = functools.partial(run_together, _extend, params.weights, reads=reads, config=params.config)
        turn = Turn(turn_tokens(reads, ids.shape[1], chunk_for(logits, state, extend_chunk)), logits, progress)
        out, writes = in_pieces(run, ids, counts, writes, turn)
    return out, note_room(state.join(writes), room)


@dataclasses.dataclass(frozen=True)
class _ScanPlan:
    """The static arguments of `_generate_steps`: the number of steps, the sampler and the stop tokens."""

    n: int
    sampler: Sampler
    stop: tuple[int, ...]


@functools.partial(
    jax.jit, static_argnames=("config", "plan"), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS
)
def _generate_steps(
    weights: dict, token: Array, reads: Reads, writes: Writes, key: Array, *, config: ModelConfig, plan: _ScanPlan
) -> tuple[Array, Writes]:
    state = KVState.of(reads, writes)
    tokens, state = generate_steps(weights, config, token, state, plan.n, plan.sampler, key, plan.stop)
    return tokens, state.split()[1]


def decode_steps(
    params: Params,
    token: Tokens,
    state: KVState,
    n: int,
    *,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: Sequence[int] | None = None,
    speculate: Drafter | None = None,
    before: Sequence[Sequence[int]] | None = None,
) -> tuple[Array, KVState]:
    """Generate up to n tokens for each row in one compiled scan. This consumes the state.

    The first step feeds `token`. Each step samples a token, and the next step feeds it.

    Args:
        params: the Params that made the state.
        token: the first token to feed to each row, int32 [B].
        state: from prefill, extend or decode_step.
        n: number of steps.
        sampler: how tokens are drawn. None means greedy.
        seed: seed of the sampler, an integer of 64 bits.
        stop: token ids that end a row. A row that has drawn one of them is not fed again. None: no token ends a row.
        speculate: a drafter. It changes no token (docs/speculation.md).
        before: the token ids that the state holds in each row, for a drafter that searches the text.

    Returns:
        The new tokens int32 [B, n], with -1 after a row's stop token, and the new state.

    Raises:
        PromptError, CapacityError, StateMismatch: as in `decode_step`.
        ConfigError: n is not an integer of at least 1, sampler is not a Sampler, seed is not an integer of 64 bits, or
            stop contains anything but token ids. Or the drafter cannot serve the model or the state.
    """
    check_state(params, state, None)
    check_integer("n", n, least=1)
    check_sampling(sampler, seed)
    plan = _ScanPlan(n, sampler or Sampler(), check_stop(stop))
    ids = check_ids(params.config, token, (state.batch,), "token")
    room = check_room(state, np.full(state.batch, n, np.int64))
    key = seed_key(seed)
    if speculate is not None:
        drawing = Drawing(plan.sampler, key, plan.stop)
        tokens, writes = speculative_steps(params, speculate, drawing, state, ids, n, before)
        return tokens, note_room(state.join(writes), room)
    with consuming(state):
        reads, writes = state.split()
        tokens, writes = _generate_steps(
            params.weights, jnp.asarray(ids), reads, writes, key, config=params.config, plan=plan
        )
    return tokens, note_room(state.join(writes), room)
