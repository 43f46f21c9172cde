"""ShadowKV's selection: chunks keep their places from query to query, and a second round chooses by keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LENGTHS, PROMPT, SMALL, STEPS, TINY, model, run_steps

from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation.speed.layer import Shape, layer_state, random_step
from jshadow.planner.bytes import abstract_state, footprint, step_footprint
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice
from jshadow.policies.shadowkv.selection import in_turn
from pallas_kernels.select_chunks import reference

SHAPES = [(1, 1, 1, 1), (2, 3, 1, 4), (2, 2, 5, 7), (1, 2, 9, 16)]


@pytest.fixture(params=[4, 256], ids=["blocks", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(reference, "PLACES", request.param)
    jax.clear_caches()


def test_many_places_take_little_memory():
    ids = jax.ShapeDtypeStruct((1, 8, 1, 4096), jnp.int32)
    shapes = (
        ids,
        jax.ShapeDtypeStruct(ids.shape, bool),
        jax.ShapeDtypeStruct((1, 1), bool),
        jax.ShapeDtypeStruct((1, 8, 4096), jnp.int32),
    )
    program = jax.jit(in_turn).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 5 * 8 * 4096 * reference.PLACES + 2**20


def draw(rng, batch, heads, queries, count, units):
    ids = np.stack([rng.permutation(units)[:count] for _ in range(batch * heads * queries)])
    ids = ids.reshape(batch, heads, queries, count)
    valid = np.arange(count) < rng.integers(0, count + 1, (batch, heads, queries, 1))
    asked = rng.random((batch, queries)) < 0.8
    return ids.astype(np.int32), valid & asked[:, None, :, None], asked


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spare", [0, 1, 20])
def test_what_stays_keeps_its_place(shape, spare, block):
    batch, heads, queries, count = shape
    rng = np.random.default_rng(sum(shape) + spare)
    resident = np.full((batch, heads, count), -1, np.int32)
    for _ in range(6):
        ids, valid, asked = draw(rng, *shape, count + spare)
        got, good, hit, held = jax.tree.map(np.asarray, jax.jit(in_turn)(ids, valid, asked, jnp.asarray(resident)))
        for b, h in np.ndindex(batch, heads):
            before = resident[b, h]
            for q in range(queries):
                chosen = set(ids[b, h, q][valid[b, h, q]].tolist())
                assert sorted(got[b, h, q]) == sorted(ids[b, h, q])
                assert set(got[b, h, q][good[b, h, q]].tolist()) == chosen
                np.testing.assert_array_equal(hit[b, h, q], good[b, h, q] & (got[b, h, q] == before))
                assert hit[b, h, q].sum() == len(chosen & set(before.tolist()))
                if asked[b, q]:
                    before = np.where(good[b, h, q], got[b, h, q], -1)
            np.testing.assert_array_equal(held[b, h], before)
        resident = held


def test_queries_together_are_queries_one_by_one():
    rng = np.random.default_rng(0)
    ids, valid, asked = draw(rng, 2, 2, 6, 5, 9)
    start = jnp.full((2, 2, 5), -1, jnp.int32)
    *together, last = in_turn(ids, valid, asked, start)
    held, parts = start, []
    for q in range(6):
        *part, held = in_turn(ids[:, :, q : q + 1], valid[:, :, q : q + 1], asked[:, q : q + 1], held)
        parts.append(part)
    np.testing.assert_array_equal(held, last)
    for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(whole, jnp.concatenate(pieces, axis=2))


POLICY = ShadowKV(rank=24, chunk_size=4, budget=24, outlier_chunks=3, local_chunks=2, choice=Choice(rounds=2))


SETTINGS = {
    "lowrank": POLICY,
    "transform": with_settings(
        POLICY,
        {
            "rank": None,
            "keys": "transform",
            "keys.profile": (3, 10, 16),
            "landmarks.dtype": "int4",
            "landmarks.tokens": 2,
        },
    ),
    "few_chunks": dataclasses.replace(POLICY, budget=100),  # twice the budget exceeds the number of chunks
    "shared": with_settings(POLICY, {"quirks.turn_selection": "shared"}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_chosen_are_the_best_of_twice_the_chunks_by_their_keys(name, dtype):
    """For one query, and for three of a turn that choose separately or together. Invalid queries have no effect."""
    shape = Shape(context=157, batch=2, heads=6, kv_heads=2, head_dim=16, dtype=dtype)
    spec, state = layer_state(shape, SETTINGS[name], "resident")
    policy, count = spec.policy, spec.policy.max_selected(spec.capacity)
    for queries in (1, 3):
        step = random_step(shape, queries, queries)
        step = step.replace(valid=jnp.arange(queries) < jnp.array([[queries], [max(1, queries - 1)]]))
        first = np.asarray(policy.scores(spec, state, step))
        ids, best = (np.asarray(x) for x in policy.finalists(spec, state, step, count).best(count))
        assert ids.shape == best.shape == (2, 2, 1 if name == "shared" else queries, count)
        chunks = first.shape[3]
        every = jnp.broadcast_to(jnp.arange(chunks), (2, 2, chunks))
        keys = policy.rebuild(spec, state, step).keys(every).astype(dtype)
        keys = np.asarray(keys, np.float64).reshape(2, 2, chunks, 4, 16)
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


def test_all_chunks_are_all_chunks():
    """A second round changes the result only if the budget is smaller than the number of chunks."""
    for budget, same in ((96, True), (12, False)):
        states = [
            decode.prefill(
                model(),
                PROMPT,
                LENGTHS,
                ShadowKV(rank=12, budget=budget, choice=Choice(rounds=rounds), **SMALL),
                capacity=96,
                fetch="resident",
            )[1]
            for rounds in (1, 2)
        ]
        one, two = (np.asarray(run_steps(model(), state, STEPS[:, :3])[0]) for state in states)
        assert np.allclose(one, two, atol=1e-5) == same


def test_a_step_rebuilds_three_times_the_keys_and_moves_no_more():
    sizes = dict(capacity=512, prompt=500, dtype="bfloat16", fetch="device_put")
    one, two = (
        step_footprint(TINY, ShadowKV(rank=12, budget=64, **SMALL, choice=Choice(rounds=rounds)), **sizes)
        for rounds in (1, 2)
    )
    assert two["bytes_moved"] == one["bytes_moved"] > 0
    left = 2 * 12 * 64 * TINY.kv_heads * TINY.num_layers
    assert two["bytes_read"] - one["bytes_read"] == 2 * left
    states = [
        abstract_state(TINY, ShadowKV(rank=12, budget=64, **SMALL, choice=Choice(rounds=rounds)), batch=1, **sizes)
        for rounds in (1, 2)
    ]
    first, second = (state.specs[0].policy.step_flops(state.specs[0], state.layers[0]) for state in states)
    products = 2 * 2 * (12 + TINY.q_heads // TINY.kv_heads) * 64 * TINY.key_columns
    assert products <= second - first <= 1.2 * products  # the formula also counts numbers that are read as multiplied
    kept = [
        footprint(TINY, ShadowKV(rank=12, budget=64, **SMALL, choice=Choice(rounds=rounds)), **sizes)["device_bytes"]
        for rounds in (1, 2)
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("rounds", [0, 3, 1.0, True])
def test_rounds_are_one_or_two(rounds):
    for kind in (ShadowKV, ShadowKVPlus):
        with pytest.raises(ConfigError, match=r"choice\.rounds must be an integer in \[1, 2\]"):
            kind(choice=Choice(rounds=rounds)).resolve(TINY, 96)
