"""ShadowKV's selection: the chunks of a turn, a second round, the cache of kept chunks, and outliers."""

import dataclasses
import functools
import itertools
import types
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from cases import BATCH, LENGTHS, PROMPT, SMALL, STEPS, TINY, model, random_tokens, run_steps, setting
from codec_calls import every_chunk, run
from few import one_of, pairwise, quick
from random_arrays import array, wide

from jshadow import load_state, save_state
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.records import LayerState, PromptKV, Rebuild, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine import decode
from jshadow.evaluation.laws import law
from jshadow.ops.rope import cos_sin, inverse_frequencies, rotate
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend
from jshadow.planner.machine import abstract_state, footprint, step_footprint
from jshadow.policies import Policy, ShadowKV, ShadowKVPlus
from jshadow.policies.base import step_flops
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, Landmarks
from jshadow.policies.shadowkv.key_codecs import ExactCodec, KeyCodec, LowRankCodec, TransformCodec
from jshadow.policies.shadowkv.selection import loses_more
from jshadow.weights.params import init_params

ROWS, HEADS, GROUP_HEADS, DIM, CONTEXT = 2, 2, 3, 16, 157
CONFIG = dataclasses.replace(TINY, num_layers=1, q_heads=HEADS * GROUP_HEADS, kv_heads=HEADS, head_dim=DIM)


def layer_of(policy: Policy, dtype: str, scale: Any = 1.0) -> tuple[CacheSpec, LayerState]:
    """The spec of a resident layer, and its state after a random prompt. Keys after RoPE are multiplied by `scale`."""
    capacity = CONTEXT + 64
    spec = cache_specs(CONFIG, policy.resolve(CONFIG, capacity), ROWS, capacity, CONTEXT, dtype, "resident")[0]
    rng, shape = np.random.default_rng(0), (ROWS, CONTEXT, HEADS, DIM)
    k, v = (rng.standard_normal(shape) for _ in range(2))
    positions, lengths = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), shape[:2]), np.full(ROWS, CONTEXT)
    tail = spec.policy.reads.last_queries
    queries = array(rng.standard_normal((ROWS, tail, HEADS * GROUP_HEADS, DIM)), dtype) if tail else None
    prompt = PromptKV(array(k, dtype), array(k * scale, dtype), array(v, dtype), array(lengths), positions, queries)
    return spec, jax.tree.map(np.asarray, run.compress(spec.policy, spec, prompt))


def step_of(queries: int, dtype: str) -> StepKV:
    """Random tokens after the prompt. In the second row the last of several is not valid."""
    rng = np.random.default_rng(queries)
    q, k, v = (
        array(rng.standard_normal((ROWS, queries, heads, DIM)), dtype) for heads in (HEADS * GROUP_HEADS, HEADS, HEADS)
    )
    positions = np.broadcast_to(np.arange(CONTEXT, CONTEXT + queries, dtype=np.int32), (ROWS, queries))
    inverse = np.asarray(inverse_frequencies(CONFIG.rope, DIM), np.float32)
    angles, valid = positions[..., None] * inverse, np.arange(queries) < np.array([[queries], [max(1, queries - 1)]])
    lengths = np.full(ROWS, CONTEXT, np.int32)
    return StepKV(q, q, k, k, v, positions, valid, lengths, inverse, np.cos(angles), np.sin(angles))


@functools.partial(jax.jit, static_argnums=(0, 3))
def chosen(spec: CacheSpec, state: LayerState, step: StepKV, count: int) -> Any:
    """The scores of all chunks, the ids and scores of those that are chosen, and the keys of all chunks."""
    scores = spec.policy.scores(spec, state, step)
    ids = every_chunk(ROWS, HEADS, scores.shape[3])
    best = spec.policy.finalists(spec, state, step, count).best(count)
    return scores, best, spec.policy.rebuild(spec, state, step).keys(ids)


POLICY = ShadowKV(rank=24, chunk_size=4, budget=24, outlier_chunks=3, local_chunks=2, choice=Choice(rounds=2))
PACKED = {"rank": None, "keys": "transform", "keys.profile": (3, 10, 16)}
SETTINGS = {
    "lowrank": POLICY,
    "transform": with_settings(POLICY, PACKED | {"landmarks.dtype": "int4", "landmarks.tokens": 2}),
    "few_chunks": dataclasses.replace(POLICY, budget=100),  # twice the budget exceeds the number of chunks
    "shared": with_settings(POLICY, {"quirks.turn_selection": "shared"}),
}


