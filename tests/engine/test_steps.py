"""The compiled steps: the traceable cores, loops of steps, what they read and consume, and turns of several pieces."""

import ast
import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LENGTHS, PROMPT, STEPS, TINY, model, prefilled, random_tokens
from few import slow
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
    jitted, known = dict(jitted_steps()), {"decode._step", "token_steps.step_and_sample", "verify._watched_step"}
    assert known | {"prefill/end._foresee", "rows/step.row_logits"} <= jitted.keys()
    assert [name for name, keywords in jitted.items() if "compiler_options" not in keywords] == []


# The check of the room


@pytest.fixture
def room_reads(monkeypatch):
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
    params, state = of_small([9, 7])
    tokens = random_tokens(2, 2, config=SMALL)
    first = np.asarray(decode.decode_steps(params, tokens[:, 0], state.fork(), 1)[0])[:, 0]
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
    assert all("consumed" in text for text in (str(state), repr(state)))


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
    with monkeypatch.context() as patch:
        patch.setattr(decode, "_step", lambda *args, **options: [][0])
        with pytest.raises(IndexError):
            decode.decode_step(model(), STEPS[:, 0], state)
    logits, _ = decode.decode_step(model(), STEPS[:, 0], state)
    assert np.isfinite(logits).all()


# Turns of several pieces


CAPACITY = 256  # the context of the model
TURN, COUNTS = random_tokens(3, 150, seed=8), [150, 77, 1]
SHADOW = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)


def after_prompt(policy: Full | ShadowKV = SHADOW, dtype: str = "float32") -> KVState:
    return decode.prefill(model(TINY, dtype), PROMPT, LENGTHS, policy, capacity=CAPACITY)[1]


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
@pytest.mark.parametrize(
    ("policy", "dtype", "tolerance"),
    [(SHADOW, "float32", 1e-4), (Full(), "float32", 1e-4), (SHADOW, "bfloat16", 0.1)],
    ids=["shadowkv", "full", "shadowkv-bfloat16"],
)
def test_large_pieces_give_the_same_as_small_ones(policy, dtype, tolerance, monkeypatch):
    """The large pieces have 80 tokens and attend blockwise. ShadowKV selects for 32, 32 and 16. The small have 16."""
    params, state = model(TINY, dtype), after_prompt(policy, dtype)
    if policy == SHADOW:
        spec = state.specs[0]
        monkeypatch.setattr(turn_pieces, "BLOCK_BYTES", 33 * spec.policy.query_temporaries(spec))
        assert block_tokens(spec, 80) == 32
    want, small = decode.extend(params, TURN, COUNTS, state.fork(), logits="all", extend_chunk=1)
    got, large = decode.extend(params, TURN, COUNTS, state.fork(), logits="all", extend_chunk=240)
    got, want = (np.asarray(logits, np.float32) for logits in (got, want))
    for row, count in enumerate(COUNTS):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=tolerance)
    for name in ("steps", "attended", "selected"):
        np.testing.assert_array_equal(getattr(large.counters, name), getattr(small.counters, name))
    if policy != SHADOW:  # the last logits and those of a callable are the same; row 1 ends in the first of two pieces
        last, _ = decode.extend(params, TURN, COUNTS, state.fork(), extend_chunk=240)
        np.testing.assert_allclose(last, [got[row, count - 1] for row, count in enumerate(COUNTS)], atol=1e-5)
        best = {"logits": lambda logits: logits.argmax(-1), "extend_chunk": 240}
        np.testing.assert_array_equal(decode.extend(params, TURN, COUNTS, state, **best)[0][0], got[0].argmax(-1))


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

    sizes = {"batch": 1, "capacity": CAPACITY, "prompt": 40, "dtype": "float32", "fetch": "resident"}
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
        (TypeError, r"unexpected keyword arguments \['extend_chunks'\]", few, {"extend_chunks": 4}),
    ):
        with pytest.raises(error, match=told):
            decode.extend(model(), *turn, state, **options)
    for stop in ("45", ["45"], [4.0], [True], 1.5, [None]):
        with pytest.raises(ConfigError, match="stop must be token ids, got"):
            decode.decode_steps(model(), STEPS[:, 0], state, 2, stop=stop)
    state.check_alive()
    assert np.asarray(state.lengths).tolist() == list(LENGTHS)
