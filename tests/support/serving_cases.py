"""What the tests of serving share: one model, two classes of rows, and options. So all files share compiled programs.

The first test that needs some of these pays for them, and may take more than two seconds. Rows of the short class are
dense.

The engine's tests call `run_once` themselves. The servers of server_cases.py have the same engine in a thread. Prompts
in the class of long ones have 65 to 128 tokens where `generate` answers them too, because it rounds their lengths up
to 64 or 128.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from byte_models import PARAMS as BARE
from byte_models import SHADOW

import jshadow
from jshadow.engine.rows.settings import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving import Engine, EngineOptions, Request, RowClass

END = 256  # the end token
PARAMS = dataclasses.replace(BARE, config=dataclasses.replace(BARE.config, eos_ids=(END,)))  # answers may end
CLASSES = (RowClass(32, 16, 4), RowClass(320, 64, 4))
PLAIN = EngineOptions(prefill_chunk=32, turn_chunk=16)
THREADED = dataclasses.replace(PLAIN, penalties=True, bias_limit=8, grammar=True, logprobs=True)
SYNC = dataclasses.replace(THREADED, threaded=False)
WARM = RowSettings(Sampler(1.2, top_k=40, top_p=0.95), seed=11)


def engine_of(classes=CLASSES, options=SYNC, **settings):
    return Engine(PARAMS, SHADOW, classes=classes, options=options, **settings)


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(3, 256, length).tolist()


def run(engine):
    while engine.run_once():
        pass


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


def offline(request):
    """What `generate` answers at the capacity of the request's class."""
    count, new = len(request.prompt), request.max_new_tokens
    one = next(one for one in CLASSES if one.prompt >= count and one.room >= new)
    return jshadow.generate(
        PARAMS,
        request.prompt,
        SHADOW,
        max_new_tokens=new,
        sampler=request.settings.sampler,
        seed=request.settings.seed,
        stop=request.stop,
        capacity=one.capacity,
    )


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
