"""Prefill and the compiled steps: bad input, the traceable cores, loops of steps, what they read and consume, turns."""

import ast
import concurrent.futures
import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, prefilled, random_tokens, run_steps, setting
from few import slow
from small_state import SMALL, small

import jshadow
from jshadow import begin_prefill, generate
from jshadow.cache.accounting import state_nbytes
from jshadow.engine import checks, decode
from jshadow.engine.sampling import Sampler
from jshadow.engine.verify import resident_twin
from jshadow.errors import CapacityError, ConfigError, PromptError, StateMismatch
from jshadow.models.transformer import abstract_weights
from jshadow.planner import pieces
from jshadow.planner.machine import abstract_state, footprint, step_footprint
from jshadow.planner.pieces import block_tokens, extend_peak, split_of, turn_tokens
from jshadow.policies import DenseFirst, Full, ShadowKV, ShadowKVPlus, SpeCache, StreamingLLM
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Quirks
from jshadow.weights.params import init_params

VOCAB = TINY.vocab_size
GOOD = np.array([[1, 2, 3], [4, 5, 0]])
TOO_MANY = f"context={TINY.context} tokens, got {TINY.context + 1}"
NO_POLICY = r"policy must be a Policy, such as ShadowKV\(\)"


WRONG = {"rank": (0, 8.0), "budget": (-1, 64.0), "chunk_size": (0, True), "outlier_chunks": [-1], "local_chunks": [-1]}


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
        bad(PromptError, rf"\[0, vocab_size={VOCAB}\), got -1", np.array([[1, 2, 3], [4, -1, 0]])),
        bad(PromptError, f"got {VOCAB}", np.array([[1, 2, 3], [4, VOCAB, 0]])),
        bad(CapacityError, TOO_MANY, capacity=TINY.context + 1),
        bad(CapacityError, "capacity=2 tokens, got 3", capacity=2),
        bad(CapacityError, "capacity must be an integer of at least 1, got 0", capacity=0),
        bad(CapacityError, "capacity must be an integer", capacity="8"),
        bad(CapacityError, "capacity must be an integer", capacity=8.0),
        bad(ConfigError, "fetch must be", fetch="disk"),
        bad(ConfigError, "fetch must be", fetch=None),
        bad(ConfigError, "logits must be", logits="first"),
        bad(ConfigError, "logits must be", logits=None),
        bad(ConfigError, r"shadowkv.rank must be an integer in \[1, 32\], got 33", policy=ShadowKV(rank=33)),
        bad(ConfigError, "shadowkv.budget must be an integer at least 8, got 7", policy=ShadowKV(budget=7)),
        *(
            bad(ConfigError, f"shadowkv.{field}", policy=ShadowKV(**{field: value}))
            for field, values in WRONG.items()
            for value in values
        ),
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
    [(GUESSING, (0, 1)), (DenseFirst(GUESSING, layers=2), ()), (DenseFirst(GUESSING, layers=1), (1,))],
)
def test_a_turn_beside_a_guess_that_no_layer_uses(policy, sliding):
    """SpeCache's guess belongs to the whole policy, also where no layer is its own."""
    config = dataclasses.replace(TINY, num_layers=2, sliding_window=8 if sliding else None, sliding_layers=sliding)
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


ROOM = 13  # the capacity of a state of the smallest model


def of_small(lengths, policy=None):
    params, tokens = small()[0], random_tokens(2, 13, config=SMALL)
    return params, decode.prefill(params, tokens, lengths, policy or Full(), capacity=ROOM)[1]


# The cores in a user's jit: they cannot raise, so impossible tokens give NaN


def test_impossible_tokens_in_a_user_s_jit_give_nan():
    """The core cannot raise; it must not clamp silently either. Only the row concerned, and only where active."""
    _, state = prefilled("shadowkv", "restricted")
    weights = model().weights  # made outside of the jit, where it would be traced
    core = jax.jit(lambda token, state, active: decode.step(weights, TINY, token, state, active))
    logits, _ = core(np.array([VOCAB, -1, 5]), state, np.array([True, True, True]))
    assert np.isnan(logits).all(axis=1).tolist() == [True, True, False]
    assert np.isfinite(np.asarray(logits)[2]).all()
    logits, after = core(np.array([VOCAB, 1, 5]), state, np.array([False, True, True]))
    assert np.isfinite(np.asarray(logits)[1:]).all()
    for mine, was in zip(*(jax.tree.leaves(one.split()[1]) for one in (after, state)), strict=True):
        # an idle row is not harmed by what it is fed
        np.testing.assert_array_equal(np.asarray(mine)[0], np.asarray(was)[0])


