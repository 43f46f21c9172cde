"""The chunks that ShadowKV keeps exactly: chosen by their landmark, and by the error of the key code."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from cases import TINY
from codec_calls import every_chunk, run
from few import one_of, pairwise, quick
from random_arrays import array

from jshadow.cache.records import PromptKV, Rebuild
from jshadow.ops.rope import cos_sin, rotate
from jshadow.planner.bytes import cache_specs
from jshadow.policies import ShadowKV
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, TransformCode
from jshadow.policies.shadowkv.key_codecs import (
    ChannelCodec,
    ExactCodec,
    KeyCode,
    KeyCodec,
    LowRankCodec,
    RotationCodec,
    TransformCodec,
)
from jshadow.policies.shadowkv.outliers import loses_more

CHUNK = 4
CODECS: dict[str, KeyCodec] = {
    "lowrank": LowRankCodec(9),
    "transform": TransformCodec((3, 10, 8)),
    "exact": ExactCodec(),
    "rotation": RotationCodec(2),
    "channel": ChannelCodec(4),
}
BOTH = ShadowKV(
    chunk_size=CHUNK,
    budget=12,
    outlier_chunks=5,
    local_chunks=1,
    keys=TransformCode(profile=(2, 10, 8)),
    choice=Choice(outlier_rule="both"),
)


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


def lost_by(codec: KeyCodec, code, keys: np.ndarray, chunks: int, weights=1.0) -> np.ndarray:
    """The largest squared error of a rebuilt key in each chunk, float64 [B, h, chunks]. Weights are [B, h, d]."""
    batch, _, heads, dim = keys.shape
    # All chunks of the code are rebuilt, so that one program serves rows with more chunks and with fewer.
    most = code.left.shape[-2]
    rebuilt = np.asarray(run.decode(codec, code, every_chunk(batch, heads, most), CHUNK), np.float64)
    rebuilt = rebuilt.reshape(batch, heads, most, CHUNK, dim)[:, :, :chunks]
    real = np.asarray(keys, np.float64)[:, : chunks * CHUNK].reshape(batch, chunks, CHUNK, heads, dim)
    sizes = np.broadcast_to(weights, (batch, heads, dim))[:, :, None, None]
    off = (rebuilt - real.transpose(0, 3, 1, 2, 4)) * sizes
    return (off**2).sum(axis=4).max(axis=3)


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
    code, lost = run.losses(codec, keys, np.array(lengths), 20, CHUNK, weights, block)
    lost = np.asarray(lost)
    assert lost.shape == (2, 2, 20)
    assert not lost[:, :, 15:].any()
    want = lost_by(codec, code, np.asarray(keys, np.float64), 15, sizes)
    for row, length in enumerate(lengths):
        whole = length // CHUNK
        np.testing.assert_allclose(lost[row, :, :whole], want[row, :, :whole], rtol=1e-3, atol=1e-5)
    assert (lost[0, :, :14] == 0).all() == (name == "exact")


def compressed(policy: ShadowKV, lengths: list[int], capacity: int, keys: np.ndarray):
    """A layer's resolved policy, and its state for a prompt whose keys before and after RoPE are `keys`."""
    config = dataclasses.replace(TINY, kv_heads=keys.shape[2], q_heads=2 * keys.shape[2], head_dim=keys.shape[3])
    spec = cache_specs(config, policy.resolve(config, capacity), len(keys), capacity, 1, "float32", "resident")[0]
    batch = array(keys, np.float32)
    positions = np.broadcast_to(np.arange(batch.shape[1]), batch.shape[:2])
    prompt = PromptKV(batch, batch, batch, np.array(lengths), positions, None)
    return spec.policy, jax.tree.map(np.asarray, run.compress(spec.policy, spec, prompt))


@pytest.mark.slow
def test_a_fact_in_a_text_that_repeats_itself_stays():
    """A sentence of 9 tokens repeats, and three tokens differ once. By the deviations alone they would be clipped."""
    rng = np.random.default_rng(5)
    sentence, turn = rng.standard_normal((9, 24)), np.linalg.qr(rng.standard_normal((24, 24)))[0]
    plain = (np.tile(sentence, (60, 1)) * 0.8 ** np.arange(24) + 0.01 * rng.standard_normal((540, 24))) @ turn
    plain[121:124] = 3 * rng.standard_normal((3, 24))
    keys = plain.reshape(1, 540, 2, 12)
    fact = 121 // CHUNK
    for policy in (BOTH, with_settings(BOTH, {"choice.outlier_rule": "landmark", "outlier_chunks": 0})):
        policy, state = compressed(policy, [540], 570, keys)
        closed = ~np.asarray(state.frozen.candidates[0])[:, : int(state.frozen.chunks[0])]
        assert closed[:, fact].all() == (policy.choice.outlier_rule == "both")
        code = KeyCode(state.frozen.left, state.frozen.right)
        lost = lost_by(policy.codec, code, keys[:, : CHUNK * closed.shape[1]], closed.shape[1])[0]
        # The error is 1/8 of the key. With steps from the deviations alone it would be 1/4 to 1/3.
        assert (lost[:, fact] < 0.2 * (keys[0, 121:124] ** 2).sum(axis=2).max()).all()


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
    code, lost = run.losses(codec, k_pre, np.array([160]), chunks, CHUNK, None, 2048)
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
        off = ((rebuilt.astype(np.float64) - later.astype(np.float64)) ** 2).sum(axis=4)
        assert (off.max(axis=3) > most[..., None]).any()
        assert not np.asarray(above(rebuilt, later, most=most)).any()
    found = np.asarray(above(rebuilt, unlike, most=most * np.float32(1.01)))
    assert found[:, :, 7].all()
    assert found.sum() == 2
    assert np.asarray(above(later, later, most=np.full((1, 2), -1, np.float32))).all()
    assert not np.asarray(above(rebuilt, unlike, most=np.full((1, 2), np.inf, np.float32))).any()
