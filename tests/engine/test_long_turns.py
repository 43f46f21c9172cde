"""Turns of several pieces: programs and calls, progress, memory, and the same results for every size of a piece."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY, model, random_tokens

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.transformer import abstract_weights
from jshadow.planner import turn_pieces
from jshadow.planner.bytes import abstract_state
from jshadow.planner.turn_pieces import block_tokens, extend_peak, split_of, turn_tokens
from jshadow.policies import Full, ShadowKV

CAPACITY = 256  # the context of the model
PROMPT, TURN = random_tokens(2, 40, seed=7), random_tokens(2, 150, seed=8)
SHADOW = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
both = pytest.mark.parametrize("policy", [Full(), SHADOW], ids=lambda policy: policy.name)


def after_prompt(policy: Full | ShadowKV, dtype: str = "float32") -> KVState:
    return decode.prefill(model(TINY, dtype), PROMPT, [40, 13], policy, capacity=CAPACITY)[1]


@both
def test_a_turn_is_a_few_calls_of_one_program(policy, monkeypatch):
    """Two calls of 80 tokens, for turns of all three lengths. In pieces of 16, the longest one took ten."""
    run, widths, done = decode._extend, [], []
    monkeypatch.setattr(
        decode, "_extend", lambda w, ids, *rest, **more: widths.append(ids.shape) or run(w, ids, *rest, **more)
    )
    state, programs = after_prompt(policy), run._cache_size()
    for count in (150, 97, 81):
        tokens, lengths = TURN[:, :count], [count, 1]
        _, after = decode.extend(model(), tokens, lengths, state.fork(), extend_chunk=160, progress=done.append)
        assert np.asarray(after.lengths).tolist() == [40 + count, 14]
    assert widths == [(2, 80)] * 6
    assert [(one.units, one.num_units) for one in done] == [(1, 2), (2, 2)] * 3
    assert all(one.seconds_left == 0 for one in done[1::2])
    assert run._cache_size() == programs + 1


@pytest.mark.parametrize(
    ("policy", "dtype", "tolerance"),
    [(Full(), "float32", 1e-4), (SHADOW, "float32", 1e-4), (SHADOW, "bfloat16", 0.1)],
    ids=["full", "shadowkv", "shadowkv-bfloat16"],
)
def test_large_pieces_give_the_same_as_small_ones(policy, dtype, tolerance, monkeypatch):
    """The large pieces have 80 tokens and attend blockwise. ShadowKV selects for 32, 32 and 16. The small have 16."""
    params, state = model(TINY, dtype), after_prompt(policy, dtype)
    if policy == SHADOW:
        spec = state.specs[0]
        monkeypatch.setattr(turn_pieces, "BLOCK_BYTES", 33 * spec.policy.query_temporaries(spec))
        assert block_tokens(spec, 80) == 32
    want, small = decode.extend(params, TURN, [150, 77], state.fork(), logits="all", extend_chunk=1)
    got, large = decode.extend(params, TURN, [150, 77], state, logits="all", extend_chunk=160)
    for row, count in enumerate((150, 77)):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=tolerance)
    for name in ("steps", "attended", "selected"):
        np.testing.assert_array_equal(getattr(large.counters, name), getattr(small.counters, name))


def test_last_logits_and_those_of_a_callable_are_the_same_as_all():
    """Row 1 ends in the first of two pieces."""
    state, want = after_prompt(Full()), {"extend_chunk": 160}
    everything, _ = decode.extend(model(), TURN, [150, 77], state.fork(), logits="all", **want)
    last, _ = decode.extend(model(), TURN, [150, 77], state.fork(), **want)
    np.testing.assert_allclose(last, [everything[0, 149], everything[1, 76]], atol=1e-5)
    best, _ = decode.extend(model(), TURN, [150, 77], state, logits=lambda logits: logits.argmax(-1), **want)
    np.testing.assert_array_equal(best[0], everything[0].argmax(-1))


@both
def test_temporaries_are_within_the_planner_s_bound(policy):
    """They do not hold the scores of all tokens of a piece and of the cache."""
    sizes = {"batch": 2, "capacity": 4096, "prompt": 40, "dtype": "float32", "fetch": "resident"}
    state = abstract_state(TINY, policy, **sizes)
    size = turn_tokens(state.reads(), 2000)
    ids, lengths = jax.ShapeDtypeStruct((2, size), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), abstract_weights(TINY))
    reads, writes = state.split()
    compiled = decode._extend.lower(weights, ids, lengths, reads, writes, config=TINY, want="last").compile()
    parts = extend_peak(TINY, state, 2000)
    bound = parts["piece"] + parts["hooks"] + parts["logits"]
    assert compiled.memory_analysis().temp_size_in_bytes <= bound
    assert bound < 4 * 2 * TINY.q_heads * size * 4096


def test_a_turn_that_has_no_room_changes_nothing():
    state = after_prompt(SHADOW)
    tokens = random_tokens(2, 217, seed=9)
    with pytest.raises(CapacityError, match="row 0 holds 40 tokens"):
        decode.extend(model(), tokens, [217, 1], state, extend_chunk=64)
    assert np.asarray(state.lengths).tolist() == [40, 13]


def test_a_subclass_with_its_own_attention_takes_blocks():
    """Its hook is called, and not the split one that it inherits."""

    class Mute(ShadowKV):
        def attend(self, spec, state, step, fetched):
            out, state = super().attend(spec, state, step, fetched)
            return 0 * out, state

    sizes = {"batch": 1, "capacity": CAPACITY, "prompt": 40, "dtype": "float32", "fetch": "resident"}
    spec = abstract_state(TINY, SHADOW, **sizes).specs[0]
    assert split_of(spec) is not None
    assert split_of(dataclasses.replace(spec, policy=Mute(rank=8))) is None


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_wrong_bound_on_a_piece_is_refused(chunk):
    with pytest.raises(ConfigError, match="extend_chunk must be an integer of at least 1"):
        decode.extend(model(), TURN[:, :3], [3, 3], after_prompt(SHADOW), extend_chunk=chunk)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match=r"unexpected keyword arguments \['extend_chunks'\]"):
        decode.extend(model(), TURN[:, :3], [3, 3], after_prompt(SHADOW), extend_chunks=4)
