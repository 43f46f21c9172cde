"""Policies on a model with attention sinks: those that lose nothing give the results of full attention, as elsewhere.

tests/ops/test_sinks.py holds the functions of attention to NumPy, and tests/models/test_parity.py holds full attention
to transformers.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import LENGTHS, POLICY_CASES, PROMPT, run_steps
from family_cases import family_config

import jshadow
from jshadow.engine import decode
from jshadow.engine.sparse_prefill import VerticalSlash
from jshadow.engine.speculation import SelfDraft
from jshadow.errors import ConfigError
from jshadow.policies import LESS, POLICIES, Full, ShadowKV
from jshadow.policies.omnikv import filter_masses
from jshadow.weights.params import init_params

CAPACITY, COUNT = 96, 20
TINY = family_config("gpt_oss")
MIXED = dataclasses.replace(TINY, sliding_layers=(1,))  # a layer with a window between two without
TOKENS = PROMPT % TINY.vocab_size
TURN = np.random.default_rng(5).integers(3, TINY.vocab_size, (len(LENGTHS), COUNT), np.int32)
NEW = np.array([COUNT, 7, 0])
SHARING = [name for name in POLICIES if POLICY_CASES[name].lossless is not None]
params = functools.cache(lambda: init_params(MIXED, seed=4))


def start(policy, **options):
    sizes = {"capacity": CAPACITY, "fetch": "resident", "logits": "all"}
    return decode.prefill(params(), TOKENS, LENGTHS, policy, **sizes, **options)


@functools.cache
def results(policy, turn):
    """Logits of the prompts, of two steps, and perhaps of a turn of 20, 7 and 0 tokens after the prompts."""
    prompt, state = start(policy)
    found = [np.asarray(prompt)[row, :length] for row, length in enumerate(LENGTHS)]
    after = state.fork() if turn else None
    found.append(run_steps(params(), state, TURN[:, :2])[0])
    if not turn:
        return found
    turned, _ = decode.extend(params(), TURN, NEW, after, logits="all")
    return found + [np.asarray(turned)[row, :count] for row, count in enumerate(NEW)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_every_lossless_policy_is_full(name):
    """Also in a turn, which takes other programs than a step. Policies that attend in turns on their own have one."""
    turn = name in ("h2o", "infllm", "quest", "shadowkv_plus", "streaming_llm")
    want = results(Full(), True)
    got = results(POLICY_CASES[name].lossless(CAPACITY, MIXED), turn)
    for mine, right in zip(got, want if turn else want[: len(got)], strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in SHARING])
def test_every_other_policy_runs(name):
    assert all(np.isfinite(part).all() for part in results(POLICY_CASES[name].restricted, True))


@pytest.mark.slow
def test_turns_of_a_policy_that_selects_are_its_steps():
    policy, active = POLICY_CASES["shadowkv"].restricted, np.arange(COUNT) < NEW[:, None]
    _, state = start(policy)
    turned, _ = decode.extend(params(), TURN, NEW, state.fork(), logits="all")
    stepped, _ = run_steps(params(), state, TURN, active)
    for row, count in enumerate(NEW):
        np.testing.assert_allclose(np.asarray(turned)[row, :count], stepped[row, :count], atol=1e-4)


@pytest.mark.slow
def test_pieces_and_a_sparse_prefill_of_all_keys_are_one_prefill():
    """A sparse prefill whose lines cover less than the prompt gives other logits, and finite ones."""
    want = np.asarray(start(Full())[0])
    few = VerticalSlash(vertical=40, slash=12, block=16)
    for options, same in (
        ({"prefill_chunk": 23}, True),
        ({"attention": VerticalSlash()}, True),
        ({"attention": few}, False),
    ):
        got = np.asarray(start(Full(), **options)[0])
        apart = max(np.abs(got[row, :length] - want[row, :length]).max() for row, length in enumerate(LENGTHS))
        assert (apart < 1e-4) == same


@pytest.mark.slow
def test_speculation_changes_no_token():
    prompts = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
    runs = [
        jshadow.generate(params(), prompts, Full(), max_new_tokens=8, speculate=speculate)
        for speculate in (None, SelfDraft(tokens=3))
    ]
    plain, guessed = ([out.tokens for out in outs] for outs in runs)
    assert plain == guessed


@pytest.mark.slow
def test_what_is_learned_from_a_text_knows_of_the_sinks():
    """A sink that takes nearly everything leaves LESS nothing to learn, and a filter nothing to give."""
    whole = params()
    policy = LESS(heavy=6, recent=8, state_rank=4, hidden=16)
    fitted = policy.fit(whole, TOKENS[:1, :61], steps=3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fitted))
    weights = {name: dict(layer) for name, layer in whole.weights.items()}
    for layer in range(MIXED.num_layers):
        own = weights[f"layer_{layer}"]["attention"]
        weights[f"layer_{layer}"]["attention"] = own | {"sinks": np.full_like(own["sinks"], 30.0)}
    masses = [
        filter_masses(dataclasses.replace(whole, weights=one), TOKENS[:1, :61], budget=8).masses
        for one in (whole.weights, weights)
    ]
    assert np.nanmax(masses[1]) < 1e-6 < np.nanmin(masses[0])


def test_a_method_whose_softmax_has_no_sink_is_refused():
    with pytest.raises(ConfigError, match="probe must take the attention sinks of a gpt_oss model"):
        start(POLICY_CASES["probe"].restricted)

    class Plain(VerticalSlash):
        takes_sinks = False

    with pytest.raises(ConfigError, match="vertical_slash must take the attention sinks of a gpt_oss model"):
        start(ShadowKV(), attention=Plain())
