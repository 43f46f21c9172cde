"""The programs of one layer of a prefill: the block over a prompt, and the compression of the keys and values.

Each program reads one piece, or attends to a whole prompt, or compresses it. `layer_units` calls them in order. The
hidden states and the layer's keys and values are written in place. All other arrays have at most the size of a piece,
with these exceptions. With `plan.needs_all`, the queries and log-sum-exps of the whole prompt are kept. An attention
that needs all keys first (`PrefillAttention.ahead`) has the queries of the whole prompt. With `plan.whole`, the queries
and the attention's output of the whole prompt are held for the rows that are read at once.

B rows, R of them that are read at once, S prompt tokens, D model width, h_q query heads, d head width.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.records import HostTier, LayerState, PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine.mesh.layer import compress_on_devices
from jshadow.engine.prefill.layer_run import LayerPlan, LayerRun, put
from jshadow.policies.capabilities import OwnPrefill
from jshadow.policies.prefill_attention import PrefillPiece

# The keys and values of a prompt, or the number of real tokens of each row, int32 [B], if no piece was read so far.
Begun = PromptKV | Array


class Given(NamedTuple):
    """The arrays of a layer that no program changes.

    Attributes:
        weights: the weights of this layer.
        inverse: angle per position of each rotated pair, float32 [rotary_dim / 2].
        learned: this layer's slice of the arrays of `PrefillAttention.prepared`, or None.
    """

    weights: dict
    inverse: np.ndarray
    learned: Any = None


def prompt_of(plan: LayerPlan, begun: Begun, x: Array) -> PromptKV:
    """Return the keys and values so far. They are zeros if no piece was read."""
    return begun if isinstance(begun, PromptKV) else plan.empty_prompt(begun, x.shape[1], x.dtype)


def run_of(plan: LayerPlan, given: Given, prompt: PromptKV, row: Array | int = 0) -> LayerRun:
    """Return the block over the R rows from `row` on."""
    rows = plan.rows or len(prompt.lengths)
    lengths = jax.lax.dynamic_slice_in_dim(prompt.lengths, row, rows)
    return LayerRun(plan, given.weights, lengths, given.inverse, row)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("x", "begun", "aux"))
def read_piece(
    given: Given, x: Array, begun: Begun, q: Array | None, aux: Any, index: Array, *, plan: LayerPlan
) -> tuple[Array, PromptKV, Any]:
    """Apply the block to piece number `index`, which attends to the pieces before it.

    Args:
        given: the weights and other arrays of the layer.
        x: hidden states [B, S, D].
        begun: the prompt so far.
        q: queries after RoPE of the whole prompt [B, S, h_q, d], if all pieces were projected before, or else None.
        aux: the pytree from `PrefillAttention.begin` or from the previous piece. None with exact attention.
        index: number of the piece.
        plan: the static arguments.

    Returns:
        The hidden states, the prompt, and the pytree for the next piece.
    """
    prompt, attention = prompt_of(plan, begun, x), plan.attention

    def attend(piece: PrefillPiece, prompt: PromptKV) -> tuple[Array, Any]:
        if attention is None or plan.needs_all:
            out, prompt = plan.exact(piece, prompt)
            if attention is None:
                return out, (prompt, aux)
        out, after = attention.attend(plan.config, plan.kind, piece, prompt, aux)
        return out, (prompt, after)

    run = run_of(plan, given, prompt)
    if q is None:
        out, (prompt, aux) = run.piece(index, x, prompt, attend)
        return put(x, out, index * plan.size), prompt, aux
    first = index * plan.size
    mine = jax.lax.dynamic_slice_in_dim(q, first, plan.size, axis=1)
    attended, (prompt, aux) = attend(PrefillPiece(None, mine, first, jnp.asarray(given.inverse)), prompt)
    return run.finish(index, x, attended), prompt, aux


@functools.partial(jax.jit, static_argnames=("plan",))
def begin_attention(given: Given, x: Array, begun: Begun, q: Array | None, *, plan: LayerPlan) -> Any:
    """Return the pytree from `PrefillAttention.begin`. The arguments are those of `read_piece`."""
    prompt, attention, tail = prompt_of(plan, begun, x), plan.attention, None
    assert attention is not None
    if q is not None and attention.tail:
        last = jnp.maximum(prompt.lengths[:, None] - attention.tail + jnp.arange(attention.tail), 0)
        tail = jnp.take_along_axis(q, last[:, :, None, None], axis=1)
    return attention.begin(plan.config, plan.kind, prompt, tail, given.learned)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("begun", "q"))
def project_piece(
    given: Given, x: Array, begun: Begun, q: Array | None, index: Array, row: Array, *, plan: LayerPlan
) -> tuple[PromptKV, Array]:
    """Project piece number `index` of the R rows from `row` on.

    Args:
        given, x, begun, index, plan: as in `read_piece`.
        q: array of the queries [R, S, h_q, d], or None if there is none yet.
        row: first row.

    Returns:
        The prompt with the keys and values of the piece, and the queries after RoPE.
    """
    prompt = prompt_of(plan, begun, x)
    run = run_of(plan, given, prompt, row)
    if q is None:
        q = jnp.zeros((len(run.lengths), x.shape[1], plan.config.q_heads, plan.config.head_dim), x.dtype)
    return run.project(index, x, prompt, q)


@functools.partial(jax.jit, static_argnames=("plan",))
def attend_whole(given: Given, prompt: PromptKV, q: Array, row: Array, *, plan: LayerPlan) -> Array:
    """Return the attention's output [R, S, h_q, d] of the whole prompt, for the R rows from `row` on, in one call."""
    return run_of(plan, given, prompt, row).attend(prompt, q)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("x",))
