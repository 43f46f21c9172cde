"""States of a tiny model on meshes, for the tests of saved states. A script imports it, or a test."""

import contextlib
import dataclasses
import functools
import resource

import jax
import numpy as np
from jax.sharding import Mesh

from jshadow.cli.mesh import parse_mesh
from jshadow.engine import decode
from jshadow.engine.saved.leaves import bare, cache_fills, own_fills, places
from jshadow.errors import JshadowError
from jshadow.evaluation.laws.inputs import TINY
from jshadow.policies import Full, Quest, ShadowKV, ShadowKVPlus, SnapKV
from jshadow.weights.params import init_params, spread

CONFIG = dataclasses.replace(TINY, num_layers=1, q_heads=8, kv_heads=4, head_dim=16, vocab_size=96)
LENGTHS, CAPACITY = np.array([60, 41], np.int32), 112
PROMPT = np.random.default_rng(0).integers(0, 96, (2, 60)).astype(np.int32)
TOKENS = [row[:length].tolist() for row, length in zip(PROMPT, LENGTHS, strict=True)]
STEP = np.array([3, 90], np.int32)
SIZES = {"chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2, "budget": 16}
POLICIES = {
    "full": Full(),
    "quest": Quest(budget=12, unit=4, dense_layers=0),
    "snapkv": SnapKV(max_capacity_prompt=14, observation_window=5, kernel=3),
    "shadowkv": ShadowKV(rank=12, **SIZES),
    "packed": dataclasses.replace(ShadowKV.packed(), **SIZES),
    "shadowkv_plus": ShadowKVPlus(rank=12, extra_outlier_chunks=2, extend_piece=6, **SIZES | {"local_chunks": 1}),
}


@functools.cache
def model():
    """The model on one device."""
    return init_params(CONFIG, seed=1)


@functools.cache
def model_on(sizes, left="split"):
    """The model on the first devices, with a mesh such as "tp=2,sp=2". "" is one device."""
    if not sizes:
        return model()
    parsed = parse_mesh(sizes)
    count = int(np.prod(list(parsed.values())))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(list(parsed.values())), tuple(parsed))
    return spread(model(), mesh, left)


def prefilled(params, name, fetch="device_put"):
    """The state of two prompts."""
    return decode.prefill(params, PROMPT, LENGTHS, POLICIES[name], capacity=CAPACITY, fetch=fetch)[1]


def difference(mine, theirs):
    """The first difference between the parts of two states on the devices of this process, or "none".

    Arrays on devices must have the same shardings. Zeros may follow the end of one on a mesh. The caches are left out.
    """
    others, free = places(theirs), cache_fills(mine) | own_fills(mine) | own_fills(theirs)
    for name, leaf in places(mine).items():
        one, other = bare(leaf), bare(others[name])
        if (one.sharding, one.shape, one.dtype) != (other.sharding, other.shape, other.dtype):
            return f"{name}: {one.sharding} {one.shape} {one.dtype}, {other.sharding} {other.shape} {other.dtype}"
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            if name not in free and np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes():
                return f"{name} at {a.index}"
    return "none"


def canonical_difference(mine, single):
    """The first difference between a state of a mesh and one of one device, or "none". Caches are left out."""
    others, free = places(single), cache_fills(mine) | own_fills(mine)
    for name, leaf in places(mine).items():
        one, other = np.asarray(bare(leaf)), np.asarray(bare(others[name]))
        if name not in free and one[tuple(map(slice, other.shape))].tobytes() != other.tobytes():
            return name
    return "none"


def text_of(work):
    """The text of the error that some work raises."""
    try:
        work()
    except JshadowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextlib.contextmanager
def file_size_limit(limit):
    """The kernel refuses to write beyond `limit` bytes of any file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
