"""What each sister method promises, beyond the laws: bounds, packed bytes, what is kept, what a text teaches."""

import dataclasses
import functools
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import TINY, model, random_tokens, run_steps

from jshadow import policies
from jshadow.cache import offload
from jshadow.cache.records import PromptKV
from jshadow.engine import decode
from jshadow.errors import ConfigError, Infeasible
from jshadow.evaluation.results import label
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import causal_attention, group_queries, key_mass
from jshadow.ops.packing import dequantise, pack, quantise, unpack, words_of
from jshadow.planner.bytes import cache_specs, footprint
from jshadow.policies import (
    H2O,
    KIVI,
    LESS,
    POLICIES,
    WRAPPERS,
    DenseFirst,
    Full,
    InfiniGen,
    InfLLM,
    Loki,
    OmniKV,
    Policy,
    Pyramid,
    Quest,
    SnapKV,
    SpeCache,
    StreamingLLM,
    parse_policy,
)
from jshadow.policies.eviction import best_positions
from jshadow.policies.omnikv.policy import OmniKVFilter, OmniKVSparse
from jshadow.policies.settings import policy_settings
from jshadow.policies.sizing import at_share
from jshadow.policies.snapkv import pool
from jshadow.policies.units import within_share

DEEP = dataclasses.replace(TINY, num_layers=8)


def spec_of(policy: Policy, config: ModelConfig = TINY, capacity: int = 96, prompt: int = 64):
    """The spec of the last layer."""
    return cache_specs(config, policy.resolve(config, capacity), 1, capacity, prompt, "float32", "resident")[-1]


def prompt_of(config: ModelConfig, tokens: int, seed: int = 0, tail: int = 0) -> PromptKV:
    """Random keys, values and queries of one row."""
    rng = np.random.default_rng(seed)

    def rows(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((1, tokens, heads, config.head_dim)), jnp.float32)

    q, k, v = rows(config.q_heads), rows(config.kv_heads), rows(config.kv_heads)
    _, lse = causal_attention(q, k, v, config.attention_scale)
    at = jnp.arange(tokens)[None]
    return PromptKV(k, k, v, jnp.array([tokens]), at, q[:, tokens - tail :] if tail else None, q, lse)


# Quest


