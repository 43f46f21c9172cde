"""What no law says of all policies: rows that do not fit, what a step fetches, counts and copies, logits in pieces."""

import dataclasses
import functools
import itertools
import re

import jax
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
    case_of,
    mode_of,
    model,
    prefilled,
    random_tokens,
    run_steps,
    setting,
)
from few import one_of, quick

from jshadow.cache import accounting, offload
from jshadow.cache.records import Selection
from jshadow.engine import decode
from jshadow.errors import StateMismatch
from jshadow.evaluation.laws import laws
from jshadow.evaluation.laws.law import abstract
from jshadow.evaluation.laws.laws import halves


def state_of(name: str, fetch: str | None = None):
    """The prefilled state of a policy, in its own fetch mode unless told otherwise."""
    return prefilled(name, "restricted", fetch or mode_of(name))[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "shadowkv", "infllm", "kivi"])
def test_prompts_of_all_lengths_have_their_room(name):
    """How many tokens a prompt leaves beside its whole units depends on its length."""
    lengths = np.arange(1, 49)
    prompts = random_tokens(len(lengths), 48)
    state = decode.prefill(model(), prompts, lengths, setting(name, "restricted"), capacity=CAPACITY, room=7)[1]
    assert 7 <= np.min(state.room()) < 7 + 4  # rows in host memory have space for whole units of four tokens


@pytest.mark.slow
def test_a_row_that_does_not_fit_is_refused():
    """A state of long prompts has small windows: a short prompt with many new tokens has no place in them."""
    policy = setting("shadowkv", "restricted")
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
    active = np.array([False, True])
    for i in range(room):
        logits, joined = decode.decode_step(model(), tokens[:, i], joined, active=active)
    assert np.isfinite(logits[1]).all()
    step = jax.jit(lambda token, state: decode.step(model().weights, TINY, token, state, active))
    logits, _ = step(tokens[:, room], joined)
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[0]).all()


def test_rows_and_states_that_do_not_match_are_refused():
    state = state_of("shadowkv")
    one, bigger = state.take([0]), dataclasses.replace(setting("shadowkv", "restricted"), budget=24)
    changes = {"policy": bigger}, {"fetch": "resident"}, {"capacity": CAPACITY + 1}
    others = [tuple(dataclasses.replace(spec, **change) for spec in one.specs) for change in changes]
    refused = [
        *((lambda row=row: state.insert(row, one), "row must be a whole number in") for row in (-1, 3)),
        (lambda: state.insert(0, state), "must be one row"),
        *((lambda own=own: state.insert(0, one.replace(specs=own)), "must be one row") for own in others),
        (lambda: state.insert(0, one.replace(fitted={"phi": np.zeros(2)})), "learned arrays"),
        *((lambda rows=rows: state.take(rows), "rows must be") for rows in ([], [3], [-1])),
        (lambda: decode.decode_step(model(), STEPS[:, 0], state, bigger), "policy must be"),
    ]
    for call, message in refused:
        with pytest.raises(StateMismatch, match=message):
            call()


@pytest.mark.parametrize("name", quick(["quest"], ["quest", "shadowkv", "infllm", "specache"]))
def test_a_callable_is_given_pieces(name):
    """prefill and extend with a callable give what it would make of all logits.

    No policy sees logits: these differ in how their prompt attends, in rows of a step and in pieces of a turn.
    """
    policy, sizes = setting(name, "restricted"), {"capacity": CAPACITY, "fetch": mode_of(name)}

    def want(logits):
        return {"top": logits.max(-1), "best": logits.argmax(-1)} if name == "shadowkv" else logits.argmax(-1)

    out, state = decode.prefill(model(), PROMPT, LENGTHS, policy, **sizes, logits=want)
    full, again = decode.prefill(model(), PROMPT, LENGTHS, policy, **sizes, logits="all")
    jax.tree.map(np.testing.assert_array_equal, out, want(np.asarray(full)))
    out, _ = decode.extend(model(), STEPS[:, :7], [7, 1, 0], state, logits=want)
    full, _ = decode.extend(model(), STEPS[:, :7], [7, 1, 0], again, logits="all")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), out, want(np.asarray(full)))


def test_prefill_many_is_prefill_for_each():
    """Policies that share a prefill do not see each other's needs (trailing queries, all queries)."""
    names = ["probe", "shadowkv"]
    other = dataclasses.replace(setting("probe", "restricted"), tail=11)
    chosen, modes = (
        [other, *(setting(name, "restricted") for name in names)],
        [mode_of(name) for name in ["probe", *names]],
    )
    together = decode.prefill_many(model(), PROMPT, LENGTHS, chosen, capacity=CAPACITY, fetch=modes)
    alone = decode.prefill(model(), PROMPT, LENGTHS, other, capacity=CAPACITY, fetch=modes[0])
    apart = [alone, *[prefilled(name, "restricted", mode_of(name)) for name in names]]
    for (logits, state), (want, wanted) in zip(together, apart, strict=True):
        np.testing.assert_array_equal(logits, want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, wanted)


@pytest.mark.parametrize("fetch", quick(["device_put"], FETCH_MODES))
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


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_rows_lie_in_host_memory_unless_resident(name):
    for kind, fetch in itertools.product(("restricted", "lossless"), FETCH_MODES):
        specs = abstract(case_of(name, fetch, kind), fetch).specs
        assert (offload.host_bytes(specs) > 0) == (fetch != "resident")


