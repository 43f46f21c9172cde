"""What ShadowKV and ShadowKV+ remember of one layer."""

import dataclasses
from typing import Any

from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.policies.shadowkv.landmark_levels import StoredLandmarks
from jshadow.policies.shadowkv.reference import Preload


class ShadowFrozen(struct.PyTreeNode):
    """The prompt, n chunks of c tokens at most, with s landmarks each.

    Attributes:
        left: left rows of the keys' code, the rows of a chunk side by side: [B, n, c * rank] of low rank.
        right: what all left rows share: [B, h_kv, rank, d] of low rank; a tree of arrays, or None, of other codes.
        landmarks: mean keys after RoPE [B, h_kv, n * s, d], or `Scaled` rows, or `Levels` of them.
        candidates: chunks that may be selected, bool [B, h_kv, n]: whole chunks of the row that are no outliers.
        chunks: chunks of each row, int32 [B]; the window begins at token chunks * c.
        outliers: exact keys and values of the outlier chunks [B, h_kv, o * c, d].
        preload: chunks that begin with exact keys, only with `Quirks.exact_preload`.
        spread: with landmarks of order 2, `chunk_spread` of landmarks [B, h_kv, n * s, 1]; with two levels, those of
            the chunks [B, h_kv, n, 1] and of their landmarks [B, h_kv, n, s].
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
    """What decoding changes.

    Attributes:
        window: exact keys (after RoPE) and values from token chunks * c on [B, h_kv, window, d].
        resident: chunks that the last query has selected, int32 [B, h_kv, k]; -1 where there is none.
        fresh: preloaded chunks that every query has selected since, bool [B, h_kv, k]; only with a preload.
        values: values of the chunks in `resident` [B, h_kv, k, c * d], only with fetch="zero_copy".
    """

    window: KeyValues
    resident: Array
    fresh: Array | None = None
    values: Array | None = None


class PlusFrozen(ShadowFrozen, kw_only=True):
    """ShadowKV+'s prompt, with the limits by which later chunks are kept exactly.

    Attributes:
        cut: least cosine of the best represented outlier that was chosen by its landmark, float32 [B, h_kv]; -inf where
            there is none.
        most: squared error of the worst chunk that may be rebuilt, float32 [B, h_kv]; infinite where no outlier was
            chosen by that. None with another outlier rule.
        key_weights: what an error in each number of a key counts, float32 [B, h_kv, d]; None where all count alike.
    """

    cut: Array
    most: Array | None = None
    key_weights: Array | None = None


class PlusLive(ShadowLive, kw_only=True):
    """What decoding with ShadowKV+ changes. Later chunk j is chunk `chunks + j` of the sequence; m of them fit.

    Attributes:
        window: the ring: token p lies in slot p % R [B, h_kv, R, d].
        left: left rows of all tokens from chunks * c on, as the prompt's: [B, m, c * rank] of low rank.
        landmarks: of later chunks, stored as the prompt's: [B, h_kv, m * s, d].
        kept: later chunks that are kept exactly, bool [B, h_kv, m].
        extra: their keys and values [B, h_kv, x * c, d].
        extra_ids: their numbers, int32 [B, h_kv, x]; -1 for a free slot.
        spread: of later chunks, stored as the prompt's.
    """

    left: Array
    landmarks: StoredLandmarks
    kept: Array
    extra: KeyValues
    extra_ids: Array
    spread: Any = None


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a state record by name, not copied."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