turn_core = jax.jit(decode.extend_steps, static_argnums=(1, 5))


@pytest.mark.parametrize(("place", "bad"), [(0, -1), (7, VOCAB), (19, -1)])
def test_an_impossible_token_spoils_the_rest_of_its_turn(place, bad):
    """Also where the model takes the turn in pieces: its own logits, and all of those behind."""
    _, state = prefilled("full", "restricted")
    turn = np.resize(STEPS, (3, 20))
    turn[1, place] = bad
    lengths = np.array([20, 20, 12])
    for want in ("last", "all"):
        logits = np.asarray(turn_core(model().weights, TINY, turn, lengths, state, want)[0])
        assert np.isfinite(logits[0]).all()
        assert np.isfinite(logits[2] if want == "last" else logits[2, :12]).all()
        spoiled = np.isnan(logits[1]).all(axis=-1)
        assert spoiled.all() if want == "last" else spoiled.tolist() == [False] * place + [True] * (20 - place)
    turn[1, place], turn[2, 12:] = 1, bad  # past a row's own
    assert np.isfinite(turn_core(model().weights, TINY, turn, lengths, state, "last")[0]).all()


@pytest.mark.parametrize("policy", [Full(), slow(StreamingLLM(sinks=1, window=2))], ids=lambda policy: policy.name)
def test_a_full_row_in_a_user_s_jit_gives_nan(policy):
    params, state = of_small([ROOM, ROOM - 1], policy)
    weights = params.weights
    logits, _ = jax.jit(lambda token, state: decode.step(weights, SMALL, token, state))(np.array([1, 2]), state)
    assert np.isnan(logits).all(axis=1).tolist() == [True, False]


def test_the_core_emits_no_token_past_the_room():
    params, state = of_small([ROOM - 2, ROOM - 3])
    core = jax.jit(decode.generate_steps, static_argnums=(1, 4, 5))
    tokens, _ = core(params.weights, SMALL, np.array([1, SMALL.vocab_size]), state, 5, Sampler(), jax.random.key(0))
    assert (np.asarray(tokens) >= 0).tolist() == [[True, True, False, False, False], [False] * 5]


# Loops of steps


@pytest.mark.parametrize("name", ["shadowkv", slow("probe")])
def test_decode_steps_is_the_greedy_loop(name):
    logits, state = prefilled(name, "restricted")
    first = np.asarray(logits).argmax(-1).astype(np.int32)
    want, held = [first], state.fork()
    for _ in range(6):
        out, held = decode.decode_step(model(), want[-1], held)
        want.append(np.asarray(out).argmax(-1).astype(np.int32))
    want = np.stack(want[1:], axis=1)
    tokens, after = decode.decode_steps(model(), first, state.fork(), 6)
    np.testing.assert_array_equal(tokens, want)
    assert np.asarray(after.lengths).tolist() == [length + 6 for length in LENGTHS]
    # the third token of row 0 stops it: it is emitted, and the row then neither emits nor feeds
    stop = int(want[0, 2])
    stops = (stop, np.array([stop]), [np.int64(stop)], [stop, VOCAB + 5])  # one id, or an array of several
    outs = [decode.decode_steps(model(), first, state.fork(), 6, stop=stop) for stop in stops]
    stopped, after = np.asarray(outs[-1][0]), outs[-1][1]
    assert all((np.asarray(tokens) == stopped).all() for tokens, _ in outs)
    ends = [(row == stop).argmax() if stop in row else 5 for row in want]
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(stopped[row, : end + 1], want[row, : end + 1])
        assert (stopped[row, end + 1 :] == -1).all()
    assert np.asarray(after.lengths).tolist() == [n + end + 1 for n, end in zip(LENGTHS, ends, strict=True)]


SEEDS = (1, 1, 2, 1 + 2**32)


def test_decode_steps_samples_by_seed_and_row():
    _, state = prefilled("full", "restricted")
    sampler = Sampler(temperature=1.5, top_k=20)
    runs = [decode.decode_steps(model(), STEPS[:, 0], state.fork(), 6, sampler=sampler, seed=s)[0] for s in SEEDS]
    runs = [np.asarray(tokens) for tokens in runs]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert all((runs[0] != other).any() for other in runs[2:])
    alone, _ = decode.decode_steps(model(), STEPS[:1, 0], state.take([0]), 6, sampler=sampler, seed=1)
    np.testing.assert_array_equal(np.asarray(alone)[0], runs[0][0])


# The jitted functions


