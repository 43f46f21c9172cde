"""Recurrent layers: tokens given back leave nothing, in one layer against NumPy, and states of hybrids move whole."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY, setting
from family_cases import short_hybrid
from saved_cases import difference
from sealed import content_of, seal
from small_state import equal

from jshadow import Full, PromptLookup, load_state, save_state
from jshadow.cache.records import StepKV
from jshadow.cache.recurrence import RECENT
from jshadow.cache.state import Counters, KVState
from jshadow.engine import decode
from jshadow.engine.prefill.whole import advance_prefill, begin_prefill, finish_prefill
from jshadow.engine.speculation.drafter import check_drafter, empty
from jshadow.errors import CheckpointError, ConfigError, StateMismatch
from jshadow.models.config import Recurrent
from jshadow.models.partition import check_heads
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import cache_specs
from jshadow.weights.params import Params, init_params

ROWS, ROUNDS, LONG = 48, 14, 40
SIZES = Recurrent(layers=(0,), key_heads=2, value_heads=4, key_dim=4, value_dim=6)
CONVOLUTION = Recurrent(layers=(0,), key_heads=2, value_heads=2, key_dim=4, value_dim=4, taps=3, kind="convolution")
RNG = np.random.default_rng(7)


class Case:
    """A recurrent layer: its sizes, its spec, the shapes of its inputs by name, and its kernels."""

    def __init__(self, sizes):
        self.sizes = sizes
        config = dataclasses.replace(TINY, num_layers=2, recurrent=sizes)
        self.spec, _ = cache_specs(config, Full(), ROWS, 512, 1, "float32", "resident")
        keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
        self.heads = {"q": keys, "k": keys, "v": values}
        inputs = self.heads if sizes.has_state else {"v": values}
        self.taps = {
            name: RNG.standard_normal((sizes.taps, *shape)).astype(np.float32) for name, shape in inputs.items()
        }


class Row:
    """A row's inputs, and its state after each of them, float64."""

    def __init__(self, case):
        self.case = case
        self.inputs = {name: [np.zeros(case.heads[name])] * (case.sizes.taps - 1) for name in case.taps}
        self.states = [np.zeros((4, 4, 6))]

    def convolved(self, name, x):
        """The convolution of an input and those before it."""
        inputs, taps = self.inputs[name], self.case.taps[name]
        inputs.append(x.astype(np.float64))
        return sum(tap * one for tap, one in zip(taps, inputs[-len(taps) :], strict=True))

    def feed(self, token):
        """The output of a token."""
        if not self.case.sizes.has_state:
            return token["q"] * self.convolved("v", token["k"] * token["v"])
        mixed = {name: self.convolved(name, token[name]) for name in self.case.heads}
        parts = {name: total / (1 + np.exp(-total)) for name, total in mixed.items()}
        q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), 2, 0) for x in (parts["q"], parts["k"]))
        state = np.exp(token["decay"].astype(np.float64))[:, None, None] * self.states[-1]
        added = token["beta"][:, None] * (parts["v"] - np.einsum("hke,hk->he", state, k))
        self.states.append(state + k[:, :, None] * added[:, None])
        return np.einsum("hke,hk->he", self.states[-1], q / 2)

    def give_back(self, count):
        states = [self.states] if self.case.sizes.has_state else []
        for values in (*self.inputs.values(), *states):
            del values[len(values) - count :]


def tokens_of(case, count):
    """Random projections of so many tokens in each row. Some decays are strong."""
    tokens = {name: RNG.standard_normal((ROWS, count, *shape)).astype(np.float32) for name, shape in case.heads.items()}
    rates = RNG.choice([0.01, 0.3, 20.0], (ROWS, count, 4))
    tokens["decay"] = (-rates * RNG.random((ROWS, count, 4))).astype(np.float32)
    return tokens | {"beta": RNG.random((ROWS, count, 4)).astype(np.float32)}


