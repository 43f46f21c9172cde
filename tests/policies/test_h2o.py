"""H2O: its budget, and the recent tokens that are never evicted."""

import numpy as np
from cases import LENGTHS, STEPS, model

from jshadow.engine import decode
from jshadow.evaluation.laws import inputs
from jshadow.policies import H2O


def test_h2o_holds_its_budget_and_never_evicts_the_recent():
    _, state = inputs.prefilled(H2O(heavy=5, recent=6))
    for step in range(12):
        _, state = decode.decode_step(model(), STEPS[:, step], state)
        for layer in state.layers:
            for rows, length in zip(np.asarray(layer.live.positions), LENGTHS, strict=True):
                held = length + step + 1
                for positions in rows:
                    kept = positions[positions >= 0].tolist()
                    assert len(kept) == len(set(kept)) == min(11, held)
                    assert set(range(max(0, held - 5), held)) <= set(kept)  # the next token is the sixth recent one
