"""The programs of one layer of a prefill: the block over a prompt, the second pass, and the compression.

Each program reads one piece, or attends to a whole prompt, or compresses it. `units_of` has them in order. The hidden
states and the layer's keys and values are written in place. All other arrays have at most the size of a piece, with
these exceptions. With `plan.needs_all`, the queries and log-sum-exps of the whole prompt are kept. An attention that
needs all keys first (`PrefillAttention.ahead`) has the queries of the whole prompt. With `plan.whole`, the queries and
the attention's output of the whole prompt are held for the rows that are read at once.

In the second pass (`SecondPass`), a layer that has read the prompt reads the requests, chunk by chunk. The
tokens of a request follow the prompt: they attend to the whole prompt and to the request's tokens before them, and to
no other request. In a recurrent layer they continue the state after the prompt. So the hidden states of all requests go
from layer to layer beside those of the prompt, and nothing of the prompt's states changes.

B rows, R of them that are read at once, S prompt tokens, P tokens of a piece, D model width, h_q query heads, h_kv KV
heads, d head width, w last queries of a row, C chunks, N keys, m tokens of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import HostTier, LayerState, PromptKV
from jshadow.cache.recurrence import Held, RecurrentTokens, read_tokens
from jshadow.cache.spec import CacheSpec
from jshadow.engine.step import compress_on_devices
from jshadow.errors import PromptError
from jshadow.models.config import AttentionKind, ModelConfig, recurrent_of
from jshadow.models.transformer import Heads, apply_block, sinks_of
from jshadow.ops.attention import (
    Implementation,
    causal_attention,
    most_attention,
    output_norms,
    output_products,
    whole_attention,
    whole_with_sinks,
)
from jshadow.ops.rope import rotation
from jshadow.policies.capabilities import OwnPrefill
from jshadow.policies.prefill_attention import (
    AFTER_REQUEST,
    REPEAT_ALL,
    REPEAT_FROM,
    PrefillAttention,
    PrefillPiece,
    SecondPass,
)
from jshadow.weights.tokenizer import encode

# Computes the attention of one piece from its queries and the prompt up to its last token. Returns the output and a
# value that is passed on to the next piece.
PieceAttention = Callable[[PrefillPiece, PromptKV], tuple[Array, Any]]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The static arguments of `prefill_layer`. Layers with equal plans share one compiled program.

    Attributes:
        needs_all: whether a policy reads all queries and the log-sum-exps of their scores.
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
        tokens = 0 if self.kind.recurrent else tokens  # its state takes the place of keys and values

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
        out, lse = causal_attention(piece.q_post, prompt.k_post, prompt.v, scale, piece.first, window, piece.sinks)
        if prompt.q_post is not None and prompt.lse is not None:
            prompt = prompt.replace(
                q_post=put(prompt.q_post, piece.q_post, piece.first),
                lse=lax.dynamic_update_slice_in_dim(prompt.lse, lse, piece.first, 2),
            )
        return out, prompt


@dataclasses.dataclass(frozen=True)
class _LayerRun:
    """The arguments of `prefill_layer` that are the same for all pieces of some rows.

    Attributes:
        lengths: number of real tokens of each of the R rows, int32 [R].
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
        valid = None
        if plan.config.experts is not None:
            valid = first + jnp.arange(plan.size, dtype=jnp.int32) < self.lengths[:, None]
        return apply_block({"layer_0": self.weights}, plan.config, 0, piece, cache, valid)

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
            if plan.kind.recurrent:
                return attend(PrefillPiece(heads.q_pre, heads.q_pre, first, turn.inverse, heads=heads), prompt)
            q, k = turn.queries(heads.q_pre), turn.keys(heads.k_pre)
            # Zeros for padding, so that a state does not depend on the width to which a prompt was padded.
            k_pre, k, v = (jnp.where(real, rows, 0) for rows in (heads.k_pre, k, heads.v))
            tail = prompt.q_tail
            if tail is not None:
                tail = put(tail, _tail_queries(self.mine(tail), q, lengths, first), 0, self.row)
            extended = prompt.replace(
                k_pre=put(prompt.k_pre, k_pre, first, self.row),
                k_post=put(prompt.k_post, k, first, self.row),
                v=put(prompt.v, v, first, self.row),
                q_tail=tail,
            )
            return attend(PrefillPiece(turn.tempered(heads.q_pre), q, first, turn.inverse, heads.sinks), extended)

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
        k, v, sinks = self.mine(prompt.k_post), self.mine(prompt.v), sinks_of(self.weights)
        if sinks is not None:
            return whole_with_sinks(q, k, v, self.lengths, scale, plan.whole, sinks)
        return whole_attention(q, k, v, self.lengths, scale, window, plan.whole)

    def finish(self, index: Array, x: Array, attended: Array) -> Array:
        """Return x with the output of the block for piece number `index`, from its attention [R, P, h_q, d]."""
        first = index * self.plan.size
        # The queries, keys and values are not used, so XLA does not project them again.
        return put(x, self.block(first, x, lambda heads: (attended, None))[0], first, self.row)