@pytest.mark.parametrize("unit", [1, 3, 16])
def test_quest_s_bound_holds_for_every_page(unit):
    """No key of a page has a larger product with a query than the page's score."""
    policy = Quest(unit=unit, budget=48, dense_layers=0)
    spec = spec_of(policy)
    rng = np.random.default_rng(unit)
    keys = jnp.asarray(rng.standard_normal((1, TINY.kv_heads, 11, unit, TINY.head_dim)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((1, TINY.kv_heads, TINY.group, 5, TINY.head_dim)), jnp.float32)
    there = jnp.ones((1, 11, unit), bool)
    scores = policy.score(spec, policy.summarise(spec, keys, there, None), q, None)
    products = jnp.einsum("bhgtd,bhnud->bhgtnu", q, keys).max(axis=(2, 5))
    assert scores.shape == (1, TINY.kv_heads, 5, 11)
    assert (scores >= products - 1e-4).all()
    if unit == 1:  # then it is the product itself
        np.testing.assert_allclose(scores, products, atol=1e-4)


# H2O


@pytest.mark.parametrize("tokens", [1, 5, 256, 300, 613])
def test_key_mass_is_the_column_sums(tokens):
    """Against the whole matrix of probabilities, past the tiles' size and with padding."""
    prompt = prompt_of(TINY, tokens, seed=tokens)
    length = max(1, tokens - 3)
    mass = key_mass(prompt.q_post, prompt.k_post, prompt.lse, jnp.array([length]), TINY.attention_scale)
    q, k = (np.asarray(x, np.float64)[0] for x in (prompt.q_post, prompt.k_post))
    want = np.zeros((TINY.kv_heads, tokens))
    for head in range(TINY.q_heads):
        logits = q[:, head] @ k[:, head // TINY.group].T * TINY.attention_scale
        logits[np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        want[head // TINY.group] += (probs / probs.sum(axis=1, keepdims=True))[:length].sum(axis=0)
    np.testing.assert_allclose(mass[0], want, rtol=1e-4, atol=1e-5)
    assert mass[0].sum() == pytest.approx(length * TINY.q_heads, rel=1e-5)


def test_h2o_holds_its_budget_and_never_evicts_the_recent():
    policy = H2O(heavy=5, recent=6)
    _, state = decode.prefill(model(), random_tokens(1, 40, seed=3), [40], policy, capacity=96)
    for step in range(30):
        _, state = run_steps(model(), state, random_tokens(1, 1, seed=step))
        held = int(state.lengths[0])
        for layer in state.layers:
            for positions in np.asarray(layer.live.positions[0]):
                kept = sorted(positions[positions >= 0].tolist())
                assert len(kept) == len(set(kept)) == 11
                assert set(range(held - 5, held)) <= set(kept)  # the sixth is the next token's place in the window


# SnapKV


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_pooling_by_hand(kernel, pooling):
    scores = jnp.asarray(np.random.default_rng(0).random((2, 3, 20)), jnp.float32)
    got = np.asarray(pool(scores, kernel, pooling))
    padded = np.pad(np.asarray(scores), ((0, 0), (0, 0), (kernel // 2, kernel // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=2)
    np.testing.assert_allclose(got, windows.max(-1) if pooling == "max" else windows.mean(-1), atol=1e-6)


def test_constant_queries_keep_the_largest_products():
    """With kernel 1 and all of a group's queries alike, what is kept is the top of K q, and the window."""
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


# Loki


def test_loki_with_all_columns_ranks_by_the_products():
    policy = Loki(budget=10, columns=TINY.head_dim)
    prompt = prompt_of(TINY, 60, seed=2)
    q = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, TINY.q_heads, TINY.head_dim)), jnp.float32)
    want = jnp.einsum("bhgtd,bshd->bhgts", group_queries(q, TINY.kv_heads), prompt.k_post).max(axis=2)
    for fetch in ("resident", "device_put"):  # the front of the keys themselves, or kept beside them
        spec = dataclasses.replace(spec_of(policy), fetch=fetch)
        state, write = policy.compress(spec, policy.init(spec), prompt)
        state = state.replace(host=offload.place(policy.host_layout(spec), spec, write))
        turned = group_queries(policy.stored(q, state.frozen.basis), TINY.kv_heads)
        scores = policy.score(spec, policy.both_summaries(spec, state)[0], turned, state.frozen.basis)
        np.testing.assert_allclose(scores[..., :60], want, atol=1e-4)


def test_loki_learns_from_a_text():
    """A basis of a text: orthonormal, the greatest variance first, and a state that is made with it."""
    text = random_tokens(120, seed=9)
    policy = Loki(budget=12, columns=5, calibration="offline")
    fitted = policy.fit(model(), text)
    components = np.asarray(fitted["components"])
    assert components.shape == (TINY.num_layers, TINY.kv_heads, TINY.head_dim, TINY.head_dim)
    np.testing.assert_allclose(
        np.einsum("lhde,lhdf->lhef", components, components), np.broadcast_to(np.eye(TINY.head_dim), components.shape),
        atol=1e-4,
    )  # fmt: skip
    tokens = random_tokens(2, 50, seed=4)
    _, state = decode.prefill(model(), tokens, [50, 31], policy, capacity=96, fitted=fitted)
    for layer, own in zip(state.layers, components, strict=True):
        np.testing.assert_array_equal(layer.frozen.basis.turn, np.broadcast_to(own, layer.frozen.basis.turn.shape))
    # a prompt that is the text itself has that basis online
    online, _ = decode.prefill(model(), text[None], [120], Loki(budget=12, columns=5), capacity=128)
    offline, _ = decode.prefill(model(), text[None], [120], policy, capacity=128, fitted=fitted)
    np.testing.assert_allclose(online, offline, atol=1e-4)
    steps, _ = run_steps(model(), state, random_tokens(2, 3, seed=5))
    assert np.isfinite(steps).all()
    with pytest.raises(ConfigError, match=r"fitted must be what Loki\.fit returned"):
        decode.prefill(model(), tokens, [50, 31], policy, capacity=96)


# OmniKV


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


def test_all_layers_filters_attend_to_everything():
    policy = OmniKV(budget=3, filter_layers=tuple(range(8)))
    tokens, steps = random_tokens(1, 40, seed=6), random_tokens(1, 4, seed=7)
    outs = []
    for one in (policy, Full()):
        _, state = decode.prefill(model(DEEP), tokens, [40], one, capacity=64)
        outs.append(run_steps(model(DEEP), state, steps)[0])
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-5)


# KIVI


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [4, 32, 33])
def test_codes_survive_packing(bits, group):
    codes = jnp.asarray(np.random.default_rng(bits).integers(0, 2**bits, (3, 5, group)), jnp.uint32)
    words = pack(codes, bits)
    assert words.shape == (3, 5, words_of(group, bits))
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack(words, group, bits), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_error_of_a_number_is_half_a_step(bits, dtype):
    """One bit: a quarter of the range, for codes stand for the middles of its halves."""
    x = jnp.asarray(np.random.default_rng(bits).standard_normal((50, 32)) * 3, dtype)
    packed = quantise(x, bits)
    wide = np.asarray(x, np.float32)
    span = wide.max(axis=1) - wide.min(axis=1)
    step = span / 4 if bits == 1 else span / (2**bits - 1) / 2
    error = np.abs(np.asarray(dequantise(packed, 32, bits)) - wide).max(axis=1)
    rounding = 0 if dtype == jnp.float32 else 2**-10 * np.abs(wide).max(axis=1) * 2  # of float16 scales and zeros
    assert (error <= step * (1 + 1e-3) + rounding + 1e-6).all()
    assert packed.scale.dtype == (jnp.float32 if dtype == jnp.float32 else jnp.float16)


def test_a_group_of_equal_numbers_is_exact():
    x = jnp.full((3, 8), 1.5)
    for bits in (1, 2, 4, 8):
        np.testing.assert_array_equal(dequantise(quantise(x, bits), 8, bits), x)


@functools.cache
def llama():
    """Llama-3.1-8B's shape."""
    return dataclasses.replace(
        TINY, num_layers=32, model_dim=4096, ffn_dim=14336, q_heads=32, kv_heads=8, head_dim=128, context=2**20,
    )  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "gib"), [(2, 32, 3.01), (2, 64, 2.51), (1, 32, 2.01), (1, 64, 1.51)])
