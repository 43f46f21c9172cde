"""ShadowKV's selection: the chunks of a turn, a second round that chooses by keys, and spreads of any size."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from cases import LENGTHS, PROMPT, SMALL, STEPS, TINY, model, run_steps
from codec_calls import every_chunk, run
from few import one_of
from random_arrays import array

from jshadow.cache.records import LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine import decode
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import abstract_state, cache_specs, footprint, step_footprint
from jshadow.policies import Policy, ShadowKV, ShadowKVPlus
from jshadow.policies.base import step_flops
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, Landmarks

BATCH, HEADS, GROUP, DIM, CONTEXT = 2, 2, 3, 16, 157
CONFIG = dataclasses.replace(TINY, num_layers=1, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM)


def layer_of(policy: Policy, dtype: str, scale: Any = 1.0) -> tuple[CacheSpec, LayerState]:
    """The spec of a resident layer, and its state after a random prompt. Keys after RoPE are multiplied by `scale`."""
    capacity = CONTEXT + 64
    spec = cache_specs(CONFIG, policy.resolve(CONFIG, capacity), BATCH, capacity, CONTEXT, dtype, "resident")[0]
    rng, shape = np.random.default_rng(0), (BATCH, CONTEXT, HEADS, DIM)
    k, v = (rng.standard_normal(shape) for _ in range(2))
    positions, lengths = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), shape[:2]), np.full(BATCH, CONTEXT)
    tail = spec.policy.reads.last_queries
    queries = array(rng.standard_normal((BATCH, tail, HEADS * GROUP, DIM)), dtype) if tail else None
    prompt = PromptKV(array(k, dtype), array(k * scale, dtype), array(v, dtype), array(lengths), positions, queries)
    return spec, jax.tree.map(np.asarray, run.compress(spec.policy, spec, prompt))


def step_of(queries: int, dtype: str) -> StepKV:
    """Random tokens after the prompt. In the second row the last of several is not valid."""
    rng = np.random.default_rng(queries)
    q, k, v = (
        array(rng.standard_normal((BATCH, queries, heads, DIM)), dtype) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    positions = np.broadcast_to(np.arange(CONTEXT, CONTEXT + queries, dtype=np.int32), (BATCH, queries))
    inverse = np.asarray(inverse_frequencies(CONFIG.rope, DIM), np.float32)
    angles, valid = positions[..., None] * inverse, np.arange(queries) < np.array([[queries], [max(1, queries - 1)]])
    lengths = np.full(BATCH, CONTEXT, np.int32)
    return StepKV(q, q, k, k, v, positions, valid, lengths, inverse, np.cos(angles), np.sin(angles))


@functools.partial(jax.jit, static_argnums=(0, 3))
def chosen(spec: CacheSpec, state: LayerState, step: StepKV, count: int) -> Any:
    """The scores of all chunks, the ids and scores of those that are chosen, and the keys of all chunks."""
    scores = spec.policy.scores(spec, state, step)
    ids = every_chunk(BATCH, HEADS, scores.shape[3])
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


@pytest.mark.parametrize(("name", "dtype"), one_of(8, itertools.product(SETTINGS, ["float32", "bfloat16"])))
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


LEVELS = [{"landmarks": Landmarks(tokens=1, levels=levels)} for levels in (1, 2)]
ROUNDS = [{"choice": Choice(rounds=rounds)} for rounds in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "budgets"),
    [(ShadowKV, ROUNDS, (96, 12)), (ShadowKV, LEVELS, (24, 4)), (ShadowKVPlus, LEVELS, (24, 4))],
)
def test_all_chunks_are_all_chunks(kind, settings, budgets):
    """A second round, or level of landmarks, changes the result only if it cannot choose among all chunks."""
    for budget, same in zip(budgets, (True, False), strict=True):
        policies = [kind(rank=12, budget=budget, **one, **SMALL) for one in settings]
        states = [decode.prefill(model(), PROMPT, LENGTHS, one, capacity=96, fetch="resident")[1] for one in policies]
        one, two = (np.asarray(run_steps(model(), state, STEPS[:, :3])[0]) for state in states)
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
