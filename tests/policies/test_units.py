"""The fewest weights that reach a share of a softmax, against plain sums."""

import jax
import numpy as np
import pytest

from jshadow.policies.units import within_share


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.01])
def test_the_share_of_a_softmax(share):
    rng = np.random.default_rng(7)
    weights = -np.sort(-rng.exponential(size=(3, 20)).astype(np.float32), axis=1)
    kept = np.asarray(jax.jit(within_share, static_argnums=1)(weights, share))
    for row, mask in zip(weights, kept, strict=True):
        count = 20 if share == 1 else next(n for n in range(1, 21) if row[:n].sum() >= share * row.sum() - 1e-6)
        assert mask.tolist() == [i < count for i in range(20)]
