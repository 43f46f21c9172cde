"""The low-rank factors of keys against a direct SVD, and the keys rebuilt from them."""

import jax
import numpy as np
import oracle
import pytest
from random_arrays import normal, wide

from jshadow.cache.records import Rebuild
from jshadow.models.config import RopeConfig
from jshadow.ops import rope
from jshadow.policies.shadowkv.key_codecs import LowRankCodec, lowrank

compiled = jax.jit(lowrank.key_factors, static_argnums=2, static_argnames="block")


def factors(keys, lengths, rank, **block):
    """The factors in NumPy."""
    return tuple(map(np.asarray, compiled(keys, lengths, rank, **block)))


@pytest.mark.parametrize(("length", "rank"), [(61, 12), (61, 32), (27, 20), (5, 16), (1, 8)])
def test_factors_are_the_truncated_svd(length, rank):
    """In a padded batch, the factors equal a direct SVD of the real rows. A rank above the length is exact."""
    keys = np.asarray(normal(2, 64, 2, 16, seed=length))
    left, right = factors(keys, np.array([length, 64]), rank)
    assert (left.shape, right.shape) == ((2, 64, rank), (2, 2, rank, 16))
    for row, count in enumerate((length, 64)):
        u, s, vt = np.linalg.svd(wide(keys[row, :count]).reshape(count, 32), full_matrices=False)
        want = (u[:, :rank] * s[:rank]) @ vt[:rank]
        got = np.einsum("sr,hrd->shd", wide(left[row]), wide(right[row])).reshape(64, 32)
        np.testing.assert_allclose(got[:count], want, atol=2e-4)
        assert not got[count:].any()
    assert not np.asarray(left[0, :, length:]).any()  # columns beyond the number of tokens are zero


def test_a_large_mean_does_not_spoil_the_factors():
    """Key biases make the first singular value large, and the Gram matrix squares it."""
    keys = np.asarray(normal(1, 61, 2, 16, seed=3)) + 30 * np.asarray(normal(1, 1, 2, 16, seed=4))
    left, right = factors(keys, np.array([61]), 12)
    u, s, vt = np.linalg.svd(wide(keys[0]).reshape(61, 32), full_matrices=False)
    want = (u[:, :12] * s[:12]) @ vt[:12]
    got = np.einsum("sr,hrd->shd", wide(left[0]), wide(right[0])).reshape(61, 32)
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-3


@pytest.mark.parametrize("block", [7, 16, 61])
def test_factors_do_not_depend_on_the_block(block):
    """Each token is counted once, although the last block overlaps the previous one."""
    keys, lengths = normal(2, 61, 2, 16, seed=8), np.array([61, 22])
    want, got = factors(keys, lengths, 12), factors(keys, lengths, 12, block=block)
    product = [np.einsum("bsr,bhrd->bshd", wide(left), wide(right)) for left, right in (want, got)]
    np.testing.assert_allclose(product[0], product[1], atol=2e-5)


def test_a_whole_basis_keeps_keys_that_no_token_had():
    """At full rank the projection keeps every key, although the prompt has fewer tokens than key columns."""
    _, right = factors(normal(1, 5, 2, 16, seed=9), np.array([5]), 32)
    basis, key = wide(right[0]).transpose(0, 2, 1).reshape(32, 32), wide(normal(32, seed=10))
    np.testing.assert_allclose(key @ basis @ basis.T, key, atol=1e-4)


def test_rebuilt_keys_are_the_rotated_product():
    """Each head rebuilds its own set of chunks, at the positions of these chunks."""
    keys, lengths = np.asarray(normal(2, 24, 2, 16)), np.array([24, 24])
    ids = np.array([[[5, 0], [2, 2]], [[1, 4], [3, 5]]])
    left, right = factors(keys, lengths, 32)
    inverse = np.asarray(rope.inverse_frequencies(RopeConfig(), 16), np.float32)

    @jax.jit
    def rebuilt(left, right, ids):
        return Rebuild(left.reshape(2, 6, 4 * 32), right, inverse, codec=LowRankCodec(32), unit=4).keys(ids)

    got = np.asarray(rebuilt(left, right, ids))
    for b, h in np.ndindex(2, 2):
        tokens = oracle.tokens_of(ids[b, h], 4)
        want = oracle.apply_rope(wide(keys[b]), np.arange(24), RopeConfig())[tokens, h]
        np.testing.assert_allclose(wide(got[b, h]), want, atol=1e-4)
