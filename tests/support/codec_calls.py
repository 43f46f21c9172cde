"""The operations of key codecs, each as one program for its shapes, and the ids of all chunks.

Outside of `jax.jit` every operation of XLA is a program. A test that replaces a constant of the library, such as the
size of a block, must compile anew: `fresh` returns the same operations without the programs of other tests.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np


def encode(codec: Any, keys: Any, lengths: Any, chunks: int, chunk: int, weights: Any = None) -> Any:
    return codec.encode(keys, lengths, chunks, chunk, weights)


def decode(codec: Any, code: Any, ids: Any, chunk: int) -> Any:
    return codec.decode(code, ids, chunk)


def project(codec: Any, keys: Any, right: Any, weights: Any = None) -> Any:
    return codec.project(keys, right, weights)


def losses(codec: Any, code: Any, keys: Any, chunk: int, weights: Any = None, block: int = 2048) -> Any:
    return codec.losses(code, keys, chunk, weights, block)


def compress(policy: Any, spec: Any, prompt: Any) -> Any:
    """The state of a layer after a prompt, without host rows."""
    return policy.compress(spec, policy.init(spec), prompt)[0]


STATIC = {encode: (0, 3, 4), decode: (0, 3), project: (0,), losses: (0, 3, 5), compress: (0, 1)}


def fresh() -> SimpleNamespace:
    """The operations, compiled."""
    made = SimpleNamespace()
    for function, numbers in STATIC.items():
        again = functools.wraps(function)(lambda *args, function=function: function(*args))
        setattr(made, function.__name__, jax.jit(again, static_argnums=numbers))
    return made


run = fresh()


def every_chunk(batch: int, heads: int, chunks: int) -> np.ndarray:
    """The ids of all chunks [B, h, n]."""
    return np.broadcast_to(np.arange(chunks, dtype=np.int32), (batch, heads, chunks))
