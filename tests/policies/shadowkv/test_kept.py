"""Resident states that keep the rows of selected chunks, as on a GPU: the same results as without."""

import dataclasses
import types
from functools import partial

import jax
import numpy as np
import pytest
from cases import BATCH, PROMPT, STEPS, TINY, model, random_tokens, setting
from random_arrays import array

from jshadow import load_state, save_state
from jshadow.cache.accounting import state_nbytes
from jshadow.engine import decode
from jshadow.evaluation.laws import law
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import abstract_of, on_backend
from jshadow.policies import ShadowKV
from jshadow.weights.params import init_params

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
    plain = law.prefilled(dataclasses.replace(setting(name, "restricted"), pool=pool))[1]
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
    rows = TINY.num_layers * BATCH * TINY.kv_heads * kept.layers[0].live.resident.shape[2] * 4 * TINY.head_dim * 4
    assert {part: more[part] for part in more.keys() - sizes.keys()} == {"keys": (rows, 0), "values": (rows, 0)}
    for i in range(3):
        plain, kept = agree(partial(decode.decode_step, model(), STEPS[:, i]), plain, kept)
    assert (np.asarray(plain.counters.hits) == np.asarray(kept.counters.hits)).all()
    assert np.asarray(kept.counters.hits).any()
    assert all(np.asarray(layer.live.keys).any() for layer in kept.layers)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [0.0, 1.5, 2.0])
@pytest.mark.parametrize("name", ["shadowkv", "shadowkv_plus", "shadowkv_transform"])
def test_nothing_depends_on_what_is_kept(name, pool, tmp_path):
    """With rows that pause, a turn of several tokens, and a state that is saved and loaded in between."""
    plain, kept = both(name, pool)
    assert (plain.specs[0].keep, kept.specs[0].keep) == (False, True)
    assert kept.layers[0].live.resident.shape[2] == max(1, pool) * kept.policy.max_selected(kept.capacity)
    for i in range(4):
        active = np.array([True, i != 1, i % 2 == 0])
        plain, kept = agree(partial(decode.decode_step, model(), STEPS[:, i], active=active), plain, kept)
    for state in (plain, kept):  # a file holds no cache, whoever wrote it
        save_state(tmp_path / str(state.specs[0].keep), state, model())
    plain, loaded = (load_state(tmp_path / str(keep), model()) for keep in (False, True))
    assert loaded.specs == plain.specs
    assert all((np.asarray(layer.live.resident) == -1).all() for layer in loaded.layers)
    plain, kept = agree(partial(decode.extend, model(), random_tokens(BATCH, 3), [3, 1, 0]), plain, keeping(loaded))
    plain, kept = agree(partial(decode.decode_step, model(), STEPS[:, 5]), plain, kept)
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
