"""Laws 1 to 4 of DESIGN 4: every law, every policy, one ragged batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ALL,
    CAPACITY,
    DEVICE_ONLY,
    FETCH_MODES,
    LENGTHS,
    OFFLOADED,
    POLICY_CASES,
    POLICY_FETCHES,
    PROMPT,
    STEPS,
    TINY,
    model,
    modes_of,
    policies_of,
    prefilled,
    run_steps,
    setting,
)  # fmt: skip
from seen import NEIGHBOUR, as_seen, same_codes

from jshadow.cache import offload
from jshadow.cache.records import Selection, StepKV
from jshadow.engine import decode
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import abstract_state
from jshadow.policies import POLICIES, ShadowKV

KINDS = ("restricted", "lossless")
policies = pytest.mark.parametrize("name", POLICY_CASES)
policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)
kinds = pytest.mark.parametrize("kind", KINDS)
fetches = pytest.mark.parametrize("fetch", FETCH_MODES)
BATCH = len(LENGTHS)
# Largest difference of logits (deviation about 1) that bfloat16 may cause: 8 bits of keys, values and sums.
BF16_TOLERANCE = 0.12


@functools.cache
def teacher_forced(name: str, kind: str, fetch: str, dtype: str = "float32") -> np.ndarray:
    """Logits [B, 6, V] of six steps after the prompt."""
    params = model(TINY, dtype)
    return np.asarray(run_steps(params, prefilled(name, kind, fetch, dtype)[1], STEPS[:, :6])[0])


def changing(state):
    """Leaves that a step changes, by path, as NumPy."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.split()[1])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def kept(state):
    """The same without the last unit of a host tail: the place of writes that must not happen."""
    return {path: leaf[:, :, :-1] if path.endswith(".array") else leaf for path, leaf in changing(state).items()}


def remembered(state):
    """`kept` without the bytes moved: a turn moves units for the padding of its last piece too."""
    return {path: leaf for path, leaf in kept(state).items() if not path.endswith(".fetched")}


def test_every_policy_has_a_case():
    assert set(POLICIES) <= set(POLICY_CASES)


@policies
def test_what_keeps_nothing_on_the_host_has_one_program(name):
    """Laws that go through the fetch modes leave the other modes of these out."""
    states = [abstract(name, fetch) for fetch in FETCH_MODES[:2]]
    assert (name in DEVICE_ONLY) == all(spec.policy.host_layout(spec) is None for spec in states[0].specs)
    if name in DEVICE_ONLY:
        token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
        one, other = (jax.jit(decode.step, static_argnums=1).lower(model().weights, TINY, token, state).as_text()
                      for state in states)  # fmt: skip
        assert one == other


def abstract(name: str, fetch: str):
    """Shapes of the restricted case's state."""
    return abstract_state(
        TINY, setting(name, "restricted"), batch=BATCH, capacity=CAPACITY, prompt=min(LENGTHS), dtype="float32",
        fetch=fetch,
    )  # fmt: skip


# Law 1


@policies_fetched
def test_lossless_is_full(name, fetch):
    logits, state = prefilled(name, "lossless", fetch)
    full, full_state = prefilled("full", "lossless", "resident")
    np.testing.assert_allclose(logits, full, atol=1e-4)
    np.testing.assert_allclose(
        teacher_forced(name, "lossless", fetch), teacher_forced("full", "lossless", "resident"), atol=1e-4
    )
    token, mine, theirs = np.asarray(full.argmax(-1), np.int32), [], []
    for tokens, held in ((mine, state), (theirs, full_state)):
        feed = token
        for _ in range(8):
            out, held = decode.decode_step(model(), feed, held)
            feed = np.asarray(out.argmax(-1), np.int32)
            tokens.append(feed)
    np.testing.assert_array_equal(np.stack(mine), np.stack(theirs))


