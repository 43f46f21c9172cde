"""What the tests of serving share: one model, two classes of rows, and options. So all files share compiled programs.

Rows of the short class are dense. The engine's tests call `run_once` themselves. The servers of server_cases.py have
the same engine in a thread. Prompts in the class of long ones have 65 to 128 tokens where `generate` answers them too,
because it rounds their lengths up to 64 or 128.
"""

import dataclasses
import time

import numpy as np
from byte_models import PARAMS as BARE
from byte_models import SHADOW

import jshadow
from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving import Engine, EngineOptions, Request, RowClass

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


def run(engine, answer=None, pieces=1):
    """Run an engine to its end, or until an answer has so many pieces."""
    while (answer is None or len(answer._pieces) < pieces) and engine.run_once():
        pass
    assert answer is None or len(answer._pieces) >= pieces


def finish(engine):
    """Run an engine to its end. A turn without work waits for the threads that read files."""
    while engine.run_once() or engine.report().waiting:
        time.sleep(0)


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
