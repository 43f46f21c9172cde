"""The traceable cores in a user's jit, and decode_steps: NaN for impossible tokens, and the greedy loop in one scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LENGTHS, STEPS, TINY, model, prefilled, setting

from jshadow.engine import decode
from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError

VOCAB = TINY.vocab_size
GOOD = np.array([[1, 2, 3], [4, 5, 0]])


def test_impossible_tokens_in_a_user_s_jit_give_nan():
    """The core cannot raise; it must not clamp silently either. Only the row concerned, and only where active."""
    _, state = prefilled("shadowkv", "restricted")
    weights = model().weights  # made outside of the jit, where it would be traced
    core = jax.jit(lambda token, state, active: decode.step(weights, TINY, token, state, active))
    logits, _ = core(jnp.array([VOCAB, -1, 5]), state, jnp.array([True, True, True]))
    assert np.isnan(logits).all(axis=1).tolist() == [True, True, False]
    assert np.isfinite(logits[2]).all()
    logits, after = core(jnp.array([VOCAB, 1, 5]), state, jnp.array([False, True, True]))
    assert np.isfinite(logits[1:]).all()
    for mine, was in zip(jax.tree.leaves(after.split()[1]), jax.tree.leaves(state.split()[1]), strict=True):
        np.testing.assert_array_equal(mine[0], was[0])  # an idle row is not harmed by what it is fed


@pytest.mark.parametrize("bad", [-1, VOCAB])
@pytest.mark.parametrize("place", [0, 7, 19])
def test_an_impossible_token_spoils_the_rest_of_its_turn(place, bad):
    """Also where the model takes the turn in pieces: its own logits, and all of those behind."""
    _, state = prefilled("full", "restricted")
    turn = np.resize(STEPS, (3, 20))
    turn[1, place] = bad
    core = jax.jit(decode.extend_steps, static_argnums=(1, 5))
    lengths = jnp.array([20, 20, 12])
    for want in ("last", "all"):
        logits, _ = core(model().weights, TINY, jnp.asarray(turn), lengths, state, want)
        assert np.isfinite(logits[0]).all()
        assert np.isfinite(logits[2] if want == "last" else logits[2, :12]).all()
        spoiled = np.isnan(np.asarray(logits[1])).all(axis=-1)
        assert spoiled[place:].all() if want == "all" else spoiled
        if want == "all":
            assert not spoiled[:place].any()
    turn[1, place], turn[2, 12:] = 1, bad  # past a row's own
    assert np.isfinite(core(model().weights, TINY, jnp.asarray(turn), lengths, state, "last")[0]).all()


@pytest.mark.parametrize("name", ["full", "streaming_llm"])
def test_a_full_row_in_a_user_s_jit_gives_nan(name):
    _, state = decode.prefill(model(), GOOD, [3, 2], setting(name, "restricted"), capacity=3)
    weights = model().weights
    logits, _ = jax.jit(lambda token, state: decode.step(weights, TINY, token, state))(jnp.array([1, 2]), state)
    assert np.isnan(logits).all(axis=1).tolist() == [True, False]


def test_the_core_emits_no_token_past_the_room():
    _, state = decode.prefill(model(), GOOD, [3, 2], capacity=5)
    core = jax.jit(decode.generate_steps, static_argnums=(1, 4, 5))
    tokens, _ = core(model().weights, TINY, jnp.array([1, VOCAB]), state, 5, Sampler(), jax.random.key(0))
    assert (np.asarray(tokens) >= 0).tolist() == [[True, True, False, False, False], [False] * 5]


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_decode_steps_is_the_greedy_loop(name):
    logits, state = prefilled(name, "restricted", "device_put")
    first = np.asarray(logits.argmax(-1), np.int32)
    token, want, held = first, [], state.fork()
    for _ in range(6):
        out, held = decode.decode_step(model(), token, held)
        token = np.asarray(out.argmax(-1), np.int32)
        want.append(token)
    want = np.stack(want, axis=1)
    tokens, after = decode.decode_steps(model(), first, state.fork(), 6)
    np.testing.assert_array_equal(tokens, want)
    assert np.asarray(after.lengths).tolist() == [length + 6 for length in LENGTHS]
    # the third token of row 0 stops it: it is emitted, and the row then neither emits nor feeds
    stop = int(want[0, 2])
    stopped, after = decode.decode_steps(model(), first, state, 6, stop=[stop, VOCAB + 5])
    ends = [(row == stop).argmax() if stop in row else 5 for row in want]
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(stopped[row, : end + 1], want[row, : end + 1])
        assert (np.asarray(stopped[row, end + 1 :]) == -1).all()
    assert np.asarray(after.lengths).tolist() == [n + end + 1 for n, end in zip(LENGTHS, ends, strict=True)]


SEEDS = (1, 1, 2, 1 + 2**32)


def test_decode_steps_samples_by_seed_and_row():
    _, state = prefilled("full", "restricted")
    sampler = Sampler(temperature=1.5, top_k=20)
    runs = [decode.decode_steps(model(), STEPS[:, 0], state.fork(), 8, sampler=sampler, seed=s)[0] for s in SEEDS]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert all((np.asarray(runs[0]) != np.asarray(other)).any() for other in runs[2:])
    alone, _ = decode.decode_steps(model(), STEPS[:1, 0], state.take([0]), 8, sampler=sampler, seed=1)
    np.testing.assert_array_equal(alone[0], runs[0][0])


@pytest.mark.parametrize("stop", ["45", ["45"], [4.0], [True], 1.5, [None]])
def test_stops_must_be_token_ids(stop):
    state = prefilled("full", "restricted")[1]
    with pytest.raises(ConfigError, match="stop must be token ids, got"):
        decode.decode_steps(model(), STEPS[:, 0], state, 2, stop=stop)
    state.check_alive()


def test_a_stop_may_be_one_id_or_an_array():
    state = prefilled("full", "restricted")[1]
    greedy = np.asarray(decode.decode_steps(model(), STEPS[:, 0], state.fork(), 3)[0])
    for stop in (int(greedy[0, 0]), np.array([greedy[0, 0]]), [np.int64(greedy[0, 0])]):
        tokens, _ = decode.decode_steps(model(), STEPS[:, 0], state.fork(), 3, stop=stop)
        assert np.asarray(tokens)[0].tolist() == [greedy[0, 0], -1, -1]
