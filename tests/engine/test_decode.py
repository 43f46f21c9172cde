"""Bad input to prefill and the steps: an error that names field and limit, a state that survives it, and the edges."""

import dataclasses

import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, prefilled, random_tokens, run_steps, setting
from small_state import SMALL, small

from jshadow import begin_prefill, generate
from jshadow.engine import decode
from jshadow.errors import CapacityError, ConfigError, PromptError, StateMismatch
from jshadow.planner.bytes import footprint, step_footprint
from jshadow.policies import DenseFirst, Full, ShadowKV, ShadowKVPlus, SpeCache, StreamingLLM
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Quirks
from jshadow.weights.params import init_params

VOCAB = TINY.vocab_size
GOOD = np.array([[1, 2, 3], [4, 5, 0]])
slow = pytest.mark.slow


def with_id(value):
    tokens = GOOD.copy()
    tokens[1, 1] = value
    return tokens


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (np.zeros((0, 4), int), [], "non-empty"),
        (np.zeros((2, 0), int), [0, 0], "non-empty"),
        (GOOD[0], [3], r"\[B, T\]"),
        (GOOD, [3, 0], r"lengths must lie in \[1, 3\], got \[3, 0\]"),
        (GOOD, [4, 2], r"lengths must lie in \[1, 3\]"),
        (GOOD, [3], r"shape \(2,\)"),
        (GOOD, [3.0, 2.0], "integers"),
        (GOOD * 1.0, [3, 2], "integers"),
        (with_id(-1), [3, 2], rf"\[0, vocab_size={VOCAB}\), got -1"),
        (with_id(VOCAB), [3, 2], f"got {VOCAB}"),
    ],
)
def test_bad_prompts(tokens, lengths, message):
    with pytest.raises(PromptError, match=message):
        decode.prefill(model(), tokens, lengths, Full(), capacity=8)


def test_padding_is_never_looked_at():
    padded = np.where(np.arange(PROMPT.shape[1]) < np.array(LENGTHS)[:, None], PROMPT, VOCAB + 7)
    logits, _ = decode.prefill(model(), padded, LENGTHS, setting("full", "restricted"), capacity=CAPACITY)
    np.testing.assert_array_equal(logits, prefilled("full", "restricted")[0])


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (TINY.context + 1, f"context={TINY.context} tokens, got {TINY.context + 1}"),
        (2, "capacity=2 tokens, got 3"),
        (0, "capacity must be an integer of at least 1, got 0"),
        ("8", "capacity must be an integer"),
        (8.0, "capacity must be an integer"),
    ],
)
def test_bad_capacity(capacity, message):
    with pytest.raises(CapacityError, match=message):
        decode.prefill(model(), GOOD, [3, 2], Full(), capacity=capacity)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fetch": "disk"}, "fetch must be"),
        ({"fetch": None}, "fetch must be"),
        ({"logits": "first"}, "logits must be"),
        ({"logits": None}, "logits must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        decode.prefill(model(), GOOD, [3, 2], Full(), **{"capacity": 8, **options})


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (ShadowKV(rank=0), "shadowkv.rank"),
        (ShadowKV(rank=33), r"shadowkv.rank must be an integer in \[1, 32\], got 33"),
        (ShadowKV(rank=8.0), "shadowkv.rank"),
        (ShadowKV(budget=7), "shadowkv.budget must be an integer at least 8, got 7"),
        (ShadowKV(budget=-1), "shadowkv.budget"),
        (ShadowKV(budget=64.0), "shadowkv.budget"),
        (ShadowKV(chunk_size=0), "shadowkv.chunk_size"),
        (ShadowKV(chunk_size=True), "shadowkv.chunk_size"),
        (ShadowKV(outlier_chunks=-1), "shadowkv.outlier_chunks"),
        (ShadowKV(local_chunks=-1), "shadowkv.local_chunks"),
        (StreamingLLM(sinks=-1), "streaming_llm.sinks"),
        (StreamingLLM(window=0), "streaming_llm.window"),
    ],
)
def test_bad_settings_name_the_field(policy, field):
    with pytest.raises(ConfigError, match=field):
        decode.prefill(model(), GOOD, [3, 2], policy, capacity=64)


# A state that survives


