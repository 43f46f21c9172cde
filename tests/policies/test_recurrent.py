"""A recurrent layer gives tokens back: each row goes on as one that never held them. Against a recurrence in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY

from jshadow import Full
from jshadow.cache.records import StepKV
from jshadow.cache.recurrence import RECENT
from jshadow.cache.state import Counters, KVState
from jshadow.errors import StateMismatch
from jshadow.models.config import DeltaNet
from jshadow.planner.bytes import cache_specs

ROWS, ROUNDS, LONG = 48, 14, 40
SIZES = DeltaNet(layers=(0,), key_heads=2, value_heads=4, key_dim=4, value_dim=6)
CONFIG = dataclasses.replace(TINY, num_layers=1, recurrent=SIZES)
(SPEC,) = cache_specs(CONFIG, Full(), ROWS, 512, 1, "float32", "resident")
RNG = np.random.default_rng(7)
HEADS = {"q": (2, 4), "k": (2, 4), "v": (4, 6)}
TAPS = {name: RNG.standard_normal((SIZES.taps, *shape)).astype(np.float32) for name, shape in HEADS.items()}


class Row:
    """A row's inputs, and its state after each of them, float64."""

    def __init__(self):
        self.inputs = {name: [np.zeros(shape)] * (SIZES.taps - 1) for name, shape in HEADS.items()}
        self.states = [np.zeros((4, 4, 6))]

    def feed(self, token):
        """The output of a token."""
        parts = {}
        for name, inputs in self.inputs.items():
            inputs.append(token[name].astype(np.float64))
            total = sum(tap * x for tap, x in zip(TAPS[name], inputs[-SIZES.taps :], strict=True))
            parts[name] = total / (1 + np.exp(-total))
        q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), 2, 0) for x in (parts["q"], parts["k"]))
        state = np.exp(token["decay"].astype(np.float64))[:, None, None] * self.states[-1]
        added = token["beta"][:, None] * (parts["v"] - np.einsum("hke,hk->he", state, k))
        self.states.append(state + k[:, :, None] * added[:, None])
        return np.einsum("hke,hk->he", self.states[-1], q / 2)

    def give_back(self, count):
        for values in (*self.inputs.values(), self.states):
            del values[len(values) - count :]


def tokens_of(count):
    """Random projections of so many tokens in each row. Some decays are strong."""
    tokens = {name: RNG.standard_normal((ROWS, count, *shape)).astype(np.float32) for name, shape in HEADS.items()}
    rates = RNG.choice([0.01, 0.3, 20.0], (ROWS, count, 4))
    tokens["decay"] = (-rates * RNG.random((ROWS, count, 4))).astype(np.float32)
    return tokens | {"beta": RNG.random((ROWS, count, 4)).astype(np.float32)}


@jax.jit
def attend(state, tokens, counts):
    """The outputs of a turn, and the state after it."""
    valid = jnp.arange(tokens["q"].shape[1]) < counts[:, None]
    gates, none = (tokens["decay"], tokens["beta"]), jnp.zeros(0)
    q, k, v = tokens["q"], tokens["k"], tokens["v"]
    step = StepKV(q, q, k, k, v, none, valid, state.lengths, none, none, none, gates=gates, taps=tuple(TAPS.values()))
    out, layer = SPEC.policy.attend(SPEC, state.layers[0], step, None)
    return out, state.replace(layers=(layer,), lengths=state.lengths + counts)


def test_tokens_given_back_leave_nothing():
    """Rounds of a short or a long turn and a rewind, in rows of different lengths. A long turn cannot be given back."""
    zeros = np.zeros(ROWS, np.int32)
    layers = jax.tree.map(np.asarray, (jax.jit(SPEC.policy.init, static_argnums=0)(SPEC),))
    counters = Counters(*[zeros] * len(dataclasses.fields(Counters)))
    state = KVState(layers, None, zeros, zeros, counters, None, (SPEC,), Full())
    rows, folded, given = [Row() for _ in range(ROWS)], np.zeros(ROWS, int), []
    for number in range(ROUNDS):
        size = LONG if number in (0, 5) else RECENT
        most = np.where(RNG.random(ROWS) < 0.5, size, 6)
        counts, tokens = RNG.integers(0, most + 1).astype(np.int32), tokens_of(size)
        before, start = jax.tree.map(np.array, state.layers), np.asarray(state.lengths)
        outs, state = jax.tree.map(np.asarray, attend(state, tokens, counts))
        for index, row in enumerate(rows):
            want = [row.feed({name: x[index, at] for name, x in tokens.items()}) for at in range(counts[index])]
            np.testing.assert_allclose(outs[index, : counts[index]], np.reshape(want, (-1, 4, 6)), atol=1e-4)
        held = start + counts
        after = held if size > RECENT else np.maximum(folded, held - RECENT)
        folded = np.where(counts > 0, after, folded)
        for old, new in zip(*map(jax.tree.leaves, (before, state.layers)), strict=True):
            np.testing.assert_array_equal(new[counts == 0], old[counts == 0])
        earliest = np.asarray(state.earliest(state.reached()))
        np.testing.assert_array_equal(earliest, np.maximum(folded, 1))
        row = int(np.argmax(held))
        with pytest.raises(StateMismatch, match=rf"lengths of row {row} must lie in \[{earliest[row]}, {held[row]}\]"):
            state.rewind(np.where(np.arange(ROWS) == row, earliest - 1, held))
        back = RNG.integers(0, np.maximum(held - earliest, 0) + 1)
        state = state.rewind(held - back)
        for row, count in zip(rows, back, strict=True):
            row.give_back(count)
        given += back.tolist()
    assert set(given) == set(range(RECENT + 1))