ENGINE = Path(jshadow.__file__).parent / "engine"
STEPS_OF_A_STATE = {"step_writes", "step_state", "scan_tokens", "generate_steps", "extend_steps"}


def jitted_steps():
    """(name, names of jax.jit's keywords) of each jitted function of the engine that runs a step."""
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            called = {one.func.id for one in ast.walk(node) if isinstance(one, ast.Call) and hasattr(one.func, "id")}
            for one in node.decorator_list:
                if called & STEPS_OF_A_STATE and isinstance(one, ast.Call) and "jax.jit" in ast.unparse(one):
                    name = f"{path.relative_to(ENGINE).with_suffix('')}.{node.name}"
                    yield name, {keyword.arg for keyword in one.keywords}


def test_every_jitted_step_has_the_compiler_options():
    jitted, known = dict(jitted_steps()), {"decode._step", "generation.step_and_sample", "verify._watched_step"}
    assert known | {"prefill/whole._foresee", "rows.row_logits"} <= jitted.keys()
    assert [name for name, keywords in jitted.items() if "compiler_options" not in keywords] == []


# The check of the room


@pytest.fixture
def room_reads(monkeypatch):
    reads, read = [], checks.read_room
    monkeypatch.setattr(checks, "read_room", lambda state: reads.append(1) or read(state))
    return reads


def test_the_room_is_read_again_before_a_step_is_refused(room_reads):
    """A row that stopped early has more room than the bound says."""
    (params, state), tokens = of_small([9, 7]), random_tokens(2, 2, config=SMALL)
    first = np.asarray(decode.decode_steps(params, tokens[:, 0], of_small([9, 7])[1], 1)[0])[:, 0]
    _, state = decode.decode_steps(params, tokens[:, 0], state, 4, stop=first.tolist())
    assert state.lengths.tolist() == [10, 8]
    room_reads.clear()
    for _ in range(3):
        _, state = decode.decode_step(params, tokens[:, 1], state)
    assert len(room_reads) == 1
    with pytest.raises(CapacityError, match=r"row 0 holds 13 tokens of capacity=13 .* room for 0 more, got 1"):
        decode.decode_step(params, tokens[:, 1], state)
    _, state = decode.decode_step(params, tokens[:, 1], state, active=[False, True])  # nothing was lost
    assert state.lengths.tolist() == [13, 12]


@pytest.mark.parametrize("name", ["full", "shadowkv", *map(slow, ("kivi", "infllm", "h2o", "probe"))])
def test_the_room_is_read_once_and_the_known_room_is_never_more(name, room_reads):
    _, state = prefilled(name, "restricted")
    _, state = decode.decode_step(model(), STEPS[:, 0], state, active=[True, False, True])
    _, state = decode.extend(model(), STEPS[:, :7], [3, 0, 1], state)
    _, state = decode.decode_steps(model(), STEPS[:, 0], state, 6)
    assert len(room_reads) == 1
    known = checks.known_room(state)
    assert known is not None
    assert (known <= np.asarray(state.room())).all()
    for other in (state.fork(), state.take([1, 0]), state.replace(lengths=np.asarray(state.lengths) + 1)):
        assert checks.known_room(other) is None


# A state that is consumed, or in use by another thread


def test_a_consumed_state_says_so():
    _, state = prefilled("full", "restricted")
    decode.decode_step(model(), STEPS[:, 0], state)
    for read in (lambda: state.lengths, lambda: state.last, state.room, state.fork):
        with pytest.raises(StateMismatch, match="state was consumed by an earlier step"):
            read()
    assert all("consumed" in text for text in (str(state), repr(state)))


def test_a_state_serves_one_thread_at_a_time(monkeypatch):
    _, state = prefilled("full", "restricted")
    entered, leave, step = threading.Event(), threading.Event(), decode._step

    def slow_step(*args, **options):
        entered.set()
        leave.wait(60)
        return step(*args, **options)

    monkeypatch.setattr(decode, "_step", slow_step)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(decode.decode_step, model(), STEPS[:, 0], state)
        assert entered.wait(60)
        threading.Timer(1.0, leave.set).start()  # where the second call is not refused, it waits too
        with pytest.raises(StateMismatch, match="another thread"):
            decode.decode_step(model(), STEPS[:, 1], state)
        leave.set()
        assert np.isfinite(future.result()[0]).all()


def test_a_failed_step_gives_the_state_back(monkeypatch):
    _, state = prefilled("full", "restricted")
    with monkeypatch.context() as patch:
        patch.setattr(decode, "_step", lambda *args, **options: [][0])
        with pytest.raises(IndexError):
            decode.decode_step(model(), STEPS[:, 0], state)
    logits, _ = decode.decode_step(model(), STEPS[:, 0], state)
    assert np.isfinite(logits).all()


