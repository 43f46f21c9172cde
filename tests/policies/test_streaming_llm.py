"""StreamingLLM on a text much longer than its window, against the NumPy oracle."""

import numpy as np
import oracle
from cases import TINY, model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import StreamingLLM


def test_streaming_llm_is_stable_far_beyond_its_window():
    """On a text of ten windows, with rebased positions, the logits stay equal to the oracle's."""
    policy, prompt, steps = StreamingLLM(sinks=2, window=10), random_tokens(1, 20, seed=16), random_tokens(100, seed=17)
    run = oracle.Oracle(model().weights, TINY, oracle.StreamingLLM(2, 10))
    run.prefill(prompt[0].tolist())
    want = np.stack([run.step(int(token)) for token in steps])
    _, state = decode.prefill(model(), prompt, [20], policy, capacity=128)
    got, state = run_steps(model(), state, steps[None])
    np.testing.assert_allclose(got[0], want, atol=1e-4)
    assert state.layers[0].live.cache.k.shape[2] == 12
