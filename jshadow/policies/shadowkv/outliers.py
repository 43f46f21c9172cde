"""Which chunks stay exact: those of the prompt, and those of ShadowKV+ that joined later.

Two kinds of chunks are worth it. A chunk that is far from its landmark is not selected when it should be, as the first
tokens of a text are. A chunk that the code of the keys cannot hold is rebuilt as something else, as a number in a
repetitive text is. The paper looks for the first kind; `Choice(outlier_rule="both")` looks for both.
"""

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.ops.layout import top_k
from jshadow.policies.shadowkv.key_codecs import squared_error
from jshadow.policies.shadowkv.landmarks import chunk_landmarks
from jshadow.policies.shadowkv.state import PlusLive


def outlier_chunks(whole: Array, worst: Array, lost: Array | None, first: int, count: int) -> Array:
    """The chunks of a prompt that stay exact, int32 [B, h_kv, count]; a row's own come first.

    Args:
        whole: chunks that the row has, bool [B, h_kv, n].
        worst: least cosine between a key of each chunk and its landmark, float32 [B, h_kv, n].
        lost: largest squared error of a rebuilt key of each chunk, float32 [B, h_kv, n]; None if first == count.
        first: chunks that are chosen because they are least like their landmark; they come first.
        count: chunks in all. The others are those of which the code loses most.
    """
    ids = top_k(jnp.where(whole, -worst, -jnp.inf), first)
    if lost is None:
        return ids
    others = leave_out(whole, ids, jnp.ones(ids.shape, bool))
    return jnp.concatenate([ids, top_k(jnp.where(others, lost, -jnp.inf), count - first)], axis=2)


def leave_out(chunks: Array, ids: Array, chosen: Array) -> Array:
    """Chunks bool [B, h_kv, n] without those ids [B, h_kv, o] that are `chosen`, bool [B, h_kv, o]."""
    row, head = jnp.ogrid[: chunks.shape[0], : chunks.shape[1]]
    ids = jnp.where(chosen, ids, chunks.shape[2])
    return chunks.at[row[..., None], head[..., None], ids].set(False, mode="drop")


def least_cosine(outliers: KeyValues, used: Array, size: int, parts: int) -> Array:
    """How well the best represented outlier is represented: its least cosine, float32 [B, h_kv]; -inf without any.

    Args:
        outliers: of the prompt, by their landmark first: keys [B, h_kv, o * c, d].
        used: whether the first m outliers were chosen by their landmark and are a row's own, bool [B, 1, m].
        size: tokens of a chunk.
        parts: landmarks of a chunk.
    """
    batch, heads, _, dim = outliers.k.shape
    exact = outliers.k.reshape(batch, heads, -1, size, dim)
    _, worst = chunk_landmarks(exact[:, :, : used.shape[2]], parts)
    return jnp.where(used, worst, -jnp.inf).max(axis=2, initial=-jnp.inf)


def loses_more(keys: Array, real: Array, weights: Array | None, most: Array) -> Array:
    """Whether the code loses more of a chunk than `most`, bool [B, h_kv, n].

    The rebuilt keys and the real ones were both rounded to the model's dtype. The keys that `most` was measured on were
    not, so the difference that rounding alone can cause is subtracted.

    Args:
        keys: rebuilt keys after RoPE [B, h_kv, n, c, d].
        real: the keys themselves.
        weights: what an error in each number of a key counts, or None.
        most: a squared error, float32 [B, h_kv]; negative: every chunk loses more.
    """
    rounding = float(jnp.finfo(real.dtype).eps)
    off, size = (jnp.sqrt(squared_error(x, real, weights)) for x in (keys, jnp.zeros_like(real)))
    limit = jnp.where(most < 0, -jnp.inf, jnp.sqrt(jnp.maximum(most, 0)))
    return (off - rounding * size).max(axis=3) > limit[..., None]


def keep_exact(live: PlusLive, number: Array, bad: Array, k: Array, v: Array) -> PlusLive:
    """ShadowKV+'s state with exact copies of the joining chunks that are badly represented, while slots are free.

    Args:
        live: the state.
        number: of the joining chunks, int32 [B, m].
        bad: which of them are badly represented, bool [B, h_kv, m].
        k: their keys after RoPE [B, h_kv, m, c, d].
        v: their values.
    """
    batch, heads = bad.shape[:2]
    slots = live.extra_ids.shape[2]
    used = (live.extra_ids >= 0).sum(axis=2, keepdims=True)
    slot = jnp.where(bad, used + jnp.cumsum(bad, axis=2) - 1, slots)  # past the last slot: dropped
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
