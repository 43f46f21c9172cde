"""Requests in one process leave no array behind, however they end, even without the garbage collector."""

import dataclasses
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import pytest
from byte_models import PARAMS, SHADOW

import jshadow
from jshadow.cache import offload
from jshadow.engine import generation
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.verify import Verifier
from jshadow.errors import CapacityError, HostMemoryError, JshadowError, VerificationError

REQUESTS = 84  # each kind six times; many of these make several requests
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


def generate(prompt=TEXTS[0], policy=SHADOW, **options):
    return jshadow.generate(PARAMS, prompt, policy, **OPTIONS | options)


def stream(**options) -> Iterator[str]:
    return jshadow.stream(PARAMS, TEXTS[0], SHADOW, **OPTIONS | {"max_new_tokens": 12} | options)


def ends_with(error: type[BaseException], run: Callable, *args) -> None:
    """The call raises the error, which is dropped at once, because its frames refer to arrays.

    A context manager that catches it would stand in the frames of the error and refer to it: a cycle.
    """
    try:
        run(*args)
    except error:
        return
    pytest.fail(f"{error} was not raised")


def failing(error: BaseException, call: int, function: Callable) -> Callable:
    """Wrap a function so that call number `call` (from 1) raises the error."""
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == call:
            raise type(error)(*error.args)
        return function(*args, **kwargs)

    return wrapped


# Requests. They may return the generator of an ended stream, which a caller may keep.


def broken(owner: object, attribute: str, error: BaseException, call: int, run: Callable, *given: Callable) -> Callable:
    """A request in which a call of a function fails. `given` make the arguments of the request."""

    def request(patch):
        patch.setattr(owner, attribute, failing(error, call, getattr(owner, attribute)))
        arguments = [make() for make in given]
        ends_with(type(error), run, *arguments)
        return arguments

    return request


def ended(end: Callable, start: Callable = stream) -> Callable:
    """A stream that ends after a piece was read."""

    def request(patch):
        pieces = start()
        next(pieces)
        end(pieces)
        return pieces

    return request


def answered(patch):
    assert generate().report.host_bytes > 0
    assert len(generate(TEXTS)) == 3
    generate(TEXTS[1], jshadow.Full(), fetch="resident")
    assert generate(verify=True).report.verified_steps == 5
    ends_with(CapacityError, lambda: generate(capacity=205))
    stream()
    next(stream())


def consumer_raises(patch):
    def read():
        for _ in stream():
            raise Consumer

    ends_with(Consumer, read)


def continued(patch):
    second = generate(TEXTS[1][:9], None, state=generate().state)
    assert second.state.lengths.tolist() == [203 + 6 + 9 + 6]
    for out in generate(TEXTS):
        generate("more", None, state=out.state)


def forked(patch):
    state = generate().state
    fork = state.fork()
    generate("more", None, state=state)
    generate("other", None, state=fork)


def continuing() -> Iterator[str]:
    return jshadow.stream(PARAMS, "more", state=generate().state, max_new_tokens=12)


def in_trace():
    """The error is raised during tracing, where JAX shortens tracebacks."""
    generate(policy=dataclasses.replace(SHADOW, budget=72))


STEP = (generation, "step_and_sample", JshadowError("broken"), 4)
KINDS = {
    "answered": answered,
    "read to the end": ended("".join),
    "closed": ended(lambda pieces: pieces.close()),
    "interrupted stream": ended(lambda pieces: ends_with(KeyboardInterrupt, pieces.throw, KeyboardInterrupt)),
    "continued and closed": ended(lambda pieces: pieces.close(), continuing),
    "consumer raises": consumer_raises,
    "continued": continued,
    "forked": forked,
    "failing stream": broken(*STEP, list, stream),
    "failing step": broken(*STEP, generate, lambda: TEXTS),
    "interrupted": broken(GenerationLoop, "_next", KeyboardInterrupt(), 3, generate),
    "lacking host memory": broken(offload, "place", HostMemoryError("full"), 2, generate, lambda: TEXTS),
    "failing trace": broken(jshadow.ShadowKV, "attend", JshadowError("broken"), 2, in_trace),
    "verified in vain": broken(Verifier, "_check", VerificationError("no"), 9, lambda: generate(verify=True)),
}


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
def test_many_requests_keep_live_bytes_flat(no_collector):
    for kind in KINDS.values():
        serve(kind)
    gc.collect()
    before, grown = live(), {}
    for name, kind in itertools.islice(itertools.cycle(KINDS.items()), REQUESTS):
        ended = serve(kind)
        if (after := live()) != before:
            grown[name] = {memory: after[memory] - before[memory] for memory in after}
            before = after
        del ended
    assert not grown


@pytest.mark.slow
def test_a_state_that_is_kept_is_seen(no_collector):
    """The measurement sees exactly the arrays of a generation that is kept."""
    generate()
    before = live()
    out = generate()
    held = live() - before
    assert held["pinned_host"] == out.report.host_bytes
    assert held["device"] >= out.report.device_bytes
    del out
    assert live() == before
