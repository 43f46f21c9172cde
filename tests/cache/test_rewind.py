"""Rows give back their newest tokens. The law of all policies is `tokens_given_back_leave_nothing`."""

import numpy as np
import pytest
from cases import BATCH, CAPACITY, LENGTHS, PROMPT, STEPS, mode_of, model, prefilled, run_steps, setting

from jshadow import KIVI, Full, StreamingLLM
from jshadow.engine import decode
from jshadow.errors import ConfigError, StateMismatch


def held(name):
    state = prefilled(name, "restricted", mode_of(name))[1]
    return decode.extend(model(), STEPS[:, :7], [7] * BATCH, state, logits="all")[1]


def test_lengths_and_last_tokens():
    state = held("full")
    lengths = np.asarray(state.lengths)
    back = state.rewind(lengths - [3, 0, 7], [5, 6, 7])
    assert back.lengths.tolist() == (lengths - [3, 0, 7]).tolist()
    assert back.last.tolist() == [5, 6, 7]
    assert back.rewind(np.asarray(back.lengths) - 1).last.tolist() == [-1] * BATCH
    assert back.rewind(np.asarray(back.lengths)).last.tolist() == [5, 6, 7]
    assert back.counters.reached.tolist() == lengths.tolist()
    assert back.counters.steps.tolist() == state.counters.steps.tolist()
    assert (np.asarray(back.room()) - np.asarray(state.room())).tolist() == [3, 0, 7]


def test_a_step_after_a_rewind_is_compiled_already():
    """Its lengths and last tokens once were placed unlike other arrays of a state, and every rewind compiled a step."""
    _, state = decode.decode_step(model(), STEPS[:, 0], prefilled("quest", "restricted", "device_put")[1])
    programs = decode._step._cache_size()
    for last in (None, [5, 6, 7]):
        _, state = decode.decode_step(model(), STEPS[:, 1], state.rewind(np.asarray(state.lengths) - 1, last))
    assert decode._step._cache_size() == programs


def test_a_row_can_go_back_into_a_prompt_that_is_stored_like_later_tokens():
    _, state = prefilled("full", "restricted")
    _, short = decode.prefill(model(), PROMPT, np.array(LENGTHS) - 2, setting("full", "restricted"), capacity=CAPACITY)
    got = run_steps(model(), state.rewind(np.array(LENGTHS) - 2), STEPS[:, :2])[0]
    np.testing.assert_allclose(got, run_steps(model(), short, STEPS[:, :2])[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "most"), [(KIVI(bits=2, group=8, residual=72), 72), (StreamingLLM(2, 70), 72)])
def test_while_nothing_was_dropped_a_row_can_go_back(policy, most):
    _, start = decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY)
    reached = np.asarray(start.lengths) + 7
    _, state = decode.extend(model(), STEPS[:, 2:9], [7] * BATCH, start.fork(), logits="all")
    limit = np.asarray(state.earliest(state.reached()))
    assert (limit < reached).tolist() == (reached <= most).tolist() == [True] * BATCH
    got = run_steps(model(), state.rewind(np.array(LENGTHS)), STEPS[:, :3])[0]
    np.testing.assert_allclose(got, run_steps(model(), start, STEPS[:, :3])[0], atol=1e-4)


def test_a_ring_buffer_remembers_how_far_it_was_written():
    """Two rewinds in a row go back no further than one."""
    state = run_steps(model(), held("quest"), STEPS[:, 7:8])[1]
    top = np.asarray(state.lengths)
    limit = np.asarray(state.earliest(state.reached()))
    assert (top - limit)[:2].tolist() == [8, 8]
    back = state.rewind(top - 5)
    assert np.asarray(back.earliest(back.reached())).tolist() == limit.tolist()
    with pytest.raises(StateMismatch, match=r"lengths of row 0 must lie in \[61, 64\] for quest, got 60"):
        back.rewind(np.maximum(top - 9, 5))


def test_what_cannot_be_is_refused(monkeypatch):
    state = held("full")
    lengths = np.asarray(state.lengths)
    for wanted, message in (
        ((lengths + 1,), r"lengths of row 0 must lie in \[1, 68\] for full, got 69"),
        ((5,), "lengths must be integers of shape"),
        ((lengths - 1, [1]), "last must be integers of shape"),
    ):
        with pytest.raises(StateMismatch, match=message):
            state.rewind(*wanted)
    with monkeypatch.context() as patch:
        patch.setattr(Full, "earliest", type(setting("h2o", "restricted")).earliest)
        with pytest.raises(ConfigError, match="policy must be one that can give tokens back"):
            state.rewind(lengths - 1)
    decode.decode_step(model(), STEPS[:, 0], state)
    with pytest.raises(StateMismatch, match="consumed"):
        state.rewind(lengths - 1)
