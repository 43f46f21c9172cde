"""Rows of a state: an insert that consumes takes only a row's memory, and rows give back their newest tokens."""

import gc

import jax
import numpy as np
import pytest
from cases import BATCH, CAPACITY, LENGTHS, PROMPT, STEPS, mode_of, model, prefilled, random_tokens, run_steps, setting

from jshadow import KIVI, Full, StreamingLLM
from jshadow.cache import rows
from jshadow.engine import decode
from jshadow.errors import ConfigError, StateMismatch


def leaves_of(state):
    return jax.tree.leaves(state.row_trees())


def pool_of(name, fetch="device_put"):
    return prefilled(name, "restricted", fetch)[1].take([0, 1, 2])


def row_alone(name, fetch="device_put", room=None):
    policy = setting(name, "restricted")
    return decode.prefill(model(), PROMPT[1:2, :27], [27], policy, capacity=CAPACITY, fetch=fetch, room=room)[1]


def live_bytes():
    """Bytes of all arrays of this process, in both memories."""
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays() if not leaf.is_deleted())


@pytest.mark.parametrize(("name", "fetch"), [("quest", "device_put"), ("full", "resident")])
def test_a_consuming_insert_is_an_insert_in_place(name, fetch):
    """Quest's rows of later tokens are fewer in the row than in the pool, so host rows are padded too."""
    pool, alone = pool_of(name, fetch), row_alone(name, fetch, room=8)
    copied = pool.insert(1, alone)
    places = {leaf.unsafe_buffer_pointer() for leaf in leaves_of(pool) if leaf.size}
    kinds, held = [leaf.sharding.memory_kind for leaf in leaves_of(pool)], live_bytes()
    joined = pool.insert(1, alone, consume=True)
    assert live_bytes() - held <= 8  # the new pool is as large as the old one
    assert {leaf.unsafe_buffer_pointer() for leaf in leaves_of(joined) if leaf.size} == places
    assert [leaf.sharding.memory_kind for leaf in leaves_of(joined)] == kinds
    jax.tree.map(np.testing.assert_array_equal, leaves_of(joined), leaves_of(copied))


def test_an_insert_s_program_aliases_the_whole_pool():
    pool, alone = (
        leaves_of(state) for state in (prefilled("quest", "restricted", "device_put")[1], row_alone("quest"))
    )
    fitted = [rows.fit_host(source, leaf) for leaf, source in zip(pool, alone, strict=True)]
    memory = rows.insert_into.lower(pool, fitted, 0).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in pool)
    assert memory.temp_size_in_bytes <= sum(leaf.nbytes for leaf in fitted)


def test_a_consumed_pool_and_its_forks_say_so():
    """A fork shares the prompt half that the insert consumes. A state that was taken from the pool goes on."""
    pool, alone = pool_of("quest"), row_alone("quest")
    fork, taken = pool.fork(), pool.take([0, 1, 2])
    for row, other in ((3, alone), (0, pool)):
        with pytest.raises(StateMismatch, match="must be"):
            pool.insert(row, other, consume=True)
    pool.check_alive()  # whatever is refused consumes nothing
    joined = pool.insert(0, alone, consume=True)
    for state in (pool, fork):
        for use in (state.fork, state.room, lambda state=state: decode.decode_step(model(), STEPS[:, 0], state)):
            with pytest.raises(StateMismatch, match="consumed"):
                use()
    alone.check_alive()
    decode.decode_step(model(), STEPS[:, 0], taken)
    decode.decode_step(model(), STEPS[:, 0], joined)


@pytest.mark.slow
def test_an_insert_without_a_window_for_the_row_consumes_nothing():
    _, full = decode.extend(model(), random_tokens(1, 60), [60], row_alone("shadowkv"))
    options = {"capacity": CAPACITY, "fetch": "device_put", "room": 8}
    small = decode.prefill(model(), PROMPT, [61, 27, 5], setting("shadowkv", "restricted"), **options)[1]
    with pytest.raises(StateMismatch, match="window="):
        small.insert(0, full, consume=True)
    small.check_alive()


def test_a_row_can_be_inserted_into_itself():
    """The pool and the row have the same arrays, and one array can stand in two places."""
    pool = row_alone("quest")
    pool = pool.replace(last=pool.lengths)
    joined = pool.insert(0, pool.fork(), consume=True)
    assert joined.lengths.tolist() == joined.last.tolist() == [27]


def extended(name):
    state = prefilled(name, "restricted", mode_of(name))[1]
    return decode.extend(model(), STEPS[:, :7], [7] * BATCH, state, logits="all")[1]


def test_lengths_and_last_tokens():
    state = extended("full")
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
    state = run_steps(model(), extended("quest"), STEPS[:, 7:8])[1]
    top = np.asarray(state.lengths)
    limit = np.asarray(state.earliest(state.reached()))
    assert (top - limit)[:2].tolist() == [8, 8]
    back = state.rewind(top - 5)
    assert np.asarray(back.earliest(back.reached())).tolist() == limit.tolist()
    with pytest.raises(StateMismatch, match=r"lengths of row 0 must lie in \[61, 64\] for quest, got 60"):
        back.rewind(np.maximum(top - 9, 5))


def test_what_cannot_be_is_refused(monkeypatch):
    state = extended("full")
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
