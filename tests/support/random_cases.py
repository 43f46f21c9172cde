"""Random rows through the library, resident and offloaded, and through the oracle; and what the three must share.

To cover a new setting of ShadowKV, add one line to SETTINGS. Every row of a batch is an own case: a prompt, two turns
and two decode steps of random tokens. Rows of one setting and capacity share their compiled programs.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import oracle
from cases import TINY
from oracle_settings import oracle_settings

from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.engine import decode
from jshadow.models.config import ModelConfig
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.shadowkv import Choice, ExactKeys, Landmarks, LowRank, Quirks
from jshadow.weights.params import Params, init_params

TURN, TURNS, STEPS = 20, 2, 2  # most tokens of a turn, turns, decode steps
FETCHES = ("resident", "device_put")
TOLERANCE, MODES_TOLERANCE = 1e-4, 1e-5  # of logits: to the oracle, between the fetch modes
# Below this gap (see oracle.Trace) float32 may choose otherwise than float64. Where its low-rank keys are off by more
# than SMALL_ERROR, tolerance and gap grow with that error, to a tenfold; beyond, nothing is compared after the prompt.
NEAR_TIE, SMALL_ERROR, LARGEST_SLACK = 1e-5, 3e-5, 10.0
ORACLES = {ShadowKV: oracle.ShadowKV, ShadowKVPlus: oracle.ShadowKVPlus}
UNLIMITED = 10_000

ONE = dataclasses.replace(TINY, num_layers=1, context=1024)
MODELS = {
    "one": ONE,
    "two": dataclasses.replace(ONE, num_layers=2),
    "group1": dataclasses.replace(ONE, q_heads=2, model_dim=48),
    "group4": dataclasses.replace(ONE, kv_heads=1, attention_bias=True),
}


class Setting(NamedTuple):
    """A policy on one of MODELS, in a cache of each of the capacities in the slow test.

    The fast test has the first capacity of those that are marked so. Rank (of low rank) and budget must be numbers: the
    oracle resolves nothing. Both fetch modes prefill in pieces of `prefill_chunk` tokens, for the order of sums shifts
    keys by a rounding, which low rank may enlarge beyond what the modes may differ by.
    """

    model: str
    capacities: tuple[int, ...]
    policy: ShadowKV
    fast: bool = False
    prefill_chunk: int = 57


# Chunks of one token are their own landmark: every cosine is 1, so which are outliers is a tie unless all or none are.
SETTINGS = {
    "c1": Setting("one", (96,), ShadowKV(8, 1, 5, 0, 0), fast=True),
    "c1_outliers": Setting("one", (32,), ShadowKV(8, 1, 5, UNLIMITED, 3)),
    "c2_full_rank": Setting("two", (160,), ShadowKV(32, 2, 6, 1, 1), fast=True),
    "c3": Setting("one", (288,), ShadowKV(5, 3, 20, 3, 6), prefill_chunk=2048),
    "c4_one_chunk": Setting("group1", (96, 480), ShadowKV(16, 4, 4, 4, 0), fast=True),
    "c4_two_layers": Setting("two", (160,), ShadowKV(24, 4, 16, 2, 2)),
    "c5_many_outliers": Setting("one", (480, 288), ShadowKV(31, 5, 37, 48, 2), fast=True),
    "c7_rank1": Setting("group4", (288,), ShadowKV(1, 7, 70, 0, 5), fast=True),
    "c8": Setting("two", (288,), ShadowKV(12, 8, 64, 2, 4), prefill_chunk=2048),
    "c8_default": Setting("one", (736,), ShadowKV(12, budget=256)),
    "c8_all_selected": Setting("group1", (160,), ShadowKV(20, 8, UNLIMITED, 3, 1), prefill_chunk=2048),
    "c13": Setting("one", (288,), ShadowKV(17, 13, 40, 1, 2)),
    "c16": Setting("one", (480, 736), ShadowKV(24, 16, 48, 1, 3)),
    "shared": Setting(
        "two",
        (160, 288),
        ShadowKV(12, 4, 24, 2, 1, quirks=Quirks(turn_selection="shared"), extend_piece=5),
        fast=True,
        prefill_chunk=2048,
    ),
    "shared_c1": Setting(
        "group4", (96,), ShadowKV(16, 1, 9, 0, 0, quirks=Quirks(turn_selection="shared"), extend_piece=20)
    ),
    "pieces": Setting("one", (288,), ShadowKV(16, 3, 40, 2, 2, extend_piece=7)),
    "bfloat16": Setting("group4", (288,), ShadowKV(16, 4, 40, 2, 2, quirks=Quirks(score_dtype="bfloat16")), fast=True),
    "score_dim": Setting(
        "group1", (160,), ShadowKV(12, 3, 24, 2, 1, quirks=Quirks(score_dim=3), extend_piece=1), prefill_chunk=2048
    ),
    "preload": Setting("two", (96,), ShadowKV(6, 4, 24, 2, 2, quirks=Quirks(exact_preload=True)), fast=True),
    "multiple": Setting("one", (160,), ShadowKV(12, 2, 20, 2, 3, quirks=Quirks(chunk_multiple=8)), prefill_chunk=2048),
    "reference": Setting(
        "one",
        (736,),
        ShadowKV(12, 8, 256, None, 4, quirks=Quirks.published()),
        fast=True,
    ),
    "reference_outliers": Setting(  # 24 of them, and all others are selected
        "one",
        (736,),
        ShadowKV(12, 8, 1024, None, 4, quirks=Quirks.published()),
    ),
    "landmarks_of_2": Setting("two", (160,), ShadowKV(12, 4, 24, 2, 2, landmarks=Landmarks(tokens=2)), fast=True),
    "landmarks_of_3": Setting(
        "group4", (288,), ShadowKV(16, 6, 42, 3, 1, extend_piece=7, landmarks=Landmarks(tokens=3))
    ),
    "landmarks_of_1": Setting("two", (160,), ShadowKV(12, 4, 24, 3, 2, landmarks=Landmarks(tokens=1)), fast=True),
    "levels": Setting("two", (288,), ShadowKV(12, 4, 16, 2, 2, landmarks=Landmarks(tokens=1, levels=2)), fast=True),
    "variance": Setting("group4", (160,), ShadowKV(12, 4, 24, 2, 2, landmarks=Landmarks(order=2)), fast=True),
    "levels_variance": Setting(
        "two",
        (288,),
        ShadowKV(12, 4, 16, 3, 2, landmarks=Landmarks(tokens=2, levels=2, order=2), quirks=Quirks(exact_preload=True)),
        fast=True,
    ),
    "plus_variance": Setting("two", (160,), ShadowKVPlus(12, 4, 12, 2, 2, landmarks=Landmarks(tokens=2, order=2))),
    "levels_shared": Setting(
        "group4",
        (288, 480),
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
    "plus_levels": Setting(
        "two", (160,), ShadowKVPlus(12, 4, 12, 2, 2, landmarks=Landmarks(tokens=2, levels=2, order=2)), fast=True
    ),
    "both_rules": Setting("two", (160,), ShadowKV(12, 4, 24, 5, 2, choice=Choice(outlier_rule="both")), fast=True),
    "both_rules_many": Setting("group4", (288,), ShadowKV(7, 3, 30, 60, 1, choice=Choice(outlier_rule="both"))),
    "weighed": Setting("two", (160,), ShadowKV(12, 4, 24, 2, 2, keys=LowRank(weights="queries")), fast=True),
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
    "plus": Setting("two", (96,), ShadowKVPlus(12, 4, 24, 2, 2), fast=True),
    "plus_exact_keys": Setting(
        "one", (96,), ShadowKVPlus(None, 4, 24, 2, 2, keys=ExactKeys(), landmarks=Landmarks(tokens=2)), fast=True
    ),
    "plus_both_rules": Setting(
        "one", (160,), ShadowKVPlus(12, 4, 24, 3, 2, choice=Choice(outlier_rule="both")), fast=True
    ),
    "plus_weighed": Setting(
        "two",
        (160,),
        ShadowKVPlus(12, 4, 24, 3, 2, choice=Choice(outlier_rule="both"), keys=LowRank(weights="queries")),
        fast=True,
    ),
    "plus_c1": Setting("one", (96,), ShadowKVPlus(32, 1, 9, 0, 0)),
    "plus_c2": Setting(
        "group4",
        (160, 288),
        ShadowKVPlus(8, 2, 10, 12, 1, extend_piece=6, extra_outlier_chunks=2),
        fast=True,
        prefill_chunk=2048,
    ),
    "plus_c8": Setting("group1", (480,), ShadowKVPlus(16, 8, 64, 8, 4, quirks=Quirks(score_dtype="bfloat16"))),
    "plus_multiple": Setting(
        "one", (160,), ShadowKVPlus(12, 4, 24, 2, 1, quirks=Quirks(chunk_multiple=4), extend_piece=5), fast=True
    ),
    "plus_preload": Setting(
        "one", (96,), ShadowKVPlus(16, 3, 30, 4, 0, quirks=Quirks(exact_preload=True), extra_outlier_chunks=1)
    ),
}


class Row(NamedTuple):
    """One case. The numbers are fitted to the capacity by `fit`; tokens follow from the seed."""

    length: int
    turns: tuple[int, ...] = ()
    seed: int = 0


class Batch(NamedTuple):
    """Rows that run together; shapes depend on the setting, the capacity, `shortest` and the number of rows alone."""

    name: str
    capacity: int
    rows: tuple[Row, ...]
    shortest: int = 1


class Run(NamedTuple):
    """What one row did: logits [1 + new tokens, V] and the sets [layer][head] after each part, by tokens fed so far."""

    logits: np.ndarray
    sets: dict[int, list[list[set[int]]]]
    attended: float


class Wanted(NamedTuple):
    """What the oracle says: a Run, and how far to trust it: new tokens before the first near tie, times TOLERANCE."""

    run: Run
    good: int
    slack: float


class Tally(NamedTuple):
    """What a comparison found; `wrong` has a line for each row that differs."""

    cases: int = 0
    sets: int = 0
    ties: int = 0
    wrong: tuple[str, ...] = ()

    def __add__(self, other: "Tally") -> "Tally":  # type: ignore[override]
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))  # type: ignore[operator]


def fit(row: Row, capacity: int) -> Row:
    """Any length as one of 1 .. capacity, turns cut to what then fits, one for each of TURNS; a step is one token."""
    length = (row.length - 1) % capacity + 1
    turns, room = [], capacity - length
    for wanted in (*row.turns, *[0] * TURNS)[:TURNS] + (1,) * STEPS:
        turns.append(min(wanted, room))
        room -= turns[-1]
    return Row(length, tuple(turns), row.seed)


@functools.cache
def model(name: str) -> Params:
    """Random weights of variance 1 / fan_in."""
    return init_params(MODELS[name], seed=0, dtype="float32")


@functools.lru_cache(maxsize=64)
def tokens_of(row: Row, config: ModelConfig) -> tuple[list[int], list[list[int]]]:
    """Prompt and parts of a fitted row. An odd seed repeats no token within a hundred: keys then have full rank."""
    rng = np.random.default_rng(row.seed)
    total = row.length + sum(row.turns)
    drawn = rng.integers(0, config.vocab_size, total)
    if row.seed % 2:
        drawn = np.concatenate([rng.permutation(config.vocab_size) for _ in range(total // config.vocab_size + 1)])
    cuts = np.cumsum([row.length, *row.turns])
    parts = [part.tolist() for part in np.split(drawn[:total], cuts[:-1])]
    return parts[0], parts[1:]


def run_library(batch: Batch, fetch: str) -> list[Run]:
    """Prefill, turns by extend, steps by decode_step: one Run a row.

    In resident mode steps are turns of one token: that is the same, and a program less to compile.
    """
    setting = SETTINGS[batch.name]
    params, rows = model(setting.model), [fit(row, batch.capacity) for row in batch.rows]
    tokens = [tokens_of(row, params.config) for row in rows]
    prompts = pad([prompt for prompt, _ in tokens], batch.capacity)
    ((logits, state),) = decode.prefill_many(
        params,
        prompts,
        [row.length for row in rows],
        [setting.policy],
        capacity=batch.capacity,
        fetch=fetch,
        shortest=batch.shortest,
        prefill_chunk=setting.prefill_chunk,
    )
    outs, sets = [[out] for out in np.asarray(logits)], [{} for _ in rows]
    for index in range(TURNS + STEPS):
        parts = [part[index] for _, part in tokens]
        counts = np.array([len(part) for part in parts])
        if not counts.any():
            continue
        if index < TURNS or fetch == "resident":
            logits, state = decode.extend(params, pad(parts, TURN), counts, state, logits="all")
        else:
            logits, state = decode.decode_step(params, pad(parts, 1)[:, 0], state, active=counts > 0)
            logits = logits[:, None]
        held = [selected_ids(spec, layer) for spec, layer in zip(state.specs, state.layers, strict=True)]
        for row, count in enumerate(counts):
            outs[row].extend(np.asarray(logits)[row, :count])
            if count:
                sets[row][len(outs[row]) - 1] = [[set(ids[ids >= 0].tolist()) for ids in layer[row]] for layer in held]
    attended = np.asarray(state.counters.attended)
    return [Run(np.stack(out), own, float(seen)) for out, own, seen in zip(outs, sets, attended, strict=True)]


def selected_ids(spec: CacheSpec, layer: LayerState) -> np.ndarray:
    """Chunks that the last query of each row selected [B, h_kv, k], -1 where there is none.

    Chunks that joined after the prompt stand in the host's tail, behind all units that a prompt may have.
    """
    ids, units = np.asarray(layer.live.resident), spec.policy.host_layout(spec).units
    return np.where(ids < units, ids, ids - units + np.asarray(layer.frozen.chunks)[:, None, None])


def pad(parts: list[list[int]], width: int) -> np.ndarray:
    """Lists as the rows of int32 [B, width]; zeros where they end."""
    out = np.zeros((len(parts), width), np.int32)
    for row, part in enumerate(parts):
        out[row, : len(part)] = part
    return out


def run_oracle(setting: Setting, row: Row) -> Wanted:
    """One fitted row in float64."""
    params = model(setting.model)
    settings = oracle_settings(setting.policy)
    assert settings.pop("rounds") == 1
    exact = {"landmark_dtype": "model", "value_dtype": "model"}
    assert {name: settings.pop(name) for name in exact} == exact  # oracle_codec.py rounds
    keys = settings.pop("keys")
    assert keys in ("lowrank", "exact")
    if keys == "exact":
        settings["rank"] = params.config.key_columns
    theirs = ORACLES[type(setting.policy)](**settings)
    run = oracle.Oracle(params.weights, params.config, theirs)
    prompt, parts = tokens_of(row, params.config)
    logits, sets = [run.prefill(prompt)[None]], {}
    for part in parts:
        if part:
            logits.append(run.extend(part))
            sets[sum(map(len, logits)) - 1] = [entry["selected"] for entry in run.trace[-params.config.num_layers :]]
    attended = sum(entry["attended"] for entry in run.trace)
    slack = max([1.0, *(entry["factor_error"] / SMALL_ERROR for entry in run.trace)])
    good = 0
    for entry in run.trace:
        gap = min(entry[name] for name in ("gap", "outlier_gap", "extra_gap", "preload_gap"))
        if gap < NEAR_TIE * slack or slack > LARGEST_SLACK:
            break
        good += entry["queries"] if entry["layer"] + 1 == params.config.num_layers else 0
    return Wanted(Run(np.concatenate(logits), sets, attended), good, slack)


def compare(batch: Batch) -> Tally:
    """Resident, offloaded and oracle on every row of a batch, each as far as its first near tie."""
    setting = SETTINGS[batch.name]
    runs = {fetch: run_library(batch, fetch) for fetch in FETCHES}
    tally = Tally()
    for index, row in enumerate(fit(row, batch.capacity) for row in batch.rows):
        wanted = run_oracle(setting, row)
        mine = [runs[fetch][index] for fetch in FETCHES]
        wrong = [
            f"{fetch}: {line}" for fetch, run in zip(FETCHES, mine, strict=True) for line in differences(run, wanted)
        ]
        between = np.abs(mine[0].logits - mine[1].logits)[: 1 + wanted.good].max()
        if not between < MODES_TOLERANCE:
            wrong.append(f"logits of the fetch modes differ by {between:.1e}")
        lines = (f"{batch.name} capacity={batch.capacity} {row}: {'; '.join(wrong)}",) if wrong else ()
        sets = [heads for count, layers in wanted.run.sets.items() if count <= wanted.good for heads in layers]
        tally += Tally(1, len(FETCHES) * sum(map(len, sets)), int(wanted.good < len(wanted.run.logits) - 1), lines)
    return tally


def differences(run: Run, wanted: Wanted) -> list[str]:
    """How a library's row differs from the oracle's before a near tie."""
    want, good, found = wanted.run, wanted.good, []
    for count, layers in want.sets.items():
        if count <= good and run.sets[count] != layers:
            found.append(f"selected after {count} tokens {run.sets[count]}, oracle {layers}")
    off = np.abs(run.logits - want.logits)[: 1 + good].max(axis=1)
    close = off < TOLERANCE * wanted.slack
    if not close.all():  # NaN is a difference too
        found.append(f"logits differ by {off.max():.1e}, first after {int(np.argmin(close))} tokens")
    if good == len(want.logits) - 1 and not np.isclose(run.attended, want.attended, rtol=1e-6):
        found.append(f"attended {run.attended}, oracle {want.attended}")
    return found
