"""RoPE's frequencies, angles and rotations, compared with NumPy and transformers."""

import jax
import jax.numpy as jnp
import make
import numpy as np
import oracle
import pytest
import seeded
from random_arrays import normal, wide

from jshadow.models.config import RopeConfig
from jshadow.ops import rope

ROPES = tuple(RopeConfig(**settings) for settings in seeded.ROPES)


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("config", ROPES)
def test_frequencies_follow_the_formula(config, dim):
    np.testing.assert_allclose(
        rope.inverse_frequencies(config, dim), oracle.inverse_frequencies(config, dim), rtol=2e-6
    )


def test_frequencies_are_those_of_transformers():
    want = make.committed("tiny")["arrays"]["rope"]
    for config, theirs in zip(ROPES, want, strict=True):
        np.testing.assert_allclose(rope.inverse_frequencies(config, 64), theirs, rtol=1e-6, err_msg=str(config))


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
