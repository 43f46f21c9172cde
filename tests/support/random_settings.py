"""The settings of ShadowKV that random rows run through, and the tiny models they run on.

To cover a new setting, add one line to SETTINGS.
"""

import dataclasses
import functools
from typing import NamedTuple

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


projected = functools.partial(ShadowKVPlus, later_keys="projected")  # the paper's code of later keys

# Chunks of one token are their own landmark: every cosine is 1, so which are outliers is a tie unless all or none are.
SETTINGS = {
    "c1": Setting("one", (96,), ShadowKV(8, 1, 5, 0, 0)),
    "c1_outliers": Setting("one", (32,), ShadowKV(8, 1, 5, UNLIMITED, 3)),
    "c2_full_rank": Setting("two", (160,), ShadowKV(32, 2, 6, 1, 1)),
    "c3": Setting("one", (288,), ShadowKV(5, 3, 20, 3, 6), prefill_chunk=2048),
    "c4_one_chunk": Setting("group1", (96,), ShadowKV(16, 4, 4, 4, 0), both=True),
    "c4_two_layers": Setting("one", (160,), ShadowKV(24, 4, 16, 2, 2)),
    "c5_many_outliers": Setting("one", (480, 288), ShadowKV(31, 5, 37, 48, 2)),
    "c7_rank1": Setting("group4", (288,), ShadowKV(1, 7, 70, 0, 5)),
    "c8": Setting("one", (288,), ShadowKV(12, 8, 64, 2, 4), prefill_chunk=2048),
    "c8_default": Setting("one", (736,), ShadowKV(12, budget=256)),
    "c8_all_selected": Setting("group1", (160,), ShadowKV(20, 8, UNLIMITED, 3, 1), prefill_chunk=2048),
    "c13": Setting("one", (288,), ShadowKV(17, 13, 40, 1, 2)),
    "c16": Setting("one", (480,), ShadowKV(24, 16, 48, 1, 3)),
    "shared": Setting(
        "two",
        (160, 288),
        ShadowKV(12, 4, 24, 2, 1, quirks=Quirks(turn_selection="shared"), extend_piece=5),
        prefill_chunk=2048,
    ),
    "shared_c1": Setting(
        "group4", (96,), ShadowKV(16, 1, 9, 0, 0, quirks=Quirks(turn_selection="shared"), extend_piece=20)
    ),
    "pieces": Setting("one", (288,), ShadowKV(16, 3, 40, 2, 2, extend_piece=7)),
    "bfloat16": Setting("group4", (288,), ShadowKV(16, 4, 40, 2, 2, quirks=Quirks(score_dtype="bfloat16"))),
    "score_dim": Setting(
        "group1", (160,), ShadowKV(12, 3, 24, 2, 1, quirks=Quirks(score_dim=3), extend_piece=1), prefill_chunk=2048
    ),
    "preload": Setting("one", (96,), ShadowKV(6, 4, 24, 2, 2, quirks=Quirks(exact_preload=True))),
    "multiple": Setting("one", (160,), ShadowKV(12, 2, 20, 2, 3, quirks=Quirks(chunk_multiple=8)), prefill_chunk=2048),
    "reference": Setting(
        "one",
        (736,),
        ShadowKV(12, 8, 256, None, 4, quirks=Quirks.published()),
    ),
    "reference_outliers": Setting(  # 24 of them, and all others are selected
        "one",
        (736,),
        ShadowKV(12, 8, 1024, None, 4, quirks=Quirks.published()),
    ),
    "landmarks_of_2": Setting("one", (160,), ShadowKV(12, 4, 24, 2, 2, landmarks=Landmarks(tokens=2))),
    "landmarks_of_3": Setting(
        "group4", (288,), ShadowKV(16, 6, 42, 3, 1, extend_piece=7, landmarks=Landmarks(tokens=3))
    ),
    "landmarks_of_1": Setting("one", (160,), ShadowKV(12, 4, 24, 3, 2, landmarks=Landmarks(tokens=1))),
    "levels": Setting("one", (288,), ShadowKV(12, 4, 16, 2, 2, landmarks=Landmarks(tokens=1, levels=2))),
    "variance": Setting("group4", (160,), ShadowKV(12, 4, 24, 2, 2, landmarks=Landmarks(order=2))),
    "levels_variance": Setting(
        "two",
        (288,),
        ShadowKV(12, 4, 16, 3, 2, landmarks=Landmarks(tokens=2, levels=2, order=2), quirks=Quirks(exact_preload=True)),
        both=True,
    ),
    "plus_variance": Setting("one", (160,), projected(12, 4, 12, 2, 2, landmarks=Landmarks(tokens=2, order=2))),
    "levels_shared": Setting(
        "group4",
        (288,),
        ShadowKV(
            16,
            4,
            24,
            3,
            1,
            extend_piece=7,
            landmarks=Landmarks(tokens=2, levels=2),
            quirks=Quirks(exact_preload=True, turn_selection="shared"),
        ),
    ),
    "plus_levels": Setting("two", (160,), projected(12, 4, 12, 2, 2, landmarks=Landmarks(tokens=2, levels=2, order=2))),
    "both_rules": Setting("one", (160,), ShadowKV(12, 4, 24, 5, 2, choice=Choice(outlier_rule="both"))),
    "both_rules_many": Setting("group4", (288,), ShadowKV(7, 3, 30, 60, 1, choice=Choice(outlier_rule="both"))),
    "weighed": Setting("one", (160,), ShadowKV(12, 4, 24, 2, 2, keys=LowRank(weights="queries"))),
    "weighed_both_rules": Setting(
        "group4",
        (288,),
        ShadowKV(
            7,
            3,
            30,
            9,
            1,
            choice=Choice(outlier_rule="both"),
            quirks=Quirks(exact_preload=True),
            keys=LowRank(weights="queries"),
        ),
    ),
    "exact_keys": Setting("one", (160,), ShadowKV(None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=Landmarks(tokens=2))),
    "plus": Setting("one", (96,), projected(12, 4, 24, 2, 2)),
    "plus_int4": Setting("two", (96,), ShadowKVPlus(12, 4, 24, 2, 2), both=True),
    "plus_int4_levels": Setting(
        "group4", (160,), ShadowKVPlus(12, 4, 12, 2, 2, landmarks=Landmarks(tokens=2, levels=2, order=2), pool=2.0)
    ),
    "plus_int4_both_rules": Setting("one", (96,), ShadowKVPlus(12, 4, 24, 3, 2, choice=Choice(outlier_rule="both"))),
    "pool": Setting("two", (160,), ShadowKV(12, 4, 16, 2, 2, pool=2.0), both=True),
    "pool_levels": Setting("one", (288,), ShadowKV(12, 4, 24, 2, 2, landmarks=Landmarks(tokens=2, levels=2), pool=1.5)),
    "pool_plus": Setting("group4", (160,), projected(12, 4, 20, 2, 2, pool=3.0)),
    "pool_preload": Setting(
        "one", (96,), ShadowKV(12, 4, 24, 2, 2, quirks=Quirks(exact_preload=True, turn_selection="shared"), pool=2.0)
    ),
    "plus_exact_keys": Setting(
        "one", (96,), projected(None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=Landmarks(tokens=2))
    ),
    "plus_both_rules": Setting("one", (160,), projected(12, 4, 24, 3, 2, choice=Choice(outlier_rule="both"))),
    "plus_weighed": Setting(
        "one",
        (160,),
        projected(12, 4, 24, 3, 2, choice=Choice(outlier_rule="both"), keys=LowRank(weights="queries")),
    ),
    "plus_c1": Setting("one", (96,), projected(32, 1, 9, 0, 0)),
    "plus_c2": Setting(
        "group4",
        (160, 288),
        projected(8, 2, 10, 12, 1, extend_piece=6, extra_outlier_chunks=2),
        prefill_chunk=2048,
    ),
    "plus_c8": Setting("group1", (480,), projected(16, 8, 64, 8, 4, quirks=Quirks(score_dtype="bfloat16"))),
    "plus_multiple": Setting(
        "one", (160,), projected(12, 4, 24, 2, 1, quirks=Quirks(chunk_multiple=4), extend_piece=5)
    ),
    "plus_preload": Setting(
        "one", (96,), projected(16, 3, 30, 4, 0, quirks=Quirks(exact_preload=True), extra_outlier_chunks=1)
    ),
}
