"""The operations of key codecs, several of them as one program, and the ids of all chunks.

Outside of `jax.jit` every operation of XLA is a program. A test that replaces a constant of the library, such as the
size of a block, must compile anew: `fresh` returns the same operations without the programs of other tests.
"""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np


def there_and_back(
    codec: Any, keys: Any, lengths: Any, chunks: int, chunk: int, weights: Any = None, later: Any = None
) -> tuple[Any, Any, Any]:
    """The code of keys [B, S, h, d], the keys [B, n * c, h, d] of all its chunks, and the rows of later keys."""
    code = codec.encode(keys, lengths, chunks, chunk, weights)
    decoded = codec.decode(code, every_chunk(len(keys), keys.shape[2], chunks), chunk).swapaxes(1, 2)
    return code, decoded, codec.project(keys if later is None else later, code.right, weights)


def losses(codec: Any, keys: Any, lengths: Any, chunks: int, chunk: int, weights: Any, block: int) -> tuple[Any, ...]:
    """The code of keys, the keys of all its chunks, and the losses of these chunks."""
    code = codec.encode(keys, lengths, chunks, chunk, weights)
    decoded = codec.decode(code, every_chunk(len(keys), keys.shape[2], chunks), chunk).swapaxes(1, 2)
    return code, decoded, codec.losses(code, keys, chunk, weights, block)


def compress(policy: Any, spec: Any, prompt: Any) -> Any:
    """The state of a layer after a prompt, without host rows."""
    return policy.compress(spec, policy.init(spec), prompt)[0]


STATIC = {there_and_back: (0, 3, 4), losses: (0, 3, 4, 6), compress: (0, 1)}


def fresh() -> SimpleNamespace:
    """The operations, compiled."""
    made = SimpleNamespace()
    for function, numbers in STATIC.items():
        compiled = jax.jit(lambda *args, function=function: function(*args), static_argnums=numbers)
        setattr(made, function.__name__, compiled)
    return made


run = fresh()


def lost_by(codec, keys, chunk: int, weights=None) -> float:
    """The mean squared error of rebuilt keys [1, T, h, d], over their mean square."""
    got = run.there_and_back(codec, keys, np.array([keys.shape[1]]), keys.shape[1] // chunk, chunk, weights)[1]
    return float(((np.asarray(got, np.float64) - keys) ** 2).sum() / (keys**2).sum())


def every_chunk(batch: int, heads: int, chunks: int) -> np.ndarray:
    """The ids of all chunks [B, h, n]."""
    return np.broadcast_to(np.arange(chunks, dtype=np.int32), (batch, heads, chunks))
