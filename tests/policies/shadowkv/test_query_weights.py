"""The weights on errors of a key's numbers, and their effect on the error of the products."""

import jax
import numpy as np
import pytest
from cases import TINY
from codec_calls import every_chunk, run
from oracle_shadowkv import query_weights as wanted

from jshadow.errors import ConfigError
from jshadow.ops.rope import cos_sin, rotate
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import LowRank, TransformCode
from jshadow.policies.shadowkv.key_codecs import LowRankCodec, TransformCodec
from jshadow.policies.shadowkv.key_codecs.query_weights import query_weights


def queries_of(batch: int, count: int, heads: int, dim: int, seed: int = 0) -> np.ndarray:
    """Queries [B, w, h, d] in which each number has its own scale."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, count, heads, dim)) * rng.uniform(0.05, 3, (heads, dim))


weights_of = jax.jit(query_weights, static_argnums=(2, 3))


@jax.jit
def turn(x, positions, inverse):
    """RoPE at positions [S] of rows [B, S, h, d]."""
    return rotate(x, *(part[:, None] for part in cos_sin(positions, inverse)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated"), [(4, 2, 12, 12), (3, 3, 10, 6), (6, 1, 16, 4)])
def test_weights_are_the_oracle_s(heads, kv_heads, dim, rotated, dtype):
    """Rows have more tokens than queries, as many, fewer, and one. In some cases not all numbers are rotated."""
    lengths = [90, 16, 7, 1]
    queries = queries_of(4, 16, heads, dim).astype(np.dtype(dtype))
    got = np.asarray(weights_of(queries, np.array(lengths), kv_heads, rotated))
    assert got.shape == (4, kv_heads, dim)
    assert got.dtype == np.float32
    for row, length in enumerate(lengths):
        real = queries[row, -min(16, length) :].astype(np.float64)
        np.testing.assert_allclose(got[row], wanted(real, kv_heads, rotated), rtol=1e-5)
    half = rotated // 2
    np.testing.assert_array_equal(got[..., :half], got[..., half:rotated])


def test_no_query_weighs_nothing_more_than_another():
    """The weights are finite and above 0 for an empty row, and for numbers that are 0 in all queries."""
    queries, lengths = np.zeros((2, 4, 2, 6), np.float32), np.array([0, 9])
    np.testing.assert_array_equal(weights_of(queries, lengths, 1, 6), np.full((2, 1, 6), 0.1, np.float32))
    queries[..., 1] = 100
    got = np.asarray(weights_of(queries, lengths, 1, 6))[1, 0]
    np.testing.assert_allclose(got[[0, 2, 3, 5]], 0.1)
    np.testing.assert_allclose(got[[1, 4]], np.sqrt(3.01), rtol=1e-6)


@pytest.mark.parametrize("rotated", [12, 8])
def test_weights_are_those_before_rope(rotated):
    """RoPE rotates a query within pairs of numbers, so the weights are the same before and after it."""
    queries = np.float32(queries_of(1, 40, 4, 12))
    inverse = np.float32(1.0 / 50 ** (np.arange(rotated // 2) / 4))
    turned = np.asarray(turn(queries, np.arange(40) * 7, inverse))
    assert np.abs(turned - queries).max() > 1
    both = weights_of(np.concatenate([turned, queries]), np.array([40, 40]), 2, rotated)
    np.testing.assert_allclose(*np.asarray(both), rtol=1e-4)


@pytest.mark.parametrize("codec", [LowRankCodec(6), TransformCodec((2, 10, 12))], ids=["lowrank", "transform"])
def test_less_is_lost_of_the_products(codec):
    """If keys are large in all numbers and queries in few, weights reduce the error of the products by half."""
    rng, dim, tokens = np.random.default_rng(2), 16, 512
    size = np.tile(2.0 ** np.linspace(2, -2, dim // 2), 2)
    keys = np.float32(rng.standard_normal((1, tokens, 2, dim)))
    queries = np.float32(rng.standard_normal((1, 64, 4, dim)) * size)
    lengths, inverse = np.array([tokens]), np.float32(1.0 / 100 ** (np.arange(dim // 2) / 8))

    def lost(weights) -> float:
        """The mean squared error of the products of queries after the prompt with all keys."""
        code = run.encode(codec, keys, lengths, tokens // 8, 8, weights)
        rebuilt = np.asarray(run.decode(codec, code, every_chunk(1, 2, tokens // 8), 8))
        turned = np.asarray(turn(rebuilt.swapaxes(1, 2) - keys, np.arange(tokens), inverse))
        asked = np.asarray(turn(queries, tokens + np.arange(64), inverse)).reshape(1, 64, 2, 2, dim)
        return (np.einsum("bthgd,bshd->bhgts", asked, turned) ** 2).mean()

    assert lost(weights_of(queries, lengths, 2, dim)) < 0.5 * lost(None)


@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
def test_refusals(kind):
    for keys in (LowRank(weights="keys"), TransformCode(weights="keys")):
        with pytest.raises(ConfigError, match=r"keys\.weights must be one of .*'none', 'queries'.* got 'keys'"):
            kind(keys=keys).resolve(TINY, 96)
    with pytest.raises(ConfigError, match=r"keys='exact' has the settings \[\], got 'weights'"):
        with_settings(kind(), {"keys.weights": "queries", "keys": "exact"})
