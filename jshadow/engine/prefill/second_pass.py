"""The second pass over a prompt: its tokens, and its program for one chunk of one layer (`SecondPass`).

After a layer has read the prompt, it reads the requests, chunk by chunk. The tokens of a request follow the prompt:
they attend to the whole prompt and to the request's tokens before them, and to no other request. So the hidden states
of all requests go from layer to layer beside those of the prompt, and nothing of the prompt's states changes.

B rows, S prompt tokens, C chunks, R tokens of a request with padding, D model width, h_kv KV heads, d head width, N
keys, m tokens of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import PromptKV
from jshadow.engine.prefill.layer import Given
from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.errors import PromptError
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import Heads, apply_block
from jshadow.ops.attention import causal_attention, most_attention, output_norms, output_products
from jshadow.ops.rope import rotation
from jshadow.policies.prefill_attention import AFTER_REQUEST, REPEAT_ALL, REPEAT_FROM, SecondPass
from jshadow.weights.tokenizer import encode


class Requests(NamedTuple):
    """The tokens of the second pass, on the host.

    Attributes:
        settings: the settings of the second pass.
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
        second: the settings.
        tokenizer: a transformers tokenizer, or None.
        tokens, lengths: the prompts, int32 [B, S] and [B].
        config: the model.

    Raises:
        PromptError: a prompt and the request after it exceed the model's context.
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
    given: Given, work: SecondWork, prompt: PromptKV, index: Array, *, plan: LayerPlan
) -> tuple[SecondWork, PromptKV]:
    """Apply the block to the request for chunk number `index`, and score the tokens of the chunk.

    Args:
        given: the weights and other arrays of the layer.
        work: the hidden states before the layer.
        prompt: the keys and values of the whole prompt in this layer, and the scores so far.
        index: number of the chunk.
        plan: the static arguments, with `second_pass`.

    Returns:
        The hidden states, in which those of this request are the block's output, and the prompt with the new scores.
    """
    config, kind, second = plan.config, plan.kind, plan.second_pass
    assert second is not None
    x, counts = work.x[index], work.counts[index]
    lengths, size, scale = prompt.lengths, x.shape[1], config.attention_scale
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
        out, _ = causal_attention(q[None], keys[None], values[None], scale, length, kind.window)
        if kind.window is not None:
            return out[0], before  # no policy reads the scores of this layer
        part = chunk_of(second, prompt_k.shape[0], length, index)
        at, inside = part
        columns, seen = columns_of(second, part, (prompt_k, k))
        real = worth = jnp.arange(size) < count
        if products is not None:
            worth = jnp.where(real, 1 / jnp.linalg.norm(x_in.astype(jnp.float32), axis=-1), 0)
        best = most_attention(q, columns, seen, worth, scale)[..., second.sinks : second.sinks + len(inside)]
        if products is not None:
            rows = lax.dynamic_slice_in_dim(prompt_v, at, len(inside)).astype(jnp.float32)
            best *= output_norms(rows, products)
        scores = jnp.where(inside, best.max(axis=1), lax.dynamic_slice_in_dim(before, at, len(inside), axis=1))
        return out[0], lax.dynamic_update_slice_in_dim(before, scores, at, 1)

    def cache(heads: Heads) -> tuple[Array, Array]:
        new = (turn.queries(heads.q_pre), turn.keys(heads.k_pre), heads.v, heads.x_in)
        return lax.map(row, (*new, prompt.k_post, prompt.v, prompt.second_pass, lengths, counts))

    x, scores = apply_block({"layer_0": given.weights}, config, 0, x, cache)
    return work._replace(x=work.x.at[index].set(x)), prompt.replace(second_pass=scores)


def chunk_of(second: SecondPass, tokens: int, length: Array, index: Array) -> tuple[Array, Array]:
    """Return a slice of a prompt that contains chunk number `index`, for one row.

    Args:
        second: the settings.
        tokens: number of tokens S to which the prompt is padded.
        length: number of real tokens of the row, int32 [].
        index: number of the chunk, int32 [].

    Returns:
        The first position of the slice, int32 [], and which of its positions are in the chunk, bool [m].
    """
    size, start = min(second.chunk, tokens), index * second.chunk
    at = jnp.minimum(start, tokens - size)
    position = at + jnp.arange(size)
    return at, (position >= start) & (position < jnp.minimum(start + size, length))


def columns_of(second: SecondPass, part: tuple[Array, Array], keys: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the keys that share the attention of a request, and which of them each query sees, for one row.

    Args:
        second: the settings.
        part: the chunk, from `chunk_of`.
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
