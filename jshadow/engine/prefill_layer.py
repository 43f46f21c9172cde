"""One layer of a prefill: the compiled block over a prompt in pieces, and the compression of its keys and values.

B rows, S prompt tokens, P tokens of a piece, D model width, h_q query heads, h_kv KV heads, d head width, w last
queries of a row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import HostTier, LayerState, PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.models.transformer import Heads, apply_block
from jshadow.ops.attention import causal_attention
from jshadow.ops.rope import rotation
from jshadow.policies.capabilities import OwnPrefill
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece

# Computes the attention of one piece from its queries and the prompt up to its last token. Returns the output and a
# value that is passed on to the next piece.
PieceAttention = Callable[[PrefillPiece, PromptKV], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The static arguments of `prefill_layer`. Layers with equal plans share one compiled program.

    Attributes:
        config: the model.
        kind: the rotation and the window of this layer's attention.
        needs_all: whether a policy reads all queries and the log-sum-exps of their scores.
        q_tail: number of last queries of each row that the policies read.
        size: number of tokens in a piece. It divides the width of the padded prompt.
        attention: the attention that replaces exact attention, or None.
    """

    config: ModelConfig
    kind: AttentionKind
    needs_all: bool
    q_tail: int
    size: int
    attention: PrefillAttention | None = None

    def empty_prompt(self, lengths: Array, tokens: int, dtype: Any) -> PromptKV:
        """Return a PromptKV with `tokens` tokens in each row, in which all keys and values are zeros."""
        config, batch = self.config, len(lengths)

        def zeros(*shape: int, dtype: Any = dtype) -> Array:
            return jnp.zeros((batch, *shape), dtype)

        rows, queries = (tokens, config.kv_heads, config.head_dim), (config.q_heads, config.head_dim)
        return PromptKV(
            k_pre=zeros(*rows),
            k_post=zeros(*rows),
            v=zeros(*rows),
            lengths=lengths,
            positions=jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens)),
            q_tail=zeros(self.q_tail, *queries) if self.q_tail else None,
            q_post=zeros(tokens, *queries) if self.needs_all else None,
            lse=zeros(config.q_heads, tokens, dtype=jnp.float32) if self.needs_all else None,
        )

    def exact(self, piece: PrefillPiece, prompt: PromptKV) -> tuple[Array, PromptKV]:
        """Compute exact attention of a piece. Return the output [B, P, h_q, d] and the prompt.

        If a policy reads them, the queries and log-sum-exps of the piece are added to the prompt.
        """
        out, lse = piece_attention(
            piece.q_post,
            prompt.k_post,
            prompt.v,
            piece.first,
            self.needs_all,
            scale=self.config.attention_scale,
            window=self.kind.window,
        )
        if prompt.q_post is not None and prompt.lse is not None and lse is not None:
            prompt = prompt.replace(
                q_post=put(prompt.q_post, piece.q_post, piece.first),
                lse=lax.dynamic_update_slice_in_dim(prompt.lse, lse, piece.first, 2),
            )
        return out, prompt


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """The arguments of `prefill_layer` that are the same for all pieces of a prompt."""

    plan: LayerPlan
    weights: dict
    lengths: Array
    inverse: np.ndarray

    def piece(self, index: Array, x: Array, prompt: PromptKV, attend: PieceAttention) -> tuple[Array, Any]:
        """Apply the block to piece number `index` of the hidden states x [B, S, D].

        Return the output [B, P, D] and the second result of `attend`.
        """
        plan, lengths = self.plan, self.lengths
        first = index * plan.size
        positions = first + jnp.arange(plan.size, dtype=jnp.int32)
        turn = rotation(plan.kind.rope, jnp.asarray(self.inverse), positions[None])
        real = (positions < lengths[:, None])[..., None, None]

        def cache(heads: Heads) -> tuple[Array, Any]:
            q, k = turn.queries(heads.q_pre), turn.keys(heads.k_pre)
            # Zeros for padding, so that a state does not depend on the width to which a prompt was padded.
            k_pre, k, v = (jnp.where(real, rows, 0) for rows in (heads.k_pre, k, heads.v))
            extended = prompt.replace(
                k_pre=put(prompt.k_pre, k_pre, first),
                k_post=put(prompt.k_post, k, first),
                v=put(prompt.v, v, first),
                q_tail=tail_queries(prompt.q_tail, q, lengths, first),
            )
            return attend(PrefillPiece(heads.q_pre, q, first, turn.inverse), extended)

        piece = lax.dynamic_slice_in_dim(x, first, plan.size, axis=1)
        return apply_block({"layer_0": self.weights}, plan.config, 0, piece, cache)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("x",))
def prefill_layer(
    weights: dict, x: Array, lengths: Array, inverse: np.ndarray, learned: Any = None, *, plan: LayerPlan
) -> tuple[Array, PromptKV]:
    """Apply one block to the prompt, piece after piece.

    The hidden states and the layer's keys and values are written in place. Later pieces attend to these keys and
    values. All other arrays have at most the size of a piece.

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


def put(whole: Array, piece: Array, first: Array) -> Array:
    """Return whole [B, S, ...] with piece [B, P, ...] written at tokens first .. first + P - 1."""
    return lax.dynamic_update_slice_in_dim(whole, piece.astype(whole.dtype), first, axis=1)


def tail_queries(tail: Array | None, q: Array, lengths: Array, first: Array) -> Array | None:
    """Return `tail` with those of each row's last w real queries that are in this piece.

    Args:
        tail: the last queries that earlier pieces had [B, w, h_q, d]. None if no policy reads them.
        q: the piece's queries [B, P, h_q, d].
        lengths: number of real tokens of each row, int32 [B].
        first: position of the piece's first token.
    """
    if tail is None:
        return None
    w = tail.shape[1]
    index = jnp.maximum(lengths[:, None] - w + jnp.arange(w), 0) - first
    inside = (index >= 0) & (index < q.shape[1])
    queries = jnp.take_along_axis(q, index[:, :, None, None], axis=1, mode="clip")
    return jnp.where(inside[:, :, None, None], queries, tail)


def piece_attention(
    q: Array, k: Array, v: Array, first: Array, with_lse: bool, *, scale: float, window: int | None = None
) -> tuple[Array, Array | None]:
    """Compute causal attention of a piece. Return the output, and the log-sum-exps of the scores or None.

    On a GPU, cuDNN computes it if the prompt is a single piece. cuDNN cannot compute other pieces, because its causal
    mask begins at the first key. It is not used with `with_lse`, because JAX returns log-sum-exps in the output's
    dtype, which is too coarse to merge pieces. The log-sum-exps are None only if cuDNN was used.
    """
    fused = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    if fused and q.shape[1] == k.shape[1] and not with_lse:
        reach = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=scale, local_window_size=reach, implementation="cudnn"
        ), None
    return causal_attention(q, k, v, scale, first, window)


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
