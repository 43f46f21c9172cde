"""Quest: the upper bound of a page, and a context shorter than a page."""

import jax
import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps
from policy_inputs import spec_of

from jshadow.engine import decode
from jshadow.policies import Full, Quest


@pytest.mark.parametrize("unit", [1, 3, 16])
def test_quest_s_bound_holds_for_every_page(unit):
    """No key of a page has a larger product with a query than the page's score."""
    policy = Quest(unit=unit, budget=48, dense_layers=0)
    spec = spec_of(policy)
    rng = np.random.default_rng(unit)
    keys = np.float32(rng.standard_normal((1, TINY.kv_heads, 11, unit, TINY.head_dim)))
    q = np.float32(rng.standard_normal((1, TINY.kv_heads, TINY.group, 5, TINY.head_dim)))
    there = np.ones((1, 11, unit), bool)
    score = jax.jit(lambda *x: policy.score(spec, policy.summarize(spec, *x[:2], None), x[2], None))
    scores = np.asarray(score(keys, there, q))
    products = np.einsum("bhgtd,bhnud->bhgtnu", q, keys).max(axis=(2, 5))
    assert scores.shape == (1, TINY.kv_heads, 5, 11)
    assert (scores >= products - 1e-4).all()
    if unit == 1:  # the bound of a single key is its product with the query
        np.testing.assert_allclose(scores, products, atol=1e-4)


@pytest.mark.slow
def test_a_capacity_below_a_page_is_no_error():
    for policy in (Quest(dense_layers=0), Quest()):
        tokens, steps = random_tokens(1, 6, seed=33), random_tokens(1, 4, seed=34)
        _, state = decode.prefill(model(), tokens, [6], policy, capacity=10)
        _, full = decode.prefill(model(), tokens, [6], Full(), capacity=10)
        got, want = (run_steps(model(), one, steps)[0] for one in (state, full))
        np.testing.assert_allclose(got, want, atol=1e-4)
