"""The laws about answers, turns and rows on every policy; and what concerns one policy or the engine alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ALL,
    BATCH,
    CAPACITY,
    DEVICE_ONLY,
    FETCH_MODES,
    KINDS,
    LENGTHS,
    LOSSLESS,
    OFFLOADED,
    POLICY_CASES,
    POLICY_FETCHES,
    POLICY_KINDS,
    PROMPT,
    STEPS,
    TINY,
    case_of,
    model,
    modes_of,
    policies_of,
    prefilled,
    run_steps,
    setting,
)

from jshadow.cache import offload
from jshadow.cache.records import Selection, StepKV
from jshadow.engine import decode
from jshadow.evaluation.laws import answers, rows, turns
from jshadow.ops.rope import cos_sin, inverse_frequencies
from jshadow.policies import POLICIES, ShadowKV

policies = pytest.mark.parametrize("name", POLICY_CASES)
policies_fetched = pytest.mark.parametrize(("name", "fetch"), POLICY_FETCHES)
kinds = pytest.mark.parametrize("kind", KINDS)
fetches = pytest.mark.parametrize("fetch", FETCH_MODES)


def test_every_policy_has_a_case():
    assert set(POLICIES) <= set(POLICY_CASES)


@policies
def test_what_keeps_nothing_on_the_host_has_one_program(name):
    """Laws that go through the fetch modes leave the other modes of these out."""
    if name in DEVICE_ONLY:
        answers.one_program_without_host_rows(case_of(name))


def test_some_policies_keep_nothing_on_the_host():
    """The table of those is computed; these are known."""
    device_only = {"full", "streaming_llm", "h2o", "less", "less_taught", "snapkv", "kivi", "kivi_1bit"}
    device_only |= {"adakv", "kvzip", "tova", "keydiff", "expected_attention"}
    assert device_only <= set(DEVICE_ONLY)
    offloading = {
        "quest",
        "rocketkv",
        "loki",
        "infinigen",
        "omnikv",
        "specache",
        "infllm",
        "shadowkv",
        "shadowkv_plus",
        "probe",
    }
    assert not offloading & set(DEVICE_ONLY)


@pytest.mark.parametrize(("name", "fetch"), [pair for pair in POLICY_FETCHES if pair[0] in LOSSLESS])
def test_lossless_is_full(name, fetch):
    answers.lossless_is_full(case_of(name, fetch, "lossless"))


@pytest.mark.parametrize("name", [name for name in policies_of() if name in LOSSLESS])
def test_lossless_is_full_in_bfloat16(name):
    answers.lossless_is_full_in_bfloat16(case_of(name, modes_of(name)[0], "lossless"))


@pytest.mark.parametrize("name", [name for name in POLICY_CASES if name not in ("full", "offloaded")])
def test_restricted_is_not_full(name):
    answers.small_is_not_full(case_of(name))


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
            fetched = fetched.listed(spec.head_dim)
            rows = [
                jnp.where(jnp.repeat(fetched.valid, x.shape[2] // fetched.ids.shape[2], axis=2)[..., None], x, 0)
                for x in (fetched.k, fetched.v)
            ]
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
        )
        rows = [np.asarray(part.array) for part in (tier.prompt, tier.tail) if part is not None]
        stored = np.concatenate([rows[0], *(part[:, :, :-1] for part in rows[1:])], axis=2)
        want = np.take_along_axis(stored, ids[..., None], axis=2)
        want = want.reshape(BATCH, layout.heads, 5, layout.planes, layout.unit, spec.head_dim)
        flat = (BATCH, layout.heads, 5 * layout.unit, spec.head_dim)
        np.testing.assert_array_equal(fetched.v, want[:, :, :, -1].reshape(flat))
        if layout.planes == 2:
            np.testing.assert_array_equal(fetched.k, want[:, :, :, 0].reshape(flat))
        np.testing.assert_array_equal(fetched.valid, ids % 2 == 0)


def layer_step(spec, query, lengths):
    """A StepKV with made-up queries; keys and values do not matter to a selection."""
    batch, rows = query.shape[:2]
    none = jnp.zeros((batch, rows, spec.kv_heads, spec.head_dim))
    positions = lengths[:, None] + jnp.arange(rows)
    inverse = jnp.asarray(inverse_frequencies(TINY.rope, TINY.head_dim))
    valid = jnp.ones((batch, rows), bool)
    return StepKV(query, query, none, none, none, positions, valid, lengths, inverse, *cos_sin(positions, inverse))


@pytest.mark.parametrize(
    ("name", "fetch", "kind"),
    [case for case in POLICY_KINDS if case[1] in OFFLOADED and case[2] in (KINDS if ALL else KINDS[:1])],
)
def test_fetch_modes_agree(name, fetch, kind, record_property):
    case = case_of(name, fetch, kind)
    answers.fetch_modes_agree(case)
    record_property("sets_compared", len(answers.selected_units(case.policy, fetch)))


@pytest.mark.parametrize(("name", "fetch"), [pair for pair in POLICY_FETCHES if pair[0] in policies_of()])
def test_jit_is_no_jit(name, fetch):
    answers.jit_is_no_jit(case_of(name, fetch))


@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for name in POLICY_CASES for row in (range(BATCH) if name in policies_of() else [1])]
)
def test_row_alone_is_row_in_batch(name, row):
    rows.row_alone_is_row_in_batch(case_of(name, modes_of(name)[0], row=row))


@policies_fetched
def test_a_step_changes_no_shape(name, fetch):
    answers.steps_change_no_shape(case_of(name, fetch))


@policies_fetched
def test_split_turns_are_one_turn(name, fetch):
    turns.split_turns_are_one_turn(case_of(name, fetch))


@policies_fetched
def test_extend_is_steps(name, fetch):
    turns.extend_is_steps(case_of(name, fetch))
    if name in policies_of():  # how logits are read off is the same for all
        turns.every_logit_of_a_turn_is_a_step_s(case_of(name, fetch))


@policies
def test_tokens_given_back_leave_nothing(name):
    if turns.cannot_rewind(case_of(name).subject) is None:
        turns.tokens_given_back_leave_nothing(case_of(name, modes_of(name)[0]))


@policies
def test_long_turn_is_steps(name):
    turns.long_turn_is_steps(case_of(name, modes_of(name)[0]))


@policies_fetched
def test_inactive_rows_do_not_change(name, fetch):
    rows.inactive_rows_do_not_change(case_of(name, fetch))


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
