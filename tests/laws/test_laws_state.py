"""Laws 5 and 7 of DESIGN 4: a state is a value that is counted byte by byte."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import (
    CAPACITY,
    FETCH_MODES,
    LENGTHS,
    POLICY_CASES,
    POLICY_FETCHES,
    STEPS,
    TINY,
    model,
    prefilled,
    run_steps,
    setting,
)  # fmt: skip
from jax.extend.core import jaxprs_in_params

from jshadow.cache import offload
from jshadow.cache.accounting import leaf_bytes, state_nbytes
from jshadow.engine import decode
from jshadow.engine.step import step_writes
from jshadow.errors import StateMismatch
from jshadow.planner.bytes import abstract_state

Space = jax.memory.Space
policies = pytest.mark.parametrize("name", POLICY_CASES)
policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)
BATCH = len(LENGTHS)


def halves(state):
    """The leaves that forks share and the leaves that they do not."""
    reads, writes = state.split()
    return jax.tree.leaves(reads), jax.tree.leaves(writes)


def pointers(leaves):
    return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]


# Law 5


@policies_fetched
@pytest.mark.parametrize("kind", ["restricted", "lossless"])
def test_bytes_are_the_leaves_bytes(name, fetch, kind):
    _, state = prefilled(name, kind, fetch)
    counted = np.sum(list(state_nbytes(state).values()), axis=0)
    leaves = jax.tree.leaves((state.layers, state.shared, state.fitted))
    by_memory = [
        sum(leaf_bytes(leaf) for leaf in leaves if leaf.sharding.memory_kind == kind)
        for kind in ("device", "pinned_host")
    ]
    assert counted.tolist() == by_memory
    assert sum(by_memory) == sum(leaf_bytes(leaf) for leaf in leaves)
    specs = state.specs
    assert by_memory[1] == offload.host_bytes(specs)
    if name in ("shadowkv", "probe"):
        assert (by_memory[1] > 0) == (fetch != "resident")


@policies_fetched
def test_an_abstract_state_is_the_real_one(name, fetch):
    """Same tree, same static fields, same shapes and dtypes, so the same bytes; and nothing is allocated for it."""
    _, state = prefilled(name, "restricted", fetch)
    policy = setting(name, "restricted")
    planned = abstract_state(
        TINY, policy, batch=BATCH, capacity=CAPACITY, prompt=min(LENGTHS), dtype="float32", fetch=fetch
    )
    assert state_nbytes(planned) == state_nbytes(state)
    assert jax.tree.structure(planned) == jax.tree.structure(state)
    for mine, real in zip(jax.tree.leaves(planned), jax.tree.leaves(state), strict=True):
        assert isinstance(mine, jax.ShapeDtypeStruct)
        assert (mine.shape, mine.dtype) == (real.shape, real.dtype)


PACKED_MOVES = (3 * 2 * 4, 4 * (16 // 2 + 4))  # codes of half a byte, and a scale for each value
SHADOW_MOVES, PROBE_MOVES = (3 * 2 * 4, 4 * 16 * 4), (3 * 2 * 3, 2 * 4 * 16 * 4)


@pytest.mark.parametrize(
    ("name", "fetch", "units", "unit_bytes"),
    # 3 layers, 2 heads, 4 chunks of 4 values; 3 fetches, 2 heads, 3 units of 4 keys and values
    [("shadowkv", "resident", *SHADOW_MOVES), ("shadowkv", "device_put", *SHADOW_MOVES),
     ("shadowkv_transform", "device_put", *PACKED_MOVES), *[("probe", fetch, *PROBE_MOVES) for fetch in FETCH_MODES]],
)  # fmt: skip
def test_fetched_bytes_are_counted(name, fetch, units, unit_bytes):
    """All that a step moves, for the rows that took part; nothing where nothing is offloaded."""
    _, state = prefilled(name, "restricted", fetch)
    active = np.array([[True, True], [True, False], [False, False]])
    _, state = run_steps(model(), state, STEPS[:, :2], active)
    moved = units * unit_bytes if fetch != "resident" else 0
    counted = np.asarray(state.counters.fetched) * offload.FETCH_QUANTUM
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
    counted = np.asarray(state.counters.fetched) * offload.FETCH_QUANTUM
    unit = 4 * 16 * 4 if state.policy.values.dtype == "model" else PACKED_MOVES[1]
    # Each step's count is cut to whole quanta.
    assert (np.abs(counted - chunks * unit) < 6 * 3 * offload.FETCH_QUANTUM).all()
    if unit % offload.FETCH_QUANTUM == 0:
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


# Law 7


@policies_fetched
def test_ten_forks_cost_ten_lives(name, fetch):
    _, state = prefilled(name, "restricted", fetch)
    frozen, live = halves(state)
    forks = [state.fork() for _ in range(10)]
    own: set[int] = set(pointers(live))
    for fork in forks:
        shared, copied = halves(fork)
        assert all(mine is theirs for mine, theirs in zip(shared, frozen, strict=True))
        assert own.isdisjoint(pointers(copied))
        own |= set(pointers(copied))
        assert [leaf.sharding.memory_kind for leaf in copied] == [leaf.sharding.memory_kind for leaf in live]
    # a step does not copy the frozen half either: what it returns shares it still
    _, stepped = decode.decode_step(model(), STEPS[:, 0], forks[0])
    assert all(mine is theirs for mine, theirs in zip(halves(stepped)[0], frozen, strict=True))


@policies_fetched
def test_a_fork_leaves_its_parent_usable(name, fetch):
    _, parent = prefilled(name, "restricted", fetch)
    fork = parent.fork()
    run_steps(model(), fork, STEPS[:, 3:9])
    untouched, _ = run_steps(model(), prefilled(name, "restricted", fetch)[1], STEPS[:, :3])
    after, _ = run_steps(model(), parent, STEPS[:, :3])
    np.testing.assert_array_equal(after, untouched)


@policies
def test_a_consumed_state_says_so(name):
    _, state = prefilled(name, "restricted")
    decode.decode_step(model(), STEPS[:, 0], state)
    uses = (
        lambda: decode.decode_step(model(), STEPS[:, 0], state),
        lambda: decode.decode_steps(model(), STEPS[:, 0], state, 2),
        lambda: decode.extend(model(), STEPS[:, :2], [1, 1, 1], state),
        state.fork,
        lambda: state.take([0]),
        lambda: prefilled(name, "restricted")[1].take([0]) and state.insert(0, state),
    )
    for use in uses:
        with pytest.raises(StateMismatch, match="consumed"):
            use()


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


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def in_host(variable) -> bool:
    return getattr(variable.aval, "memory_space", None) == Space.Host


def host_offences(function, *args, stored: set[tuple[int, ...]]) -> tuple[list[str], int]:
    """Operations that no step may do to host arrays of the given shapes, and how many fetches there are."""
    bad, fetches = [], 0
    for equation in equations(jax.make_jaxpr(function)(*args).jaxpr):
        operands = [v for v in equation.invars if hasattr(v.aval, "shape") and in_host(v)]
        whole = [v for v in operands if v.aval.shape in stored]
        name = equation.primitive.name
        if name.startswith("scatter") and operands:
            bad.append(str(equation))
        if name == "device_put":
            fetches += bool(operands)
            if whole:
                bad.append(str(equation))
    return bad, fetches


@pytest.mark.parametrize("name", ["shadowkv", "probe"])
def test_a_step_neither_scatters_on_the_host_nor_moves_all_of_it(name):
    _, state = prefilled(name, "restricted", "device_put")
    reads, writes = state.split()
    tiers = [part for layer in state.layers for part in (layer.host.prompt, layer.host.tail) if part is not None]
    stored = {part.array.shape for part in tiers}
    args = (model().weights, jnp.zeros(BATCH, jnp.int32), reads, writes, jnp.ones(BATCH, bool))

    def run(weights, token, reads, writes, active):
        return step_writes(weights, TINY, token[:, None], active.astype(jnp.int32), reads, writes)

    bad, fetches = host_offences(run, *args, stored=stored)
    assert not bad
    assert fetches >= (3 if name == "shadowkv" else 2)
    # the walk sees an offence when there is one
    offender = host_offences(lambda x: jax.device_put(x, Space.Device), tiers[0].array, stored=stored)
    assert offender[0]
