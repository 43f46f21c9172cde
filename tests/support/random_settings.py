"""The settings of ShadowKV that random rows run through, and the tiny models they run on.

To cover a new setting, add one line to SETTINGS.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from cases import TINY

from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.shadowkv import Choice, ExactKeys, Landmarks, LowRank, Quirks

UNLIMITED = 10_000

ONE = dataclasses.replace(TINY, num_layers=1, context=1024)
MODELS = {
    "one": ONE,
    "two": dataclasses.replace(ONE, num_layers=2),
    "group1": dataclasses.replace(ONE, q_heads=2, model_dim=48),
    "group4": dataclasses.replace(ONE, kv_heads=1, attention_bias=True),
}


class Setting(NamedTuple):
    """A policy on one of MODELS, in a cache of each of the capacities.

    Those with `both` run offloaded and resident, the others in one of these modes, in turn. Rank (of low rank) and
    budget must be numbers: the oracle resolves nothing. Both fetch modes prefill in pieces of `prefill_chunk` tokens,
    for the order of sums shifts keys by a rounding, which low rank may enlarge beyond what the modes may differ by.
    """

    model: str
    capacities: tuple[int, ...]
    policy: ShadowKV
    both: bool = False
    prefill_chunk: int = 57


def kv(model: str, capacities: tuple[int, ...], *sizes: int | None, both: bool = False, **settings: Any) -> Setting:
    """A setting of ShadowKV. The sizes are rank, chunk_size, budget, outlier_chunks and local_chunks."""
    kind, chunk = settings.pop("kind", ShadowKV), settings.pop("prefill_chunk", 57)
    return Setting(model, capacities, kind(*sizes, **settings), both, chunk)


later = functools.partial(kv, kind=ShadowKVPlus)
plus = functools.partial(later, later_keys="projected")  # the paper's code of later keys
BOTH, BY_QUERIES, SHARED = Choice(outlier_rule="both"), LowRank(weights="queries"), Quirks(turn_selection="shared")
PRELOAD, ROUNDED, PUBLISHED = Quirks(exact_preload=True), Quirks(score_dtype="bfloat16"), Quirks.published()
SHARED_PRELOAD = Quirks(exact_preload=True, turn_selection="shared")
TWOS, LEVELS, ALL = Landmarks(tokens=2), Landmarks(tokens=2, levels=2), Landmarks(tokens=2, levels=2, order=2)
VARIANCE = Landmarks(order=2)

# Chunks of one token are their own landmark: every cosine is 1, so which are outliers is a tie unless all or none are.
SETTINGS = {
    "c1": kv("one", (96,), 8, 1, 5, 0, 0),
    "c1_outliers": kv("one", (32,), 8, 1, 5, UNLIMITED, 3),
    "c2_full_rank": kv("two", (160,), 32, 2, 6, 1, 1),
    "c3": kv("one", (288,), 5, 3, 20, 3, 6, prefill_chunk=2048),
    "c4_one_chunk": kv("group1", (96,), 16, 4, 4, 4, 0, both=True),
    "c4_two_layers": kv("one", (160,), 24, 4, 16, 2, 2),
    "c5_many_outliers": kv("one", (480, 288), 31, 5, 37, 48, 2),
    "c7_rank1": kv("group4", (288,), 1, 7, 70, 0, 5),
    "c8": kv("one", (288,), 12, 8, 64, 2, 4, prefill_chunk=2048),
    "c8_default": kv("one", (736,), 12, budget=256),
    "c8_all_selected": kv("group1", (160,), 20, 8, UNLIMITED, 3, 1, prefill_chunk=2048),
    "c13": kv("one", (288,), 17, 13, 40, 1, 2),
    "c16": kv("one", (480,), 24, 16, 48, 1, 3),
    "shared": kv("two", (160, 288), 12, 4, 24, 2, 1, quirks=SHARED, extend_piece=5, prefill_chunk=2048),
    "shared_c1": kv("group4", (96,), 16, 1, 9, 0, 0, quirks=SHARED, extend_piece=20),
    "pieces": kv("one", (288,), 16, 3, 40, 2, 2, extend_piece=7),
    "bfloat16": kv("group4", (288,), 16, 4, 40, 2, 2, quirks=ROUNDED),
    "score_dim": kv("group1", (160,), 12, 3, 24, 2, 1, quirks=Quirks(score_dim=3), extend_piece=1, prefill_chunk=2048),
    "preload": kv("one", (96,), 6, 4, 24, 2, 2, quirks=PRELOAD),
    "multiple": kv("one", (160,), 12, 2, 20, 2, 3, quirks=Quirks(chunk_multiple=8), prefill_chunk=2048),
    "reference": kv("one", (736,), 12, 8, 256, None, 4, quirks=PUBLISHED),
    "reference_outliers": kv("one", (736,), 12, 8, 1024, None, 4, quirks=PUBLISHED),  # 24, and all others are selected
    "landmarks_of_2": kv("one", (160,), 12, 4, 24, 2, 2, landmarks=TWOS),
    "landmarks_of_3": kv("group4", (288,), 16, 6, 42, 3, 1, extend_piece=7, landmarks=Landmarks(tokens=3)),
    "landmarks_of_1": kv("one", (160,), 12, 4, 24, 3, 2, landmarks=Landmarks(tokens=1)),
    "levels": kv("one", (288,), 12, 4, 16, 2, 2, landmarks=Landmarks(tokens=1, levels=2)),
    "variance": kv("group4", (160,), 12, 4, 24, 2, 2, landmarks=VARIANCE),
    "levels_variance": kv("two", (288,), 12, 4, 16, 3, 2, landmarks=ALL, quirks=PRELOAD, both=True),
    "plus_variance": plus("one", (160,), 12, 4, 12, 2, 2, landmarks=Landmarks(tokens=2, order=2)),
    "levels_shared": kv("group4", (288,), 16, 4, 24, 3, 1, extend_piece=7, landmarks=LEVELS, quirks=SHARED_PRELOAD),
    "plus_levels": plus("two", (160,), 12, 4, 12, 2, 2, landmarks=ALL),
    "both_rules": kv("one", (160,), 12, 4, 24, 5, 2, choice=BOTH),
    "both_rules_many": kv("group4", (288,), 7, 3, 30, 60, 1, choice=BOTH),
    "weighed": kv("one", (160,), 12, 4, 24, 2, 2, keys=BY_QUERIES),
    "weighed_both_rules": kv("group4", (288,), 7, 3, 30, 9, 1, choice=BOTH, quirks=PRELOAD, keys=BY_QUERIES),
    "exact_keys": kv("one", (160,), None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=TWOS),
    "plus": plus("one", (96,), 12, 4, 24, 2, 2),
    "plus_int4": later("two", (96,), 12, 4, 24, 2, 2, both=True),
    "plus_int4_levels": later("group4", (160,), 12, 4, 12, 2, 2, landmarks=ALL, pool=2.0),
    "plus_int4_both_rules": later("one", (96,), 12, 4, 24, 3, 2, choice=BOTH),
    "pool": kv("two", (160,), 12, 4, 16, 2, 2, pool=2.0, both=True),
    "pool_levels": kv("one", (288,), 12, 4, 24, 2, 2, landmarks=LEVELS, pool=1.5),
    "pool_plus": plus("group4", (160,), 12, 4, 20, 2, 2, pool=3.0),
    "pool_preload": kv("one", (96,), 12, 4, 24, 2, 2, quirks=SHARED_PRELOAD, pool=2.0),
    "plus_exact_keys": plus("one", (96,), None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=TWOS),
    "plus_both_rules": plus("one", (160,), 12, 4, 24, 3, 2, choice=BOTH),
    "plus_weighed": plus("one", (160,), 12, 4, 24, 3, 2, choice=BOTH, keys=BY_QUERIES),
    "plus_c1": plus("one", (96,), 32, 1, 9, 0, 0),
    "plus_c2": plus("group4", (160, 288), 8, 2, 10, 12, 1, extend_piece=6, extra_outlier_chunks=2, prefill_chunk=2048),
    "plus_c8": plus("group1", (480,), 16, 8, 64, 8, 4, quirks=ROUNDED),
    "plus_multiple": plus("one", (160,), 12, 4, 24, 2, 1, quirks=Quirks(chunk_multiple=4), extend_piece=5),
    "plus_preload": plus("one", (96,), 16, 3, 30, 4, 0, quirks=PRELOAD, extra_outlier_chunks=1),
}
