"""What no law says of all policies: rows that do not fit, what a step fetches, counts and copies, logits in pieces."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import (
    BATCH,
    CAPACITY,
    FETCH_MODES,
    LENGTHS,
    PROMPT,
    STEPS,
    TINY,
    by_tier,
    case_of,
    mode_of,
    model,
    prefilled,
    random_tokens,
    run_steps,
    setting,
)

from jshadow.cache import accounting, offload
from jshadow.cache.records import Selection, StepKV
from jshadow.engine import decode
from jshadow.errors import StateMismatch
from jshadow.evaluation.laws import states
from jshadow.evaluation.laws.inputs import abstract
from jshadow.evaluation.laws.states import halves
from jshadow.ops.rope import cos_sin, inverse_frequencies

slow = pytest.mark.slow


def state_of(name: str, fetch: str | None = None):
    """The prefilled state of a policy, in its own fetch mode unless told otherwise."""
    return prefilled(name, "restricted", fetch or mode_of(name))[1]


# Rows


@slow
@pytest.mark.parametrize("name", ["quest", "shadowkv", "infllm", "kivi"])
def test_prompts_of_all_lengths_have_their_room(name):
    """How many tokens a prompt leaves beside its whole units depends on its length."""
    lengths = np.arange(1, 49)
    prompts = random_tokens(len(lengths), 48)
    state = decode.prefill(model(), prompts, lengths, setting(name, "restricted"), capacity=CAPACITY, room=7)[1]
    assert 7 <= np.min(state.room()) < 7 + 4  # rows in host memory have space for whole units of four tokens


@slow
@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_a_row_that_does_not_fit_is_refused(name):
    """A state of long prompts has small windows: a short prompt with many new tokens has no place in them."""
    policy = setting(name, "restricted")
    _, batch = decode.prefill(model(), PROMPT[:2, :61], [61, 60], policy, capacity=CAPACITY)
    _, alone = decode.prefill(model(), PROMPT[2:, :5], [5], policy, capacity=CAPACITY)
    joined = batch.insert(1, alone)
    room = int(joined.room()[1])
    assert 0 < room < CAPACITY - 5
    _, alone = decode.extend(model(), random_tokens(1, 60), [60], alone)
    with pytest.raises(StateMismatch, match="window="):
        batch.insert(1, alone)
    # the traceable core cannot raise: when the window of the joined row is full, its logits are NaN
    tokens = random_tokens(2, room + 1)
    active = jnp.array([False, True])
    for i in range(room):
        logits, joined = decode.decode_step(model(), tokens[:, i], joined, active=active)
    assert np.isfinite(logits[1]).all()
    logits, _ = jax.jit(lambda token, state: decode.step(model().weights, TINY, token, state, active))(
        jnp.asarray(tokens[:, room]), joined
    )
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[0]).all()


def test_rows_and_states_that_do_not_match_are_refused():
    state, other = state_of("shadowkv"), state_of("full")
    one = state.take([0])
    for row in (-1, 3):
        with pytest.raises(StateMismatch, match="row must be a whole number in"):
            state.insert(row, one)
    lossless = prefilled("shadowkv", "lossless", "device_put")[1]
    for misfit in (other.take([0]), state.take([0, 1]), lossless.take([0])):
        with pytest.raises(StateMismatch, match="must be one row"):
            state.insert(0, misfit)
    for numbers in ([], [3], [-1]):
        with pytest.raises(StateMismatch, match="rows must be"):
            state.take(numbers)
    bigger = dataclasses.replace(setting("shadowkv", "restricted"), budget=24)
    with pytest.raises(StateMismatch, match="policy must be"):
        decode.decode_step(model(), STEPS[:, 0], state, bigger)


# Logits of prefill and extend


@pytest.mark.parametrize("name", by_tier(("quest", "shadowkv", "infllm", "specache"), ("quest",)))
def test_a_callable_is_given_pieces(name):
    """prefill and extend with a callable give what it would make of all logits.

    No policy sees logits: these differ in how their prompt attends, in rows of a step and in pieces of a turn.
    """
    sizes = {"capacity": CAPACITY, "fetch": mode_of(name)}

    def best(logits):
        return logits.argmax(-1)

    for want in (best, lambda logits: {"top": logits.max(-1)}):
        out, state = decode.prefill(model(), PROMPT, LENGTHS, setting(name, "restricted"), **sizes, logits=want)
        full, again = decode.prefill(model(), PROMPT, LENGTHS, setting(name, "restricted"), **sizes, logits="all")
        jax.tree.map(np.testing.assert_array_equal, out, want(np.asarray(full)))
        out, _ = decode.extend(model(), STEPS[:, :7], [7, 1, 0], state, logits=want)
        full, _ = decode.extend(model(), STEPS[:, :7], [7, 1, 0], again, logits="all")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), out, want(np.asarray(full)))
        if name != "shadowkv":
            break  # the second form once is enough


def test_prefill_many_is_prefill_for_each():
    """Policies that share a prefill do not see each other's needs (trailing queries, all queries)."""
    names = ["probe", "shadowkv", "h2o"]
    chosen = [setting(name, "restricted") for name in names]
    other = dataclasses.replace(chosen[0], tail=11)
    modes = [mode_of(name) for name in ["probe", *names]]
    together = decode.prefill_many(model(), PROMPT, LENGTHS, [other, *chosen], capacity=CAPACITY, fetch=modes)
    alone = decode.prefill(model(), PROMPT, LENGTHS, other, capacity=CAPACITY, fetch=modes[0])
    apart = [alone, *[prefilled(name, "restricted", mode_of(name)) for name in names]]
    for (logits, state), (want, wanted) in zip(together, apart, strict=True):
        np.testing.assert_array_equal(logits, want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, wanted)