def put(whole: Array, piece: Array, first: Array | int, row: Array | int = 0) -> Array:
    """Return whole [B, S, ...] with piece [R, P, ...] written from token `first` of row `row` on."""
    return lax.dynamic_update_slice(whole, piece.astype(whole.dtype), (row, first, *(0,) * (whole.ndim - 2)))


def _tail_queries(tail: Array, q: Array, lengths: Array, first: Array) -> Array:
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


# The keys and values of a prompt, or the number of real tokens of each row, int32 [B], if no piece was read so far.
Begun = PromptKV | Array


class Given(NamedTuple):
    """The arrays of a layer that no program changes.

    Attributes:
        inverse: angle per position of each rotated pair, float32 [rotary_dim / 2].
        learned: this layer's slice of the arrays of `PrefillAttention.prepared`, or None.
    """

    weights: dict
    inverse: np.ndarray
    learned: Any = None


def _prompt_of(plan: LayerPlan, begun: Begun, x: Array) -> PromptKV:
    """Return the keys and values so far. They are zeros if no piece was read."""
    return begun if isinstance(begun, PromptKV) else plan.empty_prompt(begun, x.shape[1], x.dtype)


def _run_of(plan: LayerPlan, given: Given, prompt: PromptKV, row: Array | int = 0) -> _LayerRun:
    """Return the block over the R rows from `row` on."""
    rows = plan.rows or len(prompt.lengths)
    lengths = jax.lax.dynamic_slice_in_dim(prompt.lengths, row, rows)
    return _LayerRun(plan, given.weights, lengths, given.inverse, row)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("x", "begun", "aux"))
def read_piece(
    given: Given, x: Array, begun: Begun, q: Array | None, aux: Any, index: Array, *, plan: LayerPlan
) -> tuple[Array, PromptKV, Any]:
    """Apply the block to piece number `index`, which attends to the pieces before it.

    Args:
        x: hidden states [B, S, D].
        q: queries after RoPE of the whole prompt [B, S, h_q, d], if all pieces were projected before, or else None.
        aux: the pytree from `PrefillAttention.begin` or from the previous piece. None with exact attention.
    """
    prompt, attention = _prompt_of(plan, begun, x), plan.attention

    def attend(piece: PrefillPiece, prompt: PromptKV) -> tuple[Array, Any]:
        if attention is None or plan.needs_all:
            out, prompt = plan.exact(piece, prompt)
            if attention is None:
                return out, (prompt, aux)
        out, after = attention.attend(plan.config, plan.kind, piece, prompt, aux)
        return out, (prompt, after)

    run = _run_of(plan, given, prompt)
    if q is None:
        out, (prompt, aux) = run.piece(index, x, prompt, attend)
        return put(x, out, index * plan.size), prompt, aux
    first = index * plan.size
    mine = jax.lax.dynamic_slice_in_dim(q, first, plan.size, axis=1)
    sinks = sinks_of(given.weights)
    attended, (prompt, aux) = attend(PrefillPiece(None, mine, first, jnp.asarray(given.inverse), sinks), prompt)
    return run.finish(index, x, attended), prompt, aux


@functools.partial(jax.jit, static_argnames=("plan",))
def begin_attention(given: Given, x: Array, begun: Begun, q: Array | None, *, plan: LayerPlan) -> Any:
    """Return the pytree from `PrefillAttention.begin`. The arguments are those of `read_piece`."""
    prompt, attention, tail = _prompt_of(plan, begun, x), plan.attention, None
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
        q: array of the queries [R, S, h_q, d], or None if there is none yet.
    """
    prompt = _prompt_of(plan, begun, x)
    run = _run_of(plan, given, prompt, row)
    if q is None:
        q = jnp.zeros((len(run.lengths), x.shape[1], plan.config.q_heads, plan.config.head_dim), x.dtype)
    return run.project(index, x, prompt, q)


@functools.partial(jax.jit, static_argnames=("plan",))
def attend_whole(given: Given, prompt: PromptKV, q: Array, row: Array, *, plan: LayerPlan) -> Array:
    """Return the attention's output [R, S, h_q, d] of the whole prompt, for the R rows from `row` on, in one call."""
    return _run_of(plan, given, prompt, row).attend(prompt, q)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("x",))