@pytest.mark.parametrize("name", policies_of())
def test_lossless_is_full_in_bfloat16(name):
    lossless = teacher_forced(name, "lossless", modes_of(name)[0], "bfloat16")
    full = teacher_forced("full", "lossless", "resident", "bfloat16")
    np.testing.assert_allclose(lossless, full, atol=BF16_TOLERANCE)


@pytest.mark.parametrize("name", [name for name in POLICY_CASES if name != "full"])
def test_restricted_is_not_full(name):
    """Without this, a policy that ignores its setting would pass law 1."""
    difference = teacher_forced(name, "restricted", "resident") - teacher_forced("full", "lossless", "resident")
    assert np.abs(difference[0]).max() > 0.05


# Law 2


@kinds
def test_selection_and_fetched_rows_are_bit_equal(kind):
    """One layer of ShadowKV, identical inputs, both modes: select, then fetch, inside jit as in a step."""
    results = []
    for fetch in FETCH_MODES:
        state = prefilled("shadowkv", kind, fetch)[1]
        spec, layer = state.specs[1], state.layers[1]
        layout = spec.policy.host_layout(spec)
        query = jax.random.normal(jax.random.key(7), (BATCH, 1, TINY.q_heads, TINY.head_dim))
        step = layer_step(spec, query, state.lengths)

        @jax.jit
        def select_and_fetch(layer, step, spec=spec, layout=layout):
            selection, _ = spec.policy.select(spec, layer, step)
            fetched = offload.fetch(spec, layer.host, selection, layout)
            rows = [jnp.where(fetched.valid[..., None], x, 0) for x in (fetched.k, fetched.v)]
            return selection.replace(kept=None), fetched.replace(k=rows[0], v=rows[1])

        results.append(select_and_fetch(layer, step))
    for result in results[1:]:
        for one, other in zip(*map(jax.tree.leaves, (results[0], result)), strict=True):
            np.testing.assert_array_equal(one, other)


@fetches
def test_fetched_rows_are_the_prompt_s_values(fetch):
    """The tier of every policy that has one, against a plain NumPy gather, prompt and tail units alike."""
    for name in ("shadowkv", "probe"):
        state = run_steps(model(), prefilled(name, "restricted", fetch)[1], STEPS[:, :6])[1]
        spec, tier = state.specs[2], state.layers[2].host
        layout = spec.policy.host_layout(spec)
        rng, units = np.random.default_rng(3), layout.units + layout.tail_units
        ids = rng.integers(0, units, (BATCH, layout.heads, 5)).astype(np.int32)
        selection = Selection(jnp.asarray(ids), jnp.asarray(ids % 2 == 0))
        fetched = jax.jit(lambda tier, chosen, spec=spec, layout=layout: offload.fetch(spec, tier, chosen, layout))(
            tier, selection
        )  # fmt: skip
        rows = [np.asarray(part.array) for part in (tier.prompt, tier.tail) if part is not None]
        stored = np.concatenate([rows[0], *(part[:, :, :-1] for part in rows[1:])], axis=2)
        want = np.take_along_axis(stored, ids[..., None], axis=2)
        want = want.reshape(BATCH, layout.heads, 5, layout.planes, layout.unit, spec.head_dim)
        flat = (BATCH, layout.heads, 5 * layout.unit, spec.head_dim)
        np.testing.assert_array_equal(fetched.v, want[:, :, :, -1].reshape(flat))
        if layout.planes == 2:
            np.testing.assert_array_equal(fetched.k, want[:, :, :, 0].reshape(flat))
        np.testing.assert_array_equal(fetched.valid, np.repeat(ids % 2 == 0, layout.unit, axis=2))


def layer_step(spec, query, lengths):
    """A StepKV with made-up queries; keys and values do not matter to a selection."""
    batch, rows = query.shape[:2]
    none = jnp.zeros((batch, rows, spec.kv_heads, spec.head_dim))
    positions = lengths[:, None] + jnp.arange(rows)
    inverse = jnp.asarray(inverse_frequencies(TINY.rope, TINY.head_dim))
    valid = jnp.ones((batch, rows), bool)
    return StepKV(query, query, none, none, none, positions, valid, lengths, inverse)