# What a layer fetches


@slow
@pytest.mark.parametrize("kind", ["restricted", "lossless"])
def test_selection_and_fetched_rows_are_bit_equal(kind):
    """One layer of ShadowKV, identical inputs, all modes: select, then fetch, inside jit as in a step."""
    query = np.random.default_rng(7).standard_normal((BATCH, 1, TINY.q_heads, TINY.head_dim)).astype(np.float32)
    results = []
    for fetch in FETCH_MODES:
        state = prefilled("shadowkv", kind, fetch)[1]
        spec, layer = state.specs[1], state.layers[1]
        layout = spec.policy.host_layout(spec)

        @jax.jit
        def select_and_fetch(layer, query, lengths, spec=spec, layout=layout):
            selection, _ = spec.policy.select(spec, layer, layer_step(spec, query, lengths))
            fetched = offload.fetch(spec, layer.host, selection, layout).listed(spec.head_dim)
            rows = [
                jnp.where(jnp.repeat(fetched.valid, x.shape[2] // fetched.ids.shape[2], axis=2)[..., None], x, 0)
                for x in (fetched.k, fetched.v)
            ]
            return selection.replace(kept=None), fetched.replace(k=rows[0], v=rows[1])

        results.append(select_and_fetch(layer, query, state.lengths))
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], result)


def layer_step(spec, query, lengths):
    """A StepKV with made-up queries; keys and values do not matter to a selection."""
    none = jnp.zeros((*query.shape[:2], spec.kv_heads, spec.head_dim))
    positions = lengths[:, None] + jnp.arange(query.shape[1])
    inverse = jnp.asarray(inverse_frequencies(TINY.rope, TINY.head_dim))
    valid = jnp.ones(query.shape[:2], bool)
    return StepKV(query, query, none, none, none, positions, valid, lengths, inverse, *cos_sin(positions, inverse))


