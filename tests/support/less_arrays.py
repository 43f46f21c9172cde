"""A small LESS, and random arrays as if it had learned them."""

import jax
import numpy as np
from cases import random_kernels
from random_arrays import array

from jshadow.policies import LESS

SMALL = LESS(heavy=6, recent=8, state_rank=4, hidden=16)


def fitted_for(config, policy=SMALL, scale=1.0):
    """Random arrays of every layer, each its own; the key side times `scale`."""
    one, sizes = random_kernels(policy, config.kv_heads, config.head_dim), 1 + np.arange(config.num_layers) / 4
    made = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf) * np.float32(size) for size in sizes]), one)
    return jax.tree.map(array, made | {"psi": made["psi"] | {"scale": made["psi"]["scale"] * np.float32(scale)}})
