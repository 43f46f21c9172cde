"""The places of selected units from one query to the next, against sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshadow.policies.shadowkv import selection
from jshadow.policies.shadowkv.selection import in_turn

SHAPES = [(1, 1, 1, 1), (2, 3, 1, 4), (2, 2, 5, 7), (1, 2, 9, 16)]


@pytest.fixture(params=[4, 256], ids=["blocks", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(selection, "PLACES", request.param)
    jax.clear_caches()


def test_many_places_take_little_memory():
    ids = jax.ShapeDtypeStruct((1, 8, 1, 4096), jnp.int32)
    shapes = (ids, jax.ShapeDtypeStruct(ids.shape, bool), jax.ShapeDtypeStruct((1, 1), bool),
              jax.ShapeDtypeStruct((1, 8, 4096), jnp.int32))  # fmt: skip
    program = jax.jit(in_turn).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < 5 * 8 * 4096 * selection.PLACES + 2**20


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
