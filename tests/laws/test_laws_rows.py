"""Rows moved between states (take, insert): each goes on as if nothing had happened, or is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CAPACITY,
    POLICY_CASES,
    POLICY_FETCHES,
    PROMPT,
    STEPS,
    TINY,
    case_of,
    model,
    modes_of,
    prefilled,
    random_tokens,
    setting,
)

from jshadow.engine import decode
from jshadow.errors import StateMismatch
from jshadow.evaluation.laws import rows

policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)


@policies_fetched
def test_taken_rows_go_on_as_they_were(name, fetch):
    rows.taken_rows_go_on(case_of(name, fetch))


@policies_fetched
def test_a_row_prefilled_alone_joins_a_batch(name, fetch):
    rows.joining_rows_go_on(case_of(name, fetch))


@pytest.mark.parametrize("name", POLICY_CASES)
def test_a_room_changes_no_logits(name):
    rows.a_room_changes_no_logits(case_of(name, modes_of(name)[0]))


@policies_fetched
def test_a_state_gets_room(name, fetch):
    rows.a_state_gets_room(case_of(name, fetch))


@policies_fetched
def test_shared_rows_go_on_as_if_alone(name, fetch):
    rows.shared_rows_go_on_alone(case_of(name, fetch))


@pytest.mark.parametrize("name", ["shadowkv", "quest", "infllm", "kivi"])
def test_prompts_of_all_lengths_have_their_room(name):
    """How many tokens a prompt leaves beside its whole units depends on its length."""
    lengths = np.arange(1, 49)
    prompts = random_tokens(len(lengths), 48)
    state = decode.prefill(model(), prompts, lengths, setting(name, "restricted"), capacity=CAPACITY, room=7)[1]
    assert 7 <= np.min(state.room()) < 7 + 4  # rows in host memory have space for whole units of four tokens


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
        with pytest.raises(StateMismatch, match="row must be a whole number in"):
            state.insert(row, one)
    for misfit in (other.take([0]), state.take([0, 1]), prefilled("shadowkv", "lossless")[1].take([0])):
        with pytest.raises(StateMismatch, match="must be one row"):
            state.insert(0, misfit)
    for numbers in ([], [3], [-1]):
        with pytest.raises(StateMismatch, match="rows must be"):
            state.take(numbers)
    bigger = dataclasses.replace(setting("shadowkv", "restricted"), budget=24)
    with pytest.raises(StateMismatch, match="policy must be"):
        decode.decode_step(model(), STEPS[:, 0], state, bigger)