@pytest.mark.parametrize(
    "fetch", ["device_put", pytest.param("resident", marks=slow), pytest.param("zero_copy", marks=slow)]
)
@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_fetched_rows_are_the_prompt_s_values(name, fetch):
    """The tier of every policy that has one, against a plain NumPy gather, prompt and tail units alike."""
    state = run_steps(model(), state_of(name, fetch), STEPS[:, :6])[1]
    spec, tier = state.specs[2], state.layers[2].host
    layout = spec.policy.host_layout(spec)
    ids = np.random.default_rng(3).integers(0, layout.units + layout.tail_units, (BATCH, layout.heads, 5), np.int32)
    fetched = jax.jit(lambda tier, ids: offload.fetch(spec, tier, Selection(ids, ids % 2 == 0), layout))(tier, ids)
    rows = [np.asarray(part.array) for part in (tier.prompt, tier.tail) if part is not None]
    stored = np.concatenate([rows[0], *(part[:, :, :-1] for part in rows[1:])], axis=2)
    want = np.take_along_axis(stored, ids[..., None], axis=2)
    want = want.reshape(BATCH, layout.heads, 5, layout.planes, layout.unit, spec.head_dim)
    flat = (BATCH, layout.heads, 5 * layout.unit, spec.head_dim)
    np.testing.assert_array_equal(fetched.v, want[:, :, :, -1].reshape(flat))
    if layout.planes == 2:
        np.testing.assert_array_equal(fetched.k, want[:, :, :, 0].reshape(flat))
    np.testing.assert_array_equal(fetched.valid, ids % 2 == 0)


# Counts


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_rows_lie_in_host_memory_unless_resident(name):
    for kind in ("restricted", "lossless"):
        for fetch in FETCH_MODES:
            specs = abstract(case_of(name, fetch, kind), fetch).specs
            assert (offload.host_bytes(specs) > 0) == (fetch != "resident")


PACKED_MOVES = (3 * 2 * 4, 64)  # values: four tokens of 8 bytes of codes and 4 of scale, filled up to 64 bytes
PACKED = ("shadowkv_transform", "shadowkv_plus_transform")
SHADOW_MOVES, PROBE_MOVES = (3 * 2 * 4, 4 * 16 * 4), (3 * 2 * 3, 2 * 4 * 16 * 4)


@pytest.mark.parametrize(
    ("name", "fetch", "units", "unit_bytes"),
    # 3 layers, 2 heads, 4 chunks of 4 values; 3 fetches, 2 heads, 3 units of 4 keys and values
    [
        ("shadowkv", "device_put", *SHADOW_MOVES),
        ("probe", "device_put", *PROBE_MOVES),
        pytest.param("shadowkv", "resident", *SHADOW_MOVES, marks=slow),
        pytest.param("shadowkv_transform", "device_put", *PACKED_MOVES, marks=slow),
        pytest.param("probe", "resident", *PROBE_MOVES, marks=slow),
        pytest.param("probe", "zero_copy", *PROBE_MOVES, marks=slow),
    ],
)
def test_fetched_bytes_are_counted(name, fetch, units, unit_bytes):
    """All that a step moves, for the rows that took part; nothing where nothing is offloaded."""
    active = np.array([[True, True], [True, False], [False, False]])
    _, state = run_steps(model(), state_of(name, fetch), STEPS[:, :2], active)
    moved = units * unit_bytes if fetch != "resident" else 0
    counted = np.asarray(state.counters.fetched) * accounting.FETCH_QUANTUM
    assert counted.tolist() == [2 * moved, moved, 0]
    assert np.asarray(state.counters.steps).tolist() == [2, 1, 0]


@pytest.mark.parametrize("name", by_tier(("shadowkv_plus", "shadowkv", *PACKED), ("shadowkv_plus",)))
def test_zero_copy_moves_only_what_the_step_before_did_not_leave(name):
    """Chunk by chunk, with rows that pause; and what is kept are the values of the chunks that are resident."""
    state = state_of(name, "zero_copy")
    none = np.full((BATCH, 2, state.layers[0].live.resident.shape[2]), -1)
    before, chunks = [none] * TINY.num_layers, np.zeros(BATCH)
    for i in range(6):
        active = np.array([True, i != 2, i % 2 == 0])
        _, state = decode.decode_step(model(), STEPS[:, i], state, active=active)
        now = [np.asarray(layer.live.resident).copy() for layer in state.layers]
        for old, new in zip(before, now, strict=True):
            missed = (new >= 0) & ~(new[..., None] == old[..., None, :]).any(-1)
            chunks += missed.sum((1, 2)) * active
        before = now
        for layer in state.layers:
            kept, ids = np.asarray(layer.live.values), np.asarray(layer.live.resident)
            tiers = [np.asarray(part.array) for part in (layer.host.prompt, layer.host.tail) if part is not None]
            tiers[0] = tiers[0][:, :, : layer.frozen.candidates.shape[2]]
            row, head, place = np.nonzero(ids >= 0)
            want = np.concatenate(tiers, axis=2)[row, head, ids[row, head, place]]
            if setting(name, "restricted").values.dtype == "int4":
                want = oracle_codec.host_row_values(want, tokens=4, dim=16, bits=4).reshape(len(want), -1)
            np.testing.assert_array_equal(kept[row, head, place], want)
    counted = np.asarray(state.counters.fetched) * accounting.FETCH_QUANTUM
    unit = 4 * 16 * 4 if state.policy.values.dtype == "model" else PACKED_MOVES[1]
    # Each step's count is cut to whole quanta.
    assert (np.abs(counted - chunks * unit) < 6 * 3 * accounting.FETCH_QUANTUM).all()
    if unit % accounting.FETCH_QUANTUM == 0:
        assert counted.tolist() == (chunks * unit).tolist()
    assert 0 < counted[0] < 6 * 3 * 2 * 4 * unit


