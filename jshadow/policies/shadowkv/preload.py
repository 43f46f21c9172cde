"""Chunks that begin with exact keys, as the published ShadowKV code preloads them (`ShadowKV(exact_preload=True)`).

There a chunk that stays selected keeps the key it had: exact for what the prompt's last query selected, rebuilt from
the factors once it was dropped and fetched again.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched


class Preload(struct.PyTreeNode):
    """Attributes: ids: chunks, int32 [B, h, n], -1 for none; keys: theirs after RoPE [B, h, n * c, d]."""

    ids: Array
    keys: Array


def exact_keys(preload: Preload, fresh: Array, fetched: Fetched, valid: Array) -> tuple[Array, Array]:
    """The fetched keys with those of preloaded chunks exact, as long as no query has dropped them.

    Args:
        preload: the chunks.
        fresh: those that every query so far has selected, bool [B, h, n].
        fetched: the step's chunks, Q queries of k each: k [B, h, Q * k * c, d].
        valid: real queries [B, T].

    Returns:
        keys like fetched.k, and the new fresh.
    """
    assert fetched.k is not None
    batch, heads, count = preload.ids.shape
    rows, size = fetched.ids.shape[2], preload.keys.shape[2] // max(count, 1)
    queries = rows // count
    chosen = jnp.where(fetched.valid.reshape(batch, heads, rows, size)[..., 0], fetched.ids, -2)
    chosen = chosen.reshape(batch, heads, queries, count)
    same = chosen[..., :, None] == preload.ids[:, :, None, None, :]  # [B, h, Q, chosen, preloaded]
    idle = ~(valid if queries > 1 else valid.any(axis=1, keepdims=True))[:, None, :, None]
    still = fresh[:, :, None] & jnp.cumprod(same.any(axis=3) | idle, axis=2).astype(bool)  # [B, h, Q, preloaded]
    same = same & still[:, :, :, None, :]
    slot = same.argmax(axis=-1).reshape(batch, heads, rows)
    exact = preload.keys.reshape(batch, heads, count, -1)
    exact = jnp.take_along_axis(exact, slot[..., None], axis=2).reshape(fetched.k.shape)
    kept = jnp.repeat(same.any(axis=-1).reshape(batch, heads, rows), size, axis=2)
    return jnp.where(kept[..., None], exact, fetched.k), still[:, :, -1]
