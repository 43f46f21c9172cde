"""A saved state of a few kilobytes, for tests that read and write it a thousand times."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
from cases import TINY, random_tokens
from full_disk import file_size_limit as file_size_limit

from jshadow import ShadowKV, save_state
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.weights.params import Params, init_params

SMALL = dataclasses.replace(
    TINY, num_layers=1, vocab_size=13, model_dim=8, ffn_dim=8, q_heads=1, kv_heads=1, head_dim=4
)
POLICY = ShadowKV(rank=2, chunk_size=4, budget=4, outlier_chunks=1, local_chunks=1)
LENGTHS_SMALL = np.array([13, 6])


@functools.cache
def small() -> tuple[Params, KVState]:
    """One layer, two rows, a few kilobytes."""
    params = init_params(SMALL)
    tokens = random_tokens(2, 13, config=SMALL)
    return params, decode.prefill(params, tokens, LENGTHS_SMALL, POLICY, capacity=16, fetch="device_put")[1]


def save_small(path: Path, *, first: int = 0) -> bytes:
    """A file of the small state with token ids, the first of them as given; its bytes."""
    params, state = small()
    tokens = [[first] * int(length) for length in LENGTHS_SMALL]
    save_state(path, state, params, tokens=tokens)
    return path.read_bytes()


def equal(mine: KVState, theirs: KVState) -> bool:
    """Whether two states have the same structure, and the same bits, dtypes and memories in every leaf."""
    return jax.tree.structure(mine) == jax.tree.structure(theirs) and all(
        (a.dtype, a.shape, a.sharding) == (b.dtype, b.shape, b.sharding)
        and np.array(a).tobytes() == np.array(b).tobytes()
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
    )
