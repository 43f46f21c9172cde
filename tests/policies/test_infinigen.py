"""InfiniGen and Loki: prompts with fewer tokens than the columns that are used to score."""

import dataclasses

import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import InfiniGen, Loki


@pytest.mark.parametrize("name", ["loki", "infinigen"])
@pytest.mark.parametrize("length", [1, 3, 12, 20])
def test_a_prompt_shorter_than_the_subspace_is_alone_what_it_is_in_a_batch(name, length):
    """Directions in which the prompt has no component are arbitrary, so they must not be used to score."""
    config = dataclasses.replace(TINY, num_layers=2, head_dim=64, kv_heads=1)
    policy = {"loki": Loki(budget=4, columns=24), "infinigen": InfiniGen(budget=4, columns=24, dense_layers=1)}[name]
    tokens, steps = random_tokens(2, 40, seed=31), random_tokens(2, 6, seed=32)
    _, both = decode.prefill(model(config), tokens, [40, length], policy, capacity=64)
    _, alone = decode.prefill(model(config), tokens[1:, :length], [length], policy, capacity=64)
    together = run_steps(model(config), both, steps)[0][1]
    np.testing.assert_allclose(together, run_steps(model(config), alone, steps[1:])[0][0], atol=1e-4)
