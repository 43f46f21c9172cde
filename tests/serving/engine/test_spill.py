"""Rows move to host memory when device memory is short, and back. No token changes."""

import jax
import numpy as np
import pytest
from byte_models import SHADOW
from serving_cases import CLASSES, PARAMS, answers_of, engine_of, offline, prompt_of, random_requests, run

from jshadow.engine.decode import prefill
from jshadow.engine.report import CompileClock
from jshadow.engine.speculation import PromptLookup
from jshadow.errors import ConfigError, StateMismatch
from jshadow.policies import Full
from jshadow.serving import Limits, Request
from jshadow.serving.admission import needed_bytes

LONG = CLASSES[1:]
[PLAN] = engine_of(classes=LONG, spill=True).plans
SHORT = needed_bytes([PLAN.spilled, PLAN.spilled])  # memory for one group on the device, or for two in both memories


def spilling(device=SHORT.device, host=SHORT.host, **options):
    limits = Limits(device_bytes=device, host_bytes=host)
    return engine_of(classes=LONG, spill=True, limits=limits, **options)


def test_rows_that_do_not_fit_the_device_move_to_the_host_and_back():
    assert needed_bytes([PLAN]).device <= SHORT.device < needed_bytes([PLAN, PLAN.spilled]).device
    engine = spilling()
    first = [Request(prompt_of(70 + place, place), 20 + 9 * place) for place in range(4)]
    later = [Request(prompt_of(80 + place, place), 12) for place in range(3)]
    answers = [engine.submit(request) for request in first]
    run(engine, answers[-1], 4)
    assert engine.report().rows_spilled == 0
    answers += [engine.submit(request) for request in later]
    run(engine, answers[-1], 2)
    report = engine.report()
    assert (report.groups, report.rows_spilled) == (2, 7)
    assert (report.device_bytes, report.host_bytes) == (2 * PLAN.spilled.bytes.rows.device, SHORT.host)
    while engine.report().rows_in_use > 1:
        engine.run_once()
    engine.run_once()
    assert engine.report().rows_spilled == 0  # the last answer ends on the device
    assert engine.report().host_bytes == 0
    run(engine)
    for request, answer in zip([*first, *later], answers, strict=True):
        result = answer.result(0)
        assert result.tokens == offline(request).tokens
        assert (result.report.fetch, result.report.spilled) == ("resident", "device_put")
    [alone] = answers_of(engine, first[:1])
    assert not alone.report.spilled


def test_no_group_moves_where_host_memory_is_short_too():
    engine = spilling(host=SHORT.host // 2 - 1)
    requests = [Request(prompt_of(70 + place, place), 6) for place in range(6)]
    results = answers_of(engine, requests)
    assert not any(one.report.spilled for one in results)


def test_what_cannot_spill_is_refused():
    with pytest.raises(ConfigError, match="to spill, got Full"):
        engine_of(policy=Full(), classes=LONG, spill=True)
    with pytest.raises(ConfigError, match="fetch must be 'auto' or 'resident'"):
        engine_of(classes=LONG, spill=True, fetch="device_put")
    plans = engine_of(classes=CLASSES, spill=True).plans
    assert [plan.spilled is None for plan in plans] == [True, False]  # the rows of the short class are dense


def test_a_state_moves_between_the_memories_of_fetch_modes():
    def memories(state):
        return {array.sharding.memory_kind for array in jax.tree.leaves([layer.host for layer in state.layers])}

    state = prefill(PARAMS, np.array([prompt_of(70)]), [70], SHADOW, capacity=384, fetch="resident")[1]
    there = state.with_fetch("device_put")
    back = there.with_fetch("resident")
    assert (memories(there), memories(back)) == ({"pinned_host"}, {"device"})
    assert (there.fetch, back.specs) == ("device_put", state.specs)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(there))
    assert [*map(id, jax.tree.leaves(there.split()[1].counters))] == [*map(id, jax.tree.leaves(state.counters))]
    for mode in ("auto", "disk", "zero_copy"):  # with "zero_copy", a step keeps what stays selected
        with pytest.raises(ConfigError, match="fetch must be"):
            state.with_fetch(mode)
    taken = state.take([0, 0])
    taken.insert(0, state, consume=True)
    with pytest.raises(StateMismatch, match="consumed"):
        taken.with_fetch("device_put")


@pytest.mark.slow
def test_warm_up_stays_within_the_limits():
    """One group fits only in both memories, or only on the device."""
    for limits, spilled in (((SHORT.device, 1), None), ((needed_bytes([PLAN]).device - 1, SHORT.host), "device_put")):
        engine = spilling(*limits)
        engine.warm()
        compiled = CompileClock.programs
        twins = answers_of(engine, [Request(prompt_of(70), 9)] * 3)
        assert CompileClock.programs == compiled
        assert [(one.report.fetch, one.report.spilled) for one in twins] == [("resident", spilled)] * 3
        assert engine.report().host_bytes <= limits[1]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, PromptLookup(tokens=4, ngram=1)], ids=["plain", "speculating"])
def test_moves_at_random_change_no_token_and_compile_nothing(drafter):
    engine = spilling(10 * SHORT.device, 10 * SHORT.host, speculate=drafter)
    engine.warm()
    requests, rng = [one for one in random_requests(48, seed=3) if len(one.prompt) > 64], np.random.default_rng(7)
    compiled, moves = CompileClock.programs, 0
    answers = [engine.submit(request) for request in requests]
    while engine.run_once():
        for group in engine._loop.groups:
            if rng.random() < 0.3:
                group.move(group.home if group.plan is not group.home else group.home.spilled)
                moves += 1
    assert CompileClock.programs == compiled
    assert moves > 20
    for request, answer in zip(requests, answers, strict=True):
        assert answer.result(0).tokens == offline(request).tokens
