"""The compiled steps: the traceable cores, loops of steps, what they read and consume, and turns of several pieces."""

import ast
import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LENGTHS, STEPS, TINY, model, prefilled, random_tokens
from small_state import SMALL, small

import jshadow
from jshadow.cache.state import KVState
from jshadow.engine import checks, decode, host_notes
from jshadow.engine.sampling import Sampler
from jshadow.errors import CapacityError, ConfigError, StateMismatch
from jshadow.models.transformer import abstract_weights
from jshadow.planner import turn_pieces
from jshadow.planner.bytes import abstract_state
from jshadow.planner.turn_pieces import block_tokens, extend_peak, split_of, turn_tokens
from jshadow.policies import Full, ShadowKV, StreamingLLM

VOCAB = TINY.vocab_size
slow = pytest.mark.slow


def of_small(policy, lengths, capacity, width=5):
    """The smallest model, and a state of it."""
    params, tokens = small()[0], random_tokens(len(lengths), width, config=SMALL)
    return params, decode.prefill(params, tokens, lengths, policy, capacity=capacity)[1]


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
    for mine, was in zip(jax.tree.leaves(after.split()[1]), jax.tree.leaves(state.split()[1]), strict=True):
        np.testing.assert_array_equal(
            np.asarray(mine)[0], np.asarray(was)[0]
        )  # an idle row is not harmed by what it is fed


@pytest.mark.parametrize("bad", [-1, VOCAB])
@pytest.mark.parametrize("place", [0, 7, 19])
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
        assert spoiled[place:].all() if want == "all" else spoiled
        if want == "all":
            assert not spoiled[:place].any()
    turn[1, place], turn[2, 12:] = 1, bad  # past a row's own
    assert np.isfinite(turn_core(model().weights, TINY, turn, lengths, state, "last")[0]).all()


turn_core = jax.jit(decode.extend_steps, static_argnums=(1, 5))


@pytest.mark.parametrize(
    "policy", [Full(), pytest.param(StreamingLLM(sinks=1, window=2), marks=slow)], ids=lambda policy: policy.name
)
def test_a_full_row_in_a_user_s_jit_gives_nan(policy):
    params, state = of_small(policy, [5, 4], 5)
    weights = params.weights
    logits, _ = jax.jit(lambda token, state: decode.step(weights, SMALL, token, state))(np.array([1, 2]), state)
    assert np.isnan(logits).all(axis=1).tolist() == [True, False]


def test_the_core_emits_no_token_past_the_room():
    params, state = of_small(Full(), [3, 2], 5)
    core = jax.jit(decode.generate_steps, static_argnums=(1, 4, 5))
    tokens, _ = core(params.weights, SMALL, np.array([1, SMALL.vocab_size]), state, 5, Sampler(), jax.random.key(0))
    assert (np.asarray(tokens) >= 0).tolist() == [[True, True, False, False, False], [False] * 5]


# Loops of steps


@pytest.mark.parametrize("name", ["shadowkv", pytest.param("probe", marks=slow)])
def test_decode_steps_is_the_greedy_loop(name):
    logits, state = prefilled(name, "restricted")
    first = np.asarray(logits).argmax(-1).astype(np.int32)
    token, want, held = first, [], state.fork()
    for _ in range(6):
        out, held = decode.decode_step(model(), token, held)
        token = np.asarray(out).argmax(-1).astype(np.int32)
        want.append(token)
    want = np.stack(want, axis=1)
    tokens, after = decode.decode_steps(model(), first, state.fork(), 6)
    np.testing.assert_array_equal(tokens, want)
    assert np.asarray(after.lengths).tolist() == [length + 6 for length in LENGTHS]
    # the third token of row 0 stops it: it is emitted, and the row then neither emits nor feeds
    stop = int(want[0, 2])
    stopped, after = decode.decode_steps(model(), first, state, 6, stop=[stop, VOCAB + 5])
    stopped = np.asarray(stopped)
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


@pytest.mark.parametrize("stop", ["45", ["45"], [4.0], [True], 1.5, [None]])
def test_stops_must_be_token_ids(stop):
    state = prefilled("full", "restricted")[1]
    with pytest.raises(ConfigError, match="stop must be token ids, got"):
        decode.decode_steps(model(), STEPS[:, 0], state, 2, stop=stop)
    state.check_alive()


def test_a_stop_may_be_one_id_or_an_array():
    state = prefilled("full", "restricted")[1]
    greedy = np.asarray(decode.decode_steps(model(), STEPS[:, 0], state.fork(), 6)[0])
    for stop in (int(greedy[0, 0]), np.array([greedy[0, 0]]), [np.int64(greedy[0, 0])]):
        tokens, _ = decode.decode_steps(model(), STEPS[:, 0], state.fork(), 6, stop=stop)
        assert np.asarray(tokens)[0].tolist() == [greedy[0, 0], *[-1] * 5]


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
            for decorator in node.decorator_list:
                if (
                    called & STEPS_OF_A_STATE
                    and isinstance(decorator, ast.Call)
                    and "jax.jit" in ast.unparse(decorator)
                ):
                    yield (
                        f"{path.relative_to(ENGINE).with_suffix('')}.{node.name}",
                        {keyword.arg for keyword in decorator.keywords},
                    )