def test_kivi_s_bytes_at_128k_are_the_papers(bits, group, gib):
    """By hand from the papers of KIVI and SpeCache, at 131,072 tokens of Llama-3.1-8B."""
    made = footprint(llama(), KIVI(bits=bits, group=group), capacity=131_072, prompt=131_072, fetch="resident")
    assert made["device_bytes"] / 2**30 == pytest.approx(gib, rel=0.02)
    words = sum(made["parts"][part][0] for part in ("quantised",))
    assert words <= made["device_bytes"]


# InfiniGen


@pytest.mark.parametrize("name", ["loki", "infinigen"])
@pytest.mark.parametrize("length", [1, 3, 12, 20])
def test_a_prompt_shorter_than_the_subspace_is_alone_what_it_is_in_a_batch(name, length):
    """What a prompt has nothing along is arbitrary, a matter of rounding: it does not score."""
    config = dataclasses.replace(TINY, num_layers=2, head_dim=64, kv_heads=1)
    policy = {"loki": Loki(budget=4, columns=24), "infinigen": InfiniGen(budget=4, columns=24, dense_layers=1)}[name]
    tokens, steps = random_tokens(2, 40, seed=31), random_tokens(2, 6, seed=32)
    _, both = decode.prefill(model(config), tokens, [40, length], policy, capacity=64)
    _, alone = decode.prefill(model(config), tokens[1:, :length], [length], policy, capacity=64)
    together = run_steps(model(config), both, steps)[0][1]
    np.testing.assert_allclose(together, run_steps(model(config), alone, steps[1:])[0][0], atol=1e-4)