# Turns of several pieces


CONTEXT = 256  # the context of the model
TURN, TWO = random_tokens(3, 150, seed=8), dataclasses.replace(TINY, num_layers=2)
SHADOW = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)


def after_prompt(policy=SHADOW):
    return decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CONTEXT)[1]


@pytest.mark.parametrize("policy", [SHADOW, slow(Full())], ids=lambda policy: policy.name)
def test_a_turn_is_a_few_calls_of_one_program(policy, monkeypatch):
    """Two calls of 80 tokens, for turns of all three lengths. In pieces of 16, the longest one took ten."""
    run, widths, done = decode._extend, [], []
    monkeypatch.setattr(
        decode, "_extend", lambda w, ids, *rest, **more: widths.append(ids.shape) or run(w, ids, *rest, **more)
    )
    programs, options = run._cache_size(), {"extend_chunk": 240, "progress": done.append}
    for count in (150, 97, 81):
        _, after = decode.extend(model(), TURN[:, :count], [count, 1, 0], after_prompt(policy), **options)
        assert np.asarray(after.lengths).tolist() == [61 + count, 28, 5]
    assert widths == [(3, 80)] * 6
    assert [(one.units, one.num_units) for one in done] == [(1, 2), (2, 2)] * 3
    assert all(one.seconds_left == 0 for one in done[1::2])
    assert run._cache_size() == programs + 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [SHADOW, Full()], ids=lambda policy: policy.name)
def test_large_pieces_give_the_same_as_small_ones(policy, monkeypatch):
    """The large pieces have 80 tokens and attend blockwise. ShadowKV selects for 32, 32 and 16. The small have 16."""
    params, turn, counts = model(TWO), TURN[:2], [150, 77]
    _, state = decode.prefill(params, random_tokens(2, 40, seed=7), [40, 13], policy, capacity=CONTEXT)
    if policy == SHADOW:
        spec = state.specs[0]
        monkeypatch.setattr(pieces, "BLOCK_BYTES", 33 * spec.policy.query_temporaries(spec))
        assert block_tokens(spec, 80) == 32
    want, small = decode.extend(params, turn, counts, state.fork(), logits="all", extend_chunk=1)
    got, large = decode.extend(params, turn, counts, state.fork(), logits="all", extend_chunk=160)
    got, want = np.asarray(got), np.asarray(want)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=1e-4)
    for name in ("steps", "attended", "selected"):
        np.testing.assert_array_equal(getattr(large.counters, name), getattr(small.counters, name))
    if policy != SHADOW:  # the last logits and those of a callable are the same; row 1 ends in the first of two pieces
        last, _ = decode.extend(params, turn, counts, state.fork(), extend_chunk=160)
        np.testing.assert_allclose(last, [got[row, count - 1] for row, count in enumerate(counts)], atol=1e-5)
        best = {"logits": lambda logits: logits.argmax(-1), "extend_chunk": 160}
        np.testing.assert_array_equal(decode.extend(params, turn, counts, state, **best)[0][0], got[0].argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Full(), SHADOW], ids=lambda policy: policy.name)
def test_temporaries_are_within_the_planner_s_bound(policy):
    """They do not hold the scores of all tokens of a piece and of the cache."""
    sizes = {"batch": 2, "capacity": 4096, "prompt": 40, "dtype": "float32", "fetch": "resident"}
    state = abstract_state(TINY, policy, **sizes)
    size = turn_tokens(state.reads(), 2000)
    ids, lengths = jax.ShapeDtypeStruct((2, size), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), abstract_weights(TINY))
    reads, writes = state.split()
    compiled = decode._extend.lower(weights, ids, lengths, reads, writes, config=TINY, want="last").compile()
    parts = extend_peak(TINY, state, 2000)
    bound = parts["piece"] + parts["hooks"] + parts["logits"]
    assert compiled.memory_analysis().temp_size_in_bytes <= bound
    assert bound < 4 * 2 * TINY.q_heads * size * 4096


def test_a_subclass_with_its_own_attention_takes_blocks():
    """Its hook is called, and not the split one that it inherits."""

    class Mute(ShadowKV):
        def attend(self, spec, state, step, fetched):
            out, state = super().attend(spec, state, step, fetched)
            return 0 * out, state

    sizes = {"batch": 1, "capacity": CONTEXT, "prompt": 40, "dtype": "float32", "fetch": "resident"}
    spec = abstract_state(TINY, SHADOW, **sizes).specs[0]
    assert split_of(spec) is not None
    assert split_of(dataclasses.replace(spec, policy=Mute(rank=8))) is None


