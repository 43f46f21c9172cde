"""ShadowKV's selection: the chunks of several queries, and a second round that chooses by keys."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import shadow_layers
from cases import LENGTHS, PROMPT, SMALL, STEPS, TINY, model, run_steps
from codec_calls import every_chunk
from few import one_of, pairwise
from shadow_layers import layer_of, step_of

from jshadow.engine import decode
from jshadow.planner.bytes import abstract_state, footprint, step_footprint
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, Landmarks
from jshadow.policies.shadowkv.kept import choose
from jshadow.policies.shadowkv.selection import Finalists

SHAPES = [(1, 1, 2, 1), (2, 3, 3, 4), (2, 2, 5, 7), (1, 2, 9, 16)]
MOST_AGE = 255


def draw(rng, batch, heads, queries, count, units):
    """Scores with ties, of which some are -1, and the queries that select, the first ones of each row."""
    scores = rng.integers(-1, 4, (batch, heads, queries, count + units)).astype(np.float32)
    asked = np.arange(queries) < rng.integers(0, queries + 1, (batch, 1))
    return scores, asked


step = jax.jit(choose, static_argnums=2)


@pytest.mark.parametrize(("spare", "shape", "pooled"), one_of(3, pairwise([0, 1, 20], SHAPES, [0, 3])), ids=str)
def test_several_queries_choose_as_one_after_the_other(shape, spare, pooled):
    """The chunks and the hits are those of a plain search. Afterwards the cache holds the last query's chunks."""
    batch, heads, queries, count = shape
    rng = np.random.default_rng(sum(shape) + spare)
    resident = np.full((batch, heads, count + pooled), -1, np.int32)
    ages = np.full_like(resident, MOST_AGE) if pooled else None
    numbers = np.sort(rng.permuted(np.tile(np.arange(99), (batch, heads, queries, 1)), axis=3)[..., : count + spare])
    for turn in range(4):
        scores, asked = draw(rng, *shape, spare)
        ids = numbers if turn % 2 else None
        got = jax.tree.map(np.asarray, step(Finalists(scores, ids), asked, count, resident, ages))
        for b, h in np.ndindex(batch, heads):
            cache, held, hits, total = set(resident[b, h].tolist()) - {-1}, [], 0, 0
            for q in range(queries):
                ranked = sorted((-score, i) for i, score in enumerate(scores[b, h, q]) if score >= 0)[:count]
                chosen = sorted(i if ids is None else int(ids[b, h, q, i]) for _, i in ranked) if asked[b, q] else []
                assert got.valid[b, h, q].tolist() == [i < len(chosen) for i in range(count)]
                assert got.ids[b, h, q][: len(chosen)].tolist() == chosen
                hits, total = hits + len(cache & set(chosen)), total + len(chosen)
                cache = set(chosen) if asked[b, q] else cache
                held = chosen if asked[b, q] else held
            assert (got.total[b, h], got.hits[b, h]) == (total, hits)
            if asked[b].any():
                assert got.resident[b, h].tolist() == held + [-1] * (count + pooled - len(held))
                if pooled:
                    assert got.ages[b, h].tolist() == [0] * len(held) + [MOST_AGE] * (count + pooled - len(held))
            else:
                np.testing.assert_array_equal(got.resident[b, h], resident[b, h])
        resident, ages = got.resident, got.ages


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
        first = np.asarray(shadow_layers.scores(spec, state, step))
        ids, best = map(np.asarray, shadow_layers.best(spec, state, step, count))
        assert ids.shape == best.shape == (2, 2, 1 if name == "shared" else queries, count)
        chunks = first.shape[3]
        keys = np.asarray(shadow_layers.keys(spec, state, step, every_chunk(2, 2, chunks))).astype(dtype)
        keys = keys.astype(np.float64).reshape(2, 2, chunks, 4, 16)
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
    first, second = (state.specs[0].policy.step_flops(state.specs[0], state.layers[0]) for state in states)
    products = 2 * 2 * (12 + TINY.q_heads // TINY.kv_heads) * 64 * TINY.key_columns
    assert products <= second - first <= 1.2 * products  # the formula also counts numbers that are read as multiplied
    assert len({footprint(TINY, policy, **sizes)["device_bytes"] for policy in policies}) == 1
