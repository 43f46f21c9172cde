"""Loki: with all columns, scores are exact products; and a basis can be learned from a text."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps
from policy_inputs import prompt_of, spec_of

from jshadow.cache import place
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.ops.attention import group_queries
from jshadow.policies import Loki


def test_loki_with_all_columns_ranks_by_the_products():
    policy = Loki(budget=10, columns=TINY.head_dim)
    prompt = prompt_of(TINY, 60, seed=2)
    q = np.float32(np.random.default_rng(1).standard_normal((1, 1, TINY.q_heads, TINY.head_dim)))
    grouped = q.reshape(1, 1, TINY.kv_heads, TINY.group, TINY.head_dim)
    want = np.einsum("bthgd,bshd->bhgts", grouped, prompt.k_post).max(axis=2)
    for fetch in ("resident", "device_put"):  # the columns are read from the rows, or from stored summaries
        spec = dataclasses.replace(spec_of(policy), fetch=fetch)
        state, write = jax.jit(lambda prompt, spec=spec: policy.compress(spec, policy.init(spec), prompt))(prompt)
        state = state.replace(host=place.place(policy.host_layout(spec), spec, write))

        @jax.jit
        def scored(state, q, spec=spec):
            turned = group_queries(policy.stored(q, state.frozen.basis), TINY.kv_heads)
            return policy.score(spec, policy.both_summaries(spec, state)[0], turned, state.frozen.basis)

        np.testing.assert_allclose(np.asarray(scored(state, q))[..., :60], want, atol=1e-4)


@pytest.mark.slow
def test_loki_learns_from_a_text():
    """The learned basis is orthonormal, states use it, and a prompt equal to the text has the same basis online."""
    text = random_tokens(120, seed=9)
    policy = Loki(budget=12, columns=5, calibration="offline")
    fitted = policy.fit(model(), text)
    components = np.asarray(fitted["components"])
    assert components.shape == (TINY.num_layers, TINY.kv_heads, TINY.head_dim, TINY.head_dim)
    np.testing.assert_allclose(
        np.einsum("lhde,lhdf->lhef", components, components),
        np.broadcast_to(np.eye(TINY.head_dim), components.shape),
        atol=1e-4,
    )
    tokens = random_tokens(2, 50, seed=4)
    _, state = decode.prefill(model(), tokens, [50, 31], policy, capacity=96, fitted=fitted)
    for layer, basis in zip(state.layers, components, strict=True):
        np.testing.assert_array_equal(layer.frozen.basis.turn, np.broadcast_to(basis, layer.frozen.basis.turn.shape))
    # the online basis of a prompt that equals the text is the learned one
    online, _ = decode.prefill(model(), text[None], [120], Loki(budget=12, columns=5), capacity=128)
    offline, _ = decode.prefill(model(), text[None], [120], policy, capacity=128, fitted=fitted)
    np.testing.assert_allclose(online, offline, atol=1e-4)
    steps, _ = run_steps(model(), state, random_tokens(2, 3, seed=5))
    assert np.isfinite(steps).all()
    with pytest.raises(ConfigError, match=r"fitted must contain 'components', which Loki\.fit returns,.* got NoneType"):
        decode.prefill(model(), tokens, [50, 31], policy, capacity=96)
