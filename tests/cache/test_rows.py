"""Rows of a pool: an insert that consumes the pool takes only a row's memory, and what it consumed says so."""

import gc

import jax
import numpy as np
import pytest
from cases import CAPACITY, PROMPT, STEPS, model, prefilled, random_tokens, setting

from jshadow.cache import rows
from jshadow.engine import decode
from jshadow.errors import StateMismatch


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
