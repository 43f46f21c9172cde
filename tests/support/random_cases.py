"""Random rows through the library, offloaded and resident, and through the oracle; and what the three must share.

To cover a new setting of ShadowKV, add one line to SETTINGS. Every row of a batch is an own case: a prompt, two turns
and a turn of one token. Rows of one setting and capacity share their compiled programs.
"""

import functools
from typing import NamedTuple

import numpy as np
import oracle
from oracle_settings import oracle_settings
from random_settings import MODELS, SETTINGS, Setting

from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.engine import decode
from jshadow.models.config import ModelConfig
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.weights.params import init_params

TURN, TURNS, STEPS = 20, 2, 1  # most tokens of a turn, turns, turns of one token
TOLERANCE, MODES_TOLERANCE = 1e-4, 1e-5  # of logits: to the oracle, between the fetch modes
# Below this gap (see oracle.Trace) float32 may choose otherwise than float64. Where its low-rank keys are off by more
# than SMALL_ERROR, tolerance and gap grow with that error, to a tenfold; beyond, nothing is compared after the prompt.
NEAR_TIE, SMALL_ERROR, LARGEST_SLACK = 1e-5, 3e-5, 10.0
ORACLES = {ShadowKV: oracle.ShadowKV, ShadowKVPlus: oracle.ShadowKVPlus}


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


def fit(row: Row, capacity: int) -> Row:
    """Any length as one of 1 .. capacity, turns cut to what then fits, one for each of TURNS; a step is one token."""
    length = (row.length - 1) % capacity + 1
    turns, room = [], capacity - length
    for wanted in (*row.turns, *[0] * TURNS)[:TURNS] + (1,) * STEPS:
        turns.append(min(wanted, room))
        room -= turns[-1]
    return Row(length, tuple(turns), row.seed)


model = functools.cache(lambda name: init_params(MODELS[name], seed=0, dtype="float32"))


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
    """Prefill, then turns by extend: one Run a row. Steps are turns of one token, so one program serves all."""
    setting = SETTINGS[batch.name]
    params, rows = model(setting.model), [fit(row, batch.capacity) for row in batch.rows]
    tokens = [tokens_of(row, params.config) for row in rows]
    prompts = pad([prompt for prompt, _ in tokens], batch.capacity)
    sizes = {"capacity": batch.capacity, "shortest": batch.shortest, "prefill_chunk": setting.prefill_chunk}
    lengths = [row.length for row in rows]
    ((logits, state),) = decode.prefill_many(params, prompts, lengths, [setting.policy], fetch=fetch, **sizes)
    outs, sets = [[out] for out in np.asarray(logits)], [{} for _ in rows]
    for index in range(TURNS + STEPS):
        parts = [part[index] for _, part in tokens]
        counts = np.array([len(part) for part in parts])
        if not counts.any():
            continue
        logits, state = decode.extend(params, pad(parts, TURN), counts, state, logits="all")
        logits = np.asarray(logits)
        held = [selected_ids(spec, layer) for spec, layer in zip(state.specs, state.layers, strict=True)]
        for row, count in enumerate(counts):
            outs[row].extend(logits[row, :count])
            if count:
                sets[row][len(outs[row]) - 1] = [[set(ids[ids >= 0].tolist()) for ids in layer[row]] for layer in held]
    attended = np.asarray(state.counters.attended)
    return [Run(np.stack(out), own, float(seen)) for out, own, seen in zip(outs, sets, attended, strict=True)]


def selected_ids(spec: CacheSpec, layer: LayerState) -> np.ndarray:
    """Chunks that the last query of each row selected [B, h_kv, k], -1 where there is none.

    Chunks that joined after the prompt stand in the host's tail, behind all units that a prompt may have.
    """
    ids, units = np.asarray(layer.live.resident), spec.policy.host_layout(spec).units
    if layer.live.ages is not None:
        ids = np.where(np.asarray(layer.live.ages) == 0, ids, -1)
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


def compare(batch: Batch) -> tuple[dict[str, int], list[str]]:
    """The library and the oracle on every row of a batch, each as far as its first near tie.

    Returns:
        How many rows, selected sets and near ties there were, and a line for each row that differs.
    """
    setting, counts, wrong = SETTINGS[batch.name], dict.fromkeys(("random_cases", "sets_compared", "near_ties"), 0), []
    fetches = setting.fetches
    runs = {fetch: run_library(batch, fetch) for fetch in fetches}
    for index, row in enumerate(fit(row, batch.capacity) for row in batch.rows):
        wanted, mine = run_oracle(setting, row), {fetch: runs[fetch][index] for fetch in fetches}
        found = [f"{fetch}: {line}" for fetch, run in mine.items() for line in differences(run, wanted)]
        between = np.abs(mine[fetches[0]].logits - mine[fetches[-1]].logits)[: 1 + wanted.good].max()
        if not between < MODES_TOLERANCE:
            found.append(f"logits of the fetch modes differ by {between:.1e}")
        if found:
            wrong.append(f"{batch.name} capacity={batch.capacity} {row}: {'; '.join(found)}")
        sets = [heads for count, layers in wanted.run.sets.items() if count <= wanted.good for heads in layers]
        counts["random_cases"] += 1
        counts["sets_compared"] += len(fetches) * sum(map(len, sets))
        counts["near_ties"] += wanted.good < len(wanted.run.logits) - 1
    return counts, wrong


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
