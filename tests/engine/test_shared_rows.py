"""Rows that share a prompt half (`share`): turns, steps, bytes, and what is refused. `generate` is in its own file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, TINY, model, prefilled, random_tokens
from few import slow

from jshadow.cache.accounting import state_nbytes
from jshadow.engine import decode
from jshadow.engine.verify import resident_twin
from jshadow.errors import CapacityError, StateMismatch

SETTING = ("shadowkv", "restricted")
FETCHES = ["device_put", slow("resident"), slow("zero_copy")]
fetches = pytest.mark.parametrize("one", FETCHES, indirect=True)


@pytest.fixture
def one(request):
    """A state with one row of 61 tokens."""
    return prefilled(*SETTING, getattr(request, "param", "device_put"))[1].take([0])


@fetches
def test_the_prompt_half_is_held_once(one):
    """The arrays that exist after sharing and a step are those of the changing half alone, in each memory."""
    before = jax.live_arrays()  # The list keeps the arrays alive: a freed array's id may be used again.
    known = {id(leaf) for leaf in before}
    state = one.share(3)
    _, state = decode.decode_step(model(), np.arange(3), state)
    fresh = [leaf for leaf in jax.live_arrays() if id(leaf) not in known and leaf.ndim > 2]
    live = [leaf for leaf in jax.tree.leaves(state.split()[1]) if leaf.ndim > 2]
    for memory in ("device", "pinned_host"):
        got, want = (
            sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind == memory) for leaves in (fresh, live)
        )
        assert got == want
    parts, alone = state_nbytes(state), state_nbytes(one)
    assert parts["left"] == alone["left"]
    assert parts["host rows"] == alone["host rows"]
    assert parts["window"][0] == 3 * alone["window"][0]
    assert all(leaf is source for leaf, source in zip(*map(jax.tree.leaves, (state.reads(), one.reads())), strict=True))


@pytest.mark.slow
@fetches
def test_a_ragged_turn_and_steps_of_shared_rows_are_those_of_forks(one):
    turn, lengths = random_tokens(3, 21, seed=3), np.array([21, 4, 0])
    logits, state = decode.extend(model(), turn, lengths, one.share(3), logits="all", extend_chunk=24)
    logits = np.asarray(logits)
    for row in (0, 1):
        alone, fork = decode.extend(model(), turn[[row]], [lengths[row]], one.fork(), logits="all")
        np.testing.assert_allclose(logits[row, : lengths[row]], np.asarray(alone)[0, : lengths[row]], atol=1e-5)
        np.testing.assert_array_equal(state.take([row]).lengths, fork.lengths)
    np.testing.assert_array_equal(state.lengths, np.asarray(one.lengths) + lengths)
    core, _ = decode.extend_steps(model().weights, TINY, *map(jnp.asarray, (turn, lengths)), one.share(3))
    np.testing.assert_allclose(core[1], logits[1, 3], atol=1e-5)
    tokens, _ = decode.decode_steps(model(), [3, 4, 90], one.share(3), 6)
    for row, first in enumerate((3, 4, 90)):
        alone, _ = decode.decode_steps(model(), [first], one.fork(), 6)
        np.testing.assert_array_equal(np.asarray(tokens)[row], np.asarray(alone)[0])


def test_take_keeps_rows_shared_and_insert_needs_the_same_prompt(one):
    state = one.share(3)
    assert repr(state).startswith(f"KVState(lengths={[int(one.lengths[0])] * 3}, ")
    assert (state.take([2, 0]).shares_prompt, state.take([2, 0]).batch) == (True, 2)
    assert not state.take([1]).shares_prompt
    other = prefilled(*SETTING, one.fetch)[1].take([1])
    for call, told in (
        (lambda: state.insert(0, other), "the same arrays"),
        (lambda: state.insert(0, state), "got 3 of"),
        (lambda: state.share(2), "must have one row, got 3"),
        (lambda: resident_twin(state), "verify needs a prompt half for each row, got 3"),
        *((lambda rows=rows: one.share(rows), "rows must be an integer of at least 1") for rows in (0, True, 2.0)),
    ):
        with pytest.raises(StateMismatch, match=told):
            call()


def test_room_of_shared_rows_can_change(one):
    state = one.with_room(2).share(3)
    least = int(np.min(state.room()))
    assert least >= 2
    wide = state.with_room(9)
    assert wide.shares_prompt
    assert np.min(wide.room()) >= 9
    assert np.min(state.room()) == least
    most = f"at most {CAPACITY - int(one.lengths[0])}"
    for room, told in ((CAPACITY, most), *((bad, "room must be an integer") for bad in (-1, None, True, 1.5))):
        with pytest.raises(CapacityError, match=told):
            one.with_room(room)
