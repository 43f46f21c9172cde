"""The laws about states on every policy; and what ShadowKV and the probe count, move and copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import (
    BATCH,
    FETCH_MODES,
    POLICY_CASES,
    POLICY_FETCHES,
    POLICY_KINDS,
    STEPS,
    TINY,
    case_of,
    model,
    prefilled,
    run_steps,
    setting,
)

from jshadow.cache import accounting, offload
from jshadow.engine import decode
from jshadow.evaluation.laws import states
from jshadow.evaluation.laws.states import halves

Space = jax.memory.Space
policies = pytest.mark.parametrize("name", POLICY_CASES)
policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)


@pytest.mark.parametrize(("name", "fetch", "kind"), POLICY_KINDS)
def test_bytes_are_the_leaves_bytes(name, fetch, kind):
    states.bytes_are_the_leaves_bytes(case_of(name, fetch, kind))
    if name in ("shadowkv", "probe"):
        assert (offload.host_bytes(prefilled(name, kind, fetch)[1].specs) > 0) == (fetch != "resident")


@policies_fetched
def test_an_abstract_state_is_the_real_one(name, fetch):
    states.abstract_state_is_the_real_one(case_of(name, fetch))


PACKED_MOVES = (3 * 2 * 4, 64)  # values: four tokens of 8 bytes of codes and 4 of scale, filled up to 64 bytes
SHADOW_MOVES, PROBE_MOVES = (3 * 2 * 4, 4 * 16 * 4), (3 * 2 * 3, 2 * 4 * 16 * 4)


@pytest.mark.parametrize(
    ("name", "fetch", "units", "unit_bytes"),
    # 3 layers, 2 heads, 4 chunks of 4 values; 3 fetches, 2 heads, 3 units of 4 keys and values
    [
        ("shadowkv", "resident", *SHADOW_MOVES),
        ("shadowkv", "device_put", *SHADOW_MOVES),
        ("shadowkv_transform", "device_put", *PACKED_MOVES),
        *[("probe", fetch, *PROBE_MOVES) for fetch in FETCH_MODES],
    ],
)
def test_fetched_bytes_are_counted(name, fetch, units, unit_bytes):
    """All that a step moves, for the rows that took part; nothing where nothing is offloaded."""
    _, state = prefilled(name, "restricted", fetch)
    active = np.array([[True, True], [True, False], [False, False]])
    _, state = run_steps(model(), state, STEPS[:, :2], active)
    moved = units * unit_bytes if fetch != "resident" else 0
    counted = np.asarray(state.counters.fetched) * accounting.FETCH_QUANTUM
    assert counted.tolist() == [2 * moved, moved, 0]
    assert np.asarray(state.counters.steps).tolist() == [2, 1, 0]


@pytest.mark.parametrize("name", ["shadowkv", "shadowkv_plus", "shadowkv_transform", "shadowkv_plus_transform"])
def test_zero_copy_moves_only_what_the_step_before_did_not_leave(name):
    """Chunk by chunk, with rows that pause; and what is kept are the values of the chunks that are resident."""
    _, state = prefilled(name, "restricted", "zero_copy")
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
    _, state = prefilled("shadowkv", "restricted")
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


@policies_fetched
def test_ten_forks_cost_ten_lives(name, fetch):
    states.ten_forks_cost_ten_lives(case_of(name, fetch))


@policies_fetched
def test_a_fork_leaves_its_parent_usable(name, fetch):
    states.fork_leaves_its_parent_usable(case_of(name, fetch))


@policies
def test_a_consumed_state_says_so(name):
    states.consumed_state_says_so(case_of(name))


def compiled_copies(state) -> list[str]:
    """Shapes such as f32[3,2,8] of every copy in the compiled step."""
    reads, writes = state.split()
    args = (model().weights, jnp.zeros(state.batch, jnp.int32), reads, writes, jnp.ones(state.batch, bool))
    text = decode._step.lower(*args, config=TINY).compile().as_text()
    assert "ENTRY" in text
    return re.findall(r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(", text)


def shape_text(leaf) -> str:
    kinds = {"float32": "f32", "bool": "pred", "int32": "s32", "uint32": "u32"}
    return f"{kinds[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]"


@pytest.mark.parametrize(("name", "fetch"), [pair for pair in POLICY_FETCHES if pair[0] in ("shadowkv", "probe")])
def test_no_compiled_copy_has_a_frozen_shape(name, fetch):
    _, state = prefilled(name, "restricted", fetch)
    frozen, live = halves(state)
    # Row vectors such as `lengths` may be copied, and so may a shape that the live half has as well.
    watched = {shape_text(leaf) for leaf in frozen if leaf.ndim > 2} - {shape_text(leaf) for leaf in live}
    assert watched
    assert not watched & set(compiled_copies(state))


@pytest.mark.parametrize("name", ["full", "streaming_llm", "shadowkv"])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["alone", "batch"])
def test_a_step_writes_its_tokens_in_place(name, rows):
    """A copy of the whole cache at each step once took more time than all the rest."""
    state = prefilled(name, "restricted", "resident")[1].take(rows)
    caches = [leaf for leaf in halves(state)[1] if leaf.ndim == 4]
    assert caches
    assert not {shape_text(leaf) for leaf in caches} & set(compiled_copies(state))


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_a_step_neither_scatters_on_the_host_nor_moves_all_of_it(name):
    case = case_of(name, "device_put")
    states.steps_leave_the_host_alone(case)
    assert states.step_host_moves(case)[1] >= (3 if name == "shadowkv" else 2)
    # the walk sees an offense when there is one
    tiers = states.host_tiers(prefilled(name, "restricted", "device_put")[1])
    stored = {part.array.shape for part in tiers}
    offender = states.host_offenses(lambda x: jax.device_put(x, Space.Device), tiers[0].array, stored=stored)
    assert offender[0]