def test_a_capacity_below_a_page_is_no_error():
    for policy in (Quest(dense_layers=0), Quest()):
        tokens, steps = random_tokens(1, 6, seed=33), random_tokens(1, 4, seed=34)
        _, state = decode.prefill(model(), tokens, [6], policy, capacity=10)
        _, full = decode.prefill(model(), tokens, [6], Full(), capacity=10)
        mine, theirs = (run_steps(model(), one, steps)[0] for one in (state, full))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


# SpeCache


def test_specache_without_quantisation_is_full_whatever_was_guessed():
    """Nothing is low-bit while the residual holds all; the guess is never kept."""
    tokens, steps = random_tokens(2, 40, seed=11), random_tokens(2, 6, seed=12)
    _, state = decode.prefill(model(), tokens, [40, 23], SpeCache(group=8, residual=64, fetched=4), capacity=64)
    _, full = decode.prefill(model(), tokens, [40, 23], Full(), capacity=64)
    want, _ = run_steps(model(), full, steps)
    rng = np.random.default_rng(13)
    for step in range(6):
        guess = jnp.asarray(rng.integers(0, TINY.vocab_size, 2), jnp.int32)
        state = state.replace(shared=state.shared.replace(guess=guess))
        logits, state = decode.decode_step(model(), steps[:, step], state)
        np.testing.assert_allclose(logits, want[:, step], atol=1e-4)


@pytest.mark.parametrize("fetch", ["resident", "device_put"])
def test_specache_that_fetches_everything_is_full(fetch):
    """One-bit keys and values, all of them replaced by exact ones."""
    tokens, steps = random_tokens(2, 50, seed=14), random_tokens(2, 9, seed=15)
    policy = SpeCache(bits=1, group=8, residual=8, fetched=64)
    _, state = decode.prefill(model(), tokens, [50, 31], policy, capacity=64, fetch=fetch)
    _, full = decode.prefill(model(), tokens, [50, 31], Full(), capacity=64)
    mine, theirs = (run_steps(model(), one, steps)[0] for one in (state, full))
    np.testing.assert_allclose(mine, theirs, atol=1e-4)
    few = dataclasses.replace(policy, fetched=2)
    _, state = decode.prefill(model(), tokens, [50, 31], few, capacity=64, fetch=fetch)
    assert np.abs(run_steps(model(), state, steps)[0] - theirs).max() > 0.05


# StreamingLLM


def test_streaming_llm_is_stable_far_beyond_its_window():
    """Ten windows long, against the NumPy oracle: re-based positions, nothing drifts."""
    policy, prompt, steps = StreamingLLM(sinks=2, window=10), random_tokens(1, 20, seed=16), random_tokens(100, seed=17)
    run = oracle.Oracle(model().weights, TINY, oracle.StreamingLLM(2, 10))
    run.prefill(prompt[0].tolist())
    want = np.stack([run.step(int(token)) for token in steps])
    _, state = decode.prefill(model(), prompt, [20], policy, capacity=128)
    got, state = run_steps(model(), state, steps[None])
    np.testing.assert_allclose(got[0], want, atol=1e-4)
    assert state.layers[0].live.cache.k.shape[2] == 12


# InfLLM


