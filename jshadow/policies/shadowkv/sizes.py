"""The settings of ShadowKV from large to small, among which `policies/sizing.py` finds those for a share of bytes."""

import dataclasses
import itertools
from typing import Any, Protocol

from jshadow.models.config import ModelConfig
from jshadow.policies.shadowkv.key_codecs import usual_rank
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of, unit_of
from jshadow.policies.shadowkv.records import Keys, Landmarks, LowRank, TransformCode


class Codes(Protocol):
    """The settings of ShadowKV that decide the size of its codes."""

    @property
    def chunk_size(self) -> int: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def landmarks(self) -> Landmarks: ...


OUTLIERS = (48, 24, 8, 4, 1, 0)  # numbers of outlier chunks to try


def shadow_candidates[S: Codes](policy: S, config: ModelConfig) -> list[list[S]]:
    """Return groups of settings with fewer and fewer outliers. Within a group, the bits of the key code fall.

    All other settings stay as they are. Outliers are given up before the keys get fewer bits than the usual rank has.
    48 outlier chunks are a small share of 128K tokens, but a fifth of 2K tokens. There, a lower rank costs more quality
    than these outliers gain.
    """
    rich, poor = code_sizes(policy, config)
    groups = (*itertools.product(OUTLIERS, [rich]), (0, poor))
    return [
        [dataclasses.replace(policy, outlier_chunks=outliers, **code) for code in codes]  # type: ignore[type-var]
        for outliers, codes in groups
    ]


def code_sizes(policy: Codes, config: ModelConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two lists of settings of the key code: with at least the bits of the usual rank, and with fewer.

    The bits fall within each list. With the transform code, more bits come with finer landmarks, unless
    `landmarks.tokens` is given.
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
    for size in range(columns, 0, -max(unit_of(columns), columns // 128)):
        tokens = policy.landmarks.tokens
        if tokens is None and size > columns / 6:  # `packed(small=True)` has fewer bits, and one landmark a chunk
            most = 2 if size >= enough else 4
            tokens = max(count for count in range(1, most + 1) if policy.chunk_size % count == 0)
        keys = dataclasses.replace(policy.keys, bits=None, profile=profile_of(columns, 8 * size))
        landmarks = dataclasses.replace(policy.landmarks, tokens=tokens)
        (rich if size >= enough else poor).append({"keys": keys, "landmarks": landmarks})
    return rich, poor
