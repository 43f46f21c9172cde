"""RocketKV attends to the tokens that a NumPy oracle chooses, on random ragged batches, step by step."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps
from few import slow
from oracle_maths import softmax
from random_arrays import wide

from jshadow.cache import offload
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.records import PromptKV, StepKV
from jshadow.engine import decode
from jshadow.engine.step import AllLayers, step_layer
from jshadow.errors import StateMismatch
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import abstract_state, cache_specs
from jshadow.policies import Quest, RocketKV

MODELS = {"group2": TINY, "group5": dataclasses.replace(TINY, q_heads=5, kv_heads=1, head_dim=8)}
LENGTHS, CAPACITY, STEPS = (83, 40, 9, 1), 100, 13
# Kept tokens that fill no page, prompts shorter than the kept tokens, one token, pages of one token, all tokens.
POLICIES = {
    "pages": RocketKV(kept=30, budget=8, unit=4),
    "odd": RocketKV(kept=23, budget=10, unit=5, recent=7),
    "one": RocketKV(kept=1, budget=4, unit=4),
    "tokens": RocketKV(kept=17, budget=3, unit=1, recent=2),
    "all": RocketKV(kept=100, budget=100, unit=4),
    "more": RocketKV(kept=4096, budget=8, unit=4),
}
WINDOW, KERNEL = 32, 7  # SnapKV's defaults


def new_tokens(config, dtype, rng, tokens):
    """Random queries, keys and values of all rows."""
    return [
        rng.standard_normal((len(LENGTHS), tokens, heads, config.head_dim)).astype(dtype)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    ]


def prompt_of(config, dtype, rng, window):
    """A random ragged batch. Keys and values of padding are zeros."""
    lengths, positions = np.array(LENGTHS, np.int32), np.arange(max(LENGTHS), dtype=np.int32)
    q, k, v = new_tokens(config, dtype, rng, max(LENGTHS))
    real = (positions < lengths[:, None])[..., None, None]
    k, v = (np.where(real, x, 0).astype(dtype) for x in (k, v))
    last = np.maximum(lengths[:, None] - window + np.arange(window), 0)
    tail = np.take_along_axis(q, last[..., None, None], axis=1)
    return PromptKV(k, k, v, lengths, np.broadcast_to(positions, q.shape[:2]), tail)


def kept_by_oracle(policy, keys, tail, scale):
    """The positions that a head keeps, from its keys [n, d] and the last queries of its group [w, g, d]."""
    count, window = len(keys), len(tail)
    kept = min(policy.kept, count)
    scores = np.zeros(count)
    for at, queries in enumerate(tail, count - window):
        for q in queries if at >= 0 else ():
            scores[: at + 1] += softmax((keys[: at + 1] @ q) * scale) / len(queries)
    scores[max(count - window, 0) :] = 0
    half = KERNEL // 2
    pooled = np.array([scores[max(at - half, 0) : at + half + 1].max() for at in range(count)])
    pooled[count - min(window, kept) :] = np.inf
    return sorted(np.argsort(-pooled, kind="stable")[:kept])


def attended_by_oracle(policy, keys, queries):
    """The indices that a group's queries [g, d] attend to, among a head's kept and later keys [m, d]."""
    unit, count = policy.unit, len(keys)
    first = max(count - policy.recent, 0) // unit * unit
    pages = [keys[at : at + unit] for at in range(0, first, unit)]
    bounds = [max(np.maximum(q * page.min(0), q * page.max(0)).sum() for q in queries) for page in pages]
    chosen = np.argsort(-np.array(bounds), kind="stable")[: policy.budget // unit] if pages else []
    return [*(at * unit + i for at in sorted(chosen) for i in range(unit)), *range(first, count)]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "fetch"),
    [
        slow(("group2", "pages", "float32", "device_put")),
        ("group2", "pages", "bfloat16", "resident"),
        ("group5", "odd", "float32", "resident"),
        slow(("group2", "one", "float32", "zero_copy")),
        ("group5", "tokens", "float32", "device_put"),
        slow(("group2", "all", "float32", "resident")),
        slow(("group2", "more", "float32", "device_put")),
    ],
)
def test_a_query_attends_to_the_oracle_s_tokens(name, kind, dtype, fetch):
    config, rng, rows = MODELS[name], np.random.default_rng(7), len(LENGTHS)
    policy, tolerance = POLICIES[kind].resolve(config, CAPACITY), 3e-6 if dtype == "float32" else 2e-2
    spec = cache_specs(config, policy, rows, CAPACITY, min(LENGTHS), dtype, fetch)[-1]
    window, group = policy.reads.last_queries, config.group
    assert window == max(1, min(WINDOW, policy.kept // 2))
    prompt = prompt_of(config, dtype, rng, window)
    state, write = jax.jit(lambda prompt: policy.compress(spec, policy.init(spec), prompt))(prompt)
    state = state.replace(host=offload.place(policy.host_layout(spec), spec, write))
    keys, values, tails = map(wide, (prompt.k_post, prompt.v, prompt.q_tail))
    held = {}  # the keys and values that are left of each row and head
    for row, head in np.ndindex(rows, config.kv_heads):
        k, v = keys[row, : LENGTHS[row], head], values[row, : LENGTHS[row], head]
        kept = kept_by_oracle(policy, k, tails[row, :, head * group : (head + 1) * group], config.attention_scale)
        held[row, head] = k[kept], v[kept]

    @jax.jit
    def step_once(state, step):
        out, state = step_layer(spec, state, step, AllLayers((spec,), [state.host]))[:2]
        return (out, policy.attended_parts(spec, state, step.lengths + 1)), state

    inverse = np.asarray(inverse_frequencies(config.rope, config.head_dim), np.float32)
    for done in range(STEPS):
        lengths = np.array(LENGTHS, np.int32) + np.int32(done)
        q, k, v = new_tokens(config, dtype, rng, 1)
        angles = lengths[:, None, None] * inverse
        turn, valid = (np.cos(angles), np.sin(angles)), np.ones((rows, 1), bool)
        step = StepKV(q, q, k, k, v, lengths[:, None], valid, lengths, inverse, *turn)
        (out, parts), state = step_once(state, step)
        out, parts = jax.tree.map(np.asarray, (out, parts))
        for row, head in np.ndindex(rows, config.kv_heads):
            ours = [
                np.concatenate([x, wide(new[row, :, head])]) for x, new in zip(held[row, head], (k, v), strict=True)
            ]
            held[row, head], queries = ours, wide(q[row, 0, head * group : (head + 1) * group])
            seen = attended_by_oracle(policy, ours[0], queries)
            want = [softmax(ours[0][seen] @ query * config.attention_scale) @ ours[1][seen] for query in queries]
            got = wide(out[row, 0, head * group : (head + 1) * group])
            np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)
            near = len(ours[0]) - max(len(ours[0]) - policy.recent, 0) // policy.unit * policy.unit
            counts = {"window": near, "selected": len(seen) - near}
            assert {part: float(count[row]) for part, count in parts.items()} == counts


def test_bounds_and_host_rows_shrink_alike():
    sizes = {"batch": 2, "capacity": 1024, "prompt": 960, "dtype": "float32", "fetch": "device_put"}
    quest = state_nbytes(abstract_state(TINY, Quest(unit=8, dense_layers=0), **sizes))
    quarter = state_nbytes(abstract_state(TINY, RocketKV(kept=240, unit=8), **sizes))
    for part in ("summaries", "host rows"):
        whole, left = (next(sum(size) for name, size in parts.items() if part in name) for parts in (quest, quarter))
        assert left < 0.35 * whole, part  # a quarter of the prompt, and the tokens after it


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["snapkv", "keydiff"])
def test_no_token_of_an_evicted_prompt_is_given_back(scores):
    """A row of which nothing was dropped gives back tokens of its prompt, and takes them again."""
    tokens = random_tokens(2, 61, seed=5)
    policy = RocketKV(kept=31, budget=96, unit=4, scores=scores)
    _, state = decode.prefill(model(), tokens, [61, 30], policy, capacity=96)
    with pytest.raises(StateMismatch, match="row 0 must lie in"):
        state.fork().rewind([60, 29])
    logits, _ = decode.decode_step(model(), tokens[:, 29], state.fork().rewind([61, 29]), active=[False, True])
    want, _ = decode.prefill(model(), tokens[1:, :30], [30], policy, capacity=96)
    np.testing.assert_allclose(logits[1], want[0], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["snapkv", "expected_attention", "keydiff", "kvzip"])
def test_every_scorer_serves_both_stages(scores):
    policy = RocketKV(kept=16, budget=8, unit=4, scores=scores)
    _, some = decode.prefill(model(), random_tokens(2, 60, seed=3), [60, 31], policy, capacity=90)
    logits, some = run_steps(model(), some, random_tokens(2, 12, seed=4))
    assert np.isfinite(logits).all()
    assert some.layers[0].frozen.evicted.tolist() == [44, 15]