@pytest.mark.parametrize(
    ("name", "dtype"), one_of(4, zip(SETTINGS, ["float32", "float32", "bfloat16", "float32"], strict=True))
)
def test_chosen_are_the_best_of_twice_the_chunks_by_their_keys(name, dtype):
    """For one query, and for three of a turn that choose separately or together. Invalid queries have no effect."""
    spec, state = layer_of(SETTINGS[name], dtype)
    count = spec.policy.max_selected(spec.capacity)
    for queries in (1, 3):
        step = step_of(queries, dtype)
        first, (ids, best), keys = jax.tree.map(np.asarray, chosen(spec, state, step, count))
        assert ids.shape == best.shape == (2, 2, 1 if name == "shared" else queries, count)
        keys = keys.astype(dtype).astype(np.float64).reshape(2, 2, -1, 4, 16)
        q, valid = np.asarray(step.q_post, np.float64), np.asarray(step.valid)
        for b, h, chooser in np.ndindex(ids.shape[:3]):
            wide = np.argsort(-first[b, h, chooser], kind="stable")[: 2 * count]
            wide = wide[first[b, h, chooser][wide] >= 0]
            asking = [t for t in range(queries) if valid[b, t]] if name == "shared" else [chooser]
            mass = np.zeros((3, len(wide)))
            for t in asking:
                weight = np.exp(np.einsum("gd,ncd->gnc", q[b, t, 3 * h : 3 * h + 3], keys[b, h, wide]) / 4)
                mass += (weight / weight.sum(axis=(1, 2), keepdims=True)).sum(axis=2)
            if not valid[b, chooser]:
                continue
            wanted = mass.max(axis=0)
            order = np.argsort(-wanted, kind="stable")[:count]
            real, rtol = best[b, h, chooser] >= 0, 3e-4 if dtype == "float32" else 0.03
            assert real.sum() == len(order)
            np.testing.assert_allclose(best[b, h, chooser][real], wanted[order], rtol=rtol)
            if dtype == "float32":
                assert set(ids[b, h, chooser][real]) == set(wide[order])


def test_a_spread_that_float16_cannot_hold_is_its_largest_number():
    huge = np.where(np.arange(CONTEXT) % 2, 1e6, -1e6)[:, None, None]
    policy = ShadowKV(24, 4, 12, 3, 2, landmarks=Landmarks(tokens=1, levels=2, order=2))
    spec, state = layer_of(policy, "bfloat16", scale=huge)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in state.frozen.spread)
    _, (_, best), _ = chosen(spec, state, step_of(1, "bfloat16"), spec.policy.max_selected(spec.capacity))
    assert np.isfinite(np.asarray(best)).all()


ONE = dataclasses.replace(TINY, num_layers=1)  # what a layer selects does not need more of them
LEVELS = [{"landmarks": Landmarks(tokens=1, levels=levels)} for levels in (1, 2)]
ROUNDS = [{"choice": Choice(rounds=rounds)} for rounds in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "budgets"), [(ShadowKV, ROUNDS, (96, 12)), (ShadowKVPlus, LEVELS, (24, 4))]
)
def test_all_chunks_are_all_chunks(kind, settings, budgets):
    """A second round, or level of landmarks, changes the result only if it cannot choose among all chunks."""
    params = model(ONE)
    for budget, same in zip(budgets, (True, False), strict=True):
        policies = [kind(rank=12, budget=budget, **one, **SMALL) for one in settings]
        states = [decode.prefill(params, PROMPT, LENGTHS, one, capacity=96, fetch="resident")[1] for one in policies]
        one, two = (np.asarray(run_steps(params, state, STEPS[:, :3])[0]) for state in states)
        assert np.allclose(one, two, atol=1e-5) == same


