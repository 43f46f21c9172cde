"""A small LESS, and random arrays as if it had learned them."""

import jax
import jax.numpy as jnp
from cases import random_kernels

from jshadow.policies import LESS

SMALL = LESS(heavy=6, recent=8, state_rank=4, hidden=16)


def fitted_for(config, policy=SMALL, scale=1.0):
    """Random arrays of every layer, each its own; the key side times `scale`."""
    layers = [random_kernels(policy, config.kv_heads, config.head_dim) for _ in range(config.num_layers)]
    made = jax.tree.map(lambda *parts: jnp.stack([part * (1 + i / 4) for i, part in enumerate(parts)]), *layers)
    return made | {"psi": made["psi"] | {"scale": made["psi"]["scale"] * scale}}