def test_hits_are_the_chunks_selected_twice():
    state = state_of("shadowkv")
    before, hits, selected = [np.full((BATCH, 2, 4), -1)] * TINY.num_layers, np.zeros(BATCH), np.zeros(BATCH)
    for i in range(6):
        _, state = decode.decode_step(model(), STEPS[:, i], state)
        now = [np.asarray(layer.live.resident).copy() for layer in state.layers]
        for old, new in zip(before, now, strict=True):
            hits += ((new[..., None] == old[..., None, :]).any(-1) & (new >= 0)).sum((1, 2))
            selected += (new >= 0).sum((1, 2))
        before = now
    np.testing.assert_array_equal(state.counters.hits, hits)
    np.testing.assert_array_equal(state.counters.selected, selected)
    assert 0 < hits[0] < selected[0]


# Copies


def compiled_copies(state) -> list[str]:
    """Shapes such as f32[3,2,8] of every copy in the compiled step."""
    reads, writes = state.split()
    args = (model().weights, np.zeros(state.batch, np.int32), reads, writes, np.ones(state.batch, bool))
    text = decode._step.lower(*args, config=TINY).compile().as_text()
    assert "ENTRY" in text
    return re.findall(r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(", text)


def shape_text(leaf) -> str:
    kinds = {"float32": "f32", "bool": "pred", "int32": "s32", "uint32": "u32"}
    return f"{kinds[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]"


@pytest.mark.parametrize(
    ("name", "fetch"),
    [
        ("shadowkv", "device_put"),
        pytest.param("shadowkv", "zero_copy", marks=slow),
        pytest.param("probe", "device_put", marks=slow),
    ],
)
def test_no_compiled_copy_has_a_frozen_shape(name, fetch):
    state = state_of(name, fetch)
    frozen, live = halves(state)
    # Row vectors such as `lengths` may be copied, and so may a shape that the live half has as well.
    watched = {shape_text(leaf) for leaf in frozen if leaf.ndim > 2} - {shape_text(leaf) for leaf in live}
    assert watched
    assert not watched & set(compiled_copies(state))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=() if (name, len(rows)) == ("full", 3) else slow)
        for name in ("full", "streaming_llm", "shadowkv")
        for rows in ([0], [0, 1, 2])
    ],
)
def test_a_step_writes_its_tokens_in_place(name, rows):
    """A copy of the whole cache at each step once took more time than all the rest."""
    state = state_of(name, "resident").take(rows)
    caches = [leaf for leaf in halves(state)[1] if leaf.ndim == 4]
    assert caches
    assert not {shape_text(leaf) for leaf in caches} & set(compiled_copies(state))


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_a_step_neither_scatters_on_the_host_nor_moves_all_of_it(name):
    case = case_of(name, "device_put")
    states.steps_leave_the_host_alone(case)
    assert states.step_host_moves(case)[1] >= (3 if name == "shadowkv" else 2)
    # the walk sees an offense when there is one
    tiers = states.host_tiers(state_of(name))
    stored = {part.array.shape for part in tiers}
    put = functools.partial(jax.device_put, device=jax.memory.Space.Device)
    assert states.host_offenses(put, tiers[0].array, stored=stored)[0]
