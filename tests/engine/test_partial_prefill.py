"""A prefill as a value: paused at every unit, refused with another model, and gone after an interruption."""

import dataclasses
import gc
import itertools

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model, modes_of, policies_of, setting
from family_cases import family_config

import jshadow
from jshadow import VerticalSlash, begin_prefill
from jshadow.engine.blas_threads import LIMITING
from jshadow.engine.prefill import layer as prefill_layer
from jshadow.engine.prefill.job import PrefillJob
from jshadow.engine.prefill.units import Unit, units_of
from jshadow.errors import CapacityError, StateMismatch
from jshadow.policies import Full, ShadowKV
from jshadow.weights.params import init_params

SHADOW = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2)
PIECE = 20


def assert_same(got, want):
    """Two results of a prefill are equal to the bit."""
    leaves, others = jax.tree.leaves(got), jax.tree.leaves(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for leaf, other in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def pause_everywhere(params, tokens, lengths, policy, **options):
    """The result of a prefill that is paused after each unit, with another prefill beside it, and its progress."""
    partial, seen = begin_prefill(params, tokens, lengths, policy, **options), []
    while not partial.done:
        seen.append(partial.progress)
        # Another prompt on the device in between.
        jshadow.advance_prefill(params, begin_prefill(params, tokens[:1], lengths[:1], policy, **options))
        partial = jshadow.advance_prefill(params, partial, policy)
    seen.append(partial.progress)
    return jshadow.finish_prefill(params, partial), seen


@pytest.mark.parametrize("name", policies_of())
def test_paused_at_every_unit_the_state_is_equal_to_the_bit(name):
    policy = setting(name, "restricted")
    settings = dict(capacity=CAPACITY, prefill_chunk=PIECE, fetch=modes_of(name)[0])
    want = jshadow.prefill(model(), PROMPT, LENGTHS, policy, **settings)
    got, seen = pause_everywhere(model(), PROMPT, LENGTHS, policy, **settings)
    assert_same(got, want)
    shares = [progress.share for progress in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert [seen[0].layers, seen[-1].layers] == [0, TINY.num_layers]


@pytest.mark.parametrize("attention", [None, VerticalSlash(vertical=4, slash=6, last_queries=4), "whole"])
def test_every_kind_of_attention_can_be_paused(attention, monkeypatch):
    config = family_config("gemma3")
    params = init_params(config, seed=7)
    if attention == "whole":
        plan_of = PrefillJob.layer_plan
        monkeypatch.setattr(
            PrefillJob,
            "layer_plan",
            lambda job, *place: dataclasses.replace(plan_of(job, *place), whole="xla", rows=1),
        )
        attention = None
    tokens = np.random.default_rng(3).integers(3, 97, (2, 55), dtype=np.int32)
    settings = dict(capacity=80, prefill_chunk=PIECE, attention=attention, fetch="device_put", room=8)
    want = jshadow.prefill(params, tokens, [55, 21], SHADOW, **settings)
    assert_same(pause_everywhere(params, tokens, [55, 21], SHADOW, **settings)[0], want)


def test_the_units_of_a_layer():
    plan = begin_prefill(model(), PROMPT, LENGTHS, SHADOW, capacity=CAPACITY, prefill_chunk=PIECE).schedule.plans[0]
    assert units_of(plan, 3, 2) == (Unit("piece", 0), Unit("piece", 1), Unit("compress"))
    whole = dataclasses.replace(plan, whole="xla", rows=2)
    each = [
        Unit("project", 0, 2),
        Unit("project", 1, 2),
        Unit("attend", 0, 2),
        Unit("finish", 0, 2),
        Unit("finish", 1, 2),
    ]
    assert units_of(whole, 4, 2) == (*(unit._replace(row=0) for unit in each), *each, Unit("compress"))
    ahead = dataclasses.replace(plan, attention=VerticalSlash())
    assert units_of(ahead, 3, 1) == (Unit("project"), Unit("begin"), Unit("piece"), Unit("compress"))


@pytest.mark.parametrize("name", ["full", "quest", "infllm", "shadowkv"])
def test_one_program_serves_all_lengths_of_a_width(name):
    """A prompt of one token, of one piece, of one piece and a token, and of all tokens: no further program."""
    policy, tokens = setting(name, "restricted"), np.random.default_rng(5).integers(3, 97, (1, 64), dtype=np.int32)
    settings = dict(capacity=80, prefill_chunk=16)

    def programs():
        jitted = (value for value in vars(prefill_layer).values() if hasattr(value, "_cache_size"))
        return sum(one._cache_size() for one in jitted)

    counts = []
    for length in (64, 1, 16, 17, 63):
        out, state = jshadow.prefill_many(model(), tokens, [length], [policy], shortest=1, **settings)[0]
        counts.append(programs())
        short = jshadow.prefill_many(model(), tokens[:, :length], [length], [policy], shortest=1, **settings)[0]
        np.testing.assert_allclose(out, short[0], atol=1e-4)
        same = jshadow.prefill_many(model(), tokens, [length], [policy], shortest=1, **settings)[0]
        assert_same((out, state), same)
        counts.append(programs())
    grown = [after - before for before, after in itertools.pairwise(counts)][1::2]
    assert grown == [0] * 4


def test_pieces_without_real_tokens_are_not_computed():
    partial = begin_prefill(model(), PROMPT[:, :40], [21, 3, 1], Full(), capacity=CAPACITY, prefill_chunk=10)
    assert partial.progress.num_units == 3 + 1
    partial = begin_prefill(model(), PROMPT[:, :40], [20, 3, 1], Full(), capacity=CAPACITY, prefill_chunk=10)
    assert partial.progress.num_units == 2 + 1


def test_ctrl_c_leaves_nothing_behind():
    def live():
        gc.collect()
        return sum(leaf.nbytes for leaf in jax.live_arrays())

    settings = dict(capacity=CAPACITY, prefill_chunk=PIECE, fetch="device_put")
    want = jshadow.prefill(model(), PROMPT, LENGTHS, SHADOW, **settings)
    before = live()

    def interrupt(progress):
        if (progress.layers, progress.units) == (1, 1):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            jshadow.prefill_many(model(), PROMPT, LENGTHS, [SHADOW], progress=interrupt, **settings)
        assert live() == before
        assert not LIMITING.locked()
    assert_same(jshadow.prefill(model(), PROMPT, LENGTHS, SHADOW, **settings), want)


def test_progress_has_a_rate_after_the_first_layer():
    seen = []
    jshadow.prefill_many(
        model(), PROMPT, LENGTHS, [SHADOW], capacity=CAPACITY, prefill_chunk=PIECE, progress=seen.append
    )
    units = -(-PROMPT.shape[1] // PIECE) + 1
    assert len(seen) == units * TINY.num_layers
    assert [(one.layers, one.units) for one in seen[: units + 1]] == [
        *((0, n) for n in range(1, units)),
        (1, 0),
        (1, 1),
    ]
    assert seen[-1].share == 1.0
    assert seen[-1].seconds_left == 0.0
    assert all(one.tokens == sum(LENGTHS) for one in seen)
    assert all(one.tokens_per_second > 0 for one in seen)


# Bad input


def begun(policy=SHADOW):
    return begin_prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY, prefill_chunk=PIECE)


@pytest.mark.parametrize("use", [jshadow.advance_prefill, jshadow.finish_prefill])
def test_another_model_or_policy_is_refused(use):
    partial = jshadow.advance_prefill(model(), begun())
    same_shape = init_params(TINY, seed=99)
    other = init_params(family_config("gemma3"), seed=7)
    for params in (same_shape, other):
        with pytest.raises(StateMismatch, match=r"params must be those with which the prefill was begun \(\d+ layers"):
            use(params, partial)
    with pytest.raises(StateMismatch, match="policy must be the prefill's own ShadowKV"):
        use(model(), partial, Full())
    with pytest.raises(StateMismatch, match="partial must be a PartialPrefill"):
        use(model(), None)
    assert jshadow.finish_prefill(model(), partial, SHADOW)[0].shape == (len(LENGTHS), TINY.vocab_size)


def test_a_value_can_be_advanced_once():
    partial = begun()
    after = jshadow.advance_prefill(model(), partial)
    with pytest.raises(StateMismatch, match="was advanced before; use the value that advance_prefill returned"):
        jshadow.advance_prefill(model(), partial)
    while not after.done:
        after = jshadow.advance_prefill(model(), after)
    jshadow.finish_prefill(model(), after)
    with pytest.raises(StateMismatch, match="was advanced before"):
        jshadow.finish_prefill(model(), after)


def test_lengths_past_the_capacity_are_refused():
    with pytest.raises(CapacityError):
        begin_prefill(model(), PROMPT, LENGTHS, SHADOW, capacity=max(LENGTHS) - 1)