@pytest.mark.parametrize(
    "name", ["full", "shadowkv", *(pytest.param(name, marks=slow) for name in ("streaming_llm", "probe"))]
)
def test_no_room_left(name):
    """Row 0 is full: it may not step, the others may, and the refused calls have consumed nothing."""
    _, state = prefilled(name, "restricted")
    for _ in range(5):
        assert np.asarray(state.room())[0] > 0
        _, state = decode.extend(model(), STEPS[:, :7], [7, 0, 0], state)
    assert np.asarray(state.room()).tolist() == [0, 69, 91]
    refused = (
        (0, lambda: decode.decode_step(model(), [1, 2, 3], state)),
        (0, lambda: decode.decode_steps(model(), [1, 2, 3], state, 1)),
        (0, lambda: decode.extend(model(), STEPS[:, :1], [1, 1, 1], state)),
        (1, lambda: decode.extend(model(), random_tokens(3, 70), [0, 70, 70], state)),
        (0, lambda: decode.decode_step(model(), [1, 2, 3], state, active=[True, False, False])),
    )
    for row, call in refused:
        with pytest.raises(CapacityError, match=rf"row {row} holds {(96, 27)[row]} tokens of capacity=96"):
            call()
    logits, state = decode.extend(model(), STEPS[:, :7], [0, 7, 7], state)
    assert np.isfinite(logits).all()
    _, state = decode.decode_step(model(), [1, 2, 3], state, active=[False, True, True])
    assert np.asarray(state.room()).tolist() == [0, 61, 83]


def test_bad_steps_consume_nothing():
    _, state = prefilled("shadowkv", "restricted")
    other = init_params(dataclasses.replace(TINY, num_layers=2), seed=0)
    calls = (
        (PromptError, f"token must lie in .*got {VOCAB}", lambda: decode.decode_step(model(), [0, 1, VOCAB], state)),
        (PromptError, "token must lie in .*got -1", lambda: decode.decode_steps(model(), [0, 1, -1], state, 2)),
        (PromptError, r"shape \(3,\)", lambda: decode.decode_step(model(), [0, 1], state)),
        (PromptError, "integers", lambda: decode.decode_step(model(), [0.0, 1.0, 2.0], state)),
        (PromptError, "token must.*got True", lambda: decode.decode_step(model(), [0, True, 2], state)),
        (PromptError, "tokens must.*got False", lambda: decode.extend(model(), [[1], [False], [1]], [1, 1, 1], state)),
        (PromptError, "lengths must.*got True", lambda: decode.extend(model(), [[1], [1], [1]], [1, True, 1], state)),
        (PromptError, "active must", lambda: decode.decode_step(model(), [0, 1, 2], state, active=[True])),
        (PromptError, "3 rows", lambda: decode.extend(model(), [[1], [1]], [1, 1], state)),
        (PromptError, r"\[0, 1\]", lambda: decode.extend(model(), [[1], [1], [1]], [1, 1, -1], state)),
        (PromptError, f"got {VOCAB}", lambda: decode.extend(model(), [[1], [VOCAB], [1]], [1, 1, 1], state)),
        (ConfigError, "logits must", lambda: decode.extend(model(), [[1]] * 3, [1, 1, 1], state, logits="none")),
        (ConfigError, "n must", lambda: decode.decode_steps(model(), [0, 1, 2], state, 0)),
        (ConfigError, "n must", lambda: decode.decode_steps(model(), [0, 1, 2], state, 2.0)),
        (ConfigError, "seed must", lambda: decode.decode_steps(model(), [0, 1, 2], state, 2, seed="one")),
        (ConfigError, "sampler must", lambda: decode.decode_steps(model(), [0, 1, 2], state, 2, sampler="greedy")),
        (StateMismatch, "state must be a KVState", lambda: decode.decode_step(model(), [0, 1, 2], [state])),
        (StateMismatch, "policy must", lambda: decode.decode_step(model(), [0, 1, 2], state, Full())),
        (StateMismatch, "policy must", lambda: decode.extend(model(), [[1]] * 3, [1, 1, 1], state, ShadowKV())),
        (StateMismatch, "model like", lambda: decode.decode_step(other, [0, 1, 2], state)),
        (StateMismatch, "model like", lambda: decode.decode_step(model(TINY, "bfloat16"), [0, 1, 2], state)),
    )
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()
    logits, _ = decode.decode_step(model(), STEPS[:, 0], state, setting("shadowkv", "restricted"))
    assert np.isfinite(logits).all()


GUESSING = SpeCache(bits=1, group=8, residual=8, fetched=6)


@slow
@pytest.mark.parametrize(
    ("policy", "sliding"),
    [(GUESSING, (0, 1, 2)), (DenseFirst(GUESSING, layers=3), ()), (DenseFirst(GUESSING, layers=1), (1, 2))],
)
def test_a_turn_beside_a_guess_that_no_layer_uses(policy, sliding):
    """SpeCache's guess belongs to the whole policy, also where no layer is its own."""
    config = dataclasses.replace(TINY, sliding_window=8 if sliding else None, sliding_layers=sliding)
    _, state = decode.prefill(model(config), PROMPT, LENGTHS, policy, capacity=CAPACITY)
    last, _ = decode.extend(model(config), STEPS[:, :7], [7, 3, 0], state.fork())
    by_steps, _ = run_steps(model(config), state, STEPS[:, :7], np.arange(7) < np.array([7, 3, 0])[:, None])
    np.testing.assert_allclose(last[0], by_steps[0, 6], atol=1e-4)
    np.testing.assert_allclose(last[1], by_steps[1, 2], atol=1e-4)