PACKED_BYTES = 64  # values: four tokens of 8 bytes of codes and 4 of scale, filled up to 64 bytes
# What a step moves: 3 layers, 2 heads, 4 chunks of 4 values; 3 fetches, 2 heads, 3 units of 4 keys and values.
MOVED = {
    "shadowkv": 3 * 2 * 4 * (4 * 16 * 4),
    "probe": 3 * 2 * 3 * (2 * 4 * 16 * 4),
    "shadowkv_transform": 3 * 2 * 4 * PACKED_BYTES,
}
MOVES = [
    ("shadowkv", "device_put"),
    ("probe", "device_put"),
    ("shadowkv", "resident"),
    ("shadowkv_transform", "device_put"),
]


@pytest.mark.parametrize(("name", "fetch"), quick(MOVES[:2], [*MOVES, ("probe", "resident"), ("probe", "zero_copy")]))
def test_fetched_bytes_are_counted(name, fetch):
    """All that a step moves, for the rows that took part; nothing where nothing is offloaded."""
    active = np.array([[True, True], [True, False], [False, False]])
    _, state = run_steps(model(), state_of(name, fetch), STEPS[:, :2], active)
    moved = MOVED[name] if fetch != "resident" else 0
    counted = np.asarray(state.counters.fetched) * accounting.FETCH_QUANTUM
    assert counted.tolist() == [2 * moved, moved, 0]
    assert np.asarray(state.counters.steps).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    "name", one_of(4, ["shadowkv_plus", "shadowkv", "shadowkv_transform", "shadowkv_plus_transform"])
)
def test_zero_copy_moves_only_what_the_step_before_did_not_leave(name):
    """Chunk by chunk, with rows that pause; and what is kept are the values of the chunks that are resident.

    Hits are the chunks that were selected twice in a row.
    """
    state = state_of(name, "zero_copy")
    none = np.full((BATCH, 2, state.layers[0].live.resident.shape[2]), -1)
    before, chunks, selected = [none] * TINY.num_layers, np.zeros(BATCH), np.zeros(BATCH)
    for i in range(6):
        active = np.array([True, i != 2, i % 2 == 0])
        _, state = decode.decode_step(model(), STEPS[:, i], state, active=active)
        now = [np.asarray(layer.live.resident).copy() for layer in state.layers]
        for old, new in zip(before, now, strict=True):
            missed = (new >= 0) & ~(new[..., None] == old[..., None, :]).any(-1)
            chunks += missed.sum((1, 2)) * active
            selected += (new >= 0).sum((1, 2)) * active
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
    np.testing.assert_array_equal(state.counters.hits, selected - chunks)
    np.testing.assert_array_equal(state.counters.selected, selected)
    assert 0 < chunks[0] < selected[0]
    counted = np.asarray(state.counters.fetched) * accounting.FETCH_QUANTUM
    unit = 4 * 16 * 4 if state.policy.values.dtype == "model" else PACKED_BYTES
    # Each step's count is cut to whole quanta.
    assert (np.abs(counted - chunks * unit) < 6 * 3 * accounting.FETCH_QUANTUM).all()
    if unit % accounting.FETCH_QUANTUM == 0:
        assert counted.tolist() == (chunks * unit).tolist()
    assert 0 < counted[0] < 6 * 3 * 2 * 4 * unit


COPIES = [("full", "resident"), ("shadowkv", "device_put"), ("streaming_llm", "resident"), ("shadowkv", "resident")]
KINDS = {"float32": "f32", "bool": "pred", "int32": "s32", "uint32": "u32"}


@pytest.mark.parametrize("rows", quick([[0, 1, 2]], ([0, 1, 2], [0])))
@pytest.mark.parametrize(
    ("name", "fetch"), quick(COPIES[:2], [*COPIES, ("shadowkv", "zero_copy"), ("probe", "device_put")])
)
def test_a_compiled_step_copies_no_prompt_half_and_writes_its_tokens_in_place(name, fetch, rows):
    """A copy of the whole cache at each step once took more time than all the rest."""

    def shapes(leaves, axes):
        """Shapes such as f32[3,2,8]. Row vectors such as `lengths` may be copied."""
        return {f"{KINDS[str(x.dtype)]}[{','.join(map(str, x.shape))}]" for x in leaves if x.ndim in axes}

    state = state_of(name, fetch).take(rows)
    frozen, live = halves(state)
    watched = shapes(frozen, range(3, 9)) - shapes(live, range(9))  # the live half may have the same shape
    if fetch == "resident":
        watched |= shapes(live, [4])
    args = (model().weights, np.zeros(state.batch, np.int32), *state.split(), np.ones(state.batch, bool))
    text = decode._step.lower(*args, config=TINY).compile().as_text()
    assert "ENTRY" in text
    assert watched
    assert not watched & set(re.findall(r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(", text))


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_a_step_neither_scatters_on_the_host_nor_moves_all_of_it(name):
    case = case_of(name, "device_put")
    laws.steps_leave_the_host_alone(case)
    assert laws.step_host_moves(case)[1] >= (3 if name == "shadowkv" else 2)
    # the walk sees an offense when there is one
    tiers = laws.host_tiers(state_of(name))
    stored = {part.array.shape for part in tiers}
    put = functools.partial(jax.device_put, device=jax.memory.Space.Device)
    assert laws.host_offenses(put, tiers[0].array, stored=stored)[0]
