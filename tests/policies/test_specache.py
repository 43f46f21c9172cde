"""SpeCache: the guess is never stored, and if all tokens are fetched the result is that of full attention."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY, model, random_tokens, run_steps

from jshadow.engine import decode
from jshadow.policies import Full, SpeCache


@pytest.mark.slow
def test_specache_without_quantization_is_full_whatever_was_guessed():
    """No token is quantized while the residual holds all, and the guess is never stored."""
    tokens, steps = random_tokens(2, 40, seed=11), random_tokens(2, 6, seed=12)
    _, state = decode.prefill(model(), tokens, [40, 23], SpeCache(group=8, residual=64, fetched=4), capacity=64)
    _, full = decode.prefill(model(), tokens, [40, 23], Full(), capacity=64)
    want, _ = run_steps(model(), full, steps)
    rng = np.random.default_rng(13)
    for step in range(6):
        guess = jnp.asarray(rng.integers(0, TINY.vocab_size, 2), jnp.int32)
        state = state.replace(shared=state.shared.replace(guess=guess))
        logits, state = decode.decode_step(model(), steps[:, step], state)
        np.testing.assert_allclose(logits, want[:, step], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["resident", "device_put"])
def test_specache_that_fetches_everything_is_full(fetch):
    """Keys and values have one bit, and all of them are replaced by exact ones."""
    tokens, steps = random_tokens(2, 50, seed=14), random_tokens(2, 9, seed=15)
    policy = SpeCache(bits=1, group=8, residual=8, fetched=64)
    _, state = decode.prefill(model(), tokens, [50, 31], policy, capacity=64, fetch=fetch)
    _, full = decode.prefill(model(), tokens, [50, 31], Full(), capacity=64)
    got, want = (run_steps(model(), one, steps)[0] for one in (state, full))
    np.testing.assert_allclose(got, want, atol=1e-4)
    few = dataclasses.replace(policy, fetched=2)
    _, state = decode.prefill(model(), tokens, [50, 31], few, capacity=64, fetch=fetch)
    assert np.abs(run_steps(model(), state, steps)[0] - want).max() > 0.05
