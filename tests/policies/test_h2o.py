"""H2O: its budget, and the recent tokens that are never evicted."""

import numpy as np
from cases import model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import H2O


def test_h2o_holds_its_budget_and_never_evicts_the_recent():
    policy = H2O(heavy=5, recent=6)
    _, state = decode.prefill(model(), random_tokens(1, 40, seed=3), [40], policy, capacity=96)
    for step in range(30):
        _, state = run_steps(model(), state, random_tokens(1, 1, seed=step))
        held = int(state.lengths[0])
        for layer in state.layers:
            for positions in np.asarray(layer.live.positions[0]):
                kept = sorted(positions[positions >= 0].tolist())
                assert len(kept) == len(set(kept)) == 11
                assert set(range(held - 5, held)) <= set(kept)  # the next token will be the sixth recent one
