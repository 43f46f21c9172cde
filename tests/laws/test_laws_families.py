"""The laws on every family: another model's attention (partial or no rotation, windows, norms) keeps them all.

`test_laws.py` holds every policy to them on one family; here `full` and `shadowkv` meet all the others.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import ALL, CAPACITY, LENGTHS, OFFLOADED, PROMPT, SMALL, run_steps
from family_cases import ONE_OF_EACH, family_config

import jshadow
from jshadow.cache.accounting import leaf_bytes, state_nbytes
from jshadow.engine import decode
from jshadow.planner.bytes import abstract_state
from jshadow.policies import Full, Policy, ShadowKV
from jshadow.policies.sliding_window import SlidingWindow
from jshadow.weights.params import Params, init_params

# Longer turns than a window and than a piece of a turn; 61 + 20 tokens go round every ring of the cases.
TURN = np.random.default_rng(5).integers(3, 97, (len(LENGTHS), 20), dtype=np.int32)
NEW = np.array([20, 7, 0])
POLICIES = {"full": Full(), "shadowkv": ShadowKV(rank=8, budget=16, **SMALL)}
families = pytest.mark.parametrize("name", ONE_OF_EACH)
# Full attention on the family with every kind of layer.
cases = pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "shadowkv") for name in ONE_OF_EACH] + [(name, "full") for name in (ONE_OF_EACH if ALL else ["gemma3"])],
)


@functools.cache
def family_params(name: str) -> Params:
    """Random weights."""
    return init_params(family_config(name), seed=4)


def lossless(name: str) -> Policy:
    """ShadowKV that must equal full attention."""
    return dataclasses.replace(ShadowKV.lossless(CAPACITY, family_config(name)), **SMALL)


@functools.cache
def prefilled(name: str, policy: Policy, fetch: str = "resident"):
    """Logits and state of the ragged batch."""
    tokens = PROMPT % 97
    return decode.prefill(family_params(name), tokens, np.array(LENGTHS), policy, capacity=CAPACITY, fetch=fetch)


@families
def test_every_family_is_lossless(name):
    full, full_state = prefilled(name, Full())
    want = run_steps(family_params(name), full_state.fork(), TURN[:, :6])[0]
    for fetch in OFFLOADED if ALL else OFFLOADED[:1]:  # the other laws here run resident
        logits, state = prefilled(name, lossless(name), fetch)
        np.testing.assert_allclose(logits, full, atol=1e-4)
        got = run_steps(family_params(name), state.fork(), TURN[:, :6])[0]
        np.testing.assert_allclose(got, want, atol=1e-4)


@cases
def test_a_turn_is_as_many_steps(name, policy):
    _, state = prefilled(name, POLICIES[policy])
    active = np.arange(TURN.shape[1]) < NEW[:, None]
    stepped, after = run_steps(family_params(name), state.fork(), TURN, active)
    turned, at_once = decode.extend(family_params(name), TURN, NEW, state.fork(), logits="all")
    for row, count in enumerate(NEW):
        np.testing.assert_allclose(turned[row, :count], stepped[row, :count], atol=1e-4)
    np.testing.assert_array_equal(after.lengths, at_once.lengths)
    more = [run_steps(family_params(name), one.fork(), TURN[:, :2])[0] for one in (after, at_once)]
    np.testing.assert_allclose(more[0], more[1], atol=1e-4)


@cases
def test_a_row_alone_is_the_row_in_a_batch(name, policy):
    params, tokens = family_params(name), PROMPT % 97
    logits, state = prefilled(name, POLICIES[policy])
    steps = run_steps(params, state.fork(), TURN[:, :3])[0]
    for row in (0, 2):  # the longest and the shortest
        length = LENGTHS[row]
        alone, held = decode.prefill(
            params, tokens[row : row + 1, :length], np.array([length]), POLICIES[policy], capacity=CAPACITY
        )
        np.testing.assert_allclose(alone[0], logits[row], atol=1e-4)
        np.testing.assert_allclose(run_steps(params, held, TURN[row : row + 1, :3])[0][0], steps[row], atol=1e-4)


@cases
def test_pieces_of_a_prompt_give_the_same_model(name, policy):
    params, tokens = family_params(name), PROMPT % 97
    want, state = prefilled(name, POLICIES[policy])
    got, pieces = decode.prefill(
        params, tokens, np.array(LENGTHS), POLICIES[policy], capacity=CAPACITY, prefill_chunk=23
    )
    np.testing.assert_allclose(got, want, atol=1e-4)
    a, b = (run_steps(params, one.fork(), TURN[:, :3])[0] for one in (state, pieces))
    np.testing.assert_allclose(a, b, atol=1e-4)


@cases
def test_bytes_are_the_plan_s(name, policy):
    state = prefilled(name, POLICIES[policy])[1]
    planned = abstract_state(
        family_config(name),
        POLICIES[policy],
        batch=len(LENGTHS),
        capacity=CAPACITY,
        prompt=min(LENGTHS),
        dtype="float32",
        fetch="resident",
    )
    assert state_nbytes(state) == state_nbytes(planned)
    counted = sum(device + host for device, host in state_nbytes(state).values())
    assert counted == sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state.layers))


@families
def test_sliding_layers_keep_a_window_and_the_others_the_policy(name):
    config = family_config(name)
    state = prefilled(name, POLICIES["shadowkv"])[1]
    for layer, spec in enumerate(state.specs):
        window = config.attention_kind(layer).window
        assert isinstance(spec.policy, ShadowKV if window is None else SlidingWindow)
        assert spec.sliding_window == window
    if config.sliding_layers:
        layer = config.sliding_layers[0]
        slots = state.layers[layer].live.cache.k.shape[2]
        assert slots == min(config.attention_kind(layer).window + 15, CAPACITY)


@cases
def test_every_family_generates(name, policy):
    params, prompts = (
        family_params(name),
        [row[:length].tolist() for row, length in zip(PROMPT % 97, LENGTHS, strict=True)],
    )
    outs = jshadow.generate(params, prompts, POLICIES[policy], max_new_tokens=5, fetch="device_put")
    # greedy tokens of the steps below it; a row ends with its stop token
    for prompt, out in zip(prompts, outs, strict=True):
        logits, state = decode.prefill(
            params, np.array([prompt]), np.array([len(prompt)]), outs[0].state.policy, capacity=outs[0].state.capacity
        )
        for token in out.tokens:
            assert token == int(np.argmax(logits[0]))
            logits, state = decode.decode_step(params, np.array([token]), state)
        assert len(out.tokens) == 5 or out.tokens[-1] in params.config.eos_ids