def test_a_step_rebuilds_three_times_the_keys_and_moves_no_more():
    sizes = dict(capacity=512, prompt=500, dtype="bfloat16", fetch="device_put")
    policies = [ShadowKV(rank=12, budget=64, **SMALL, **rounds) for rounds in ROUNDS]
    one, two = (step_footprint(TINY, policy, **sizes) for policy in policies)
    assert two["bytes_moved"] == one["bytes_moved"] > 0
    assert two["bytes_read"] - one["bytes_read"] == 2 * 2 * 12 * 64 * TINY.kv_heads * TINY.num_layers
    states = [abstract_state(TINY, policy, batch=1, **sizes) for policy in policies]
    first, second = (step_flops(state.specs[0], state.layers[0]) for state in states)
    products = 2 * 2 * (12 + TINY.q_heads // TINY.kv_heads) * 64 * TINY.key_columns
    assert products <= second - first <= 1.2 * products  # the formula also counts numbers that are read as multiplied
    assert len({footprint(TINY, policy, **sizes)["device_bytes"] for policy in policies}) == 1


CACHED = ("values", "keys")


def keeping(state):
    """A prefilled state in the form that it has on a GPU."""
    shapes = abstract_of(on_backend(state.specs, "gpu"), state.policy)
    layers = []
    for layer, like in zip(state.layers, shapes.layers, strict=True):
        rows = {name: array(np.zeros(getattr(like.live, name).shape), like.live.values.dtype) for name in CACHED}
        layers.append(layer.replace(live=layer.live.replace(**rows)))
    return state.replace(layers=tuple(layers), specs=shapes.specs)


@partial(jax.jit, static_argnums=0)
def rebuilt(spec, layer, inverse, lengths, ids):
    """The keys of chunks, rebuilt from their code."""
    return spec.policy.rebuild(spec, layer, types.SimpleNamespace(inverse=inverse, lengths=lengths)).keys(ids)


def both(name, pool):
    """A prefilled state with a pool, and the same in the form that it has on a GPU."""
    policy = dataclasses.replace(setting(name, "restricted"), pool=pool)
    _, plain = decode.prefill(model(ONE), PROMPT, LENGTHS, policy, capacity=law.CAPACITY)
    return plain, keeping(plain.fork())


def agree(step, plain, kept):
    """The states after a step or a turn of both, whose logits must be equal."""
    (want, plain), (got, kept) = (step(state) for state in (plain, kept))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    return plain, kept


def test_a_step_is_that_of_a_state_without_kept_rows():
    """The kept rows are counted: two for each selected chunk, keys and values.

    It may take over two seconds: no other quick test has states as on a GPU.
    """
    plain, kept = both("shadowkv", 1.5)
    sizes, more = state_nbytes(plain), state_nbytes(kept)
    rows = BATCH * TINY.kv_heads * kept.layers[0].live.resident.shape[2] * 4 * TINY.head_dim * 4
    assert {part: more[part] for part in more.keys() - sizes.keys()} == {"keys": (rows, 0), "values": (rows, 0)}
    for i in range(3):
        plain, kept = agree(partial(decode.decode_step, model(ONE), STEPS[:, i]), plain, kept)
    assert (np.asarray(plain.counters.hits) == np.asarray(kept.counters.hits)).all()
    assert np.asarray(kept.counters.hits).any()
    assert all(np.asarray(layer.live.keys).any() for layer in kept.layers)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pool"), [("shadowkv", 0.0), ("shadowkv_plus", 1.5), ("shadowkv_transform", 2.0)])
def test_nothing_depends_on_what_is_kept(name, pool, tmp_path):
    """With rows that pause, a turn of several tokens, and a state that is saved and loaded in between."""
    plain, kept = both(name, pool)
    assert (plain.specs[0].keep, kept.specs[0].keep) == (False, True)
    assert kept.layers[0].live.resident.shape[2] == max(1, pool) * kept.policy.max_selected(kept.capacity)
    for i in range(4):
        active = np.array([True, i != 1, i % 2 == 0])
        plain, kept = agree(partial(decode.decode_step, model(ONE), STEPS[:, i], active=active), plain, kept)
    for state in (plain, kept):  # a file holds no cache, whoever wrote it
        save_state(tmp_path / str(state.specs[0].keep), state, model(ONE))
    plain, loaded = (load_state(tmp_path / str(keep), model(ONE)) for keep in (False, True))
    assert loaded.specs == plain.specs
    assert all((np.asarray(layer.live.resident) == -1).all() for layer in loaded.layers)
    plain, kept = agree(partial(decode.extend, model(ONE), random_tokens(BATCH, 3), [3, 1, 0]), plain, keeping(loaded))
    plain, kept = agree(partial(decode.decode_step, model(ONE), STEPS[:, 5]), plain, kept)
    assert not np.asarray(kept.counters.fetched).any()
    for spec, layer, other in zip(kept.specs, kept.layers, plain.layers, strict=True):
        ids = np.asarray(layer.live.resident)
        np.testing.assert_array_equal(ids, other.live.resident)
        inverse = inverse_frequencies(spec.rope, spec.head_dim, spec.capacity)
        keys = np.asarray(rebuilt(spec, layer, inverse, kept.lengths, np.maximum(ids, 0))).reshape(
            layer.live.keys.shape
        )
        np.testing.assert_allclose(np.asarray(layer.live.keys)[ids >= 0], keys[ids >= 0], rtol=1e-5, atol=1e-5)
    fields = [field.name for field in dataclasses.fields(kept.counters)]
    for field in set(fields) - {"attended"}:
        np.testing.assert_array_equal(getattr(kept.counters, field), getattr(plain.counters, field))


@pytest.mark.slow
def test_a_pool_changes_no_bit_of_a_result_and_moves_less():
    """The hits are those of an LRU cache as anyone would write it, and the bytes are those of its misses."""
    runs = {}
    for pool in (0.0, 2.0):
        policy = dataclasses.replace(setting("shadowkv", "restricted"), pool=pool)
        state, logits, selected = law.prefilled(policy, "zero_copy")[1], [], []
        for i in range(8):
            out, state = decode.decode_step(model(), STEPS[:, i], state)
            logits.append(np.asarray(out))
            held = [(np.asarray(layer.live.resident), layer.live.ages) for layer in state.layers]
            selected.append([np.where(True if ages is None else np.asarray(ages) == 0, ids, -1) for ids, ages in held])
        runs[pool] = np.stack(logits), selected, state.counters, state.specs[0].policy.max_places(state.capacity)
    (want, chosen, plain, few), (got, same, counters, many) = runs.values()
    np.testing.assert_array_equal(got, want)
    assert many == 2 * few
    hits, total = np.zeros(BATCH, int), np.zeros(BATCH, int)
    for layer, b, h in np.ndindex(TINY.num_layers, BATCH, TINY.kv_heads):
        recent: list[int] = []  # the least recently selected first
        for step, other in zip(chosen, same, strict=True):
            ids = sorted(step[layer][b, h][step[layer][b, h] >= 0].tolist())
            assert ids == sorted(other[layer][b, h][other[layer][b, h] >= 0].tolist())
            hits[b] += len(set(ids) & set(recent))
            total[b] += len(ids)
            recent = [*[chunk for chunk in recent if chunk not in ids], *ids][-many:]
    # Chunks of one selection are equally old. Which of them leaves first is a matter of places, and may cost hits.
    assert counters.selected.tolist() == total.tolist()
    assert (np.abs(np.asarray(counters.hits) - hits) <= 0.1 * hits).all()
    assert (np.asarray(counters.hits) >= np.asarray(plain.hits)).all()
    assert np.asarray(counters.hits).sum() > np.asarray(plain.hits).sum()
    chunk = 4 * TINY.head_dim * 4 // 64  # of FETCH_QUANTUM bytes each
    for counts in (plain, counters):
        np.testing.assert_array_equal(counts.fetched, chunk * (np.asarray(counts.selected) - np.asarray(counts.hits)))


@pytest.mark.slow
def test_a_pool_changes_no_bit_after_a_turn():
    """A turn rebuilds the keys of 80 tokens at once, and a step those of 16. At rank 5, XLA rounds them differently."""
    config = dataclasses.replace(TINY, num_layers=1, q_heads=1, kv_heads=1)
    params, runs = init_params(config, seed=0, dtype="float32"), []
    for pool in (0.0, 4.0):
        policy = ShadowKV(5, 4, 16, 1, 1, extend_piece=5, pool=pool)
        _, state = decode.prefill(params, PROMPT[:1], np.array([61]), policy, capacity=96, fetch="zero_copy")
        _, state = decode.extend(params, random_tokens(1, 5), np.array([5]), state)
        runs.append([])
        for i in range(12):
            out, state = decode.decode_step(params, STEPS[:1, i], state)
            runs[-1].append(np.asarray(out))
    np.testing.assert_array_equal(*runs)


CHUNK = 4
CODECS: dict[str, KeyCodec] = {
    "lowrank": LowRankCodec(9),
    "transform": TransformCodec((3, 10, 8)),
    "exact": ExactCodec(),
}


def keys_of(lengths: list[int], heads: int = 2, dim: int = 12, seed: int = 0) -> np.ndarray:
    """Keys [B, S, h, d] in a few directions, with some different tokens, padded with numbers that must not be read."""
    rng = np.random.default_rng(seed)
    keys = np.full((len(lengths), max(lengths) + 3, heads, dim), 99.0)
    for row, length in enumerate(lengths):
        plain = rng.standard_normal((length, 5)) @ rng.standard_normal((5, heads * dim)) + 3
        plain += 0.1 * rng.standard_normal(plain.shape)
        plain[rng.integers(0, length, max(1, length // 15))] += 4 * rng.standard_normal(heads * dim)
        keys[row, :length] = plain.reshape(length, heads, dim)
    return keys


@pytest.mark.parametrize(
    ("name", "weighed", "block", "dtype"),
    one_of(8, pairwise(CODECS, [False, True], [3, 16, 2048], ["float32", "bfloat16"])),
)
def test_losses_are_those_of_the_worst_token(name, weighed, block, dtype):
    """The result does not depend on the block, and chunks after the end of the prompt have no error."""
    codec, lengths = CODECS[name], [57, 30]
    keys = array(keys_of(lengths), dtype)
    sizes = np.random.default_rng(1).uniform(0.2, 2, (2, 2, 12)) if weighed else np.ones((2, 2, 12))
    weights = array(sizes, np.float32) if weighed else None
    _, decoded, lost = jax.tree.map(np.asarray, run.losses(codec, keys, np.array(lengths), 20, CHUNK, weights, block))
    assert lost.shape == (2, 2, 20)
    assert not lost[:, :, 15:].any()
    off = ((wide(decoded)[:, :60] - wide(keys)) * sizes[:, None]) ** 2
    want = off.sum(axis=3).reshape(2, 15, CHUNK, 2).max(axis=2).swapaxes(1, 2)
    for row, length in enumerate(lengths):
        whole = length // CHUNK
        np.testing.assert_allclose(lost[row, :, :whole], want[row, :, :whole], rtol=1e-3, atol=1e-5)
    assert (lost[0, :, :14] == 0).all() == (name == "exact")


@pytest.mark.parametrize(
    ("dtype", "name"),
    quick([("bfloat16", "transform")], itertools.product(["float32", "bfloat16"], ["lowrank", "transform"])),
)
def test_the_same_keys_later_are_no_worse(name, dtype):
    """Keys far from zero, as with biases, have a rounding error that is larger than the error of a good code."""
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((1, 160, 2, 12)) * 0.5 + np.where(rng.random((2, 12)) < 0.2, 60, 0)
    codec = LowRankCodec(24) if name == "lowrank" else CODECS[name]
    k_pre, chunks = array(keys, dtype), 160 // CHUNK
    code, _, lost = run.losses(codec, k_pre, np.array([160]), chunks, CHUNK, None, 2048)
    most = np.asarray(lost).max(axis=2)
    inverse = np.float32(10000.0 ** -(np.arange(6) / 6))

    @jax.jit
    def both(k_pre, code, inverse, at):
        """Later keys, and what is rebuilt of them."""
        tail = codec.project(k_pre, code.right).swapaxes(1, 2)
        tail = tail.reshape(*tail.shape[:2], chunks, -1)
        tail = tail if code.left.ndim == 4 else tail[:, 0]
        rebuild = Rebuild(code.left, code.right, inverse, tail, at[:1] // CHUNK, codec=codec, unit=CHUNK)
        later = rotate(k_pre, *(x[None, :, None] for x in cos_sin(at, inverse)))
        later = later.transpose(0, 2, 1, 3).reshape(1, 2, chunks, CHUNK, 12)
        return later, rebuild.keys(chunks + every_chunk(1, 2, chunks)).reshape(later.shape)

    later, rebuilt = map(np.asarray, both(k_pre, code, inverse, 160 + np.arange(160)))
    unlike, above = later.copy(), jax.jit(functools.partial(loses_more, weights=None))
    unlike[:, :, 7, 2] *= -1
    if dtype == "bfloat16":  # without the allowance for rounding, these keys would be above the limit
        off = ((wide(rebuilt) - wide(later)) ** 2).sum(axis=4)
        assert (off.max(axis=3) > most[..., None]).any()
        assert not np.asarray(above(rebuilt, later, most=most)).any()
    found = np.asarray(above(rebuilt, unlike, most=most * np.float32(1.01)))
    assert found[:, :, 7].all()
    assert found.sum() == 2
    assert np.asarray(above(later, later, most=np.full((1, 2), -1, np.float32))).all()
    assert not np.asarray(above(rebuilt, unlike, most=np.full((1, 2), np.inf, np.float32))).any()
