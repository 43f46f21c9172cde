"""Normal random arrays, and any array in float64."""

import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def wide(x):
    return np.asarray(x, np.float64)