def infllm_run(policy: InfLLM, tokens: int, steps: int):
    """The state after a prompt and so many steps, and the blocks in the pool and in use after each."""
    prompt, after = random_tokens(1, tokens, seed=3), random_tokens(1, steps, seed=4)
    _, state = decode.prefill(model(), prompt, [tokens], policy, capacity=160)
    seen = []
    for step in range(steps):
        _, state = decode.decode_step(model(), after[:, step], state)
        live = state.layers[1].live
        seen.append((np.asarray(live.held[0]), np.asarray(live.used[0])))
    return state, seen


def test_the_pool_keeps_what_was_used_last():
    """Against a list kept by hand: what is used moves to the front, what is new drops the last."""
    policy = InfLLM(window=10, sinks=3, budget=8, unit=4, representatives=2, cached=16, query_block=8)
    _, seen = infllm_run(policy, 90, 30)
    recent: list[int] = []
    for step, (held, used) in enumerate(seen):
        chosen = {int(place) for place, position in zip(held, used, strict=True) if position == 90 + step}
        assert len(chosen) == 2
        missing = chosen - set(recent)
        kept = [place for place in recent if place not in chosen]  # the oldest first
        assert len(missing) <= 2
        recent = kept[max(0, len(kept) + len(chosen) - 4) :] + sorted(chosen)
        assert chosen <= set(held.tolist())
        assert len(set(held.tolist()) - {-1}) == len(recent)
    assert len({int(place) for held, _ in seen for place in held}) > 4  # something was dropped


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


def test_the_window_has_a_block_to_itself_before_it_leaves():
    """Sinks, blocks, the rest of a block and the window: every token is in one of them."""
    policy = InfLLM(window=7, sinks=2, budget=100, unit=5, representatives=1, query_block=4).resolve(TINY, 100)
    spec = cache_specs(TINY, policy, 1, 100, 40, "float32", "resident")[0]
    _, state = decode.prefill(model(), random_tokens(1, 40, seed=5), [40], policy, capacity=100)
    for token in random_tokens(1, 30, seed=6)[0]:
        _, state = decode.decode_step(model(), [token], state)
        parts = policy.attended_parts(spec, state.layers[0], state.lengths)
        assert sum(float(part[0]) for part in parts.values()) == float(state.lengths[0])


def test_a_prefill_of_its_own_is_not_shared():
    policy = InfLLM(window=16, unit=4, budget=8)
    for other in (Full(), DenseFirst(policy, layers=1), Pyramid(policy, steepness=2.0)):
        for both in ([policy, other], [other, policy]):
            with pytest.raises(ConfigError, match="infllm attends to a prompt in its own way"):
                decode.prefill_many(model(), random_tokens(1, 20), [20], both, capacity=40)
    (one, _), (two, _) = decode.prefill_many(model(), random_tokens(1, 20), [20], [policy] * 2, capacity=40)
    np.testing.assert_array_equal(one, two)


# Wrappers


def test_a_pyramid_spends_what_it_was_given():
    """Falling budgets, in whole units, with the mean of equal ones."""
    for inner in (
        Quest(budget=512, unit=16, dense_layers=0),
        SnapKV(max_capacity_prompt=100),
        H2O(heavy=50, recent=30),
    ):
        policy = Pyramid(inner, steepness=5.0).resolve(DEEP, 4096)
        layers = [policy.for_layer(layer, DEEP) for layer in range(8)]
        for name in inner.budget_fields:
            sizes = [getattr(layer, name) for layer in layers]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] > getattr(inner, name) > sizes[-1]
            assert np.mean(sizes) == pytest.approx(getattr(inner, name), rel=0.05)
            assert sizes[-1] == pytest.approx(getattr(inner, name) / 5, abs=16)


