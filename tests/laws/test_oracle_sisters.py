"""Law 6 for the sister methods: jshadow agrees with the NumPy oracle, row by row of a ragged batch."""

import dataclasses
import functools

import numpy as np
import oracle_bases
import oracle_infllm
import oracle_kivi
import oracle_sisters
import oracle_specache
import pytest
from cases import CONFIGS, model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import H2O, KIVI, InfiniGen, InfLLM, Loki, OmniKV, Quest, SnapKV, SpeCache

# The middle row ends inside a chunk and a page, the last one is shorter than every window and budget.
LENGTHS, CAPACITY, STEPS = (118, 67, 9), 160, 14
NEAR_TIE, TOLERANCE = 1e-5, 1e-4
SNAP = SnapKV(max_capacity_prompt=24, observation_window=6, kernel=5)
LOKI = Loki(budget=20, columns=4, recent=1)
OMNI = OmniKV(budget=20, filter_layers=(0, 3))  # dense: 0, 1, 3, 4; sparse: 2 and 5
INFI = InfiniGen(budget=30, columns=5, alpha=1.0, dense_layers=1)
CONFIGS = CONFIGS | {"deep": dataclasses.replace(CONFIGS["group2"], num_layers=6)}
QUEST = Quest(budget=32, unit=8, dense_layers=0)
INFLLM = InfLLM(window=20, sinks=5, budget=16, unit=8, representatives=3, query_block=16)
SPE = SpeCache(bits=1, group=8, residual=16, fetched=12)
ORACLES = {
    KIVI: (oracle_kivi, oracle_sisters.SetOracle),
    InfiniGen: (oracle_bases, oracle_sisters.SetOracle),
    Loki: (oracle_bases, oracle_sisters.SetOracle),
    InfLLM: (oracle_infllm, oracle_infllm.InfLLMOracle),
    SpeCache: (oracle_specache, oracle_specache.SpeCacheOracle),
}
CASES = {
    "h2o": ("group2", H2O(heavy=10, recent=7)),
    "h2o_normalized": ("group2", H2O(heavy=10, recent=7, normalize=True)),
    "h2o_recent_alone": ("group1", H2O(heavy=0, recent=12)),
    "h2o_wide": ("head_dim80", H2O(heavy=16, recent=1)),
    "infinigen": ("deep", INFI),
    "infinigen_wide_net": ("deep", dataclasses.replace(INFI, alpha=9.0, budget=12, columns=8, recent=5)),
    # of a group of one, nine queries would leave most of the basis undetermined
    "infinigen_dense": ("deep", dataclasses.replace(INFI, dense_layers=3)),
    "infllm": ("group2", INFLLM),
    "infllm_no_sinks": ("group1", dataclasses.replace(INFLLM, sinks=0, unit=5, budget=15, query_block=64)),
    "infllm_wide": ("head_dim80", dataclasses.replace(INFLLM, window=11, unit=4, budget=8, query_block=4)),
    "infinigen_all_columns": ("deep", dataclasses.replace(INFI, columns=16, budget=12)),
    "kivi": ("group2", KIVI(bits=2, group=8, residual=16)),
    "kivi_1bit": ("group1", KIVI(bits=1, group=4, residual=12)),
    "kivi_4bit": ("head_dim80", KIVI(bits=4, group=5, residual=10)),
    "loki": ("group2", LOKI),
    "loki_wide": ("head_dim80", dataclasses.replace(LOKI, columns=13, recent=6)),
    "loki_whole_heads": ("group1", dataclasses.replace(LOKI, columns=16)),
    "omnikv": ("deep", OMNI),
    "omnikv_uniform": ("deep", dataclasses.replace(OMNI, selector="uniform", observation_window=5)),
    "omnikv_exp": ("deep", dataclasses.replace(OMNI, selector="exp", observation_window=3, filter_layers=(1,))),
    "quest": ("group2", QUEST),
    "quest_pages_of_3": ("head_dim80", dataclasses.replace(QUEST, unit=3, budget=20, recent=5)),
    "quest_group1": ("group1", dataclasses.replace(QUEST, budget=8)),
    "specache": ("group2", SPE),
    "specache_2bit": ("group1", dataclasses.replace(SPE, bits=2, fetched=3)),
    "specache_wide": ("head_dim80", dataclasses.replace(SPE, group=5, residual=10, fetched=30)),
    "snapkv": ("group2", SNAP),
    "snapkv_avg": ("group2", dataclasses.replace(SNAP, pooling="avg")),
    "snapkv_q_head": ("group2", dataclasses.replace(SNAP, granularity="q_head")),
    "snapkv_kernel1": ("head_dim80", dataclasses.replace(SNAP, kernel=1, observation_window=1)),
}


