"""SnapKV: pooling, the tokens of a prompt that are kept, and short prompts."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY
from codec_calls import run
from policy_inputs import prompt_of, spec_of

from jshadow.planner.bytes import cache_specs
from jshadow.policies import SnapKV
from jshadow.policies.snapkv import pool


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_pooling_by_hand(kernel, pooling):
    scores = np.float32(np.random.default_rng(0).random((2, 3, 20)))
    got = np.asarray(jax.jit(pool, static_argnums=(1, 2))(scores, kernel, pooling))
    padded = np.pad(scores, ((0, 0), (0, 0), (kernel // 2, kernel // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=2)
    np.testing.assert_allclose(got, windows.max(-1) if pooling == "max" else windows.mean(-1), atol=1e-6)


def test_constant_queries_keep_the_largest_products():
    """With kernel 1 and equal queries, the keys with the largest products with the query are kept, and the window."""
    config = dataclasses.replace(TINY, q_heads=2, kv_heads=2)
    policy = SnapKV(max_capacity_prompt=20, observation_window=4, kernel=1)
    spec, prompt = spec_of(policy, config), prompt_of(config, 60, seed=8, tail=4)
    same = np.broadcast_to(prompt.q_tail[:, :1], prompt.q_tail.shape)
    kept = np.asarray(run.compress(spec.policy, spec, prompt.replace(q_tail=same)).frozen.kept.k)
    for head in range(2):
        products = prompt.k_post[0, :56, head] @ same[0, 0, head]
        want = sorted([*np.argsort(-products, kind="stable")[:16].tolist(), 56, 57, 58, 59])
        np.testing.assert_array_equal(kept[0, head], prompt.k_post[0, want, head])


@pytest.mark.parametrize(("most", "kept"), [(14, [14, 14, 13, 14]), (20, [20, 14, 13, 20])])
def test_snapkv_keeps_short_prompts_whole(most, kept):
    lengths = np.array([20, 14, 13, 61], np.int32)
    policy = SnapKV(max_capacity_prompt=most, observation_window=5).resolve(TINY, 96)
    spec = cache_specs(TINY, policy, 4, 96, 13, "float32", "resident")[0]
    one = prompt_of(TINY, 61, tail=5)
    rows = jax.tree.map(lambda x: np.broadcast_to(x, (4, *x.shape[1:])), one).replace(lengths=lengths)
    assert np.asarray(run.compress(policy, spec, rows).frozen.count).tolist() == kept
