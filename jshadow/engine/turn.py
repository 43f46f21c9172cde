"""How a long turn passes through the model: many tokens at once, and block by block in the hooks of each layer.

The tokens of a turn do not depend on the layers above them. So a layer can take all tokens of a piece before the next
layer starts. Its products read the weights once for the whole piece. Its hooks take the piece in blocks of
`HookInputs.piece` tokens, one after the other, so each query selects and attends as it does in a single step.

If a policy permits it (`SplitsTurns`), all tokens of a piece are stored and attended to at once. Only the selection and
the attention to selected units take blocks, which are larger.

B rows, T tokens of a piece, b tokens of a block, h_q query heads, d head width.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import HostTier, LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState, Writes
from jshadow.engine.layer_hooks import append_tokens, fetch_units
from jshadow.engine.step_work import LayerWork, count_step
from jshadow.engine.types import Logits, PrefillProgress, Progress
from jshadow.ops.prefix_attention import add_rows, attend_prefixes
from jshadow.planner.turn_pieces import EXTEND_CHUNK, block_tokens, split_of
from jshadow.policies.capabilities import SplitsTurns

LOGITS_PIECE = 256  # if `logits` is a callable, the number of tokens whose float32 logits exist at once
TOKEN_FIELDS = ("q_pre", "q_post", "k_pre", "k_post", "v", "cos", "sin", "valid")  # of StepKV, [B, T, ...] each


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


def in_blocks(
    run_layer: Callable[..., tuple[Array, LayerState, LayerWork]],
    spec: CacheSpec,
    state: LayerState,
    step: StepKV,
    everyone: Any,
) -> tuple[Array, LayerState, LayerWork]:
    """Run one layer for the T tokens of a piece, in blocks of `block_tokens` tokens.

    Args:
        run_layer: runs a layer for a block. It is `step_layer`.
        spec, state, step, everyone: as in `step_layer`. The tokens with `step.valid` come first in each row.

    Returns:
        The attention's output [B, T, h_q, d], the layer's new state, and the work, which has only its counters.
    """
    split = split_of(spec)
    if split is None:
        return over_blocks(lambda before, block, _: run_layer(spec, before, block, everyone), spec, state, step)
    state, step = append_tokens(spec, state, step)
    pieces = [(piece.k, piece.v, piece.valid) for piece in split.exact_pieces(spec, state, step)]
    exact = attend_prefixes(step.q_post, pieces, spec.scale)
    return over_blocks(functools.partial(add_selected, spec, split), spec, state, step, exact)


def add_selected(
    spec: CacheSpec, split: SplitsTurns, state: LayerState, block: StepKV, exact: tuple[Array, Array]
) -> tuple[Array, LayerState, LayerWork]:
    """Let each query of a block, whose tokens are stored, select units and attend to them.

    Args:
        spec: the spec of the layer.
        split: the layer's cache.
        state: the layer's state.
        block: the queries.
        exact: their attention to the exact tokens [B, b, h_q, d], and its log-sum-exp, float32 [B, b, h_q].

    Returns:
        The attention's output [B, b, h_q, d], the layer's new state, and the units that were fetched.
    """
    fetched, state, work = fetch_units(spec, state, block)
    if fetched is None:
        return exact[0], state, work
    piece, state = split.selected_piece(spec, state, block, fetched)
    return add_rows(block.q_post, (piece.k, piece.v, piece.valid), spec.scale, exact), state, work


def over_blocks(
    run_block: Callable[[LayerState, StepKV, Any], tuple[Array, LayerState, LayerWork]],
    spec: CacheSpec,
    state: LayerState,
    step: StepKV,
    more: Any = (),
) -> tuple[Array, LayerState, LayerWork]:
    """Cut the tokens of a piece into blocks, and run the blocks one after the other.

    Args:
        run_block: maps the state, a block and its part of `more` to the results of `step_layer`.
        spec, state, step: as in `in_blocks`.
        more: a pytree of arrays [B, T, ...], which are cut in the same way.
    """
    count = step.valid.shape[1]
    size = block_tokens(spec, count)
    blocks = -(-count // size)
    names = TOKEN_FIELDS + (() if step.q_foreseen is None else ("q_foreseen",))

    def cut(x: Array) -> Array:  # [B, T, ...] -> [blocks, B, size, ...]
        x = jnp.pad(x, [(0, 0), (0, blocks * size - count), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], blocks, size, *x.shape[2:]).swapaxes(0, 1)

    def body(carry: tuple[Any, Any, Array, Counters], parts: tuple[dict[str, Array], Any]) -> tuple[Any, Array]:
        live, tail, lengths, counters = carry
        positions = lengths[:, None] + jnp.arange(size, dtype=jnp.int32)
        block = step.replace(**parts[0], positions=positions, lengths=lengths)
        before = state.replace(live=live, host=HostTier(state.host.prompt, tail))
        out, after, work = run_block(before, block, parts[1])
        assert not work.later, "a layer that plans ahead takes no blocks"
        counters = count_step(counters, (spec,), [after], [work], positions + 1, block.valid)
        lengths = lengths + block.valid.sum(axis=1, dtype=jnp.int32)
        return (after.live, after.host.tail, lengths, counters), out

    start = state.live, state.host.tail, step.lengths, Counters.zeros(spec.batch)
    parts = jax.tree.map(cut, ({name: getattr(step, name) for name in names}, more))
    if blocks == 1:
        (live, tail, _, counters), out = body(start, jax.tree.map(functools.partial(jnp.squeeze, axis=0), parts))
    else:
        (live, tail, _, counters), outs = lax.scan(body, start, parts)
        out = outs.swapaxes(0, 1).reshape(outs.shape[1], blocks * size, *outs.shape[3:])[:, :count]
    return out, state.replace(live=live, host=HostTier(state.host.prompt, tail)), LayerWork(counted=counters)
