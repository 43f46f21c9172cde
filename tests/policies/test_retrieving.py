"""The methods that fetch a part of the prompt: Quest, Loki, InfiniGen, InfLLM, SpeCache, OmniKV and others."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import CONFIGS, TINY, model, random_tokens, run_steps
from few import slow
from oracle_maths import softmax
from policy_inputs import DEEP
from random_arrays import wide

from jshadow import Offloaded
from jshadow.cache import offload
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.records import PromptKV, StepKV
from jshadow.engine import decode
from jshadow.engine.step import AllLayers, step_layer
from jshadow.errors import ConfigError, StateMismatch
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import abstract_state
from jshadow.policies import DenseFirst, Full, InfiniGen, InfLLM, Loki, OmniKV, Pyramid, Quest, RocketKV, SpeCache
from jshadow.policies.omnikv import OmniKVFilter, OmniKVSparse
from jshadow.policies.retrieval import within_share

ONE = dataclasses.replace(TINY, num_layers=1)  # what a layer does does not need more of them


def fed(policy, tokens, lengths, steps, config=TINY, **options):
    """Logits and state after prompts [B, S] and steps [B, T]."""
    _, state = decode.prefill(model(config), tokens, lengths, policy, **options)
    return run_steps(model(config), state, steps)


@pytest.mark.slow
def test_a_capacity_below_a_page_is_no_error():
    given = random_tokens(1, 6, seed=33), [6], random_tokens(1, 4, seed=34)
    want, _ = fed(Full(), *given, capacity=10)
    for policy in (Quest(dense_layers=0), Quest()):
        np.testing.assert_allclose(fed(policy, *given, capacity=10)[0], want, atol=1e-4)


@pytest.mark.slow
def test_top_p_attends_to_fewer_and_a_flat_context_to_more():
    given = random_tokens(1, 90, seed=8), [90], random_tokens(1, 4, seed=9), ONE
    policies = [Quest(budget=64, unit=4, dense_layers=0, top_p=share) for share in (1.0, 0.9, 0.3)]
    attended = [float(fed(policy, *given, capacity=128)[1].counters.attended[0]) for policy in policies]
    assert attended[0] > attended[1] > attended[2]


def test_the_share_of_a_softmax():
    shares, weights = (1.0, 0.9, 0.5, 0.01), np.random.default_rng(7).exponential(size=(3, 20)).astype(np.float32)
    weights = -np.sort(-weights, axis=1)
    kept = jax.jit(lambda weights: [within_share(weights, share) for share in shares])(weights)
    for share, masks in zip(shares, kept, strict=True):
        for row, mask in zip(weights, np.asarray(masks), strict=True):
            count = 20 if share == 1 else next(n for n in range(1, 21) if row[:n].sum() >= share * row.sum() - 1e-6)
            assert mask.tolist() == [i < count for i in range(20)]


@pytest.mark.slow
def test_loki_learns_from_a_text():
    """The learned basis is orthonormal, states use it, and a prompt equal to the text has the same basis online."""
    text = random_tokens(120, seed=9)
    policy = Loki(budget=12, columns=5, calibration="offline")
    fitted = policy.fit(model(), text)
    components = np.asarray(fitted["components"])
    assert components.shape == (TINY.num_layers, TINY.kv_heads, TINY.head_dim, TINY.head_dim)
    products = np.einsum("lhde,lhdf->lhef", components, components)
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(TINY.head_dim), components.shape), atol=1e-4)
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


def infllm_run(policy: InfLLM, tokens: int, steps: int):
    """The state after a prompt and `steps` steps, and the pool's (held, used) after each step."""
    prompt, after = random_tokens(1, tokens, seed=3), random_tokens(1, steps, seed=4)
    _, state = decode.prefill(model(), prompt, [tokens], policy, capacity=160)
    seen = []
    for step in range(steps):
        _, state = decode.decode_step(model(), after[:, step], state)
        live = state.layers[1].live
        seen.append((np.asarray(live.held[0]), np.asarray(live.used[0])))
    return state, seen


@pytest.mark.slow
def test_the_pool_keeps_what_was_used_last():
    """The pool equals a plain list: a used block moves to the end, and a new block drops the first one."""
    policy = InfLLM(window=10, sinks=3, budget=8, unit=4, representatives=2, cached=16, query_block=8)
    _, seen = infllm_run(policy, 90, 30)
    recent: list[int] = []
    for step, (held, used) in enumerate(seen):
        chosen = {int(place) for place, position in zip(held, used, strict=True) if position == 90 + step}
        assert len(chosen) == 2
        missing = chosen - set(recent)
        kept = [place for place in recent if place not in chosen]  # the least recently used first
        assert len(missing) <= 2
        recent = kept[max(0, len(kept) + len(chosen) - 4) :] + sorted(chosen)
        assert chosen <= set(held.tolist())
        assert len(set(held.tolist()) - {-1}) == len(recent)
    assert len({int(place) for held, _ in seen for place in held}) > 4  # more blocks than slots, so some were dropped


@pytest.mark.slow
def test_capped_fetches_move_less_and_attend_to_what_is_there():
    full = InfLLM(window=10, sinks=3, budget=16, unit=4, representatives=2, cached=32, query_block=8)
    capped = dataclasses.replace(full, fetched=4)
    specs = [cache_specs(TINY, p.resolve(TINY, 160), 1, 160, 90, "float32", "device_put")[0] for p in (full, capped)]
    whole, one = (spec.policy.moved(spec) for spec in specs)
    assert (whole, one) == (4, 1)
    state, seen = infllm_run(capped, 90, 12)
    for step, (held, used) in enumerate(seen):
        new = set(held.tolist()) - (set(seen[step - 1][0].tolist()) if step else {-1})
        assert len(new - {-1}) <= 1
        assert (used == 90 + step).sum() <= 4
    parts = state.specs[1].policy.attended_parts(state.specs[1], state.layers[1], state.lengths)
    assert float(parts["selected"][0]) == 4 * (seen[-1][1] == 101).sum()


