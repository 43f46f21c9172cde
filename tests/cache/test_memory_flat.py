"""Two hundred requests in one process leave no array behind, however they end, even without the garbage collector."""

import contextlib
import dataclasses
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import pytest
from byte_models import PARAMS, SHADOW

import jshadow
from jshadow.cache import place
from jshadow.engine import token_steps
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.verify import Verifier
from jshadow.errors import CapacityError, HostMemoryError, JshadowError, VerificationError

REQUESTS = 200
TEXTS = ["abcdefg" * 29, "hijkl" * 12, "mnopqrst" * 15]  # a token is a byte
OPTIONS = {"max_new_tokens": 6, "capacity": 256, "fetch": "device_put"}


def live() -> Counter[str]:
    """Bytes of all live arrays, by memory kind."""
    total: Counter[str] = Counter()
    for array in jax.live_arrays():
        total[array.sharding.memory_kind] += array.nbytes
    return total


class Consumer(Exception):
    """The error that the reader of a stream raises."""


def generate(prompt, policy=SHADOW, **options):
    return jshadow.generate(PARAMS, prompt, policy, **OPTIONS | options)


def stream(**options) -> Iterator[str]:
    return jshadow.stream(PARAMS, TEXTS[0], SHADOW, **OPTIONS | {"max_new_tokens": 12} | options)


@contextlib.contextmanager
def ends_with(*errors: type[BaseException]) -> Iterator[None]:
    """Like pytest.raises, but the error is dropped at once, because its frames refer to arrays."""
    raised = False
    try:
        yield
    except errors:
        raised = True
    assert raised, f"none of {errors} was raised"


def failing(error: BaseException, call: int, function: Callable) -> Callable:
    """Wrap a function so that call number `call` (from 1) raises the error."""
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == call:
            raise type(error)(*error.args)
        return function(*args, **kwargs)

    return wrapped


# Requests. Some return the generator of an ended stream, which a caller may keep.


def bare(patch):
    assert generate(TEXTS[0]).report.host_bytes > 0


def batch(patch):
    assert len(generate(TEXTS)) == 3


def dense(patch):
    generate(TEXTS[1], jshadow.Full(), fetch="resident")


def read_to_the_end(patch):
    pieces = stream()
    assert "".join(pieces)
    return pieces


def closed(patch):
    pieces = stream()
    next(pieces)
    pieces.close()
    return pieces


def dropped(patch):
    next(stream())


def never_read(patch):
    stream()


def consumer_raises(patch):
    with ends_with(Consumer):
        for _ in stream():
            raise Consumer


def interrupted_stream(patch):
    pieces = stream()
    next(pieces)
    with ends_with(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt())
    return pieces


def interrupted(patch):
    patch.setattr(GenerationLoop, "_next", failing(KeyboardInterrupt(), 3, GenerationLoop._next))
    with ends_with(KeyboardInterrupt):
        generate(TEXTS[0])


def refused(patch):
    with ends_with(CapacityError):
        generate(TEXTS[0], capacity=205)


def lacking_host_memory(patch):
    patch.setattr(place, "place", failing(HostMemoryError("full"), 2, place.place))
    with ends_with(HostMemoryError):
        generate(TEXTS)


def failing_step(patch):
    patch.setattr(token_steps, "step_and_sample", failing(JshadowError("broken"), 4, token_steps.step_and_sample))
    with ends_with(JshadowError):
        generate(TEXTS)


def failing_stream(patch):
    patch.setattr(token_steps, "step_and_sample", failing(JshadowError("broken"), 4, token_steps.step_and_sample))
    pieces = stream()
    with ends_with(JshadowError):
        list(pieces)
    return pieces


def failing_trace(patch):
    """The error is raised during tracing, where JAX shortens tracebacks."""
    broken = dataclasses.replace(SHADOW, budget=72)
    patch.setattr(jshadow.ShadowKV, "attend", failing(JshadowError("broken"), 2, jshadow.ShadowKV.attend))
    with ends_with(JshadowError):
        generate(TEXTS[0], broken)


def continued(patch):
    first = generate(TEXTS[0])
    second = generate(TEXTS[1][:9], None, state=first.state)
    assert second.state.lengths.tolist() == [203 + 6 + 9 + 6]


def continued_rows(patch):
    outs = generate(TEXTS)
    for out in outs:
        generate("more", None, state=out.state)


def continued_and_closed(patch):
    pieces = jshadow.stream(PARAMS, "more", state=generate(TEXTS[0]).state, max_new_tokens=12)
    next(pieces)
    pieces.close()
    return pieces


def forked(patch):
    state = generate(TEXTS[0]).state
    fork = state.fork()
    generate("more", None, state=state)
    generate("other", None, state=fork)


def verified(patch):
    assert generate(TEXTS[0], verify=True).report.verified_steps == 5


def verified_in_vain(patch):
    patch.setattr(Verifier, "_check", failing(VerificationError("differs"), 9, Verifier._check))
    with ends_with(VerificationError):
        generate(TEXTS[0], verify=True)


KINDS = [
    bare,
    batch,
    dense,
    read_to_the_end,
    closed,
    dropped,
    never_read,
    consumer_raises,
    interrupted_stream,
    interrupted,
    refused,
    lacking_host_memory,
    failing_step,
    failing_stream,
    failing_trace,
    continued,
    continued_rows,
    continued_and_closed,
    forked,
    verified,
    verified_in_vain,
]


@pytest.fixture
def no_collector():
    """Disable the garbage collector, so that reference cycles are not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def serve(kind: Callable) -> object:
    """Run one request with patches that are undone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        return kind(patch)


@pytest.mark.slow
def test_two_hundred_requests_keep_live_bytes_flat(no_collector):
    for kind in KINDS:
        serve(kind)
    gc.collect()
    before, grown = live(), {}
    for kind in itertools.islice(itertools.cycle(KINDS), REQUESTS):
        ended = serve(kind)
        if (after := live()) != before:
            grown[kind.__name__] = {memory: after[memory] - before[memory] for memory in after}
            before = after
        del ended
    assert not grown


@pytest.mark.slow
def test_a_state_that_is_kept_is_seen(no_collector):
    """The measurement sees exactly the arrays of a generation that is kept."""
    serve(bare)
    before = live()
    out = generate(TEXTS[0])
    held = live() - before
    assert held["pinned_host"] == out.report.host_bytes
    assert held["device"] >= out.report.device_bytes
    del out
    assert live() == before
