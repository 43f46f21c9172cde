"""RocketKV attends to the tokens that a NumPy oracle chooses, on random ragged batches, step by step."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps
from few import slow

from jshadow.cache import place
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.records import PromptKV, StepKV
from jshadow.engine import decode
from jshadow.engine.step import AllLayers, step_layer
from jshadow.errors import ConfigError, StateMismatch
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
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}
WINDOW, KERNEL = 32, 7  # SnapKV's defaults


def normal(rng, dtype, *shape):
    """Random numbers of a dtype."""
    return rng.standard_normal(shape).astype(dtype)


def prompt_of(config, dtype, rng, window):
    """A random ragged batch. Keys and values of padding are zeros."""
    rows, tokens = len(LENGTHS), max(LENGTHS)
    real = (np.arange(tokens) < np.array(LENGTHS)[:, None])[..., None, None]
    k, v = (
        np.where(real, normal(rng, dtype, rows, tokens, config.kv_heads, config.head_dim), 0).astype(dtype)
        for _ in range(2)
    )
    q = normal(rng, dtype, rows, tokens, config.q_heads, config.head_dim)
    last = np.maximum(np.array(LENGTHS)[:, None] - window + np.arange(window), 0)
    tail = np.take_along_axis(q, last[..., None, None], axis=1)
    where = np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens))
    return PromptKV(k, k, v, np.array(LENGTHS, np.int32), where, tail)


def kept_by_oracle(policy, keys, tail, scale):
    """The positions that a head keeps, from its keys [n, d] and the last queries of its group [w, g, d]."""
    count, window = len(keys), len(tail)
    kept = min(policy.kept, count)
    scores = np.zeros(count)
    for i, queries in enumerate(tail):
        at = count - window + i
        for q in queries if at >= 0 else ():
            shares = np.exp((keys[: at + 1] @ q) * scale)
            scores[: at + 1] += shares / shares.sum() / len(queries)
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
    policy = POLICIES[kind].resolve(config, CAPACITY)
    spec = cache_specs(config, policy, rows, CAPACITY, min(LENGTHS), dtype, fetch)[-1]
    window = policy.reads.last_queries
    assert window == max(1, min(WINDOW, policy.kept // 2))
    prompt = prompt_of(config, dtype, rng, window)
    state, write = jax.jit(lambda prompt: policy.compress(spec, policy.init(spec), prompt))(prompt)
    state = state.replace(host=place.place(policy.host_layout(spec), spec, write))
    group, heads = config.q_heads // config.kv_heads, range(config.kv_heads)
    wide = [np.asarray(x, np.float64) for x in (prompt.k_post, prompt.v, prompt.q_tail)]
    held = {}  # the keys and values that are left of each row and head
    for row, count in enumerate(LENGTHS):
        for head in heads:
            k, v = (x[row, :count, head] for x in wide[:2])
            tail = wide[2][row, :, head * group : (head + 1) * group]
            kept = kept_by_oracle(policy, k, tail, config.attention_scale)
            held[row, head] = [k[kept], v[kept]]
    step_once = jax.jit(lambda state, step: step_layer(spec, state, step, AllLayers((spec,), [state.host]))[:2])
    inverse = np.asarray(inverse_frequencies(config.rope, config.head_dim), np.float32)
    counted = jax.jit(lambda state, lengths: policy.attended_parts(spec, state, lengths))
    for done in range(STEPS):
        lengths = np.array(LENGTHS, np.int32) + np.int32(done)
        q = normal(rng, dtype, rows, 1, config.q_heads, config.head_dim)
        k, v = (normal(rng, dtype, rows, 1, config.kv_heads, config.head_dim) for _ in range(2))
        angles = lengths[:, None, None] * inverse
        turn = np.cos(angles), np.sin(angles)
        step = StepKV(q, q, k, k, v, lengths[:, None], np.ones((rows, 1), bool), lengths, inverse, *turn)
        out, state = step_once(state, step)
        out = np.asarray(out, np.float64)
        counts = {part: np.zeros(rows) for part in ("window", "selected")}
        for row in range(rows):
            for head in heads:
                ours = held[row, head]
                for at, new in enumerate((k, v)):
                    ours[at] = np.concatenate([ours[at], new[row, :, head].astype(np.float64)])
                queries = q[row, 0, head * group : (head + 1) * group].astype(np.float64)
                seen = attended_by_oracle(policy, ours[0], queries)
                for index, query in enumerate(queries):
                    shares = np.exp(ours[0][seen] @ query * config.attention_scale)
                    want = shares @ ours[1][seen] / shares.sum()
                    got = out[row, 0, head * group + index]
                    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            first = max(len(ours[0]) - policy.recent, 0) // policy.unit * policy.unit
            counts["window"][row], counts["selected"][row] = len(ours[0]) - first, len(seen) - len(ours[0]) + first
        parts = counted(state, lengths + np.int32(1))
        assert {part: count.tolist() for part, count in parts.items()} == {
            part: count.tolist() for part, count in counts.items()
        }


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
def test_every_scorer_serves_both_stages():
    tokens, steps = random_tokens(2, 60, seed=3), random_tokens(2, 12, seed=4)
    for scores in ("snapkv", "expected_attention", "keydiff", "kvzip"):
        _, some = decode.prefill(
            model(), tokens, [60, 31], RocketKV(kept=16, budget=8, unit=4, scores=scores), capacity=90
        )
        logits, some = run_steps(model(), some, steps)
        assert np.isfinite(logits).all()
        assert some.layers[0].frozen.evicted.tolist() == [44, 15]


def test_settings_out_of_range_are_refused():
    for message, policy in {
        "rocketkv.kept must be an integer at least 1, got 0": RocketKV(kept=0),
        "rocketkv.budget must be an integer at least 8, got 7": RocketKV(budget=7),
        "rocketkv.scores must be one of ('snapkv', ": RocketKV(scores="h2o"),
    }.items():
        with pytest.raises(ConfigError) as error:
            policy.resolve(TINY, CAPACITY)
        assert message in str(error.value)