def test_what_is_refused_changes_nothing():
    state, few = after_prompt(), (TURN[:, :3], [3, 3, 3])
    too_long = random_tokens(3, 196, seed=9), [196, 1, 1]
    whole = "extend_chunk must be an integer of at least 1"
    for error, told, turn, options in (
        (CapacityError, "row 0 holds 61 tokens", too_long, {"extend_chunk": 64}),
        *((ConfigError, whole, few, {"extend_chunk": chunk}) for chunk in (0, -1, 2.0, True)),
        (TypeError, r"unexpected keyword argument 'extend_chunks'", few, {"extend_chunks": 4}),
    ):
        with pytest.raises(error, match=told):
            decode.extend(model(), *turn, state, **options)
    for stop in ("45", ["45"], [4.0], [True], 1.5, [None]):
        with pytest.raises(ConfigError, match="stop must be token ids, got"):
            decode.decode_steps(model(), STEPS[:, 0], state, 2, stop=stop)
    state.check_alive()
    assert np.asarray(state.lengths).tolist() == list(LENGTHS)


# Rows that share a prompt half

SETTING = ("shadowkv", "restricted")


@pytest.fixture
def one():
    """A state with one row of 61 tokens."""
    return prefilled(*SETTING, "device_put")[1].take([0])


@pytest.mark.slow
def test_a_ragged_turn_and_steps_of_shared_rows_are_those_of_forks(one):
    turn, lengths = random_tokens(3, 21, seed=3), np.array([21, 4, 0])
    logits, state = decode.extend(model(), turn, lengths, one.share(3), logits="all", extend_chunk=24)
    logits = np.asarray(logits)
    for row in (0, 1):
        alone, fork = decode.extend(model(), turn[[row]], [lengths[row]], one.fork(), logits="all")
        np.testing.assert_allclose(logits[row, : lengths[row]], np.asarray(alone)[0, : lengths[row]], atol=1e-5)
        np.testing.assert_array_equal(state.take([row]).lengths, fork.lengths)
    np.testing.assert_array_equal(state.lengths, np.asarray(one.lengths) + lengths)
    core, _ = decode.extend_steps(model().weights, TINY, *map(jnp.asarray, (turn, lengths)), one.share(3))
    np.testing.assert_allclose(core[1], logits[1, 3], atol=1e-5)
    tokens, _ = decode.decode_steps(model(), [3, 4, 90], one.share(3), 6)
    for row, first in enumerate((3, 4, 90)):
        alone, _ = decode.decode_steps(model(), [first], one.fork(), 6)
        np.testing.assert_array_equal(np.asarray(tokens)[row], np.asarray(alone)[0])


def test_take_keeps_rows_shared_and_insert_needs_the_same_prompt(one):
    state = one.share(3)
    assert repr(state).startswith(f"KVState(lengths={[int(one.lengths[0])] * 3}, ")
    parts, alone = state_nbytes(state), state_nbytes(one)
    assert [parts[name] for name in ("left", "host rows")] == [alone[name] for name in ("left", "host rows")]
    assert parts["window"][0] == 3 * alone["window"][0]
    assert (state.take([2, 0]).shares_prompt, state.take([2, 0]).batch) == (True, 2)
    assert not state.take([1]).shares_prompt
    other = prefilled(*SETTING, one.fetch)[1].take([1])
    for call, told in (
        (lambda: state.insert(0, other), "the same arrays"),
        (lambda: state.insert(0, state), "got 3 of"),
        (lambda: state.share(2), "must have one row, got 3"),
        (lambda: resident_twin(state), "verify needs a prompt half for each row, got 3"),
        *((lambda rows=rows: one.share(rows), "rows must be an integer of at least 1") for rows in (0, True, 2.0)),
    ):
        with pytest.raises(StateMismatch, match=told):
            call()
    most = f"at most {CAPACITY - int(one.lengths[0])}"
    for room, told in ((CAPACITY, most), *((bad, "room must be an integer") for bad in (-1, None, True, 1.5))):
        with pytest.raises(CapacityError, match=told):
            one.with_room(room)


@pytest.mark.slow
def test_room_of_shared_rows_can_change(one):
    state = one.with_room(2).share(3)
    least = int(np.min(state.room()))
    assert least >= 2
    wide = state.with_room(9)
    assert wide.shares_prompt
    assert np.min(wide.room()) >= 9
    assert np.min(state.room()) == least