@functools.partial(jax.jit, static_argnums=0)
def attend(case, state, tokens, counts):
    """The outputs of a turn, and the state after it."""
    valid = jnp.arange(tokens["q"].shape[1]) < counts[:, None]
    gates, none = (tokens["decay"], tokens["beta"]) if case.sizes.has_state else None, jnp.zeros(0)
    q, k, v = tokens["q"], tokens["k"], tokens["v"]
    step = StepKV(q, q, k, k, v, none, valid, state.lengths, none, none, none, gates=gates)
    step = step.replace(taps=tuple(case.taps.values()))
    out, layer = case.spec.policy.attend(case.spec, state.layers[0], step, None)
    return out, state.replace(layers=(layer,), lengths=state.lengths + counts)


@pytest.mark.parametrize("sizes", [SIZES, CONVOLUTION], ids=lambda sizes: sizes.kind)
def test_tokens_given_back_leave_nothing(sizes):
    """Rounds of a short or a long turn and a rewind, in rows of different lengths.

    A state cannot give back a long turn. A short convolution gives back the end of it.
    """
    zeros, case = np.zeros(ROWS, np.int32), Case(sizes)
    layers = jax.tree.map(np.asarray, (jax.jit(case.spec.policy.init, static_argnums=0)(case.spec),))
    counters = Counters(*[zeros] * len(dataclasses.fields(Counters)))
    state = KVState(layers, None, zeros, zeros, counters, None, (case.spec,), Full())
    rows, folded, given = [Row(case) for _ in range(ROWS)], np.zeros(ROWS, int), []
    for number in range(ROUNDS):
        size = LONG if number in (0, 5) else RECENT
        most = np.where(RNG.random(ROWS) < 0.5, size, 6)
        counts, tokens = RNG.integers(0, most + 1).astype(np.int32), tokens_of(case, size)
        before, start = jax.tree.map(np.array, state.layers), np.asarray(state.lengths)
        outs, state = jax.tree.map(np.asarray, attend(case, state, tokens, counts))
        for index, row in enumerate(rows):
            want = [row.feed({name: x[index, at] for name, x in tokens.items()}) for at in range(counts[index])]
            got = outs[index, : counts[index]]
            np.testing.assert_allclose(got, np.reshape(want, got.shape), atol=1e-4)
        held = start + counts
        after = held if size > RECENT else np.where(held - folded < 2 * RECENT, folded, held - RECENT)
        if not sizes.has_state:
            after = np.maximum(folded, held - RECENT)
        folded = np.where(counts > 0, after, folded)
        for old, new in zip(*map(jax.tree.leaves, (before, state.layers)), strict=True):
            np.testing.assert_array_equal(new[counts == 0], old[counts == 0])
        reached = np.asarray(state.reached())
        earliest = np.asarray(state.earliest(reached))
        np.testing.assert_array_equal(earliest, np.maximum(1, np.maximum(folded, reached - RECENT)))
        row = int(np.argmax(held))
        with pytest.raises(StateMismatch, match=rf"lengths of row {row} must lie in \[{earliest[row]}, {held[row]}\]"):
            state.rewind(np.where(np.arange(ROWS) == row, earliest - 1, held))
        back = RNG.integers(0, np.maximum(held - earliest, 0) + 1)
        state = state.rewind(held - back)
        for row, count in zip(rows, back, strict=True):
            row.give_back(count)
        given += back.tolist()
    assert set(given) == set(range(RECENT + 1))


# Tiny hybrids: a recurrent layer, and one that attends

HYBRID, LFM2 = short_hybrid("qwen3_5"), short_hybrid("lfm2")
PROMPT = RNG.integers(0, HYBRID.vocab_size, (3, 50)).astype(np.int32)
STEPS = RNG.integers(0, HYBRID.vocab_size, (3, 50)).astype(np.int32)
LENGTHS = np.array([50, 27, 5])
MODES = [(HYBRID, "shadowkv", "device_put"), (LFM2, "full", "resident")]
# Tokens that rows can give back after their prompts, a turn of [5, 3, 0], and one of [40, 3, 0]. Where recurrent layers
# are short convolutions, tokens of a prompt that attention holds like later ones can be given back too.
GIVEN = [
    (HYBRID, "shadowkv", ([0] * 3, [5, 3, 0], [0] * 3)),
    (LFM2, "full", ([16, 16, 4],) * 3),
    (LFM2, "shadowkv", ([10, 11, 4], [15, 14, 4], [16, 14, 4])),
]


