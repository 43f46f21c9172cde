"""The state of ShadowKV and ShadowKV+ in one layer.

Example for `ShadowFrozen` and `ShadowLive`: B = 1, 2 KV heads of width 64, chunks of c = 8 tokens, rank 16, one outlier
chunk, 4 local chunks, and a capacity of 56 tokens. At most 56 / 8 - 4 = 3 chunks are outside the window, so n = 3. A
prompt of 50 tokens has 6 whole chunks, of which the last 4 stay in the window. So chunks is [2], and the window begins
at token 16.

    left        [1, 3, 128]     the 8 left rows of a chunk, 16 numbers each; the third chunk is unused
    right       [1, 2, 16, 64]  rebuilds the keys of all chunks
    landmarks   [1, 2, 3, 64]   one mean key for each chunk
    outliers    [1, 2, 8, 64]   head 0 keeps chunk 0 exactly, and head 1 keeps chunk 1
    candidates  [[[False, True, False], [True, False, False]]]
    resident    [[[1, -1], [0, -1]]]   a cache with P = 2 places; each head has one chunk in it
"""

import dataclasses
from typing import Any

from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.policies.shadowkv.landmarks import StoredLandmarks


class Preload(struct.PyTreeNode):
    """The chunks that begin with exact keys.

    Attributes:
        ids: ids of the chunks, int32 [B, h_kv, n]; -1 in an unused entry.
        keys: exact keys after RoPE of these chunks [B, h_kv, n * c, d].
    """

    ids: Array
    keys: Array


class ShadowFrozen(struct.PyTreeNode):
    """The prompt: at most n chunks of c tokens, with s landmarks each. Arrays have the model's dtype unless stated.

    Attributes:
        left: the part of the key code that belongs to a token or chunk; see `KeyCode`. With low rank it is
            [B, n, c * rank], with the rows of a chunk side by side.
        right: the part of the key code that all chunks share; see `KeyCode`. With low rank it is [B, h_kv, rank, d].
            With other codes it is a pytree of arrays, or None.
        landmarks: mean keys after RoPE [B, h_kv, n * s, d]. In another dtype than the model's they are `Scaled` rows,
            and with two levels they are `Levels`.
        candidates: the chunks that may be selected, bool [B, h_kv, n]. These are the row's chunks without its outliers.
        chunks: number of chunks of each row, int32 [B]. The window begins at token chunks * c.
        outliers: exact keys after RoPE and values of the o outlier chunks [B, h_kv, o * c, d].
        preload: chunks that begin with exact keys, or None unless `Quirks.exact_preload`.
        spread: `chunk_spread` of the landmarks [B, h_kv, n * s, 1], or None with landmarks of order 1. With two levels
            it is a pair: that of the chunks [B, h_kv, n, 1] and that of their landmarks [B, h_kv, n, s].
    """

    left: Array
    right: Any
    landmarks: StoredLandmarks
    candidates: Array
    chunks: Array
    outliers: KeyValues
    preload: Preload | None = None
    spread: Any = None


class ShadowLive(struct.PyTreeNode):
    """The part that decoding changes.

    Attributes:
        window: exact keys after RoPE and values of all tokens from position chunks * c on [B, h_kv, W, d].
        resident: the cache of recently selected chunks: the id of the chunk in each of its P places, int32
            [B, h_kv, P]; -1 in an empty place. Without `ages` it holds the chunks that the last query selected.
        ages: how many selections ago the chunk of each place was selected last, int32 [B, h_kv, P], at most
            `pallas_kernels.MOST_AGE`. None: the cache holds one selection.
        fresh: which preloaded chunks every query so far has selected, bool [B, h_kv, k], or None without a preload.
        values: values of the chunks in `resident`, in the same places [B, h_kv, P, c * d], or None without
            `CacheSpec.keep`.
        keys: keys after RoPE of the same chunks, in the shape of `values`, or None.
    """

    window: KeyValues
    resident: Array
    ages: Array | None = None
    fresh: Array | None = None
    values: Array | None = None
    keys: Array | None = None


class PlusFrozen(ShadowFrozen, kw_only=True):
    """ShadowKV+'s prompt, with the limits that decide which later chunks are kept exactly.

    Attributes:
        cut: limit on the cosine, float32 [B, h_kv]. The least cosine of a chunk is the smallest cosine between one of
            its keys and its landmark. A later chunk is kept exactly if its least cosine is below the limit. The limit
            is the largest least cosine among the prompt's outliers that were chosen by their landmark, or -inf if there
            is none.
        most: limit on the coding error, float32 [B, h_kv], or None with outlier_rule="landmark". A later chunk is kept
            exactly if its squared error is above this. It is the largest error of the prompt's chunks that may be
            rebuilt, below 0 if there is none, and infinite if no outlier may be chosen by its error.
        key_weights: weights on the errors of a key's numbers, float32 [B, h_kv, d], or None if they count equally.
        later: the part of the code of later keys that all later chunks share: with later_keys="int6" or "int4"
            the mean key of the prompt before RoPE [B, h_kv, d]. None: it is `right`.
    """

    cut: Array
    most: Array | None = None
    key_weights: Array | None = None
    later: Any = None


class PlusLive(ShadowLive, kw_only=True):
    """The part that decoding with ShadowKV+ changes. There is space for m later chunks.

    Later chunk j of row b is chunk chunks[b] + j of the sequence.

    Attributes:
        window: a ring buffer of exact keys after RoPE and values [B, h_kv, R, d]. The token at position p is in slot
            p % R.
        resident, ages, fresh, values, keys: as in `ShadowLive`. The id of later chunk j is n + j.
        left: left rows of all tokens from position chunks * c on, uint8 [B, h_kv, m, c * w] with later_keys="int6"
            or "int4" (`TokenCodec`). With "projected" they are stored as in the prompt: [B, m, c * rank] with low rank.
        landmarks: landmarks of later chunks, stored as in the prompt: [B, h_kv, m * s, d].
        kept: which later chunks are kept exactly, bool [B, h_kv, m].
        extra: exact keys after RoPE and values of these chunks [B, h_kv, x * c, d].
        extra_ids: the j of the later chunk in each of the x slots, int32 [B, h_kv, x]; -1 in a free slot.
        spread: the spread of later chunks, stored as in the prompt.
    """

    left: Array
    landmarks: StoredLandmarks
    kept: Array
    extra: KeyValues
    extra_ids: Array
    spread: Any = None


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a state record as a dictionary by name. The arrays are not copied."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
