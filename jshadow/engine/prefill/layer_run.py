"""The block of one layer over a prompt: the static arguments of the program, and its steps on pieces and on rows.

B rows, R of them that are read at once, S prompt tokens, P tokens of a piece, D model width, h_q query heads, h_kv KV
heads, d head width, w last queries of a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.models.transformer import Heads, apply_block
from jshadow.ops.attention import Implementation, causal_attention, whole_attention
from jshadow.ops.rope import rotation
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece, SecondPass

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
        whole: None, or what computes exact attention in one call over the whole prompt, after the projections of all
            pieces. It must be None with `attention` or `needs_all`.
        rows: number of rows that are read at once, a divisor of the batch size. Used only with `whole`. None means all.
        second_pass: the second pass over the prompt, or None.
    """

    config: ModelConfig
    kind: AttentionKind
    needs_all: bool
    q_tail: int
    size: int
    attention: PrefillAttention | None = None
    whole: Implementation | None = None
    rows: int | None = None
    second_pass: SecondPass | None = None

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
            second_pass=zeros(config.kv_heads, tokens, dtype=jnp.float32) if self.second_pass else None,
        )

    def exact(self, piece: PrefillPiece, prompt: PromptKV) -> tuple[Array, PromptKV]:
        """Compute exact attention of a piece. Return the output [B, P, h_q, d] and the prompt.

        If a policy reads them, the queries and log-sum-exps of the piece are added to the prompt.
        """
        scale, window = self.config.attention_scale, self.kind.window
        out, lse = causal_attention(piece.q_post, prompt.k_post, prompt.v, scale, piece.first, window)
        if prompt.q_post is not None and prompt.lse is not None:
            prompt = prompt.replace(
                q_post=put(prompt.q_post, piece.q_post, piece.first),
                lse=lax.dynamic_update_slice_in_dim(prompt.lse, lse, piece.first, 2),
            )
        return out, prompt


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """The arguments of `prefill_layer` that are the same for all pieces of some rows.

    Attributes:
        plan: the static arguments.
        weights: the weights of the layer.
        lengths: number of real tokens of each of the R rows, int32 [R].
        inverse: angle per position of each rotated pair.
        row: index of the first of these rows in the batch.
    """

    plan: LayerPlan
    weights: dict
    lengths: Array
    inverse: np.ndarray
    row: Array | int = 0

    def mine(self, whole: Array) -> Array:
        """Return these rows [R, ...] of an array [B, ...]."""
        return lax.dynamic_slice_in_dim(whole, self.row, len(self.lengths))

    def block(self, first: Array, x: Array, cache: Callable[[Heads], tuple[Array, Any]]) -> tuple[Array, Any]:
        """Apply the block to the piece of the hidden states x [B, S, D] that begins at token `first`.

        `cache` gets the piece's heads, and returns the attention's output and another value. Return the output of the
        block [R, P, D], and this other value.
        """
        plan = self.plan
        piece = lax.dynamic_slice(x, (self.row, first, 0), (len(self.lengths), plan.size, x.shape[-1]))
        return apply_block({"layer_0": self.weights}, plan.config, 0, piece, cache)

    def piece(self, index: Array, x: Array, prompt: PromptKV, attend: PieceAttention) -> tuple[Array, Any]:
        """Apply the block to piece number `index` of the hidden states x [B, S, D].

        Return the output [R, P, D] and the second result of `attend`.
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
            tail = prompt.q_tail
            if tail is not None:
                tail = put(tail, tail_queries(self.mine(tail), q, lengths, first), 0, self.row)
            extended = prompt.replace(
                k_pre=put(prompt.k_pre, k_pre, first, self.row),
                k_post=put(prompt.k_post, k, first, self.row),
                v=put(prompt.v, v, first, self.row),
                q_tail=tail,
            )
            return attend(PrefillPiece(heads.q_pre, q, first, turn.inverse), extended)

        return self.block(first, x, cache)

    def project(self, index: Array, x: Array, prompt: PromptKV, q: Array) -> tuple[PromptKV, Array]:
        """Project piece number `index` of the hidden states x [B, S, D].

        Return the prompt with the keys and values of the piece, and `q` [R, S, h_q, d] with its queries after RoPE.
        """

        def keep(piece: PrefillPiece, extended: PromptKV) -> tuple[Array, tuple[PromptKV, Array]]:
            return piece.q_post, (extended, put(q, piece.q_post, piece.first))

        # The block's output is dropped, so XLA computes no output projection and no MLP here.
        return self.piece(index, x, prompt, keep)[1]

    def attend(self, prompt: PromptKV, q: Array) -> Array:
        """Return the attention's output [R, S, h_q, d] of the whole prompt, in one call."""
        plan = self.plan
        assert plan.whole is not None
        scale, window = plan.config.attention_scale, plan.kind.window
        return whole_attention(
            q, self.mine(prompt.k_post), self.mine(prompt.v), self.lengths, scale, window, plan.whole
        )

    def finish(self, index: Array, x: Array, attended: Array) -> Array:
        """Return x with the output of the block for piece number `index`, from its attention [R, P, h_q, d]."""
        first = index * self.plan.size
        # The queries, keys and values are not used, so XLA does not project them again.
        return put(x, self.block(first, x, lambda heads: (attended, None))[0], first, self.row)


def put(whole: Array, piece: Array, first: Array | int, row: Array | int = 0) -> Array:
    """Return whole [B, S, ...] with piece [R, P, ...] written from token `first` of row `row` on."""
    return lax.dynamic_update_slice(whole, piece.astype(whole.dtype), (row, first, *(0,) * (whole.ndim - 2)))


def tail_queries(tail: Array, q: Array, lengths: Array, first: Array) -> Array:
    """Return `tail` with those of each row's last w real queries that are in this piece.

    Args:
        tail: the last queries that earlier pieces had [R, w, h_q, d].
        q: the piece's queries [R, P, h_q, d].
        lengths: number of real tokens of each row, int32 [R].
        first: position of the piece's first token.
    """
    w = tail.shape[1]
    index = jnp.maximum(lengths[:, None] - w + jnp.arange(w), 0) - first
    inside = (index >= 0) & (index < q.shape[1])
    queries = jnp.take_along_axis(q, index[:, :, None, None], axis=1, mode="clip")
    return jnp.where(inside[:, :, None, None], queries, tail)
