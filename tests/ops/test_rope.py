"""RoPE's frequencies, angles and rotations, compared with NumPy and transformers."""

import jax
import make
import numpy as np
import oracle_maths as oracle
import seeded
from random_arrays import normal, wide

from jshadow.models.config import RopeConfig
from jshadow.ops import rope

ROPES = tuple(RopeConfig(**settings) for settings in seeded.ROPES)


def test_frequencies_follow_the_formula_and_are_those_of_transformers():
    for config, theirs in zip(ROPES, make.committed("tiny")["arrays"]["rope"], strict=True):
        for dim in (16, 64, 80, 128):
            got, want = (module.inverse_frequencies(config, dim) for module in (rope, oracle))
            np.testing.assert_allclose(got, want, rtol=2e-6, err_msg=f"{dim}, {config}")
        np.testing.assert_allclose(rope.inverse_frequencies(config, 64), theirs, rtol=1e-6, err_msg=str(config))


def read(**scaling):
    """The RoPE of a config.json with a context of 512 tokens, of which 64 are the original one."""
    scaling = {"original_max_position_embeddings": 64} | scaling
    return RopeConfig.from_hf({"rope_theta": 1e4, "max_position_embeddings": 512, "rope_scaling": scaling})


def test_a_llama3_ramp_without_width_is_a_step():
    """Wavelengths above original_context / low_freq_factor are divided, and all others are kept, as in transformers."""
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    for bound in (1.0, 4.0):
        config = read(rope_type="llama3", factor=8.0, low_freq_factor=bound, high_freq_factor=bound)
        divided = 2 * np.pi / plain > 64 / bound
        assert 0 < divided.sum() < 32
        got = rope.inverse_frequencies(config, 64)
        np.testing.assert_allclose(got, np.where(divided, plain / 8, plain), rtol=1e-6)


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts():
    """The formula is that of transformers, in NumPy. The file may have the key with null, or not at all."""
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    first, last = (64 * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(1e4)) for turns in (32, 1))
    first, last = max(np.floor(first), 0), np.ceil(last)
    divided = np.clip((np.arange(32) - first) / (last - first), 0, 1)
    want = plain * (1 - divided) + plain / 8 * divided
    growth = 0.1 * np.log(8) + 1
    tuned = {"mscale": 1.5, "mscale_all_dim": 0.5}
    for factor in ({}, {"factor": None}):
        config = read(rope_type="yarn", **factor)
        np.testing.assert_allclose(rope.inverse_frequencies(config, 64), want, rtol=1e-6)
        assert (config.factor, config.original_context) == (8.0, 64)
        np.testing.assert_allclose(config.attention_factor, growth, rtol=1e-9)
        got = read(rope_type="yarn", **factor, **tuned).attention_factor
        np.testing.assert_allclose(got, (0.15 * np.log(8) + 1) / (0.05 * np.log(8) + 1), rtol=1e-9)


def test_cosines_and_sines_are_exact_to_a_million_and_a_half_radians():
    rng = np.random.default_rng(3)
    angle = np.concatenate([rng.uniform(0, 1.6e6, 200_000), rng.uniform(0, 10, 50_000), np.arange(200_000)])
    angle = np.concatenate([angle, np.arange(1000) * np.pi / 4, [0.0, 1.6e6]]).astype(np.float32)
    for got, exact in zip(jax.jit(rope.cos_sin_of)(angle), (np.cos, np.sin), strict=True):
        np.testing.assert_allclose(got, exact(angle.astype(np.float64)), atol=2e-7, rtol=0)


def test_rotation_keeps_length_and_knows_distances_only():
    q, k, inverse = *(np.asarray(normal(80, seed=seed)) for seed in (1, 2)), rope.inverse_frequencies(RopeConfig(), 80)
    places = np.array([0, 5, 77, 100, 105, 1000, 1005, 1234])
    turn = jax.jit(lambda x, places, inverse: rope.rotate(x, *rope.cos_sin(places, inverse)))
    rows = (np.asarray(turn(np.tile(x, (8, 1)), places, inverse)) for x in (q, k))
    of_q, of_k = (dict(zip(places.tolist(), x, strict=True)) for x in rows)
    np.testing.assert_allclose(np.linalg.norm(of_q[1234]), np.linalg.norm(q), rtol=1e-5)
    for near, far in ((100, 105), (1000, 1005)):
        np.testing.assert_allclose(of_q[far] @ of_k[near], of_q[5] @ of_k[0], atol=2e-3)
    np.testing.assert_array_equal(of_q[0], q)
    want = oracle.apply_rope(wide(q)[None, None], np.array([77]), RopeConfig())[0, 0]
    np.testing.assert_allclose(of_q[77], want, atol=1e-5)
