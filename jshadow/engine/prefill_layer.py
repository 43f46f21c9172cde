"""One layer of a prefill: the compiled block over a prompt in pieces, and the compression of its keys and values.

B rows, S prompt tokens, D model width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import HostTier, LayerState, PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine.layer_run import LayerPlan, LayerRun, put
from jshadow.policies.capabilities import OwnPrefill
from jshadow.policies.prefill_attention import PrefillPiece


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("x",))
def prefill_layer(
    weights: dict, x: Array, lengths: Array, inverse: np.ndarray, learned: Any = None, *, plan: LayerPlan
) -> tuple[Array, PromptKV]:
    """Apply one block to the prompt, piece after piece.

    The hidden states and the layer's keys and values are written in place. Later pieces attend to these keys and
    values. All other arrays have at most the size of a piece, with these exceptions. With `plan.needs_all`, the queries
    and log-sum-exps of the whole prompt are kept. With `plan.whole`, all pieces are projected first. Then the attention
    of the whole prompt is computed, and then the rest of the block in pieces. This needs the queries and the
    attention's output of the whole prompt, for the rows that are read at once.

    Args:
        weights: the weights of this layer.
        x: hidden states [B, S, D]. They are donated.
        lengths: number of real tokens of each row, int32 [B].
        inverse: angle per position of each rotated pair, float32 [rotary_dim / 2].
        learned: this layer's slice of the arrays of `PrefillAttention.prepared`, or None.
        plan: the static arguments.

    Returns:
        The hidden states [B, S, D] after the block, and the prompt's keys and values.
    """
    config, kind, attention = plan.config, plan.kind, plan.attention
    tokens = x.shape[1]
    count = tokens // plan.size
    assert count * plan.size == tokens, f"{tokens} tokens are no pieces of {plan.size}"
    prompt = plan.empty_prompt(lengths, tokens, x.dtype)

    if plan.whole is not None:
        assert attention is None, "exact attention is replaced"
        assert not plan.needs_all, "attention in one call gives no log-sum-exps"
        rows = plan.rows or len(lengths)

        def some(index: Array, carry: tuple[Array, PromptKV]) -> tuple[Array, PromptKV]:
            row = index * rows
            mine = lax.dynamic_slice_in_dim(lengths, row, rows)
            return LayerRun(plan, weights, mine, inverse, row).whole(*carry)

        return lax.fori_loop(0, len(lengths) // rows, some, (x, prompt))

    run = LayerRun(plan, weights, lengths, inverse)

    def one(index: Array, carry: tuple[Array, PromptKV, Any]) -> tuple[Array, PromptKV, Any]:
        x, prompt, aux = carry

        def attend(piece: PrefillPiece, prompt: PromptKV) -> tuple[Array, Any]:
            if attention is None or plan.needs_all:
                out, prompt = plan.exact(piece, prompt)
                if attention is None:
                    return out, (prompt, aux)
            out, after = attention.attend(config, kind, piece, prompt, aux)
            return out, (prompt, after)

        out, (prompt, aux) = run.piece(index, x, prompt, attend)
        return put(x, out, index * plan.size), prompt, aux

    def look(index: Array, prompt: PromptKV) -> PromptKV:
        # The block's output is dropped, so XLA computes no attention and no MLP here.
        return run.piece(index, x, prompt, lambda piece, extended: (piece.q_post, extended))[1]

    aux = None
    if attention is not None:
        tail = None
        if attention.ahead:
            queries = (len(lengths), attention.tail, config.q_heads, config.head_dim)
            empty = jnp.zeros(queries, x.dtype) if attention.tail else None
            whole = lax.fori_loop(0, count, look, prompt.replace(q_tail=empty))
            tail = whole.q_tail
            prompt = whole.replace(q_tail=prompt.q_tail)
        aux = attention.begin(config, kind, prompt, tail, learned)
    x, prompt, aux = lax.fori_loop(0, count, one, (x, prompt, aux))
    return x, prompt.replace(extra=aux)


def needed(prompt: PromptKV, spec: CacheSpec) -> PromptKV:
    """Return the prompt without the arrays that the policy of `spec` does not read. Another policy may read them."""
    reads = spec.policy.reads
    tail = prompt.q_tail[:, -reads.last_queries :] if prompt.q_tail is not None and reads.last_queries else None
    everything = reads.all_queries
    return prompt.replace(
        q_tail=tail,
        q_post=prompt.q_post if everything else None,
        lse=prompt.lse if everything else None,
        extra=prompt.extra if isinstance(spec.policy, OwnPrefill) else None,
    )


@functools.partial(jax.jit, static_argnames=("spec",))
def compress_layer(prompt: PromptKV, fitted: Any, *, spec: CacheSpec) -> tuple[LayerState, Any]:
    """Compress the prompt in one layer. Return the layer's state, and the write that fills its host tier.

    `spec.layer` must be None, so that all layers share one compiled program.
    """
    state, write = spec.policy.compress(spec, spec.policy.init(spec, fitted), prompt, fitted)
    return state.replace(host=HostTier()), write