@pytest.mark.parametrize(("name", "fetch"), [(name, fetch) for name, fetch in POLICY_FETCHES if fetch in OFFLOADED])
@pytest.mark.parametrize("kind", KINDS if ALL else KINDS[:1])
def test_fetch_modes_agree(name, fetch, kind, record_property):
    modes = ("resident", fetch)
    resident, offloaded = (teacher_forced(name, kind, mode) for mode in modes)
    np.testing.assert_allclose(resident, offloaded, atol=1e-4)
    # Sets may differ only at a near tie; none does here, and if one ever did, its logits would differ above.
    sets = [
        leaf
        for mode in modes
        for leaf in changing(run_steps(model(), prefilled(name, kind, mode)[1], STEPS[:, :6])[1]).items()
        if leaf[0].endswith(".resident")
    ]
    half = len(sets) // 2
    record_property("sets_compared", half)
    for (_, one), (_, other) in zip(sets[:half], sets[half:], strict=True):
        np.testing.assert_array_equal(np.sort(one), np.sort(other))


# Law 3


@pytest.mark.parametrize(("name", "fetch"), [pair for pair in POLICY_FETCHES if pair[0] in policies_of()])
def test_jit_is_no_jit(name, fetch):
    """The core, called operation by operation, gives the step's logits and state. Each operation is a program."""
    _, state = prefilled(name, "restricted", fetch)
    token = jnp.asarray(STEPS[:, 0])
    plain, plain_state = decode.step(model().weights, TINY, token, state)
    jitted, jitted_state = decode.decode_step(model(), token, state.fork())
    np.testing.assert_allclose(plain, jitted, atol=1e-4)
    for path, leaf in changing(jitted_state).items():
        np.testing.assert_allclose(changing(plain_state)[path], leaf, atol=1e-4, err_msg=path)


@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for name in POLICY_CASES for row in (range(BATCH) if name in policies_of() else [1])]
)
def test_row_alone_is_row_in_batch(name, row):
    """Alone, unpadded, and with a window of its own size; the programs differ, so codes may be neighbours."""
    length, fetch = LENGTHS[row], modes_of(name)[0]
    logits, state = decode.prefill(
        model(), PROMPT[row : row + 1, :length], [length], setting(name, "restricted"), capacity=CAPACITY, fetch=fetch
    )
    batch_logits, batch = prefilled(name, "restricted", fetch)
    np.testing.assert_allclose(logits[0], batch_logits[row], atol=1e-4)
    same = same_codes(as_seen(state, [length]), as_seen(batch, LENGTHS), row).all()
    alone, _ = run_steps(model(), state, STEPS[row : row + 1, :6])
    np.testing.assert_allclose(
        alone[0], teacher_forced(name, "restricted", fetch)[row], atol=1e-4 if same else NEIGHBOUR
    )


@policies_fetched
def test_a_step_changes_no_shape(name, fetch):
    _, state = prefilled(name, "restricted", fetch)

    def describe(state):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding.memory_kind), state)

    before = describe(state)
    once = decode.decode_step(model(), STEPS[:, 0], state)[1]
    assert describe(once) == before  # equal trees: static fields are compared too
    assert describe(decode.extend(model(), STEPS[:, :7], [3, 0, 2], once)[1]) == before


