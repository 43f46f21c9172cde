"""Normal random arrays, and any array in float64."""

from typing import Any

import jax
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """An array on the device. No program is compiled: `jnp.asarray` of a NumPy array is one for each shape."""
    x = np.asarray(x)
    return jax.device_put(x if dtype is None else x.astype(np.dtype(dtype)))


def normal(*shape, seed=0, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def wide(x):
    return np.asarray(x, np.float64)
