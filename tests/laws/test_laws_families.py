"""The laws on every family: another model's attention (partial or no rotation, windows, norms) keeps them all.

`test_laws.py` holds every policy to them on one family; here `shadowkv` and `full` meet all the others. The tests of a
family share one prefilled batch of a policy, and one step.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, SMALL, run_steps
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
TOKENS = PROMPT % 97
SHADOWKV = ShadowKV(rank=8, budget=16, **SMALL)
# Windows and two kinds of rotation, and layers without rotation. Sliding layers of `full` are those of `shadowkv`.
few = pytest.mark.parametrize("name", ["gemma3", "smollm3", "phi3_partial_longrope"])


@functools.cache
def family_params(name: str) -> Params:
    """Random weights."""
    return init_params(family_config(name), seed=4)


@functools.cache
def held(name: str, policy: Policy, fetch: str = "resident"):
    """Logits and state of the ragged batch."""
    return decode.prefill(family_params(name), TOKENS, LENGTHS, policy, capacity=CAPACITY, fetch=fetch)


def prefilled(name: str, policy: Policy, fetch: str = "resident"):
    """Logits, and a new fork of the state."""
    logits, state = held(name, policy, fetch)
    return logits, state.fork()


@functools.cache
def six_steps(name: str, policy: Policy):
    """Logits of six steps after the prompts."""
    return run_steps(family_params(name), prefilled(name, policy)[1], TURN[:, :6])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_family_is_lossless(name):
    lossless = dataclasses.replace(ShadowKV.lossless(CAPACITY, family_config(name)), **SMALL)
    logits, state = prefilled(name, lossless, "device_put")  # the other laws here run resident
    np.testing.assert_allclose(logits, prefilled(name, Full())[0], atol=1e-4)
    got = run_steps(family_params(name), state, TURN[:, :6])[0]
    np.testing.assert_allclose(got, six_steps(name, Full()), atol=1e-4)


def turn_is_steps(name: str, policy: Policy) -> None:
    """A turn of 20, 7 and 0 tokens: its logits, its lengths and the next logits are those of single steps."""
    active = np.arange(TURN.shape[1]) < NEW[:, None]
    stepped, after = run_steps(family_params(name), prefilled(name, policy)[1], TURN, active)
    turned, at_once = decode.extend(family_params(name), TURN, NEW, prefilled(name, policy)[1], logits="all")
    for row, count in enumerate(NEW):
        np.testing.assert_allclose(np.asarray(turned)[row, :count], stepped[row, :count], atol=1e-4)
    np.testing.assert_array_equal(after.lengths, at_once.lengths)
    more = [run_steps(family_params(name), one, TURN[:, :2])[0] for one in (after, at_once)]
    np.testing.assert_allclose(more[0], more[1], atol=1e-4)


def pieces_are_one_prefill(name: str, policy: Policy) -> None:
    got, pieces = decode.prefill(
        family_params(name), TOKENS, LENGTHS, policy, capacity=CAPACITY, fetch="resident", prefill_chunk=23
    )
    np.testing.assert_allclose(got, prefilled(name, policy)[0], atol=1e-4)
    steps = run_steps(family_params(name), pieces, TURN[:, :6])[0]
    np.testing.assert_allclose(steps, six_steps(name, policy), atol=1e-4)


def bytes_are_the_plan_s(name: str, policy: Policy) -> None:
    sizes = {"batch": len(LENGTHS), "capacity": CAPACITY, "prompt": min(LENGTHS)}
    state = prefilled(name, policy)[1]
    planned = abstract_state(family_config(name), policy, **sizes, dtype="float32", fetch="resident")
    assert state_nbytes(state) == state_nbytes(planned)
    counted = sum(device + host for device, host in state_nbytes(state).values())
    assert counted == sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state.layers))


def sliding_layers_keep_a_window(name: str, policy: Policy) -> None:
    """And the other layers are the policy's."""
    config, state = family_config(name), prefilled(name, policy)[1]
    for layer, spec in enumerate(state.specs):
        window = config.attention_kind(layer).window
        assert isinstance(spec.policy, type(policy) if window is None else SlidingWindow)
        assert spec.sliding_window == window
    if config.sliding_layers:
        layer = config.sliding_layers[0]
        slots = state.layers[layer].live.cache.k.shape[2]
        assert slots == min(config.attention_kind(layer).window + 15, CAPACITY)


@pytest.mark.slow
@pytest.mark.parametrize("law", [turn_is_steps, bytes_are_the_plan_s, sliding_layers_keep_a_window])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_family_keeps_the_law(name, law):
    law(name, SHADOWKV)


@pytest.mark.slow
@few
def test_pieces_of_a_prompt_give_the_same_model(name):
    pieces_are_one_prefill(name, SHADOWKV)


@pytest.mark.slow
@pytest.mark.parametrize("law", [turn_is_steps, pieces_are_one_prefill, bytes_are_the_plan_s])
def test_full_attention_in_a_family_with_windows(law):
    law("gemma3", Full())


@pytest.mark.slow
@few
def test_a_row_alone_is_the_row_in_a_batch(name):
    logits, steps = np.asarray(prefilled(name, SHADOWKV)[0]), six_steps(name, SHADOWKV)
    for row in (0, 2):  # the longest and the shortest
        length = LENGTHS[row]
        alone, state = decode.prefill(
            family_params(name), TOKENS[row : row + 1, :length], [length], SHADOWKV, capacity=CAPACITY, fetch="resident"
        )
        np.testing.assert_allclose(alone[0], logits[row], atol=1e-4)
        again = run_steps(family_params(name), state, TURN[row : row + 1, :6])[0]
        np.testing.assert_allclose(again[0], steps[row], atol=1e-4)


@pytest.mark.slow
@few
def test_every_family_generates(name):
    """Greedy tokens are those of the steps below it; a row ends with its stop token."""
    params = family_params(name)
    prompts = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
    outs = jshadow.generate(params, prompts, SHADOWKV, max_new_tokens=5, fetch="resident")
    first, state = decode.prefill(params, TOKENS, LENGTHS, SHADOWKV, capacity=outs[0].state.capacity, fetch="resident")
    logits = [np.asarray(first)]
    tokens = np.array([out.tokens + [0] * (5 - len(out.tokens)) for out in outs])
    more, _ = run_steps(params, state, tokens[:, :4])
    best = np.concatenate([np.stack(logits, axis=1), more], axis=1).argmax(-1)
    for out, row in zip(outs, best, strict=True):
        assert out.tokens == row[: len(out.tokens)].tolist()
        assert len(out.tokens) == 5 or out.tokens[-1] in params.config.eos_ids
