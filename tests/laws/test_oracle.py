"""Law 6: jshadow agrees with the independent NumPy oracle, alone, as rows of a ragged batch, and through device_put.

Float32 may pick another chunk than float64 where two scores nearly tie: such a row is not compared further, counted,
and reported at the end of the run.
"""

import dataclasses
import functools

import numpy as np
import oracle
import pytest
from cases import CONFIGS, model, random_tokens, run_steps
from oracle_settings import oracle_settings

from jshadow.engine import decode
from jshadow.policies import Full, ShadowKV, StreamingLLM

LENGTHS, CAPACITY, STEPS = (203, 130, 21), 224, 5
NEAR_TIE = 1e-5
TOLERANCE = 1e-4  # the issue asks for 1e-3

BASE = ShadowKV(rank=12, budget=64, outlier_chunks=2, local_chunks=4)
SHADOWKV_CASES = {
    "base": ("group2", BASE),
    "no_outliers": ("group2", dataclasses.replace(BASE, outlier_chunks=0)),
    "group1": ("group1", BASE),
    "head_dim80": ("head_dim80", dataclasses.replace(BASE, rank=24)),
    "chunk4": ("group2", dataclasses.replace(BASE, chunk_size=4)),
    "full_rank": ("group2", dataclasses.replace(BASE, rank=32)),
    "tied_with_bias": ("tied", BASE),
    "llama3_rope": ("llama3_rope", BASE),
}
OTHERS = {
    "full": Full(),
    "streaming": StreamingLLM(sinks=4, window=24),
    "streaming_in_place": StreamingLLM(sinks=4, window=24, rebase_positions=False),
    "streaming_no_sinks": StreamingLLM(sinks=0, window=23),
}
ORACLES = {Full: oracle.Full, StreamingLLM: oracle.StreamingLLM, ShadowKV: oracle.ShadowKV}
# rows as (first, one past the last): the long row alone, and all three together
BATCHES = {"alone": (0, 1), "ragged": (0, 3)}


@functools.cache
def prompts(config_name):
    config = CONFIGS[config_name]
    return random_tokens(3, max(LENGTHS), seed=11, config=config), random_tokens(3, STEPS, seed=12, config=config)


def oracle_policy(policy):
    """The oracle's own policy of the same settings."""
    theirs = ORACLES[type(policy)]
    names = {field.name for field in dataclasses.fields(theirs)}
    settings = oracle_settings(policy) if isinstance(policy, ShadowKV) else dataclasses.asdict(policy)
    return theirs(**{name: value for name, value in settings.items() if name in names})


@functools.cache
def oracle_run(config_name, policy, row):
    """Logits [1 + STEPS, V] of one row and the trace of its steps."""
    config = CONFIGS[config_name]
    theirs = oracle_policy(policy)
    run = oracle.Oracle(model(config).weights, config, theirs)
    tokens, steps = prompts(config_name)
    logits = [run.prefill(tokens[row, : LENGTHS[row]].tolist())]
    logits += [run.step(int(token)) for token in steps[row]]
    return np.stack(logits), run.trace


def run_batch(config_name, policy, rows, fetch):
    """Logits [B, 1 + STEPS, V], the states after each step's selection as {(step, layer): resident}, last state."""
    tokens, steps = (x[slice(*rows)] for x in prompts(config_name))
    params, lengths = model(CONFIGS[config_name]), LENGTHS[slice(*rows)]
    logits, state = decode.prefill(params, tokens, lengths, policy, capacity=CAPACITY, fetch=fetch)
    outs, resident = [np.asarray(logits)], {}
    for i in range(STEPS):
        out, state = run_steps(params, state, steps[:, i : i + 1])
        outs.append(np.asarray(out[:, 0]))
        if isinstance(policy, ShadowKV):
            for j, layer in enumerate(state.layers):
                resident[i, j] = np.asarray(layer.live.resident)
    return np.stack(outs, axis=1), resident, state


# Every case alone and resident, ragged and offloaded; the base case in the crossed pairs as well.
PAIRS = [(case, *pair) for case in SHADOWKV_CASES for pair in (("resident", "alone"), ("device_put", "ragged"))]
PAIRS += [("base", "device_put", "alone"), ("base", "resident", "ragged")]


