"""The methods that drop tokens: H2O, SnapKV and StreamingLLM."""

import dataclasses

import jax
import numpy as np
import oracle
import pytest
from cases import LENGTHS, STEPS, TINY, model, random_tokens, run_steps
from codec_calls import run
from policy_inputs import prompt_of, spec_of

from jshadow.engine import decode
from jshadow.evaluation.laws import inputs
from jshadow.planner.bytes import cache_specs
from jshadow.policies import H2O, SnapKV, StreamingLLM
from jshadow.policies.snapkv import pool


def test_h2o_holds_its_budget_and_never_evicts_the_recent():
    _, state = inputs.prefilled(H2O(heavy=5, recent=6))
    for step in range(12):
        _, state = decode.decode_step(model(), STEPS[:, step], state)
        for layer in state.layers:
            for rows, length in zip(np.asarray(layer.live.positions), LENGTHS, strict=True):
                held = length + step + 1
                for positions in rows:
                    kept = positions[positions >= 0].tolist()
                    assert len(kept) == len(set(kept)) == min(11, held)
                    assert set(range(max(0, held - 5), held)) <= set(kept)  # the next token is the sixth recent one


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


def test_streaming_llm_is_stable_far_beyond_its_window():
    """On a text of ten windows, with rebased positions, the logits stay equal to the oracle's."""
    policy, prompt, steps = StreamingLLM(sinks=2, window=10), random_tokens(1, 20, seed=16), random_tokens(100, seed=17)
    run = oracle.Oracle(model().weights, TINY, oracle.StreamingLLM(2, 10))
    run.prefill(prompt[0].tolist())
    want = np.stack([run.step(int(token)) for token in steps])
    _, state = decode.prefill(model(), prompt, [20], policy, capacity=128)
    got, state = run_steps(model(), state, steps[None])
    np.testing.assert_allclose(got[0], want, atol=1e-4)
    assert state.layers[0].live.cache.k.shape[2] == 12