def test_a_pyramid_spends_it_on_the_layers_that_choose():
    for policy in (Pyramid(DenseFirst(Quest(budget=128, dense_layers=0), layers=4)), Pyramid(Quest(budget=128))):
        policy = policy.resolve(DEEP, 4096)
        layers = [policy.for_layer(layer, DEEP) for layer in range(8)]
        budgets = [layer.budget for layer in layers if isinstance(layer, Quest)]
        assert budgets[0] > 128 > budgets[-1]
        assert np.mean(budgets) == pytest.approx(128, rel=0.1)


def test_a_pyramid_keeps_the_newest_tokens_of_a_prompt():
    """Where the budget of a layer would not hold the observation window, that shrinks."""
    policy = Pyramid(SnapKV(max_capacity_prompt=24, observation_window=16, kernel=3), steepness=4.0)
    _, state = decode.prefill(model(), random_tokens(1, 61, seed=30), [61], policy, capacity=96)
    for spec, layer in zip(state.specs, state.layers, strict=True):
        spec.policy.resolve(TINY, 96)  # is in range
        prompt = prompt_of(TINY, 61, tail=spec.policy.observation_window)
        kept = best_positions(*spec.policy.score(spec, prompt)[:1], jnp.array([61]), jnp.array([16]), 6)
        assert (np.asarray(kept)[0] >= 55).all()  # six of sixteen reserved ones: the newest
        assert layer.frozen.kept.k.shape[2] == spec.policy.max_capacity_prompt
    assert [spec.policy.observation_window for spec in state.specs] == [16, 12, 3]


def test_dense_first_is_dense_first():
    gemma = dataclasses.replace(DEEP, sliding_window=8, sliding_layers=(0, 2, 4, 6))
    policy = DenseFirst(Quest(dense_layers=0), layers=2).resolve(gemma, 128)
    kinds = [type(spec.policy).__name__ for spec in cache_specs(gemma, policy, 1, 128, 64, "float32", "resident")]
    assert kinds == ["SlidingWindow", "Full"] * 2 + ["SlidingWindow", "Quest"] * 2


WRAPPED = {
    "layers": (DenseFirst(layers=9), "dense_first.layers"),
    "coupled": (DenseFirst(OmniKV()), "layers that stand alone, got omnikv"),
    "no policy": (DenseFirst(inner=3), "dense_first.inner"),
    "no budget": (Pyramid(Full()), "pyramid.inner must be a policy with a budget, got full"),
    "steepness": (Pyramid(steepness=0.5), "pyramid.steepness"),
    "flag": (Pyramid(steepness=True), "pyramid.steepness"),
    "top_p": (Quest(top_p=0.0), "quest.top_p"),
    "top_p flag": (Quest(top_p=True), "quest.top_p"),
    "infllm pool": (InfLLM(budget=256, cached=128), "infllm.cached"),
    "infllm fetched": (InfLLM(budget=256, fetched=512), "infllm.fetched"),
    "normalise": (H2O(normalise="no"), "h2o.normalise"),
    "alpha": (InfiniGen(alpha="abc"), "infinigen.alpha"),
    "alpha flag": (InfiniGen(alpha=True), "infinigen.alpha"),
    "recent": (InfiniGen(recent="abc"), "infinigen.recent"),
    "state rank": (LESS(state_rank=10**11), "less.state_rank"),
    "infllm unit": (InfLLM(unit=4096), "infllm.budget"),
    "infllm representatives": (InfLLM(unit=2, representatives=3), "infllm.representatives"),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_what_is_put_around_is_checked(case):
    policy, message = WRAPPED[case]
    with pytest.raises(ConfigError, match=message):
        policy.resolve(DEEP, 4096)


def test_wrappers_come_from_the_command_line():
    settings = ["budget=64", "dense_layers=0", "pyramid.steepness=4", "dense_first.layers=1"]
    made = parse_policy("quest", settings)
    assert made == DenseFirst(Pyramid(Quest(budget=64, dense_layers=0), steepness=4), layers=1)
    name, *again = label(made).split(":")
    assert parse_policy(name, again) == made
    assert policy_settings(made)["inner"]["inner"]["name"] == "quest"
    assert parse_policy("omnikv", ["filter_layers=[0,3]"]) == OmniKV(filter_layers=(0, 3))
    with pytest.raises(ConfigError, match="or of a wrapper"):
        parse_policy("quest", ["pyramid.width=3"])


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.01])
def test_the_share_of_a_softmax(share):
    rng = np.random.default_rng(7)
    weights = -np.sort(-rng.exponential(size=(3, 20)).astype(np.float32), axis=1)
    kept = np.asarray(within_share(jnp.asarray(weights), share))
    for row, mask in zip(weights, kept, strict=True):
        count = 20 if share == 1 else next(n for n in range(1, 21) if row[:n].sum() >= share * row.sum() - 1e-6)
        assert mask.tolist() == [i < count for i in range(20)]


