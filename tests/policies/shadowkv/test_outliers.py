"""The error of a key code, by which ShadowKV chooses chunks that it keeps exactly."""

import functools
import itertools

import jax
import numpy as np
import pytest
from codec_calls import every_chunk, run
from few import one_of, pairwise, quick
from random_arrays import array, wide

from jshadow.cache.records import Rebuild
from jshadow.ops.rope import cos_sin, rotate
from jshadow.policies.shadowkv.key_codecs import (
    ExactCodec,
    KeyCodec,
    LowRankCodec,
    TransformCodec,
)
from jshadow.policies.shadowkv.selection import loses_more

CHUNK = 4
CODECS: dict[str, KeyCodec] = {
    "lowrank": LowRankCodec(9),
    "transform": TransformCodec((3, 10, 8)),
    "exact": ExactCodec(),
}


def keys_of(lengths: list[int], heads: int = 2, dim: int = 12, seed: int = 0) -> np.ndarray:
    """Keys [B, S, h, d] in a few directions, with some different tokens, padded with numbers that must not be read."""
    rng = np.random.default_rng(seed)
    keys = np.full((len(lengths), max(lengths) + 3, heads, dim), 99.0)
    for row, length in enumerate(lengths):
        plain = rng.standard_normal((length, 5)) @ rng.standard_normal((5, heads * dim)) + 3
        plain += 0.1 * rng.standard_normal(plain.shape)
        plain[rng.integers(0, length, max(1, length // 15))] += 4 * rng.standard_normal(heads * dim)
        keys[row, :length] = plain.reshape(length, heads, dim)
    return keys


@pytest.mark.parametrize(
    ("name", "weighed", "block", "dtype"),
    one_of(8, pairwise(CODECS, [False, True], [3, 16, 2048], ["float32", "bfloat16"])),
)
def test_losses_are_those_of_the_worst_token(name, weighed, block, dtype):
    """The result does not depend on the block, and chunks after the end of the prompt have no error."""
    codec, lengths = CODECS[name], [57, 30]
    keys = array(keys_of(lengths), dtype)
    sizes = np.random.default_rng(1).uniform(0.2, 2, (2, 2, 12)) if weighed else np.ones((2, 2, 12))
    weights = array(sizes, np.float32) if weighed else None
    _, decoded, lost = jax.tree.map(np.asarray, run.losses(codec, keys, np.array(lengths), 20, CHUNK, weights, block))
    assert lost.shape == (2, 2, 20)
    assert not lost[:, :, 15:].any()
    off = ((wide(decoded)[:, :60] - wide(keys)) * sizes[:, None]) ** 2
    want = off.sum(axis=3).reshape(2, 15, CHUNK, 2).max(axis=2).swapaxes(1, 2)
    for row, length in enumerate(lengths):
        whole = length // CHUNK
        np.testing.assert_allclose(lost[row, :, :whole], want[row, :, :whole], rtol=1e-3, atol=1e-5)
    assert (lost[0, :, :14] == 0).all() == (name == "exact")


@pytest.mark.parametrize(
    ("dtype", "name"),
    quick([("bfloat16", "transform")], itertools.product(["float32", "bfloat16"], ["lowrank", "transform"])),
)
def test_the_same_keys_later_are_no_worse(name, dtype):
    """Keys far from zero, as with biases, have a rounding error that is larger than the error of a good code."""
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((1, 160, 2, 12)) * 0.5 + np.where(rng.random((2, 12)) < 0.2, 60, 0)
    codec = LowRankCodec(24) if name == "lowrank" else CODECS[name]
    k_pre, chunks = array(keys, dtype), 160 // CHUNK
    code, _, lost = run.losses(codec, k_pre, np.array([160]), chunks, CHUNK, None, 2048)
    most = np.asarray(lost).max(axis=2)
    inverse = np.float32(10000.0 ** -(np.arange(6) / 6))

    @jax.jit
    def both(k_pre, code, inverse, at):
        """Later keys, and what is rebuilt of them."""
        tail = codec.project(k_pre, code.right).swapaxes(1, 2)
        tail = tail.reshape(*tail.shape[:2], chunks, -1)
        tail = tail if code.left.ndim == 4 else tail[:, 0]
        rebuild = Rebuild(code.left, code.right, inverse, tail, at[:1] // CHUNK, codec=codec, unit=CHUNK)
        later = rotate(k_pre, *(x[None, :, None] for x in cos_sin(at, inverse)))
        later = later.transpose(0, 2, 1, 3).reshape(1, 2, chunks, CHUNK, 12)
        return later, rebuild.keys(chunks + every_chunk(1, 2, chunks)).reshape(later.shape)

    later, rebuilt = map(np.asarray, both(k_pre, code, inverse, 160 + np.arange(160)))
    unlike, above = later.copy(), jax.jit(functools.partial(loses_more, weights=None))
    unlike[:, :, 7, 2] *= -1
    if dtype == "bfloat16":  # without the allowance for rounding, these keys would be above the limit
        off = ((wide(rebuilt) - wide(later)) ** 2).sum(axis=4)
        assert (off.max(axis=3) > most[..., None]).any()
        assert not np.asarray(above(rebuilt, later, most=most)).any()
    found = np.asarray(above(rebuilt, unlike, most=most * np.float32(1.01)))
    assert found[:, :, 7].all()
    assert found.sum() == 2
    assert np.asarray(above(later, later, most=np.full((1, 2), -1, np.float32))).all()
    assert not np.asarray(above(rebuilt, unlike, most=np.full((1, 2), np.inf, np.float32))).any()
