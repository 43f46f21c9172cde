"""RoPE's frequencies, angles and rotations, compared with NumPy and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import LLAMA3_ROPE
from random_arrays import normal, wide

from jshadow.models.config import RopeConfig
from jshadow.ops import rope

ROPES = (
    RopeConfig(),
    RopeConfig(theta=5e5),
    RopeConfig(kind="linear", factor=4.0),
    LLAMA3_ROPE,
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192),
    RopeConfig(theta=5e5, kind="llama3", factor=32.0, low_freq_factor=1.5, high_freq_factor=2.5, original_context=128),
)


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("config", ROPES)
def test_frequencies_follow_the_formula(config, dim):
    np.testing.assert_allclose(
        rope.inverse_frequencies(config, dim), oracle.inverse_frequencies(config, dim), rtol=2e-6
    )


@pytest.mark.parity
@pytest.mark.parametrize("config", ROPES)
def test_frequencies_are_those_of_transformers(config):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": config.kind,
        "rope_theta": config.theta,
        "factor": config.factor,
        "low_freq_factor": config.low_freq_factor,
        "high_freq_factor": config.high_freq_factor,
        "original_max_position_embeddings": config.original_context,
    }
    if config.kind == "default":
        parameters = {"rope_type": "default", "rope_theta": config.theta}
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=parameters, max_position_embeddings=131072
    )
    if config.kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        want, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        want, _ = ROPE_INIT_FUNCTIONS[config.kind](theirs, "cpu")
    np.testing.assert_allclose(rope.inverse_frequencies(config, 64), want.numpy(), rtol=1e-6)


def test_cosines_and_sines_are_exact_to_a_million_and_a_half_radians():
    rng = np.random.default_rng(3)
    angle = np.concatenate([rng.uniform(0, 1.6e6, 200_000), rng.uniform(0, 10, 50_000), np.arange(200_000)])
    angle = np.concatenate([angle, np.arange(1000) * np.pi / 4, [0.0, 1.6e6]]).astype(np.float32)
    for run in (rope.cos_sin_of, jax.jit(rope.cos_sin_of)):
        cos, sin = run(jnp.asarray(angle))
        np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), atol=2e-7, rtol=0)
        np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), atol=2e-7, rtol=0)


def test_rotation_keeps_length_and_knows_distances_only():
    q, k, inverse = normal(80, seed=1), normal(80, seed=2), jnp.asarray(rope.inverse_frequencies(RopeConfig(), 80))

    def turn(x, position):
        return rope.rotate(x, *rope.cos_sin(jnp.array(position), inverse))

    np.testing.assert_allclose(jnp.linalg.norm(turn(q, 1234)), jnp.linalg.norm(q), rtol=1e-5)
    for near, far in ((0, 5), (100, 105), (1000, 1005)):
        np.testing.assert_allclose(turn(q, far) @ turn(k, near), turn(q, 5) @ turn(k, 0), atol=2e-3)
    np.testing.assert_array_equal(turn(q, 0), q)
    np.testing.assert_allclose(
        turn(q, 77), oracle.apply_rope(wide(q)[None, None], np.array([77]), RopeConfig())[0, 0], atol=1e-5
    )
