"""Runs a sparse attention on given queries, keys and values, piece by piece."""

import functools

import jax
import numpy as np

from jshadow.cache.records import PromptKV
from jshadow.policies.prefill_attention import PrefillPiece


@functools.partial(jax.jit, static_argnums=(0, 1))
def begin(attention, config, prompt, tail, learned):
    return attention.begin(config, config.attention_kind(0), prompt, tail, learned)


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(attention, config, piece, prompt, aux):
    return attention.attend(config, config.attention_kind(0), piece, prompt, aux)


def run_attention(attention, config, q, k, v, lengths, size=None):
    """Attention of a prompt in pieces of `size` tokens: the output, and the `aux` that counted the tiles."""
    attention, learned = attention.prepared(config)
    learned = jax.tree.map(lambda leaf: np.asarray(leaf)[0], learned)
    q, k, lengths = np.asarray(q), np.asarray(k), np.asarray(lengths, np.int32)
    tokens, size = q.shape[1], size or q.shape[1]
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), q.shape[:2])
    prompt, tail = PromptKV(k, k, v, lengths, positions), None
    if attention.tail:
        index = np.maximum(lengths[:, None] - attention.tail + np.arange(attention.tail), 0)
        tail = np.take_along_axis(q, index[..., None, None], axis=1)
    aux, outs = begin(attention, config, prompt, tail, learned), []
    for first in range(0, tokens, size):
        seen = prompt
        if not attention.ahead:  # the keys behind the piece must not be read
            behind = (np.arange(tokens) >= first + size)[:, None, None]
            seen = prompt.replace(k_post=np.where(behind, 1e3, k).astype(k.dtype))
        piece = q[:, first : first + size]
        out, aux = attend(
            attention, config, PrefillPiece(piece, piece, np.int32(first), np.zeros(1, np.float32)), seen, aux
        )
        outs.append(np.asarray(out))
    return np.concatenate(outs, axis=1), aux