def test_top_p_attends_to_fewer_and_a_flat_context_to_more():
    prompt = random_tokens(1, 90, seed=8)
    attended = []
    for share in (1.0, 0.9, 0.3):
        policy = Quest(budget=64, unit=4, dense_layers=0, top_p=share)
        _, state = decode.prefill(model(), prompt, [90], policy, capacity=128)
        _, state = run_steps(model(), state, random_tokens(1, 4, seed=9))
        attended.append(float(state.counters.attended[0]))
    assert attended[0] > attended[1] > attended[2]


# All of them


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.12])
def test_nominal_is_at_or_under_its_share(name, fraction):
    """Of full attention's device bytes, offloaded where the method can be; what is infeasible says the least share."""
    config, tokens = llama(), 32_768
    try:
        policy = at_share(POLICIES[name](), fraction, tokens, config)
    except Infeasible as error:
        least = float(str(error).split("at least ")[1].split()[0])
        assert fraction < least < 1
        return
    taken = footprint(config, policy, capacity=tokens, prompt=tokens, fetch="device_put")
    assert taken["device_bytes"] <= fraction * taken["full_bytes"] * 1.01
    specs = cache_specs(config, policy.resolve(config, tokens), 1, tokens, tokens, "bfloat16", "device_put")
    assert (taken["host_bytes"] > 0) == any(spec.policy.host_layout(spec) is not None for spec in specs)


