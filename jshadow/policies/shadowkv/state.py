"""What ShadowKV and ShadowKV+ remember of one layer."""

import dataclasses
from typing import Any

from flax import struct
from jax import Array

from jshadow.cache.records import KeyValues
from jshadow.policies.shadowkv.landmark_levels import Landmarks
from jshadow.policies.shadowkv.preload import Preload


class ShadowFrozen(struct.PyTreeNode):
    """The prompt, n chunks of c tokens at most.

    Attributes:
        left: left factor of the pre-RoPE keys, one chunk contiguous [B, n, c * rank]; of other codecs their rows.
        right: right factor [B, h_kv, rank, d]; of other codecs what their rows share, or None.
        landmarks: mean post-RoPE keys, s for each chunk [B, h_kv, n * s, d], or `Scaled` rows, or `Levels` of them.
        spread: with landmark_order=2, `chunk_spread` of landmarks [B, h_kv, n * s, 1]; of levels, that of the chunks
            [B, h_kv, n, 1] and of their landmarks [B, h_kv, n, s].
        candidates: chunks that may be selected, bool [B, h_kv, n]: whole chunks of the row that are no outliers.
        chunks: chunks of each row, int32 [B]; the window begins at token chunks * c.
        outliers: exact keys and values of the outlier chunks [B, h_kv, o * c, d].
        preload: chunks that begin with exact keys, only with `exact_preload`.
    """

    left: Array
    right: Any
    landmarks: Landmarks
    candidates: Array
    chunks: Array
    outliers: KeyValues
    preload: Preload | None = None
    spread: Any = None


class ShadowLive(struct.PyTreeNode):
    """What decoding changes.

    Attributes:
        window: exact keys (after RoPE) and values from token chunks * c on [B, h_kv, window, d].
        resident: chunks selected by the last query, int32 [B, h_kv, k]; -1 where there is none.
        fresh: preloaded chunks that every query has selected since, bool [B, h_kv, k]; only with `exact_preload`.
        values: values of the chunks in `resident` [B, h_kv, k, c * d], only with fetch="zero_copy".
    """

    window: KeyValues
    resident: Array
    fresh: Array | None = None
    values: Array | None = None


class PlusFrozen(ShadowFrozen, kw_only=True):
    """ShadowKV+'s. By these, later chunks are kept exactly too.

    Attributes:
        cut: least cosine of the best represented outlier that was kept, float32 [B, h_kv]; -inf where none was.
        most: squared error of the worst chunk that may be rebuilt, float32 [B, h_kv]; infinite where no outlier was
            chosen by that, None where it is not the rule.
        key_weights: what an error in each number of a key counts, float32 [B, h_kv, d], only where keys are weighed.
    """

    cut: Array
    most: Array | None = None
    key_weights: Array | None = None


class PlusLive(ShadowLive, kw_only=True):
    """What decoding with ShadowKV+ changes. Later chunk j is chunk `chunks + j` of the sequence; m of them fit.

    Attributes:
        window: the ring: token p in slot p % R [B, h_kv, R, d].
        left: left rows of all tokens from chunks * c on, one chunk contiguous [B, m, c * rank], or as the codec's are.
        landmarks: of later chunks [B, h_kv, m * s, d], or kept as the prompt's.
        spread: of later chunks, as the prompt's.
        kept: later chunks that are kept exactly, bool [B, h_kv, m].
        extra: their keys and values [B, h_kv, x * c, d].
        extra_ids: their numbers, int32 [B, h_kv, x]; -1 for a free slot.
    """

    left: Array
    landmarks: Landmarks
    kept: Array
    extra: KeyValues
    extra_ids: Array
    spread: Any = None


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a state record by name, not copied."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