def oracle_of(policy):
    """Module and class of its oracle."""
    return ORACLES.get(type(policy), (oracle_sisters, oracle_sisters.SetOracle))


def oracle_policy(policy):
    """The oracle's own policy of the same settings."""
    theirs = getattr(oracle_of(policy)[0], type(policy).__name__)
    names = {field.name for field in dataclasses.fields(theirs)}
    return theirs(**{name: value for name, value in dataclasses.asdict(policy).items() if name in names})


@functools.cache
def oracle_run(case, row, near_tie=0.0):
    """Logits [1 + STEPS, V] of one row, and the trace of its steps. For near_tie see oracle_kivi.KIVI."""
    config, policy = CONFIGS[CASES[case][0]], oracle_policy(CASES[case][1])
    policy = dataclasses.replace(policy, near_tie=near_tie) if near_tie else policy
    run = oracle_of(CASES[case][1])[1](model(config).weights, config, policy)
    tokens, steps = prompts(config)
    logits = [run.prefill(tokens[row, : LENGTHS[row]].tolist())]
    logits += [run.step(int(token)) for token in steps[row]]
    return np.stack(logits), run.trace


def prompts(config):
    """Prompts and the tokens that follow."""
    return random_tokens(3, max(LENGTHS), seed=41, config=config), random_tokens(3, STEPS, seed=42, config=config)


@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(case, record_property):
    config_name, policy = CASES[case]
    config = CONFIGS[config_name]
    tokens, steps = prompts(config)
    first, state = decode.prefill(model(config), tokens, LENGTHS, policy, capacity=CAPACITY)
    rest, state = run_steps(model(config), state, steps)
    logits = np.concatenate([np.asarray(first)[:, None], rest], axis=1)
    quantizes, ties = isinstance(oracle_policy(policy), oracle_kivi.KIVI), 0
    for row in range(len(LENGTHS)):
        want, trace = oracle_run(case, row)
        tied = [entry["step"] for entry in trace if entry["gap"] < NEAR_TIE]
        good = 1 + min(tied, default=STEPS)
        if quantizes and np.abs(logits[row, :good] - want[:good]).max() > TOLERANCE:
            # A number in the middle between two codes may get either code, and all later steps read it. If the nearer
            # code does not give these logits, the farther one must. The row counts as a near tie.
            want, trace = oracle_run(case, row, NEAR_TIE)
            ties += 1
        ties += len(tied)
        np.testing.assert_allclose(logits[row, :good], want[:good], atol=TOLERANCE)
        if not tied:
            assert float(state.counters.attended[row]) == pytest.approx(sum(entry["attended"] for entry in trace))
    record_property("near_ties", ties)
    assert ties <= 1


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_oracle_gives_only_a_near_tie_the_farther_code(bits):
    codes = 2**bits - 1
    group = np.array([0.0, 0.5 - 1e-6, 0.5 + 1e-6, 0.5 + 1e-3, codes])  # in steps
    nearer, farther = (oracle_kivi.KIVI(bits, 5, 5, near_tie=near_tie).rounded(group) for near_tie in (0.0, 1e-5))
    np.testing.assert_array_equal(farther[[0, 3, 4]], nearer[[0, 3, 4]])
    np.testing.assert_array_equal(farther[1:3], nearer[[2, 1]])
    assert nearer[1] < nearer[2]
