"""Runs a sparse attention on given queries, keys and values, piece by piece."""

import functools

import jax
import jax.numpy as jnp

from jshadow.cache.records import PromptKV
from jshadow.policies.prefill_attention import PrefillPiece


def run_attention(attention, config, q, k, v, lengths, size=None):
    """Attention of a prompt in pieces of `size` tokens: the output, and the `aux` that counted the tiles."""
    attention, learned = attention.prepared(config)
    learned = jax.tree.map(lambda leaf: leaf[0], learned)
    tokens, size, lengths = q.shape[1], size or q.shape[1], jnp.asarray(lengths)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), q.shape[:2])
    prompt, tail = PromptKV(k, k, v, lengths, positions), None
    if attention.tail:
        index = jnp.maximum(lengths[:, None] - attention.tail + jnp.arange(attention.tail), 0)
        tail = jnp.take_along_axis(q, index[..., None, None], axis=1)
    kind = config.attention_kind(0)

    @functools.partial(jax.jit, static_argnums=0)
    def attend(attention, piece, prompt, aux):
        return attention.attend(config, kind, piece, prompt, aux)

    aux, outs = jax.jit(lambda *given: attention.begin(config, kind, *given))(prompt, tail, learned), []
    for first in range(0, tokens, size):
        piece = q[:, first : first + size]
        # the keys behind the piece must not be read
        seen = prompt if attention.ahead else prompt.replace(k_post=k.at[:, first + size :].set(1e3))
        out, aux = attend(attention, PrefillPiece(piece, piece, jnp.int32(first), jnp.zeros(1)), seen, aux)
        outs.append(out)
    return jnp.concatenate(outs, axis=1), aux
