"""SnapKV: pooling, the tokens of a prompt that are kept, and short prompts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY, model, random_tokens
from policy_inputs import prompt_of, spec_of

from jshadow.engine import decode
from jshadow.policies import SnapKV
from jshadow.policies.snapkv import pool


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_pooling_by_hand(kernel, pooling):
    scores = jnp.asarray(np.random.default_rng(0).random((2, 3, 20)), jnp.float32)
    got = np.asarray(pool(scores, kernel, pooling))
    padded = np.pad(np.asarray(scores), ((0, 0), (0, 0), (kernel // 2, kernel // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=2)
    np.testing.assert_allclose(got, windows.max(-1) if pooling == "max" else windows.mean(-1), atol=1e-6)


def test_constant_queries_keep_the_largest_products():
    """With kernel 1 and equal queries, the keys with the largest products with the query are kept, and the window."""
    config = dataclasses.replace(TINY, q_heads=2, kv_heads=2)
    policy = SnapKV(max_capacity_prompt=20, observation_window=4, kernel=1)
    spec, prompt = spec_of(policy, config), prompt_of(config, 60, seed=8, tail=4)
    same = jnp.broadcast_to(prompt.q_tail[:, :1], prompt.q_tail.shape)
    state, _ = policy.compress(spec, policy.init(spec), prompt.replace(q_tail=same))
    for head in range(2):
        products = np.asarray(prompt.k_post[0, :56, head] @ same[0, 0, head])
        want = sorted([*np.argsort(-products, kind="stable")[:16].tolist(), 56, 57, 58, 59])
        np.testing.assert_array_equal(state.frozen.kept.k[0, head], np.asarray(prompt.k_post[0, want, head]))


@pytest.mark.parametrize(("tokens", "kept"), [(20, 20), (14, 14), (13, 13), (61, 14)])
def test_snapkv_keeps_short_prompts_whole(tokens, kept):
    policy = SnapKV(max_capacity_prompt=14, observation_window=5)
    if tokens == 20:
        policy = dataclasses.replace(policy, max_capacity_prompt=20)
    _, state = decode.prefill(model(), random_tokens(1, tokens), [tokens], policy, capacity=96)
    assert int(state.layers[0].frozen.count[0]) == kept
