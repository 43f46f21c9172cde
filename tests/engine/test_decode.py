"""Bad input to prefill and the steps: an error that names field and limit, a state that survives it, and the edges."""

import dataclasses

import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, prefilled, random_tokens, run_steps, setting
from few import slow
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
CONTEXT = f"context={TINY.context} tokens, got {TINY.context + 1}"
NO_POLICY = r"policy must be a Policy, such as ShadowKV\(\)"


def with_id(value):
    return np.array([[1, 2, 3], [4, value, 0]])


def bad(error, told, tokens=GOOD, lengths=(3, 2), policy=None, **options):
    return error, told, tokens, lengths, policy or Full(), {"capacity": 64} | options


@pytest.mark.parametrize(
    ("error", "told", "tokens", "lengths", "policy", "options"),
    [
        bad(PromptError, "non-empty", np.zeros((0, 4), int), []),
        bad(PromptError, "non-empty", np.zeros((2, 0), int), [0, 0]),
        bad(PromptError, r"\[B, T\]", GOOD[0], [3]),
        bad(PromptError, r"lengths must lie in \[1, 3\], got \[3, 0\]", lengths=[3, 0]),
        bad(PromptError, r"lengths must lie in \[1, 3\]", lengths=[4, 2]),
        bad(PromptError, r"shape \(2,\)", lengths=[3]),
        bad(PromptError, "integers", lengths=[3.0, 2.0]),
        bad(PromptError, "integers", GOOD * 1.0),
        bad(PromptError, rf"\[0, vocab_size={VOCAB}\), got -1", with_id(-1)),
        bad(PromptError, f"got {VOCAB}", with_id(VOCAB)),
        bad(CapacityError, CONTEXT, capacity=TINY.context + 1),
        bad(CapacityError, "capacity=2 tokens, got 3", capacity=2),
        bad(CapacityError, "capacity must be an integer of at least 1, got 0", capacity=0),
        bad(CapacityError, "capacity must be an integer", capacity="8"),
        bad(CapacityError, "capacity must be an integer", capacity=8.0),
        bad(ConfigError, "fetch must be", fetch="disk"),
        bad(ConfigError, "fetch must be", fetch=None),
        bad(ConfigError, "logits must be", logits="first"),
        bad(ConfigError, "logits must be", logits=None),
        bad(ConfigError, "shadowkv.rank", policy=ShadowKV(rank=0)),
        bad(ConfigError, r"shadowkv.rank must be an integer in \[1, 32\], got 33", policy=ShadowKV(rank=33)),
        bad(ConfigError, "shadowkv.rank", policy=ShadowKV(rank=8.0)),
        bad(ConfigError, "shadowkv.budget must be an integer at least 8, got 7", policy=ShadowKV(budget=7)),
        bad(ConfigError, "shadowkv.budget", policy=ShadowKV(budget=-1)),
        bad(ConfigError, "shadowkv.budget", policy=ShadowKV(budget=64.0)),
        bad(ConfigError, "shadowkv.chunk_size", policy=ShadowKV(chunk_size=0)),
        bad(ConfigError, "shadowkv.chunk_size", policy=ShadowKV(chunk_size=True)),
        bad(ConfigError, "shadowkv.outlier_chunks", policy=ShadowKV(outlier_chunks=-1)),
        bad(ConfigError, "shadowkv.local_chunks", policy=ShadowKV(local_chunks=-1)),
        bad(ConfigError, "streaming_llm.sinks", policy=StreamingLLM(sinks=-1)),
        bad(ConfigError, "streaming_llm.window", policy=StreamingLLM(window=0)),
    ],
)
def test_bad_arguments_of_prefill(error, told, tokens, lengths, policy, options):
    with pytest.raises(error, match=told):
        decode.prefill(model(), tokens, lengths, policy, **options)


def test_padding_is_never_looked_at():
    padded = np.where(np.arange(PROMPT.shape[1]) < np.array(LENGTHS)[:, None], PROMPT, VOCAB + 7)
    logits, _ = decode.prefill(model(), padded, LENGTHS, setting("full", "restricted"), capacity=CAPACITY)
    np.testing.assert_array_equal(logits, prefilled("full", "restricted")[0])


# A state that survives


@pytest.mark.parametrize("name", ["full", "shadowkv", slow("streaming_llm"), slow("probe")])
def test_no_room_left(name):
    """Row 0 is full: it may not step, the others may, and the refused calls have consumed nothing."""
    _, state = prefilled(name, "restricted")
    for _ in range(5):
        assert np.asarray(state.room())[0] > 0
        _, state = decode.extend(model(), STEPS[:, :7], [7, 0, 0], state)
    assert np.asarray(state.room()).tolist() == [0, 69, 91]
    for row, call in (
        (0, lambda: decode.decode_step(model(), [1, 2, 3], state)),
        (0, lambda: decode.decode_steps(model(), [1, 2, 3], state, 1)),
        (0, lambda: decode.extend(model(), STEPS[:, :1], [1, 1, 1], state)),
        (1, lambda: decode.extend(model(), random_tokens(3, 70), [0, 70, 70], state)),
        (0, lambda: decode.decode_step(model(), [1, 2, 3], state, active=[True, False, False])),
    ):
        with pytest.raises(CapacityError, match=rf"row {row} holds {(96, 27)[row]} tokens of capacity=96"):
            call()
    logits, state = decode.extend(model(), STEPS[:, :7], [0, 7, 7], state)
    assert np.isfinite(logits).all()
    _, state = decode.decode_step(model(), [1, 2, 3], state, active=[False, True, True])
    assert np.asarray(state.room()).tolist() == [0, 61, 83]