@pytest.mark.parametrize(("case", "fetch", "batch"), PAIRS)
def test_shadowkv(case, fetch, batch, record_property):
    config_name, policy = SHADOWKV_CASES[case]
    rows = BATCHES[batch]
    logits, resident, state = run_batch(config_name, policy, rows, fetch)
    compared = ties = 0
    for row in range(*rows):
        want, trace = oracle_run(config_name, policy, row)
        np.testing.assert_allclose(logits[row, 0], want[0], atol=TOLERANCE)
        tied = [i for i, entry in enumerate(trace) if min(entry["gap"], entry["outlier_gap"]) < NEAR_TIE]
        ties += len(tied)
        good = trace[: tied[0]] if tied else trace
        for entry in good:
            mine = [set(ids[ids >= 0].tolist()) for ids in resident[entry["step"], entry["layer"]][row]]
            assert mine == entry["selected"], (row, entry["step"], entry["layer"])
            compared += len(mine)
        whole_steps = STEPS if not tied else trace[tied[0]]["step"]
        np.testing.assert_allclose(logits[row, 1 : 1 + whole_steps], want[1 : 1 + whole_steps], atol=TOLERANCE)
        attended = sum(entry["attended"] for entry in trace)
        assert float(state.counters.attended[row]) == attended
        check_outliers(state, row, trace)
    record_property("sets_compared", compared)
    record_property("near_ties", ties)


def check_outliers(state, row, trace):
    for layer, entry in zip(state.layers, trace, strict=False):  # the first step's entries: one a layer
        if entry["outlier_gap"] > NEAR_TIE:
            whole = np.arange(layer.frozen.candidates.shape[2]) < int(layer.frozen.chunks[row])
            out = np.asarray(~layer.frozen.candidates[row]) & whole
            assert [set(np.flatnonzero(head).tolist()) for head in out] == entry["outliers"]


@pytest.mark.parametrize(
    ("name", "config_name"),
    [(name, "group2") for name in OTHERS]
    + [(name, config) for name in ("full", "streaming") for config in ("group1", "tied", "llama3_rope")],
)
def test_full_and_streaming_llm(name, config_name):
    """A prompt of 203 tokens is far past the window of 28, one of 21 never reaches it."""
    policy, rows = OTHERS[name], (0, 3)
    logits, _, state = run_batch(config_name, policy, rows, "resident")
    for row in range(*rows):
        want, trace = oracle_run(config_name, policy, row)
        np.testing.assert_allclose(logits[row], want, atol=TOLERANCE)
        assert float(state.counters.attended[row]) == sum(entry["attended"] for entry in trace)


@pytest.mark.parametrize("rebase", [True, False])
def test_streaming_llm_while_it_evicts(rebase):
    """From an empty-ish cache over the first eviction and twice around the ring, by extend."""
    policy, config = StreamingLLM(sinks=2, window=5, rebase_positions=rebase), CONFIGS["group2"]
    tokens, new = random_tokens(2, 3, seed=21, config=config), random_tokens(2, 18, seed=22, config=config)
    lengths = [3, 1]
    logits, state = decode.prefill(model(config), tokens, lengths, policy, capacity=32)
    out, _ = decode.extend(model(config), new, [18, 18], state, logits="all")
    for row, length in enumerate(lengths):
        run = oracle.Oracle(model(config).weights, config, oracle.StreamingLLM(2, 5, rebase))
        np.testing.assert_allclose(logits[row], run.prefill(tokens[row, :length].tolist()), atol=TOLERANCE)
        want = np.stack([run.step(int(token)) for token in new[row]])
        np.testing.assert_allclose(out[row], want, atol=TOLERANCE)


@pytest.mark.parametrize("outliers", [0, 1, 3])
def test_rank_above_a_short_prompt(outliers):
    """Factors with more columns than the prompt has tokens, chunks of two tokens."""
    config = CONFIGS["group2"]
    policy = ShadowKV(rank=32, budget=6, chunk_size=2, outlier_chunks=outliers, local_chunks=1)
    tokens, new = random_tokens(1, 13, seed=31, config=config), random_tokens(1, 4, seed=32, config=config)
    logits, state = decode.prefill(model(config), tokens, [13], policy, capacity=24)
    out, _ = run_steps(model(config), state, new)
    theirs = oracle_policy(policy)
    run = oracle.Oracle(model(config).weights, config, theirs)
    np.testing.assert_allclose(logits[0], run.prefill(tokens[0].tolist()), atol=TOLERANCE)
    want = np.stack([run.step(int(token)) for token in new[0]])
    assert min(min(entry["gap"], entry["outlier_gap"]) for entry in run.trace) > NEAR_TIE
    np.testing.assert_allclose(out[0], want, atol=TOLERANCE)
