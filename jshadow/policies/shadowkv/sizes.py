"""The sizes in which ShadowKV can be brought to a share of full attention's bytes (`policies/sizing.py` searches)."""

import dataclasses
import itertools
from typing import Any, Protocol, TypeVar

from jshadow.models.config import ModelConfig
from jshadow.policies.shadowkv.key_codecs import usual_rank
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of
from jshadow.policies.shadowkv.records import ExactKeys, Landmarks, LowRank, TransformCode


class Codes(Protocol):
    """The settings of ShadowKV that its size depends on beside the number of outliers."""

    @property
    def chunk_size(self) -> int: ...  # noqa: D102
    @property
    def keys(self) -> LowRank | TransformCode | ExactKeys: ...  # noqa: D102
    @property
    def landmarks(self) -> Landmarks: ...  # noqa: D102


S = TypeVar("S", bound=Codes)
OUTLIERS = (48, 24, 8, 4, 1, 0)  # outlier chunks that a size tries, from many to none


def shadow_candidates(policy: S, config: ModelConfig) -> list[list[S]]:
    """The policy with fewer and fewer outliers, each by falling bits of its key code; all other settings stay.

    Outliers go before the keys fall below the bits of the usual rank. 48 outlier chunks are few of 128K tokens, but a
    fifth of 2K tokens, where a low rank costs more than they save.
    """
    rich, poor = code_sizes(policy, config)
    groups = (*itertools.product(OUTLIERS, [rich]), (0, poor))
    return [
        [dataclasses.replace(policy, outlier_chunks=outliers, **code) for code in codes]  # type: ignore[type-var]
        for outliers, codes in groups
    ]


def code_sizes(policy: Codes, config: ModelConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Settings of the key code from most bits to least: those with the bits of the usual rank or more, and the others.

    With the transform code, more bits of the keys come with finer landmarks, unless these were given.
    """
    columns, usual = config.key_columns, usual_rank(config.key_columns)
    if isinstance(policy.keys, LowRank):
        ranks = range(columns // 8 * 8 or columns, 0, -8)
        return [{"rank": rank} for rank in ranks if rank >= usual], [{"rank": rank} for rank in ranks if rank < usual]
    if not isinstance(policy.keys, TransformCode):
        return [{}], []
    enough = min(2 * usual, columns)
    rich: list[dict[str, Any]] = []
    poor: list[dict[str, Any]] = []
    for size in range(columns, 0, -max(1, columns // 128)):
        tokens = policy.landmarks.tokens
        if tokens is None and size > columns / 6:  # `packed(small=True)` has fewer bits, and one landmark a chunk
            most = 2 if size >= enough else 4
            tokens = max(count for count in range(1, most + 1) if policy.chunk_size % count == 0)
        keys = dataclasses.replace(policy.keys, bits=None, profile=profile_of(columns, 8 * size))
        landmarks = dataclasses.replace(policy.landmarks, tokens=tokens)
        (rich if size >= enough else poor).append({"keys": keys, "landmarks": landmarks})
    return rich, poor
