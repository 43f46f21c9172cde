"""The compiled steps: their compiler options, what they read from the device, and who may consume a state."""

import ast
import threading
from pathlib import Path

import numpy as np
import pytest
from cases import STEPS, model, prefilled

import jshadow
from jshadow.engine import checks, decode, host_notes
from jshadow.errors import CapacityError, StateMismatch

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
    _, state = decode.extend(model(), STEPS[:, :3], [3, 0, 1], state)
    _, state = decode.decode_steps(model(), STEPS[:, 0], state, 2)
    assert len(room_reads) == 1


def test_the_room_is_read_again_before_a_step_is_refused(room_reads):
    """A row that stopped early has more room than the bound says."""
    _, state = decode.prefill(model(), STEPS[:, :12], [12, 12, 10], jshadow.Full(), capacity=16)
    first = np.asarray(decode.decode_steps(model(), STEPS[:, 0], state.fork(), 1)[0])[:, 0]
    _, state = decode.decode_steps(model(), STEPS[:, 0], state, 4, stop=first.tolist())
    assert state.lengths.tolist() == [13, 13, 11]
    room_reads.clear()
    for _ in range(3):
        _, state = decode.decode_step(model(), STEPS[:, 1], state)
    assert len(room_reads) == 1
    with pytest.raises(CapacityError, match=r"row 0 holds 16 tokens of capacity=16 .* room for 0 more, got 1"):
        decode.decode_step(model(), STEPS[:, 1], state)
    _, state = decode.decode_step(model(), STEPS[:, 1], state, active=[False, False, True])  # nothing was lost
    assert state.lengths.tolist() == [16, 16, 15]


@pytest.mark.parametrize("name", ["full", "shadowkv", "kivi", "infllm", "h2o", "probe"])
def test_the_known_room_is_never_more_than_there_is(name):
    _, state = prefilled(name, "restricted")
    _, state = decode.decode_step(model(), STEPS[:, 0], state, active=[True, False, True])
    _, state = decode.extend(model(), STEPS[:, :3], [3, 0, 1], state)
    _, state = decode.decode_steps(model(), STEPS[:, 0], state, 2)
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