JITTED = dict(jitted_steps())


def test_the_jitted_steps_are_found():
    assert {
        "decode._step",
        "token_steps.step_and_sample",
        "verify._watched_step",
        "prefill/end._foresee",
        "rows/step.row_logits",
    } <= JITTED.keys()


@pytest.mark.parametrize("name", JITTED)
def test_every_jitted_step_has_the_compiler_options(name):
    assert "compiler_options" in JITTED[name]


# The check of the room


@pytest.fixture
def room_reads(monkeypatch):
    """A list that grows by one with each read of the room from the device."""
    reads, read = [], checks.read_room
    monkeypatch.setattr(checks, "read_room", lambda state: reads.append(1) or read(state))
    return reads


def test_steps_read_the_room_once(room_reads):
    _, state = prefilled("shadowkv", "restricted")
    for step in range(4):
        _, state = decode.decode_step(model(), STEPS[:, step], state)
    _, state = decode.extend(model(), STEPS[:, :7], [3, 0, 1], state)
    _, state = decode.decode_steps(model(), STEPS[:, 0], state, 6)
    assert len(room_reads) == 1


def test_the_room_is_read_again_before_a_step_is_refused(room_reads):
    """A row that stopped early has more room than the bound says."""
    params, state = of_small(Full(), [12, 12, 10], 16, width=12)
    tokens = random_tokens(3, 2, config=SMALL)
    first = np.asarray(decode.decode_steps(params, tokens[:, 0], state.fork(), 1)[0])[:, 0]
    _, state = decode.decode_steps(params, tokens[:, 0], state, 4, stop=first.tolist())
    assert state.lengths.tolist() == [13, 13, 11]
    room_reads.clear()
    for _ in range(3):
        _, state = decode.decode_step(params, tokens[:, 1], state)
    assert len(room_reads) == 1
    with pytest.raises(CapacityError, match=r"row 0 holds 16 tokens of capacity=16 .* room for 0 more, got 1"):
        decode.decode_step(params, tokens[:, 1], state)
    _, state = decode.decode_step(params, tokens[:, 1], state, active=[False, False, True])  # nothing was lost
    assert state.lengths.tolist() == [16, 16, 15]


@pytest.mark.parametrize(
    "name", ["full", "shadowkv", *(pytest.param(name, marks=slow) for name in ("kivi", "infllm", "h2o", "probe"))]
)
def test_the_known_room_is_never_more_than_there_is(name):
    _, state = prefilled(name, "restricted")
    _, state = decode.decode_step(model(), STEPS[:, 0], state, active=[True, False, True])
    _, state = decode.extend(model(), STEPS[:, :7], [3, 0, 1], state)
    _, state = decode.decode_steps(model(), STEPS[:, 0], state, 6)
    known = host_notes.known_room(state)
    assert known is not None
    assert (known <= np.asarray(state.room())).all()
    for other in (state.fork(), state.take([1, 0]), state.replace(lengths=state.lengths + 1)):
        assert host_notes.known_room(other) is None


# A state that is consumed, or in use by another thread


def test_a_consumed_state_says_so():
    _, state = prefilled("full", "restricted")
    decode.decode_step(model(), STEPS[:, 0], state)
    for read in (lambda: state.lengths, lambda: state.last, state.room, state.fork):
        with pytest.raises(StateMismatch, match="state was consumed by an earlier step"):
            read()
    assert "consumed" in str(state)
    assert "consumed" in repr(state)


def test_a_state_serves_one_thread_at_a_time(monkeypatch):
    _, state = prefilled("full", "restricted")
    entered, leave, step = threading.Event(), threading.Event(), decode._step
    results = []

    def slow_step(*args, **options):
        entered.set()
        leave.wait(60)
        return step(*args, **options)

    monkeypatch.setattr(decode, "_step", slow_step)
    thread = threading.Thread(target=lambda: results.append(decode.decode_step(model(), STEPS[:, 0], state)))
    thread.start()
    assert entered.wait(60)
    leave_later = threading.Timer(1.0, leave.set)  # where the second call is not refused, it waits too
    leave_later.start()
    try:
        with pytest.raises(StateMismatch, match="another thread"):
            decode.decode_step(model(), STEPS[:, 1], state)
    finally:
        leave.set()
        leave_later.cancel()
        thread.join()
    assert len(results) == 1


