"""InfLLM: its pool of blocks, limited fetches, the window, and its prefill attention."""

import dataclasses

import numpy as np
import pytest
from cases import TINY, model, random_tokens

from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.planner.bytes import cache_specs
from jshadow.policies import DenseFirst, Full, InfLLM, Pyramid


def infllm_run(policy: InfLLM, tokens: int, steps: int):
    """The state after a prompt and `steps` steps, and the pool's (held, used) after each step."""
    prompt, after = random_tokens(1, tokens, seed=3), random_tokens(1, steps, seed=4)
    _, state = decode.prefill(model(), prompt, [tokens], policy, capacity=160)
    seen = []
    for step in range(steps):
        _, state = decode.decode_step(model(), after[:, step], state)
        live = state.layers[1].live
        seen.append((np.asarray(live.held[0]), np.asarray(live.used[0])))
    return state, seen


@pytest.mark.slow
def test_the_pool_keeps_what_was_used_last():
    """The pool equals a plain list: a used block moves to the end, and a new block drops the first one."""
    policy = InfLLM(window=10, sinks=3, budget=8, unit=4, representatives=2, cached=16, query_block=8)
    _, seen = infllm_run(policy, 90, 30)
    recent: list[int] = []
    for step, (held, used) in enumerate(seen):
        chosen = {int(place) for place, position in zip(held, used, strict=True) if position == 90 + step}
        assert len(chosen) == 2
        missing = chosen - set(recent)
        kept = [place for place in recent if place not in chosen]  # the least recently used first
        assert len(missing) <= 2
        recent = kept[max(0, len(kept) + len(chosen) - 4) :] + sorted(chosen)
        assert chosen <= set(held.tolist())
        assert len(set(held.tolist()) - {-1}) == len(recent)
    assert len({int(place) for held, _ in seen for place in held}) > 4  # more blocks than slots, so some were dropped


@pytest.mark.slow
def test_capped_fetches_move_less_and_attend_to_what_is_there():
    full = InfLLM(window=10, sinks=3, budget=16, unit=4, representatives=2, cached=32, query_block=8)
    capped = dataclasses.replace(full, fetched=4)
    specs = [cache_specs(TINY, p.resolve(TINY, 160), 1, 160, 90, "float32", "device_put")[0] for p in (full, capped)]
    whole, one = (spec.policy.moved(spec) for spec in specs)
    assert (whole, one) == (4, 1)
    state, seen = infllm_run(capped, 90, 12)
    for step, (held, used) in enumerate(seen):
        new = set(held.tolist()) - (set(seen[step - 1][0].tolist()) if step else {-1})
        assert len(new - {-1}) <= 1
        assert (used == 90 + step).sum() <= 4
    parts = state.specs[1].policy.attended_parts(state.specs[1], state.layers[1], state.lengths)
    assert float(parts["selected"][0]) == 4 * (seen[-1][1] == 101).sum()


@pytest.mark.slow
def test_the_window_has_a_block_to_itself_before_it_leaves():
    """With a budget for all blocks, every token is in the sinks, in a block, in a leaving block or in the window."""
    policy = InfLLM(window=7, sinks=2, budget=100, unit=5, representatives=1, query_block=4).resolve(TINY, 100)
    spec = cache_specs(TINY, policy, 1, 100, 40, "float32", "resident")[0]
    _, state = decode.prefill(model(), random_tokens(1, 40, seed=5), [40], policy, capacity=100)
    for token in random_tokens(1, 30, seed=6)[0]:
        _, state = decode.decode_step(model(), [token], state)
        parts = policy.attended_parts(spec, state.layers[0], state.lengths)
        assert sum(float(part[0]) for part in parts.values()) == float(state.lengths[0])


def test_a_prefill_of_its_own_is_not_shared():
    policy = InfLLM(window=16, unit=4, budget=8)
    for other in (Full(), DenseFirst(policy, layers=1), Pyramid(policy, steepness=2.0)):
        for both in ([policy, other], [other, policy]):
            with pytest.raises(ConfigError, match="infllm attends to a prompt in its own way"):
                decode.prefill_many(model(), random_tokens(1, 20), [20], both, capacity=40)
    (one, _), (two, _) = decode.prefill_many(model(), random_tokens(1, 20), [20], [policy] * 2, capacity=40)
    np.testing.assert_array_equal(one, two)
