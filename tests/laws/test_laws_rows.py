"""Rows moved between states (take, insert): each goes on as if nothing had happened, or is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CAPACITY,
    FETCH_MODES,
    LENGTHS,
    POLICY_CASES,
    POLICY_FETCHES,
    PROMPT,
    STEPS,
    TINY,
    model,
    prefilled,
    random_tokens,
    run_steps,
    setting,
)  # fmt: skip

from jshadow.engine import decode
from jshadow.errors import StateMismatch

policies = pytest.mark.parametrize("name", POLICY_CASES)
policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)
fetches = pytest.mark.parametrize("fetch", FETCH_MODES)
BATCH = len(LENGTHS)


@policies_fetched
def test_taken_rows_go_on_as_they_were(name, fetch):
    _, state = prefilled(name, "restricted", fetch)
    _, state = run_steps(model(), state, STEPS[:, :2])
    rows = [2, 0, 2]  # as many as there were, so that no other program is compiled
    taken = state.take(rows)
    assert np.asarray(taken.lengths).tolist() == [LENGTHS[row] + 2 for row in rows]
    whole, _ = run_steps(model(), state, STEPS[:, 2:5])
    part, _ = run_steps(model(), taken, STEPS[rows, 2:5])
    np.testing.assert_allclose(part, whole[np.asarray(rows)], atol=1e-5)


@policies_fetched
def test_a_row_prefilled_alone_joins_a_batch(name, fetch):
    """Its window is sized for its own length; afterwards it goes on as alone, and the other rows as before."""
    tokens = random_tokens(1, 27, seed=5)
    _, alone = decode.prefill(model(), tokens, [27], setting(name, "restricted"), capacity=CAPACITY, fetch=fetch)
    _, alone = run_steps(model(), alone, STEPS[:1, :3])
    _, state = prefilled(name, "restricted", fetch)
    joined = state.insert(1, alone)
    assert np.asarray(joined.lengths).tolist() == [61, 30, 5]
    before, _ = run_steps(model(), state, STEPS[:, 3:9])
    own, _ = run_steps(model(), alone, STEPS[1:2, 3:9])
    after, _ = run_steps(model(), joined, STEPS[:, 3:9])
    np.testing.assert_allclose(after[1], own[0], atol=1e-4)
    np.testing.assert_allclose(after[0], before[0], atol=1e-5)
    np.testing.assert_allclose(after[2], before[2], atol=1e-5)


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_a_row_that_does_not_fit_is_refused(name):
    """A state of long prompts has small windows: a short prompt with many new tokens has no place in them."""
    policy = setting(name, "restricted")
    _, batch = decode.prefill(model(), PROMPT[:2, :61], [61, 60], policy, capacity=CAPACITY)
    _, alone = decode.prefill(model(), PROMPT[2:, :5], [5], policy, capacity=CAPACITY)
    joined = batch.insert(1, alone)
    room = int(joined.room()[1])
    assert 0 < room < CAPACITY - 5
    _, alone = decode.extend(model(), random_tokens(1, 60), [60], alone)
    with pytest.raises(StateMismatch, match="window="):
        batch.insert(1, alone)
    # the traceable core cannot raise: when the window of the joined row is full, its logits are NaN
    tokens = random_tokens(2, room + 1)
    active = jnp.array([False, True])
    for i in range(room):
        logits, joined = decode.decode_step(model(), tokens[:, i], joined, active=active)
    assert np.isfinite(logits[1]).all()
    logits, _ = jax.jit(lambda token, state: decode.step(model().weights, TINY, token, state, active))(
        jnp.asarray(tokens[:, room]), joined
    )
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[0]).all()


def test_rows_and_states_that_do_not_match_are_refused():
    _, state = prefilled("shadowkv", "restricted")
    _, other = prefilled("full", "restricted")
    one = state.take([0])
    for row in (-1, 3):
        with pytest.raises(StateMismatch, match="row must lie"):
            state.insert(row, one)
    for misfit in (other.take([0]), state.take([0, 1]), prefilled("shadowkv", "lossless")[1].take([0])):
        with pytest.raises(StateMismatch, match="must be one row"):
            state.insert(0, misfit)
    for rows in ([], [3], [-1]):
        with pytest.raises(StateMismatch, match="rows must be"):
            state.take(rows)
    bigger = dataclasses.replace(setting("shadowkv", "restricted"), budget=24)
    with pytest.raises(StateMismatch, match="policy must be"):
        decode.decode_step(model(), STEPS[:, 0], state, bigger)