def finish_piece(
    given: Given, x: Array, lengths: Array, attended: Array, index: Array, row: Array, *, plan: LayerPlan
) -> Array:
    """Return the hidden states after the rest of the block, for piece number `index` of the R rows from `row` on.

    Args:
        lengths: number of real tokens of each row, int32 [B].
        attended: the attention's output [R, S, h_q, d].
        row: first row.
    """
    rows = jax.lax.dynamic_slice_in_dim(lengths, row, plan.rows or len(lengths))
    run, first = _LayerRun(plan, given.weights, rows, given.inverse, row), index * plan.size
    return run.finish(index, x, jax.lax.dynamic_slice_in_dim(attended, first, plan.size, axis=1))


def needed(prompt: PromptKV, spec: CacheSpec) -> PromptKV:
    """Return the prompt without the arrays that the policy of `spec` does not read. Another policy may read them."""
    reads = spec.policy.reads
    tail = prompt.q_tail[:, -reads.last_queries :] if prompt.q_tail is not None and reads.last_queries else None
    everything, own = reads.all_queries, isinstance(spec.policy, OwnPrefill) or spec.policy.is_recurrent
    return prompt.replace(
        q_tail=tail,
        q_post=prompt.q_post if everything else None,
        lse=prompt.lse if everything else None,
        second_pass=prompt.second_pass if reads.second_pass else None,
        extra=prompt.extra if own else None,
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


class Requests(NamedTuple):
    """The tokens of the second pass, on the host.

    Attributes:
        tokens: int32 [B, C, R], each request padded on the right.
        counts: number of real tokens of each request, int32 [B, C]. It is 0 for a chunk after the end of a prompt.
            Chunks after the end of all prompts are not read.
    """

    settings: SecondPass
    tokens: np.ndarray
    counts: np.ndarray

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of chunks in the longest prompt, and the tokens of a request with padding."""
        return int((self.counts > 0).any(axis=0).sum()), self.tokens.shape[2]


class SecondWork(NamedTuple):
    """The arrays of the second pass between two units.

    Attributes:
        x: hidden states [C, B, R, D].
        counts: as in `Requests`, int32 [C, B].
    """

    x: Array
    counts: Array


def requests_of(
    second: SecondPass, tokenizer: Any, tokens: np.ndarray, lengths: np.ndarray, config: ModelConfig
) -> Requests:
    """Return the tokens of the second pass.

    Without a tokenizer, a request has no words: only the tokens before the chunk, and the chunk.

    Args:
        tokenizer: a transformers tokenizer, or None.
        tokens, lengths: the prompts, int32 [B, S] and [B].
    """

    def words(text: str) -> list[int]:
        return [] if tokenizer is None else encode(tokenizer, text)

    first, other, between = words(REPEAT_ALL), words(REPEAT_FROM), words(AFTER_REQUEST)
    rows: list[list[list[int]]] = []
    for row, length in zip(tokens, lengths, strict=True):
        ids, requests = row[:length].tolist(), []
        for start in range(0, int(length), second.chunk):
            asked = [*other, *ids[max(start - second.overlap, 0) : start]] if start else first
            requests.append([*asked, *between, *ids[start : start + second.chunk]])
        rows.append(requests)
        longest = int(length) + max(map(len, requests))
        if longest > config.context:
            raise PromptError(
                f"the prompt and a request of the second pass must be within the model's context={config.context}, got "
                f"{longest} tokens for a prompt of {length} and chunk={second.chunk}; a smaller chunk needs fewer"
            )
    # The shapes follow from the padded width of the prompts, so that prompts of similar lengths share a program.
    most = tokens.shape[1]
    asked_first, asked_later = len(first), len(other) + second.overlap if most > second.chunk else 0
    width = max(asked_first, asked_later) + len(between) + min(second.chunk, most)
    counts = np.zeros((len(rows), -(-most // second.chunk)), np.int32)
    padded = np.zeros((*counts.shape, width), np.int32)
    for row, requests in enumerate(rows):
        for chunk, request in enumerate(requests):
            padded[row, chunk, : len(request)] = request
            counts[row, chunk] = len(request)
    return Requests(second, padded, counts)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("work", "prompt"))
def read_request(
    given: Given, work: SecondWork, prompt: PromptKV, index: Array, held: Held | None = None, *, plan: LayerPlan
) -> tuple[SecondWork, PromptKV]:
    """Apply the block to the request for chunk number `index`, and score the tokens of the chunk.

    Args:
        held: in a recurrent layer, what it holds after the prompt. The request continues it, and no token is scored.
    """
    x, counts = work.x[index], work.counts[index]
    real = jnp.arange(x.shape[1]) < counts[:, None]

    def cache(heads: Heads) -> tuple[Array, Array | None]:
        if held is not None:
            out, _ = read_tokens(held, RecurrentTokens.of(heads, recurrent_of(plan.config), prompt.lengths, real))
            return out, prompt.second_pass
        return _attend_and_score(given, heads, prompt, (counts, index), plan)

    valid = None if plan.config.experts is None else real
    x, scores = apply_block({"layer_0": given.weights}, plan.config, 0, x, cache, valid)
    return work._replace(x=work.x.at[index].set(x)), prompt.replace(second_pass=scores)


def _attend_and_score(
    given: Given, heads: Heads, prompt: PromptKV, request: tuple[Array, Array], plan: LayerPlan
) -> tuple[Array, Array]:
    """Return the attention of a request to the prompt and to itself [B, R, h_q, d], and the scores of the prompt.

    Args:
        request: the number of its real tokens in each row, int32 [B], and the number of its chunk, int32 [].
    """
    (counts, index), config, kind, second = request, plan.config, plan.kind, plan.second_pass
    assert second is not None
    lengths, size, scale = prompt.lengths, heads.v.shape[1], config.attention_scale
    turn = rotation(kind.rope, jnp.asarray(given.inverse), lengths[:, None] + jnp.arange(size))
    products = None
    if second.normalized:
        products = output_products(given.weights["attention"]["o"], config.kv_heads, config.head_dim)

    def row(args: Any) -> tuple[Array, Array]:
        q, k, v, x_in, prompt_k, prompt_v, before, length, count = args
        keys, values = (
            lax.dynamic_update_slice_in_dim(jnp.pad(old, ((0, size), (0, 0), (0, 0))), new, length, 0)
            for old, new in ((prompt_k, k), (prompt_v, v))
        )
        out, _ = causal_attention(q[None], keys[None], values[None], scale, length, kind.window, heads.sinks)
        if kind.window is not None:
            return out[0], before  # no policy reads the scores of this layer
        part = _chunk_of(second, prompt_k.shape[0], length, index)
        at, inside = part
        columns, seen = _columns_of(second, part, (prompt_k, k))
        real = worth = jnp.arange(size) < count
        if products is not None:
            worth = jnp.where(real, 1 / jnp.linalg.norm(x_in.astype(jnp.float32), axis=-1), 0)
        best = most_attention(q, columns, seen, worth, scale)[..., second.sinks : second.sinks + len(inside)]
        if products is not None:
            rows = lax.dynamic_slice_in_dim(prompt_v, at, len(inside)).astype(jnp.float32)
            best *= output_norms(rows, products)
        scores = jnp.where(inside, best.max(axis=1), lax.dynamic_slice_in_dim(before, at, len(inside), axis=1))
        return out[0], lax.dynamic_update_slice_in_dim(before, scores, at, 1)

    new = (turn.queries(heads.q_pre), turn.keys(heads.k_pre), heads.v, heads.x_in)
    found: tuple[Array, Array] = lax.map(row, (*new, prompt.k_post, prompt.v, prompt.second_pass, lengths, counts))
    return found


def _chunk_of(second: SecondPass, tokens: int, length: Array, index: Array) -> tuple[Array, Array]:
    """Return a slice of a prompt that contains chunk number `index`, for one row.

    Args:
        length: number of real tokens of the row, int32 [].
        index: number of the chunk, int32 [].

    Returns:
        The first position of the slice, int32 [], and which of its positions are in the chunk, bool [m].
    """
    size, start = min(second.chunk, tokens), index * second.chunk
    at = jnp.minimum(start, tokens - size)
    position = at + jnp.arange(size)
    return at, (position >= start) & (position < jnp.minimum(start + size, length))


def _columns_of(second: SecondPass, part: tuple[Array, Array], keys: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the keys that share the attention of a request, and which of them each query sees, for one row.

    Args:
        keys: keys after RoPE of the prompt [S, h_kv, d], and of the request [R, h_kv, d].

    Returns:
        The keys of the sinks, the chunk and the request [N, h_kv, d], and bool [R, N].
    """
    (prompt, own), (at, inside) = keys, part
    size, sinks = len(own), second.sinks
    first = jnp.pad(prompt[:sinks], ((0, max(sinks - len(prompt), 0)), (0, 0), (0, 0)))
    chunk = lax.dynamic_slice_in_dim(prompt, at, len(inside))
    # The sinks before the chunk: the first chunk contains them.
    shared = jnp.concatenate([jnp.arange(sinks) < at + jnp.argmax(inside), inside])
    shared = jnp.broadcast_to(shared, (size, len(shared)))
    causal = jnp.arange(size) <= jnp.arange(size)[:, None]
    return jnp.concatenate([first, chunk, own]), jnp.concatenate([shared, causal], axis=1)