def test_a_failed_step_gives_the_state_back(monkeypatch):
    _, state = prefilled("full", "restricted")

    def fail(*args, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(decode, "_step", fail)
        with pytest.raises(MemoryError):
            decode.decode_step(model(), STEPS[:, 0], state)
    logits, _ = decode.decode_step(model(), STEPS[:, 0], state)
    assert np.isfinite(logits).all()


# Turns of several pieces


CAPACITY = 256  # the context of the model
PROMPT, TURN = random_tokens(2, 40, seed=7), random_tokens(2, 150, seed=8)
SHADOW = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
both = pytest.mark.parametrize("policy", [SHADOW, pytest.param(Full(), marks=slow)], ids=lambda policy: policy.name)


def after_prompt(policy: Full | ShadowKV, dtype: str = "float32") -> KVState:
    return decode.prefill(model(TINY, dtype), PROMPT, [40, 13], policy, capacity=CAPACITY)[1]


@both
def test_a_turn_is_a_few_calls_of_one_program(policy, monkeypatch):
    """Two calls of 80 tokens, for turns of all three lengths. In pieces of 16, the longest one took ten."""
    run, widths, done = decode._extend, [], []
    monkeypatch.setattr(
        decode, "_extend", lambda w, ids, *rest, **more: widths.append(ids.shape) or run(w, ids, *rest, **more)
    )
    state, programs = after_prompt(policy), run._cache_size()
    for count in (150, 97, 81):
        tokens, lengths = TURN[:, :count], [count, 1]
        _, after = decode.extend(model(), tokens, lengths, state.fork(), extend_chunk=160, progress=done.append)
        assert np.asarray(after.lengths).tolist() == [40 + count, 14]
    assert widths == [(2, 80)] * 6
    assert [(one.units, one.num_units) for one in done] == [(1, 2), (2, 2)] * 3
    assert all(one.seconds_left == 0 for one in done[1::2])
    assert run._cache_size() == programs + 1


@slow
@pytest.mark.parametrize(
    ("policy", "dtype", "tolerance"),
    [
        (SHADOW, "float32", 1e-4),
        (Full(), "float32", 1e-4),
        (SHADOW, "bfloat16", 0.1),
    ],
    ids=["shadowkv", "full", "shadowkv-bfloat16"],
)
def test_large_pieces_give_the_same_as_small_ones(policy, dtype, tolerance, monkeypatch):
    """The large pieces have 80 tokens and attend blockwise. ShadowKV selects for 32, 32 and 16. The small have 16."""
    params, state = model(TINY, dtype), after_prompt(policy, dtype)
    if policy == SHADOW:
        spec = state.specs[0]
        monkeypatch.setattr(turn_pieces, "BLOCK_BYTES", 33 * spec.policy.query_temporaries(spec))
        assert block_tokens(spec, 80) == 32
    want, small = decode.extend(params, TURN, [150, 77], state.fork(), logits="all", extend_chunk=1)
    got, large = decode.extend(params, TURN, [150, 77], state, logits="all", extend_chunk=160)
    got, want = (np.asarray(logits, np.float32) for logits in (got, want))
    for row, count in enumerate((150, 77)):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=tolerance)
    for name in ("steps", "attended", "selected"):
        np.testing.assert_array_equal(getattr(large.counters, name), getattr(small.counters, name))


@slow
def test_last_logits_and_those_of_a_callable_are_the_same_as_all():
    """Row 1 ends in the first of two pieces."""
    state, want = after_prompt(Full()), {"extend_chunk": 160}
    everything, _ = decode.extend(model(), TURN, [150, 77], state.fork(), logits="all", **want)
    last, _ = decode.extend(model(), TURN, [150, 77], state.fork(), **want)
    everything = np.asarray(everything)
    np.testing.assert_allclose(last, [everything[0, 149], everything[1, 76]], atol=1e-5)
    best, _ = decode.extend(model(), TURN, [150, 77], state, logits=lambda logits: logits.argmax(-1), **want)
    np.testing.assert_array_equal(best[0], everything[0].argmax(-1))


@slow
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


def test_a_turn_that_has_no_room_changes_nothing():
    state = after_prompt(SHADOW)
    tokens = random_tokens(2, 217, seed=9)
    with pytest.raises(CapacityError, match="row 0 holds 40 tokens"):
        decode.extend(model(), tokens, [217, 1], state, extend_chunk=64)
    assert np.asarray(state.lengths).tolist() == [40, 13]


def test_a_subclass_with_its_own_attention_takes_blocks():
    """Its hook is called, and not the split one that it inherits."""

    class Mute(ShadowKV):
        def attend(self, spec, state, step, fetched):
            out, state = super().attend(spec, state, step, fetched)
            return 0 * out, state

    sizes = {"batch": 1, "capacity": CAPACITY, "prompt": 40, "dtype": "float32", "fetch": "resident"}
    spec = abstract_state(TINY, SHADOW, **sizes).specs[0]
    assert split_of(spec) is not None
    assert split_of(dataclasses.replace(spec, policy=Mute(rank=8))) is None


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_wrong_bound_on_a_piece_is_refused(chunk):
    with pytest.raises(ConfigError, match="extend_chunk must be an integer of at least 1"):
        decode.extend(model(), TURN[:, :3], [3, 3], after_prompt(SHADOW), extend_chunk=chunk)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match=r"unexpected keyword arguments \['extend_chunks'\]"):
        decode.extend(model(), TURN[:, :3], [3, 3], after_prompt(SHADOW), extend_chunks=4)