def finish_piece(
    given: Given, x: Array, lengths: Array, attended: Array, index: Array, row: Array, *, plan: LayerPlan
) -> Array:
    """Return the hidden states after the rest of the block, for piece number `index` of the R rows from `row` on.

    Args:
        given, x, index, plan: as in `read_piece`.
        lengths: number of real tokens of each row, int32 [B].
        attended: the attention's output [R, S, h_q, d].
        row: first row.
    """
    rows = jax.lax.dynamic_slice_in_dim(lengths, row, plan.rows or len(lengths))
    run, first = LayerRun(plan, given.weights, rows, given.inverse, row), index * plan.size
    return run.finish(index, x, jax.lax.dynamic_slice_in_dim(attended, first, plan.size, axis=1))


def needed(prompt: PromptKV, spec: CacheSpec) -> PromptKV:
    """Return the prompt without the arrays that the policy of `spec` does not read. Another policy may read them."""
    reads = spec.policy.reads
    tail = prompt.q_tail[:, -reads.last_queries :] if prompt.q_tail is not None and reads.last_queries else None
    everything = reads.all_queries
    return prompt.replace(
        q_tail=tail,
        q_post=prompt.q_post if everything else None,
        lse=prompt.lse if everything else None,
        second_pass=prompt.second_pass if reads.second_pass else None,
        extra=prompt.extra if isinstance(spec.policy, OwnPrefill) else None,
    )


@functools.partial(jax.jit, static_argnames=("spec",))
def compress_layer(prompt: PromptKV, fitted: Any, *, spec: CacheSpec) -> tuple[LayerState, Any]:
    """Compress the prompt in one layer. Return the layer's state, and the write that fills its host tier.

    `spec.layer` must be None, so that all layers share one compiled program.
    """

    def compress(prompt: PromptKV, fitted: Any) -> tuple[LayerState, Any]:
        state, write = spec.policy.compress(spec, spec.policy.init(spec, fitted), prompt, fitted)
        return state.replace(host=HostTier()), write

    if spec.shards is not None:
        return compress_on_devices(compress, prompt, fitted, spec)
    return compress(prompt, fitted)
