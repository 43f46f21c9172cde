"""Retrieval with `top_p`: with a smaller share, fewer tokens are attended to."""

import pytest
from cases import model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import Quest


@pytest.mark.slow
def test_top_p_attends_to_fewer_and_a_flat_context_to_more():
    prompt = random_tokens(1, 90, seed=8)
    attended = []
    for share in (1.0, 0.9, 0.3):
        policy = Quest(budget=64, unit=4, dense_layers=0, top_p=share)
        _, state = decode.prefill(model(), prompt, [90], policy, capacity=128)
        _, state = run_steps(model(), state, random_tokens(1, 4, seed=9))
        attended.append(float(state.counters.attended[0]))
    assert attended[0] > attended[1] > attended[2]