SETTINGS = {
    "h2o heavy": (H2O(heavy=-1), "h2o.heavy"),
    "h2o recent": (H2O(recent=0), "h2o.recent"),
    "snapkv window": (SnapKV(observation_window=0), "snapkv.observation_window"),
    "snapkv prompt": (SnapKV(max_capacity_prompt=4), "snapkv.max_capacity_prompt"),
    "snapkv kernel": (SnapKV(kernel=4), "snapkv.kernel"),
    "snapkv pooling": (SnapKV(pooling="sum"), "snapkv.pooling"),
    "snapkv granularity": (SnapKV(granularity="layer"), "snapkv.granularity"),
    "quest unit": (Quest(unit=0), "quest.unit"),
    "quest budget": (Quest(budget=3), "quest.budget"),
    "quest dense": (Quest(dense_layers=-1), "quest.dense_layers"),
    "loki columns": (Loki(columns=99), "loki.columns"),
    "loki calibration": (Loki(calibration="later"), "loki.calibration"),
    "omnikv layers": (OmniKV(filter_layers=(7,)), "omnikv.filter_layers"),
    "omnikv order": (OmniKV(filter_layers=(2, 1)), "omnikv.filter_layers"),
    "omnikv selector": (OmniKV(selector="first"), "omnikv.selector"),
    "kivi bits": (KIVI(bits=3), "kivi.bits"),
    "kivi group": (KIVI(group=7), "kivi.group must divide"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_checked(case):
    policy, told = SETTINGS[case]
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        policy.resolve(TINY, 96)


def test_each_constructs_without_arguments_and_names_its_source():
    for name, policy in POLICIES.items():
        made = policy()
        assert made.name == name
        assert made.source
        assert hash(made) == hash(policy())
    assert StreamingLLM in POLICIES.values()


def test_a_policy_that_is_listed_nowhere_is_found():
    """Every class of every file in policies/ goes by a listed name; a layer's own form goes by its policy's."""
    for file in Path(policies.__file__).parent.glob("*.py"):
        importlib.import_module(f"jshadow.policies.{file.stem}" if file.stem != "__init__" else "jshadow.policies")

    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    own = {kind for kind in below(Policy) if kind.__module__.startswith("jshadow.") and not inspect.isabstract(kind)}
    names = {kind.name for kind in own} - {"sliding_window", ""}  # the model's own; and Wrapper, which is none itself
    assert names == set(POLICIES) | set(WRAPPERS)
    assert {kind.__name__ for kind in own if not kind.name} == {"Wrapper"}


# By hand from the papers: GiB on the device and on the host, MiB moved a step, at 131,072 tokens of Llama-3.1-8B; None:
# not told. Rows that a step fetches are no state here, but what moves; some papers count them as device bytes.
PAPERS_BYTES = {
    ("full", "resident"): (16.0, 0, 0),
    ("streaming_llm:sinks=4:window=2000", "resident"): (0.245, 0, 0),
    ("h2o", "resident"): (3.2, 0, 0),
    ("snapkv:max_capacity_prompt=2048", "resident"): (0.25, 0, 0),
    ("snapkv:max_capacity_prompt=2048:granularity=q_head", "resident"): (1.0, 0, 0),
    ("quest:budget=2048:dense_layers=0", "resident"): (17.0, 0, 0),
    ("quest:budget=2048:dense_layers=0", "device_put"): (1.0, 16.0, 256),
    ("loki", "resident"): (16.0, 0, 0),
    ("infinigen:columns=25", "device_put"): (1.5625 * 30 / 32 + 1.0, 15.0, None),
    ("infinigen:columns=16", "device_put"): (1.0 * 30 / 32 + 1.0, 15.0, None),
    ("omnikv:budget=2048", "device_put"): (4.0, 12.0, 192),
    ("kivi:bits=2:group=32", "resident"): (3.01, 0, 0),
    ("kivi:bits=2:group=64", "resident"): (2.51, 0, 0),
    ("specache:bits=2:group=64", "device_put"): (2.51, 16.0, 8),
    ("specache:bits=1:group=64", "device_put"): (1.51, 16.0, 8),
    # the published code keeps the window twice, a buffer of the blocks that it attends to, 768 tokens of a prompt's
    # unit on their way, and a representative of each query head; here window and sinks are not on the host as well
    ("infllm", "device_put"): (1.86 + 0.25 - (4096 + 2048 + 768 - 128) * 4096 * 32 / 2**30 - 0.1875, 15.5, 256),
    # the published code also keeps the selected keys and values on the device from step to step, 0.25 GiB
    ("shadowkv:rank=160:budget=2048", "device_put"): (2.57 - 0.25, 8.0, 128),
}


def test_the_table_of_bytes_is_the_papers(capsys):
    import json

    from jshadow.cli.main import main

    assert main(["policies", "--context", "131072", "--model", "llama-3.1-8b", "--json"]) == 0
    rows = {(row["setting"], row["fetch"]): row for row in json.loads(capsys.readouterr().out)["policies"]}
    assert {row["policy"] for row in rows.values()} == set(POLICIES)
    for key, (device, host, moved) in PAPERS_BYTES.items():
        row = rows[key]
        assert row["bytes_device"] / 2**30 == pytest.approx(device, rel=0.02), (key, row["parts"])
        assert row["bytes_host"] / 2**30 == pytest.approx(host, rel=0.02), (key, row["parts"])
        if moved is not None:
            assert row["bytes_moved"] / 2**20 == pytest.approx(moved, rel=0.02), key
