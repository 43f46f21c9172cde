"""InfiniGen and Loki: prompts with fewer tokens than the columns that are used to score."""

import dataclasses

import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import InfiniGen, Loki

FEW_TOKENS = [20, 1, 3, 12, 20]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Loki(budget=4, columns=24), InfiniGen(budget=4, columns=24, dense_layers=1)])
def test_a_prompt_shorter_than_the_subspace_does_not_depend_on_its_padding(policy):
    """Directions in which the prompt has no component are arbitrary, so they must not be used to score."""
    config = dataclasses.replace(TINY, num_layers=2, head_dim=64, kv_heads=1)
    tokens, steps = random_tokens(5, 70, seed=31), random_tokens(5, 6, seed=32)
    _, short = decode.prefill(model(config), tokens[:, :20], FEW_TOKENS, policy, capacity=96)
    _, long = decode.prefill(model(config), tokens, [70, *FEW_TOKENS[1:]], policy, capacity=96)
    one, other = (np.asarray(run_steps(model(config), state, steps)[0]) for state in (short, long))
    np.testing.assert_allclose(one[1:], other[1:], atol=1e-4)
    assert np.abs(one[0] - other[0]).max() > 1e-2  # another prompt