@functools.cache
def params(config=HYBRID):
    return init_params(config, seed=1)


def model_of(state):
    """The model of a state."""
    return params(HYBRID if state.specs[0].policy.sizes.has_state else LFM2)


def prefilled(name, fetch="resident", config=HYBRID):
    return decode.prefill(params(config), PROMPT, LENGTHS, setting(name, "restricted"), capacity=112, fetch=fetch)[1]


def run(state, first, count, rows=(0, 1, 2)):
    """The logits of steps that feed these columns of STEPS, and the state after them."""
    logits = []
    for column in range(first, first + count):
        out, state = decode.decode_step(model_of(state), STEPS[list(rows), column], state)
        logits.append(np.asarray(out))
    return np.stack(logits), state


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name", "each"), GIVEN)
def test_rewinds_of_a_hybrid_equal_a_state_that_never_saw_the_tokens(config, name, each):
    """That each number of tokens can be given back, a layer alone shows above."""
    start = prefilled(name, config=config)
    for counts, given in zip(([0] * 3, [5, 3, 0], [40, 3, 0]), each, strict=True):
        _, state = decode.extend(params(config), STEPS[:, : max(1, *counts)], counts, start.fork())
        held = np.asarray(state.lengths)
        np.testing.assert_array_equal(held - np.minimum(state.earliest(state.reached()), held), given)
    state, states, logits = start.fork(), [start], []
    for column in range(40):
        out, state = run(state, column, 1)
        logits.append(out[0])
        states.append(state.fork())
    for fed in (1, 16, 17, 40):
        for back in (back for back in (1, 2, 9, RECENT - 1, RECENT) if back <= fed):
            held = np.asarray(states[fed].lengths)
            wrong = states[fed].fork().rewind(held - back)
            got, _ = run(wrong, fed - back, min(2, back))
            np.testing.assert_allclose(got, logits[fed - back : fed - back + len(got)], atol=1e-4)
        most = min(RECENT, fed + each[0][0])
        with pytest.raises(StateMismatch, match=r"lengths of row 0 must lie in \["):
            states[fed].rewind(np.asarray(states[fed].lengths) - most - 1)
    # rows that give back different numbers of tokens, and other tokens than before
    wrong = states[20].fork().rewind(np.asarray(states[20].lengths) - [16, 0, 7])
    alone = [states[20 - back].take([row]) for row, back in enumerate((16, 0, 7))]
    got, _ = run(wrong, 40, 3)
    for row, one in enumerate(alone):
        np.testing.assert_allclose(got[:, row], run(one, 40, 3, [row])[0][:, 0], atol=1e-4)
    if name == "full" and any(each[0]):  # tokens of the prompts, which a step reads again as the prefill did
        cut = start.fork().rewind(LENGTHS - each[0])
        again = np.stack(
            [np.resize(row[held - back : held], 16) for row, held, back in zip(PROMPT, LENGTHS, each[0], strict=True)]
        )
        _, state = decode.extend(params(config), again, each[0], cut)
        np.testing.assert_allclose(run(state, 0, 3)[0], logits[:3], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name", "fetch"), MODES)
def test_states_of_a_hybrid_move_whole(tmp_path, config, name, fetch):
    """Forked, taken, inserted, shared, resized, saved and loaded: the same bits as without it."""
    state, its = prefilled(name, fetch, config), params(config)
    for column in range(3):  # rows of different ages
        _, state = decode.decode_step(its, STEPS[:, column], state, active=[True, column != 1, column == 2])
    want, after = run(state.fork(), 5, 3)
    others = [2, 0, 1]
    np.testing.assert_array_equal(run(state.take(others), 5, 3, others)[0], want[:, others])
    for consume in (False, True):
        pool = state.take([0, 0, 2]).insert(1, state.take([1]), consume=consume)
        np.testing.assert_array_equal(run(pool, 5, 3)[0], want)
    np.testing.assert_array_equal(run(state.with_room(20), 5, 3)[0], want)
    save_state(tmp_path / "state", state, its)
    loaded = load_state(tmp_path / "state", its)
    assert difference(loaded, state) == "none"
    got, again = run(loaded, 5, 3)
    np.testing.assert_array_equal(got, want)
    assert difference(again, after, stepped=True) == "none"

    shared, tokens = state.take([1]).share(3), STEPS[[1, 1, 1], 5:11]
    apart = [decode.extend(its, tokens[:1], [count], state.take([1])) for count in (6, 3, 1)]
    logits, shared = decode.extend(its, tokens, [6, 3, 1], shared)
    for row, (one, _) in enumerate(apart):
        np.testing.assert_allclose(logits[row], one[0], atol=1e-4)
    back = shared.rewind(np.asarray(shared.lengths) - [3, 0, 0])
    assert back.shares_prompt
    got, _ = run(back, 11, 2, [1] * 3)
    np.testing.assert_allclose(got[:, 0], got[:, 1], atol=1e-4)  # both then hold the first three tokens


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name", "fetch"), MODES)
def test_a_paused_prefill_of_a_hybrid_is_a_whole_one(config, name, fetch):
    policy, sizes = setting(name, "restricted"), {"capacity": 112, "fetch": fetch, "prefill_chunk": 16}
    logits, state = decode.prefill(params(config), PROMPT, LENGTHS, policy, **sizes)
    partial = begin_prefill(params(config), PROMPT, LENGTHS, policy, **sizes)
    for _ in range(7):
        assert not partial.done
        partial = advance_prefill(params(config), partial)
    out, paused = finish_prefill(params(config), partial)
    np.testing.assert_array_equal(out, logits)
    assert equal(paused, state)


@pytest.mark.slow
def test_states_of_other_recurrences_are_refused(tmp_path):
    """Of another dtype, and of models whose recurrent layers have other sizes."""
    state = prefilled("full")
    save_state(tmp_path / "state", state, params())
    for change in ({"value_dim": 6}, {"taps": 3}, {"key_dim": 4}, {"layers": (1,)}):
        config = dataclasses.replace(HYBRID, recurrent=dataclasses.replace(HYBRID.recurrent, **change))
        other = init_params(config, seed=1)
        with pytest.raises(StateMismatch, match="state must come from a model like params"):
            decode.decode_step(other, STEPS[:, 0], state)
        with pytest.raises(StateMismatch, match=rf"config\.recurrent\.{next(iter(change))}: file has"):
            load_state(tmp_path / "state", other)
    first, *rest = state.layers
    held = first.live.recurrent
    short = first.live.replace(recurrent=held._replace(state=held.state.astype(jnp.bfloat16)))
    with pytest.raises(CheckpointError, match="state must have the structure that"):
        save_state(tmp_path / "short", state.replace(layers=(first.replace(live=short), *rest)), params())
    tensors, texts = content_of(tmp_path / "state")
    name = next(name for name in tensors if name.endswith("recurrent.state"))
    tensors[name] = tensors[name].astype(jnp.bfloat16)
    seal(tmp_path / "state", tensors, texts)
    with pytest.raises(CheckpointError, match=r"recurrent\.state: expected \('F32', .*got \('BF16'"):
        load_state(tmp_path / "state", params())


def test_what_a_mesh_does_not_divide_is_named():
    halves = SimpleNamespace(shape={"tp": 2})
    check_heads(halves, HYBRID)
    with pytest.raises(ConfigError, match="tp must divide the 2 key heads of recurrent layers, got tp=4"):
        check_heads(SimpleNamespace(shape={"tp": 4}), HYBRID)
    with pytest.raises(ConfigError, match="tp must divide the 1 KV heads, got tp=2"):
        check_heads(halves, dataclasses.replace(HYBRID, kv_heads=1))


def test_no_drafter_proposes_more_than_a_ring_gives_back():
    state, weights = empty(HYBRID, Full(), 64), abstract_weights(HYBRID)
    told = "speculate.tokens must be at most 15, because a recurrent layer .*got 16"
    on_one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), leaf.dtype), weights)
    for tokens, expected in ((15, contextlib.nullcontext()), (16, pytest.raises(ConfigError, match=told))):
        with expected:
            check_drafter(PromptLookup(tokens=tokens), Params(on_one, HYBRID), state, [20], 30)
