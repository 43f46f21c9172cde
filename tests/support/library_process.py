"""What another process does with its library, when a test tells it."""

import hashlib
import itertools
import os
import signal
from unittest import mock

import jax
import numpy as np
from disk_calls import before_disk_calls
from small_state import POLICY, SMALL

import jshadow
from jshadow.engine.saved import file
from jshadow.errors import JshadowError
from jshadow.library import TierLimits
from jshadow.weights.params import init_params

opened = []


def ids_of(seed):
    """Token ids of a text of 20 tokens."""
    return np.random.default_rng(seed).integers(0, 13, 20).tolist()


def digest(state):
    """SHA-256 of all arrays of a state."""
    return hashlib.sha256(b"".join(np.array(leaf).tobytes() for leaf in jax.tree.leaves(state))).hexdigest()


def open_library(place):
    limits = TierLimits(device=0, host=0)
    opened[:] = [jshadow.Library(place, init_params(SMALL), POLICY, capacity=40, fetch="device_put", limits=limits)]
    return listed()


def add_and_be_killed(place, seed, point):
    """Add a text. At a point of its writing, the process is killed. Returns the number of points if there is none."""
    open_library(place)
    points = itertools.count()

    def reached(_):
        if next(points) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    real = file.write_payload

    def write_payload(*args):
        reached("write")
        return real(*args)

    with before_disk_calls(place, reached), mock.patch.object(file, "write_payload", write_payload):
        add([seed])
    return next(points)


def listed():
    return {found.key: (found.tier, found.problem) for found in opened[0].documents()}


def add(seeds):
    return [opened[0].add(ids_of(seed)).key for seed in seeds]


def ask(key):
    return opened[0].ask(key, [1, 2, 3], max_new_tokens=4).tokens


def load(keys):
    """The digest of each state, or the name of the error."""
    found = []
    for key in keys:
        try:
            found.append(digest(opened[0].load(key)))
        except JshadowError as error:
            found.append(type(error).__name__)
    return found