@policies_fetched
def test_split_turns_are_one_turn(name, fetch):
    """Rows take their new tokens in turns of other sizes, some rows pausing: the same tokens, the same state.

    All turns are padded to the width of the whole one, so that no other program is compiled.
    """
    new = np.array([7, 4, 6])
    once, state = decode.extend(model(), STEPS[:, :7], new, prefilled(name, "restricted", fetch)[1])
    _, split = decode.extend(model(), STEPS[:, :7], [3, 0, 3], prefilled(name, "restricted", fetch)[1])
    second = np.zeros((BATCH, 7), np.int32)
    second[0, :4], second[1, :4], second[2, :3] = STEPS[0, 3:7], STEPS[1, :4], STEPS[2, 3:6]
    twice, split = decode.extend(model(), second, [4, 4, 3], split)
    np.testing.assert_allclose(once, twice, atol=1e-4)
    for path, leaf in remembered(state).items():
        np.testing.assert_allclose(remembered(split)[path], leaf, atol=1e-4, err_msg=path)


# Law 4


@policies_fetched
def test_extend_is_steps(name, fetch):
    lengths = np.array([7, 0, 4])
    active = np.arange(7) < lengths[:, None]
    start = prefilled(name, "restricted", fetch)[1]
    by_steps, stepped = run_steps(model(), start.fork(), np.where(active, STEPS[:, :7], 0), active)
    last, extended = decode.extend(model(), STEPS[:, :7], lengths, start.fork())
    np.testing.assert_allclose(last[0], by_steps[0, 6], atol=1e-4)
    np.testing.assert_allclose(last[2], by_steps[2, 3], atol=1e-4)
    assert not np.asarray(last[1]).any()
    if name in policies_of():  # how logits are read off is the same for all
        everything, extended = decode.extend(model(), STEPS[:, :7], lengths, start.fork(), logits="all")
        np.testing.assert_allclose(np.asarray(everything)[active], np.asarray(by_steps)[active], atol=1e-4)
        np.testing.assert_allclose(last[0], everything[0, 6], atol=1e-6)
    for path, leaf in remembered(stepped).items():
        np.testing.assert_allclose(remembered(extended)[path], leaf, atol=1e-4, err_msg=path)


@policies_fetched
def test_inactive_rows_do_not_change(name, fetch):
    """Every leaf of an idle row, bit for bit, what the policies share included; host writes of it go nowhere."""
    _, state = prefilled(name, "restricted", fetch)
    _, state = run_steps(model(), state, STEPS[:, :1])  # row 1 then holds 28 tokens: its next one opens a unit
    before = {path: leaf.copy() for path, leaf in kept(state).items()}
    _, state = decode.decode_step(model(), STEPS[:, 1], state, active=[True, False, True])
    for path, leaf in kept(state).items():
        np.testing.assert_array_equal(leaf[1], before[path][1], err_msg=path)


@pytest.mark.parametrize("name", ["infllm", "specache", "shadowkv"])
def test_a_callable_is_given_pieces(name):
    """prefill and extend with a callable give what it would make of all logits.

    No policy sees logits: these differ in how their prompt attends, in rows of a step and in pieces of a turn.
    """
    policy = setting(name, "restricted")

    def best(logits):
        return logits.argmax(-1)

    for want in (best, lambda logits: {"top": logits.max(-1)}):
        out, state = decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY, logits=want)
        full, again = decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY, logits="all")
        jax.tree.map(np.testing.assert_array_equal, out, want(full))
        out, _ = decode.extend(model(), STEPS[:, :3], [3, 1, 0], state, logits=want)
        full, _ = decode.extend(model(), STEPS[:, :3], [3, 1, 0], again, logits="all")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), out, want(full))
        if name != "shadowkv":
            break  # the second form once is enough


def test_prefill_many_is_prefill_for_each():
    """Policies that share a prefill do not see each other's needs (trailing queries, all queries)."""
    other = dataclasses.replace(POLICY_CASES["probe"].restricted, tail=11)
    chosen = [POLICY_CASES["probe"].restricted, other, ShadowKV(rank=8), None]
    together = decode.prefill_many(model(), PROMPT, LENGTHS, chosen, capacity=CAPACITY)
    for policy, (logits, state) in zip(chosen, together, strict=True):
        alone, apart = decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY)
        np.testing.assert_array_equal(logits, alone)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, apart)
