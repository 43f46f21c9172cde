"""What the tests of serving share: one model, two classes of rows, and options. So all files share compiled programs.

Rows of the short class are dense. The engine's tests call `run_once` themselves. The servers of server_cases.py have
the same engine in a thread. Prompts in the class of long ones have 65 to 128 tokens where `generate` answers them too,
because it rounds their lengths up to 64 or 128.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from byte_models import PARAMS as BARE
from byte_models import SHADOW

import jshadow
from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving import Engine, EngineOptions, Request, RowClass
from jshadow.serving.groups import Group

END = 256  # the end token
PARAMS = dataclasses.replace(BARE, config=dataclasses.replace(BARE.config, eos_ids=(END,)))  # answers may end
CLASSES = (RowClass(32, 16, 4), RowClass(320, 64, 4))
OPTIONS = EngineOptions(
    prefill_chunk=32, turn_chunk=16, penalties=True, bias_limit=8, grammar=True, logprobs=True, threaded=False
)
WARM = RowSettings(Sampler(1.2, top_k=40, top_p=0.95), seed=11)


def engine_of(params=PARAMS, policy=SHADOW, *, classes=CLASSES, library=None, limits=None, **options):
    options = dataclasses.replace(OPTIONS, **options)
    return Engine(params, policy, classes=classes, library=library, limits=limits, options=options)


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(3, 256, length).tolist()


def run(engine):
    while engine.run_once():
        pass


def finish(engine):
    """Run an engine to its end. A turn without work waits for the threads that read files."""
    while engine.run_once() or engine.report().waiting:
        time.sleep(0)


def until_answered(engine, answer, pieces=1):
    """Run an engine until an answer has so many pieces."""
    while len(answer._pieces) < pieces:
        assert engine.run_once()


def answers_of(engine, requests):
    answers = [engine.submit(request) for request in requests]
    run(engine)
    assert engine.report().rows_in_use == 0
    return [answer.result(0) for answer in answers]


def random_requests(count, seed):
    rng = np.random.default_rng(seed)
    sizes = [CLASSES[int(rng.integers(2))] for _ in range(count)]
    return [
        Request(
            prompt_of(int(rng.integers(1, min(one.prompt, 128) + 1)), index),
            int(rng.integers(1, one.room + 1)),
            RowSettings(Sampler(float(rng.uniform(0.3, 2)), int(rng.integers(1, 50))), int(rng.integers(1 << 40)))
            if rng.random() < 0.5
            else RowSettings(),
            priority=int(rng.integers(3)),
        )
        for index, one in enumerate(sizes)
    ]


def class_of(prompt, new):
    """The class of rows that a request takes."""
    return next(one for one in CLASSES if one.prompt >= prompt and one.room >= new)


def offline(request):
    """What `generate` answers at the capacity of the request's class."""
    ids, new, settings = request.prompt, request.max_new_tokens, request.settings
    draw = {"sampler": settings.sampler, "seed": settings.seed, "stop": request.stop}
    return jshadow.generate(PARAMS, ids, SHADOW, max_new_tokens=new, capacity=class_of(len(ids), new).capacity, **draw)


def poison(group, slot):
    """Fill a row of a group with NaN, and with numbers that are no index."""

    def fill(leaf):
        array = np.array(leaf)
        if array.dtype == bool:
            array[slot] = True
        else:
            array[slot] = np.nan if jnp.issubdtype(array.dtype, jnp.floating) else np.iinfo(array.dtype).max // 2
        return jax.device_put(array, leaf.sharding)

    if group.pool is not None:
        state, rows = group.pool
        if state.shares_prompt:  # the prompt half has no rows
            state = state.join(jax.tree.map(fill, state.split()[1]))
        else:
            state = state.with_row_trees(jax.tree.map(fill, state.row_trees()))
        group.pool = group.pool._replace(state=state, rows=jax.tree.map(fill, rows))


def poison_what_is_released(monkeypatch):
    """Fill all free rows of a group with NaN, whenever one of its rows is freed."""
    release = Group.release

    def release_and_poison(group, slot):
        release(group, slot)
        for free in np.flatnonzero([job is None for job in group.jobs]):
            poison(group, free)

    monkeypatch.setattr(Group, "release", release_and_poison)