def test_bad_steps_consume_nothing():
    _, state = prefilled("shadowkv", "restricted")
    other = init_params(dataclasses.replace(TINY, num_layers=2), seed=0)
    ids = [0, 1, 2]

    def step(token=ids, params=None, of=state, *policy, **options):
        return lambda: decode.decode_step(params or model(), token, of, *policy, **options)

    def steps(n, token=ids, **options):
        return lambda: decode.decode_steps(model(), token, state, n, **options)

    def turn(tokens=((1,), (1,), (1,)), lengths=(1, 1, 1), *policy, **options):
        return lambda: decode.extend(model(), tokens, lengths, state, *policy, **options)

    for error, told, call in (
        (PromptError, f"token must lie in .*got {VOCAB}", step([0, 1, VOCAB])),
        (PromptError, "token must lie in .*got -1", steps(2, [0, 1, -1])),
        (PromptError, r"shape \(3,\)", step([0, 1])),
        (PromptError, "integers", step([0.0, 1.0, 2.0])),
        (PromptError, "token must.*got True", step([0, True, 2])),
        (PromptError, "tokens must.*got False", turn([[1], [False], [1]])),
        (PromptError, "lengths must.*got True", turn(lengths=[1, True, 1])),
        (PromptError, "active must", step(active=[True])),
        (PromptError, "3 rows", turn([[1], [1]], [1, 1])),
        (PromptError, r"\[0, 1\]", turn(lengths=[1, 1, -1])),
        (PromptError, f"got {VOCAB}", turn([[1], [VOCAB], [1]])),
        (ConfigError, "logits must", turn(logits="none")),
        (ConfigError, "n must", steps(0)),
        (ConfigError, "n must", steps(2.0)),
        (ConfigError, "seed must", steps(2, seed="one")),
        (ConfigError, "sampler must", steps(2, sampler="greedy")),
        (StateMismatch, "state must be a KVState", step(of=[state])),
        (StateMismatch, "policy must", step(ids, model(), state, Full())),
        (StateMismatch, "policy must", turn([[1]] * 3, [1, 1, 1], ShadowKV())),
        (StateMismatch, "model like", step(params=other)),
        (StateMismatch, "model like", step(params=model(TINY, "bfloat16"))),
    ):
        with pytest.raises(error, match=told):
            call()
    for policy in ("quest", StreamingLLM, {}, 0):  # neither a policy's name nor its class is one
        for call in (
            step(ids, model(), state, policy),
            lambda policy=policy: decode.prefill(model(), GOOD, [3, 2], policy, capacity=8),
            lambda policy=policy: generate(model(), [1, 2], policy, max_new_tokens=1),
        ):
            with pytest.raises(ConfigError, match=NO_POLICY):
                call()
    for row in (True, 1.0, None):
        with pytest.raises(StateMismatch, match="row must be a whole number"):
            state.insert(row, state.take([0]))
    for rows in ([0.7], [True, False], np.array([True, False, True])):  # of a mask, rows 1 and 0 would be taken
        with pytest.raises(StateMismatch, match="whole numbers"):
            state.take(rows)
    assert state.take(np.array([2, 0])).lengths.tolist() == [LENGTHS[2], LENGTHS[0]]
    logits, _ = decode.decode_step(model(), STEPS[:, 0], state, setting("shadowkv", "restricted"))
    assert np.isfinite(logits).all()


GUESSING = SpeCache(bits=1, group=8, residual=8, fetched=6)


@pytest.mark.slow
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


def test_one_compiled_step_serves_all_tokens():
    """The first step after a prefill, later ones, a fork's, a taken and an inserted row's: one program."""
    before, state = decode._step._cache_size(), prefilled("shadowkv", "restricted", "device_put")[1]
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
    for policies, fetch in (([], "auto"), ([None], ["resident", "device_put"])):
        with pytest.raises(ConfigError, match="policies must be a non-empty list with one fetch mode each"):
            decode.prefill_many(model(), PROMPT, LENGTHS, policies, capacity=CAPACITY, fetch=fetch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
def test_a_state_that_is_full_can_rest(kind):
    """Whole chunks up to the capacity leave the window nothing; a step in which no row takes part is legal there."""
    params, tokens = small()[0], random_tokens(2, 64, config=SMALL)
    policy = kind(rank=2, budget=8, chunk_size=8, local_chunks=0)
    _, state = decode.prefill(params, tokens, [64, 64], policy, capacity=64)
    assert state.policy.name == policy.name
    assert state.room().tolist() == [0, 0]
    _, state = decode.decode_step(params, [1, 2], state, active=[False, False])
    _, state = decode.extend(params, tokens[:, :3], [0, 0], state)
    assert state.lengths.tolist() == [64, 64]
    with pytest.raises(CapacityError, match="capacity=64"):
        decode.decode_step(params, [1, 2], state)


def test_settings_of_shadowkv_plus():
    resolved = ShadowKVPlus.reference().resolve(TINY, CAPACITY)
    assert resolved.quirks == dataclasses.replace(Quirks.published(), turn_selection="each")
    wrong = {"extend_piece": 65, "quirks.turn_selection": "shared", "extra_outlier_chunks": -1}
    for field, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"shadowkv_plus\.{field} must be"):
            with_settings(ShadowKVPlus(), {field: value}).resolve(TINY, CAPACITY)
    assert "shadowkv_plus has nothing" in ShadowKVPlus().resolve(TINY, 32).fallback(TINY, 32)