def test_a_prefill_of_its_own_is_not_shared():
    policy = InfLLM(window=16, unit=4, budget=8)
    for other in (Full(), DenseFirst(policy, layers=1), Pyramid(policy, steepness=2.0)):
        for both in ([policy, other], [other, policy]):
            with pytest.raises(ConfigError, match="infllm attends to a prompt in its own way"):
                decode.prefill_many(model(), random_tokens(1, 20), [20], both, capacity=40)
    (one, _), (two, _) = decode.prefill_many(model(), random_tokens(1, 20), [20], [policy] * 2, capacity=40)
    np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_specache_that_fetches_everything_is_full():
    """Keys and values have one bit, and all of them are replaced by exact ones. A second layer is foreseen."""
    given = random_tokens(2, 50, seed=14), [50, 31], random_tokens(2, 9, seed=15), CONFIGS["group2"]
    every, few = (SpeCache(bits=1, group=8, residual=8, fetched=fetched) for fetched in (64, 2))
    want, _ = fed(Full(), *given, capacity=64)
    np.testing.assert_allclose(fed(every, *given, capacity=64, fetch="device_put")[0], want, atol=1e-4)
    assert np.abs(fed(few, *given, capacity=64, fetch="device_put")[0] - want).max() > 0.05


def test_omnikv_s_plan_of_layers():
    policy = OmniKV(filter_layers=(1, 4)).resolve(DEEP, 64)
    kinds = [type(policy.for_layer(layer, DEEP)) for layer in range(8)]
    assert kinds == [Full, OmniKVFilter, Full, OmniKVSparse, OmniKVFilter, Full, OmniKVSparse, OmniKVSparse]
    assert [policy.for_layer(layer, DEEP).serves for layer in (1, 4)] == [(3,), (6, 7)]
    for layers, filters in ((32, (2, 8, 18)), (48, (6, 11, 30)), (80, (4, 19, 41)), (30, (1, 7, 16))):
        config = dataclasses.replace(TINY, num_layers=layers)
        assert OmniKV().resolve(config, 64).filter_layers == filters
    sliding = dataclasses.replace(DEEP, sliding_window=16, sliding_layers=(0, 2, 4, 6))
    policy = OmniKV(filter_layers=(1,)).resolve(sliding, 64)
    assert policy.for_layer(1, sliding).serves == (5, 7)


@pytest.mark.slow
@pytest.mark.parametrize("block", [7, 500])
def test_a_stream_is_full_attention(block):
    """Blocks of any size, prompts that end inside a block, and long turns. `all_tokens` is Full's."""
    params, outs, states = model(ONE), [], []
    for policy, fetch in ((Full(), "resident"), (Offloaded(block=block), "device_put")):
        logits, state = decode.prefill(
            params, random_tokens(3, 61, seed=3), [61, 27, 5], policy, capacity=192, fetch=fetch
        )
        turn, state = decode.extend(params, random_tokens(3, 70, seed=4), [70, 3, 0], state, logits="all")
        steps, state = run_steps(params, state, random_tokens(3, 2, seed=5))
        outs.append(np.concatenate([logits[:, None], turn, steps], axis=1))
        states.append(state)
    real = np.ones((3, 73), bool)
    real[1, 4:71], real[2, 1:71] = False, False
    np.testing.assert_allclose(outs[1][real], outs[0][real], atol=2e-5)
    size = states[1].policy.block
    assert size == min(block, 192)
    rows, blocks = 2 * TINY.kv_heads * TINY.head_dim * 4, -(-61 // size)  # of the longest prompt
    passes = np.array([3, 3, 2])  # the turn, unless a row has no tokens in it, and two steps
    moved = np.asarray(states[1].counters.fetched).astype(int) * 64
    assert moved.tolist() == (passes * blocks * size * rows).tolist()
    want, got = (state.specs[0].policy.all_tokens(state.specs[0], state.layers[0]) for state in states)
    for row, length in enumerate(np.asarray(states[0].lengths)):
        np.testing.assert_allclose(got.k[row, :, :length], want.k[row, :, :length], atol=1e-5)
        np.testing.assert_allclose(got.v[row, :, :length], want.v[row, :, :length], atol=1e-5)


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
def test_no_token_of_an_evicted_prompt_is_given_back():
    """A row of which nothing was dropped gives back tokens of its prompt, and takes them again."""
    tokens = random_tokens(2, 61, seed=5)
    policy = RocketKV(kept=31, budget=96, unit=4, scores="keydiff")
    _, state = decode.prefill(model(ONE), tokens, [61, 30], policy, capacity=96)
    with pytest.raises(StateMismatch, match="row 0 must lie in"):
        state.fork().rewind([60, 29])
    logits, _ = decode.decode_step(model(ONE), tokens[:, 29], state.fork().rewind([61, 29]), active=[False, True])
    want, _ = decode.prefill(model(ONE), tokens[1:, :30], [30], policy, capacity=96)
    np.testing.assert_allclose(logits[1], want[0], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["expected_attention", "kvzip"])
def test_every_scorer_serves_both_stages(scores):
    policy = RocketKV(kept=16, budget=8, unit=4, scores=scores)
    _, some = decode.prefill(model(ONE), random_tokens(2, 60, seed=3), [60, 31], policy, capacity=90)
    logits, some = run_steps(model(ONE), some, random_tokens(2, 12, seed=4))
    assert np.isfinite(logits).all()
    assert some.layers[0].frozen.evicted.tolist() == [44, 15]
