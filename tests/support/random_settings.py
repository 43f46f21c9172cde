"""The settings of ShadowKV that random rows run through, and the tiny models they run on.

SETTINGS have each value of each option, and the pairs of options that meet in one piece of code. To cover a new
setting, add one line. Settings of the same model and capacity share the programs that read a prompt.
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

    Rank (of low rank) and budget must be numbers: the oracle resolves nothing. Both fetch modes prefill in pieces of
    `prefill_chunk` tokens, for the order of sums shifts keys by a rounding, which low rank may enlarge beyond what the
    modes may differ by.
    """

    model: str
    capacities: tuple[int, ...]
    policy: ShadowKV
    both: bool = False
    prefill_chunk: int = 57

    @property
    def fetches(self) -> tuple[str, ...]:
        """Those with `both` run offloaded and resident. Of the modes, only "zero_copy" keeps rows of a pool."""
        if self.policy.pool:
            return ("zero_copy", "resident")[: 1 + self.both]
        return ("device_put", "resident") if self.both else ("resident",)


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
    "c1_outliers": kv("one", (96,), 8, 1, 5, UNLIMITED, 3),
    "c2_full_rank": kv("two", (96,), 32, 2, 6, 1, 1),
    "c4_one_chunk": kv("group1", (96,), 16, 4, 4, 4, 0),
    "c5_many_outliers": kv("one", (288,), 31, 5, 37, 48, 2),
    "c7_rank1": kv("group4", (160,), 1, 7, 70, 0, 5),
    "c8_default": kv("one", (736,), 12, budget=256),
    "c8_all_selected": kv("group1", (160,), 20, 8, UNLIMITED, 3, 1),
    "c13": kv("one", (288,), 17, 13, 40, 1, 2),
    "shared": kv("two", (96, 160), 12, 4, 24, 2, 1, quirks=SHARED, extend_piece=5, prefill_chunk=2048),
    "shared_c1": kv("group4", (96,), 16, 1, 9, 0, 0, quirks=SHARED, extend_piece=20),
    "score_dim": kv("group1", (96,), 12, 3, 24, 2, 1, quirks=Quirks(score_dim=3), extend_piece=1),
    "reference": kv("one", (736,), 12, 8, 256, None, 4, quirks=PUBLISHED),
    "landmarks_of_3": kv("group4", (160,), 16, 6, 42, 3, 1, extend_piece=7, landmarks=Landmarks(tokens=3)),
    "levels": kv("one", (288,), 12, 4, 16, 2, 2, landmarks=Landmarks(tokens=1, levels=2)),
    "variance": kv("group4", (96,), 12, 4, 24, 2, 2, landmarks=VARIANCE),
    "levels_variance": kv("two", (96,), 12, 4, 16, 3, 2, landmarks=ALL, quirks=PRELOAD, both=True),
    "levels_shared": kv("group4", (96,), 16, 4, 24, 3, 1, extend_piece=7, landmarks=LEVELS, quirks=SHARED_PRELOAD),
    "weighed_both_rules": kv("group4", (96,), 7, 3, 30, 9, 1, choice=BOTH, quirks=PRELOAD, keys=BY_QUERIES),
    "exact_keys": kv("one", (96,), None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=TWOS),
    "plus_int4": later("one", (96,), 12, 4, 24, 2, 2, both=True),
    "plus_int4_levels": later("group4", (160,), 12, 4, 12, 2, 2, landmarks=ALL, pool=2.0),
    "plus_int4_both_rules": later("one", (96,), 12, 4, 24, 3, 2, choice=BOTH),
    "pool": kv("two", (96,), 12, 4, 16, 2, 2, pool=1.5, both=True),
    "pool_preload": kv("one", (96,), 12, 4, 24, 2, 2, quirks=SHARED_PRELOAD, pool=2.0),
    "plus_exact_keys": plus("one", (96,), None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=TWOS),
    "plus_weighed": plus("one", (96,), 12, 4, 24, 3, 2, choice=BOTH, keys=BY_QUERIES),
    "plus_c1": plus("one", (96,), 32, 1, 9, 0, 0),
    "plus_c2": plus("group4", (96, 160), 8, 2, 10, 12, 1, extend_piece=6, extra_outlier_chunks=2, prefill_chunk=2048),
    "plus_c8": plus("group1", (160,), 16, 8, 24, 2, 1, quirks=ROUNDED),
    "plus_multiple": plus("two", (96,), 12, 4, 24, 2, 1, quirks=Quirks(chunk_multiple=4), extend_piece=5),
    "plus_preload": plus("one", (96,), 16, 3, 30, 4, 0, quirks=PRELOAD, extra_outlier_chunks=1),
}