def test_planned_prompts_must_fit():
    for prompt in (0, -5, 21):
        for plan in (footprint, step_footprint):
            with pytest.raises(CapacityError, match=f"prompt must have 1 to capacity=20 tokens, got {prompt}"):
                plan(TINY, Full(), capacity=20, prompt=prompt)


@pytest.mark.parametrize("fetch", ["device_put", pytest.param("resident", marks=slow)])
def test_one_compiled_step_serves_all_tokens(fetch):
    """The first step after a prefill, later ones, a fork's, a taken and an inserted row's: one program."""
    before, state = decode._step._cache_size(), prefilled("shadowkv", "restricted", fetch)[1]
    _, state = run_steps(model(), state, STEPS[:, :3])
    for one in (state.fork(), state.take([2, 1, 0]), state.insert(0, state.take([1]))):
        run_steps(model(), one, STEPS[:, 3:6])
    assert decode._step._cache_size() <= before + 1  # another test may have compiled it


def test_a_prefill_carries_its_policy_and_mode():
    """No policy is ShadowKV(), resolved."""
    job = begin_prefill(model(), PROMPT, LENGTHS, capacity=CAPACITY, fetch="auto").job
    assert list(job.policies) == [ShadowKV().resolve(TINY, CAPACITY)]
    assert (job.policies[0].rank, job.policies[0].budget) == (8, 256)
    assert {(spec.capacity, spec.fetch, spec.batch) for spec in job.plans[0]} == {(CAPACITY, "resident", len(LENGTHS))}
    state = prefilled("shadowkv", "restricted", "device_put")[1]
    assert (state.policy, state.fetch) == (setting("shadowkv", "restricted").resolve(TINY, CAPACITY), "device_put")
    assert (state.capacity, state.batch) == (CAPACITY, len(LENGTHS))


@slow
@pytest.mark.parametrize(
    "policy",
    [
        ShadowKV(rank=2, budget=8, chunk_size=8, local_chunks=0),
        ShadowKVPlus(rank=2, budget=8, chunk_size=8, local_chunks=0),
    ],
    ids=lambda policy: policy.name,
)
def test_a_state_that_is_full_can_rest(policy):
    """Whole chunks up to the capacity leave the window nothing; a step in which no row takes part is legal there."""
    params, tokens = small()[0], random_tokens(2, 64, config=SMALL)
    _, state = decode.prefill(params, tokens, [64, 64], policy, capacity=64)
    assert state.policy.name == policy.name
    assert state.room().tolist() == [0, 0]
    _, state = decode.decode_step(params, [1, 2], state, active=[False, False])
    _, state = decode.extend(params, tokens[:, :3], [0, 0], state)
    assert state.lengths.tolist() == [64, 64]
    with pytest.raises(CapacityError, match="capacity=64"):
        decode.decode_step(params, [1, 2], state)


def test_lists_of_policies_and_modes_must_match():
    for policies, fetch in (([], "auto"), ([None], ["resident", "device_put"])):
        with pytest.raises(ConfigError, match="policies must be a non-empty list with one fetch mode each"):
            decode.prefill_many(model(), PROMPT, LENGTHS, policies, capacity=CAPACITY, fetch=fetch)


def test_settings_of_shadowkv_plus():
    resolved = ShadowKVPlus.reference().resolve(TINY, CAPACITY)
    assert resolved.quirks == dataclasses.replace(Quirks.published(), turn_selection="each")
    wrong = {"extend_piece": 65, "quirks.turn_selection": "shared", "extra_outlier_chunks": -1}
    for field, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"shadowkv_plus\.{field} must be"):
            with_settings(ShadowKVPlus(), {field: value}).resolve(TINY, CAPACITY)
    assert "shadowkv_plus has nothing" in ShadowKVPlus().resolve(TINY, 32).fallback(TINY, 32)


@pytest.mark.parametrize("policy", ["quest", StreamingLLM, {}, 0])
def test_a_policy_is_neither_its_name_nor_its_class(policy):
    state = prefilled("full", "restricted")[1]
    calls = (
        lambda: decode.prefill(model(), GOOD, [3, 2], policy, capacity=8),
        lambda: generate(model(), [1, 2], policy, max_new_tokens=1),
        lambda: decode.decode_step(model(), STEPS[:, 0], state, policy),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"policy must be a Policy, such as ShadowKV\(\)"):
            call()
    state.check_alive()


def test_rows_must_be_whole_numbers():
    state = prefilled("full", "restricted")[1]
    for row in (True, 1.0, None):
        with pytest.raises(StateMismatch, match="row must be a whole number"):
            state.insert(row, state.take([0]))
    for rows in ([0.7], [True, False], np.array([True, False, True])):  # of a mask, rows 1 and 0 would be taken
        with pytest.raises(StateMismatch, match="whole numbers"):
            state.take(rows)
    assert state.take(np.array([2, 0])).lengths.tolist() == [LENGTHS[2], LENGTHS[0]]
