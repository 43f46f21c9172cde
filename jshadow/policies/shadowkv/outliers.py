"""Outliers: the chunks of the prompt that stay exact, and the later chunks that ShadowKV+ keeps exactly.

Two kinds of chunks should stay exact. The keys of the first kind differ from their landmark, so the chunk is not
selected when it should be; the first tokens of a text are an example. The second kind has a large coding error, so its
keys are rebuilt wrongly; a number in a repetitive text is an example. The paper keeps the first kind.
`Choice(outlier_rule="both")` keeps both.
"""

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.ops.layout import top_k
from jshadow.policies.shadowkv.key_codecs import squared_error
from jshadow.policies.shadowkv.landmarks import chunk_landmarks
from jshadow.policies.shadowkv.state import PlusLive


def outlier_chunks(whole: Array, worst: Array, lost: Array | None, first: int, count: int) -> Array:
    """Choose the chunks of a prompt that stay exact.

    Args:
        whole: which chunks the row has, bool [B, h_kv, n].
        worst: least cosine between a key of each chunk and its landmark, float32 [B, h_kv, n].
        lost: largest squared error of a rebuilt key of each chunk, float32 [B, h_kv, n]; None if first == count.
        first: number of chunks that are chosen by the least cosine. They come first.
        count: number of chunks in all. The others are chosen by the largest error.

    Returns:
        The chunks, int32 [B, h_kv, count]. A row with fewer than `count` chunks has its real chunks first. The entries
        after them are arbitrary.
    """
    ids = top_k(jnp.where(whole, -worst, -jnp.inf), first)
    if lost is None:
        return ids
    others = leave_out(whole, ids, jnp.ones(ids.shape, bool))
    return jnp.concatenate([ids, top_k(jnp.where(others, lost, -jnp.inf), count - first)], axis=2)


def leave_out(chunks: Array, ids: Array, chosen: Array) -> Array:
    """Return the mask `chunks` [B, h_kv, n] with False at some ids.

    The ids are those of `ids` [B, h_kv, o] for which `chosen` [B, h_kv, o] is True.
    """
    row, head = jnp.ogrid[: chunks.shape[0], : chunks.shape[1]]
    ids = jnp.where(chosen, ids, chunks.shape[2])
    return chunks.at[row[..., None], head[..., None], ids].set(False, mode="drop")


def least_cosine(outliers: KeyValues, used: Array, size: int, parts: int) -> Array:
    """Return the limit `PlusFrozen.cut`.

    The least cosine of an outlier is the smallest cosine between one of its keys and its landmark. The limit is the
    largest of these numbers, over the outliers that were chosen by their landmark.

    Args:
        outliers: the prompt's outliers, those chosen by their landmark first: keys [B, h_kv, o * c, d].
        used: which of the first m outliers are real and were chosen by their landmark, bool [B, 1, m].
        size: tokens in a chunk.
        parts: number of landmarks of a chunk.

    Returns:
        float32 [B, h_kv]; -inf if there is no such outlier.
    """
    batch, heads, _, dim = outliers.k.shape
    exact = outliers.k.reshape(batch, heads, -1, size, dim)
    _, worst = chunk_landmarks(exact[:, :, : used.shape[2]], parts)
    return jnp.where(used, worst, -jnp.inf).max(axis=2, initial=-jnp.inf)


def most_lost(candidates: Array, lost: Array | None) -> Array:
    """Return the limit `PlusFrozen.most`, float32 [B, h_kv].

    Args:
        candidates: the chunks that may be rebuilt, bool [B, h_kv, n].
        lost: largest squared error of a rebuilt key of every chunk of the prompt, float32 [B, h_kv, n]. None: no
            outlier is chosen by its error.
    """
    if lost is None:
        return jnp.full(candidates.shape[:2], jnp.inf)
    return jnp.where(candidates, lost, -1.0).max(axis=2, initial=-1.0)


def loses_more(keys: Array, real: Array, weights: Array | None, most: Array) -> Array:
    """Return whether the coding error of a chunk is above the limit `PlusFrozen.most`, bool [B, h_kv, n].

    The rebuilt keys and the real keys were rounded to the model's dtype after RoPE. The keys from which `most` was
    measured were not. Therefore the difference that rounding alone can cause is subtracted.

    Args:
        keys: rebuilt keys after RoPE [B, h_kv, n, c, d].
        real: the exact keys after RoPE [B, h_kv, n, c, d].
        weights: weights on the errors of a key's numbers, float32 [B, h_kv, d], or None.
        most: limit on the squared error, float32 [B, h_kv]. If it is negative, every chunk is above it.
    """
    rounding = float(jnp.finfo(real.dtype).eps)
    off, size = (jnp.sqrt(squared_error(x, real, weights)) for x in (keys, jnp.zeros_like(real)))
    limit = jnp.where(most < 0, -jnp.inf, jnp.sqrt(jnp.maximum(most, 0)))
    return (off - rounding * size).max(axis=3) > limit[..., None]


def keep_exact(live: PlusLive, number: Array, bad: Array, k: Array, v: Array) -> PlusLive:
    """Copy the joining chunks that should stay exact to free exact slots of ShadowKV+.

    A chunk that finds no free slot is not copied.

    Args:
        live: the state.
        number: which later chunks are joining, int32 [B, m].
        bad: which of them should stay exact, bool [B, h_kv, m].
        k: their keys after RoPE [B, h_kv, m, c, d].
        v: their values [B, h_kv, m, c, d].
    """
    batch, heads = bad.shape[:2]
    slots = live.extra_ids.shape[2]
    used = (live.extra_ids >= 0).sum(axis=2, keepdims=True)
    slot = jnp.where(bad, used + jnp.cumsum(bad, axis=2) - 1, slots)  # an index past the last slot is dropped
    bad = bad & (slot < slots)
    row, head = jnp.ogrid[:batch, :heads]
    place = (row[..., None], head[..., None], slot)
    numbers = jnp.broadcast_to(number[:, None], bad.shape)

    def into_slots(buffer: Array, rows: Array) -> Array:
        chunked = buffer.reshape(batch, heads, slots, *rows.shape[3:])
        return chunked.at[place].set(rows.astype(buffer.dtype), mode="drop").reshape(buffer.shape)

    return live.replace(
        extra=KeyValues(into_slots(live.extra.k, k), into_slots(live.extra.v, v)),
        extra_ids=live.extra_ids.at[place].set(numbers, mode="drop"),
        kept=live.kept.at[row[..., None], head[..., None], jnp.where(bad, numbers, live.kept.shape[2])].set(
            True, mode="drop"
        ),
    )


def without_later(live: PlusLive, behind: Array, prompt: int) -> PlusLive:
    """Return the state without the later chunks from number `behind` on, in the exact slots and in the cache.

    Args:
        live: the state.
        behind: number of later chunks that have left the window, int32 [B, 1, 1].
        prompt: the id of later chunk 0.
    """
    return live.replace(
        kept=live.kept & (jnp.arange(live.kept.shape[2]) < behind),
        extra_ids=jnp.where(live.extra_ids < behind, live.extra_ids, -1),
        resident=jnp.where(live.resident < prompt + behind, live.resident, -1),
    )
