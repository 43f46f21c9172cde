"""Resident states that keep the rows of selected chunks, as on a GPU: the same results as without."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest
from cases import BATCH, STEPS, TINY, model, prefilled, random_tokens

from jshadow import load_state, save_state
from jshadow.cache.accounting import state_nbytes
from jshadow.engine import decode
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import abstract_of, on_backend

NAMES = ("shadowkv", "shadowkv_plus", "shadowkv_transform")


def keeping(state):
    """A prefilled state in the form that it has on a GPU."""
    shapes = abstract_of(on_backend(state.specs, "gpu"), state.policy)
    layers = []
    for layer, like in zip(state.layers, shapes.layers, strict=True):
        rows = {name: jnp.zeros(getattr(like.live, name).shape, like.live.values.dtype) for name in ("values", "keys")}
        layers.append(layer.replace(live=layer.live.replace(**rows)))
    return state.replace(layers=tuple(layers), specs=shapes.specs)


def rebuilt(spec, layer, lengths):
    """The keys of the resident chunks, rebuilt from their code."""
    inverse = jnp.asarray(inverse_frequencies(spec.rope, spec.head_dim, spec.capacity))
    step = types.SimpleNamespace(inverse=inverse, lengths=lengths)
    return spec.policy.rebuild(spec, layer, step).keys(jnp.maximum(layer.live.resident, 0))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_what_is_kept(name, tmp_path):
    """With rows that pause, a turn of several tokens, and a state that is saved and loaded in between."""
    plain = prefilled(name, "restricted")[1]
    kept = keeping(plain.fork())
    assert (plain.specs[0].keep, kept.specs[0].keep) == (False, True)
    for i in range(4):
        active = np.array([True, i != 1, i % 2 == 0])
        (want, plain), (got, kept) = (
            decode.decode_step(model(), STEPS[:, i], state, active=active) for state in (plain, kept)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    save_state(tmp_path / "kept", kept, model())
    kept = load_state(tmp_path / "kept", model())
    assert kept.specs[0].keep
    turn, new = random_tokens(BATCH, 3), np.array([3, 1, 0])
    (want, plain), (got, kept) = (decode.extend(model(), turn, new, state) for state in (plain, kept))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    (want, plain), (got, kept) = (decode.decode_step(model(), STEPS[:, 5], state) for state in (plain, kept))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not np.asarray(kept.counters.fetched).any()
    for spec, layer, other in zip(kept.specs, kept.layers, plain.layers, strict=True):
        ids = np.asarray(layer.live.resident)
        np.testing.assert_array_equal(ids, other.live.resident)
        keys = np.asarray(rebuilt(spec, layer, kept.lengths)).reshape(layer.live.keys.shape)
        np.testing.assert_allclose(np.asarray(layer.live.keys)[ids >= 0], keys[ids >= 0], rtol=1e-5, atol=1e-5)
    fields = [field.name for field in dataclasses.fields(kept.counters)]
    for field in set(fields) - {"attended"}:
        np.testing.assert_array_equal(getattr(kept.counters, field), getattr(plain.counters, field))


def test_what_is_kept_is_counted():
    """A state on a GPU has two more rows for each selected chunk, keys and values."""
    state = prefilled("shadowkv", "restricted")[1]
    plain, kept = state_nbytes(state), state_nbytes(keeping(state))
    row = 4 * TINY.head_dim * 4  # bytes of a chunk of 4 tokens
    one = TINY.num_layers * BATCH * TINY.kv_heads * 4 * row
    assert {part: kept[part] for part in kept.keys() - plain.keys()} == {"keys": (one, 0), "values": (one, 0)}
