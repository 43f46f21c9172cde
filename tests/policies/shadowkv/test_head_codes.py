"""The key codes of single heads, which others published: their levels and errors beside an oracle, and refusals."""

import dataclasses

import jax
import numpy as np
import oracle_head_codes
import pytest
from cases import TINY
from codec_calls import every_chunk, fresh, run
from few import one_of
from random_arrays import array

from jshadow.errors import ConfigError
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import ChannelCode, Choice, RotationCode
from jshadow.policies.shadowkv.key_codecs import ChannelCodec, KeyCode, KeyCodec, RotationCodec, per_head, rotation

CODECS: dict[str, KeyCodec] = {
    "rotation2": RotationCodec(2),
    "rotation3": RotationCodec(3),
    "channel2": ChannelCodec(2),
    "channel4": ChannelCodec(4),
}
SIZES = [(1, 8), (2, 16), (3, 40)]  # KV heads and their width


def random_keys(lengths: list[int], heads: int, dim: int, seed: int) -> np.ndarray:
    """Keys [B, S, h, d] whose channels have other means and sizes, padded with numbers that must not be read."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((len(lengths), max(lengths) + 3, heads, dim))
    keys = keys * rng.uniform(0.1, 5, (heads, dim)) + rng.uniform(-9, 9, (heads, dim))
    for row, length in enumerate(lengths):
        keys[row, length:] = 1e4
    return keys.astype(np.float32)


def rows_of(code: KeyCode, row: int, head: int, tokens: int) -> np.ndarray:
    """The left rows of a head's tokens [tokens, w]."""
    left = code.left[row, head]
    return left.reshape(len(left) * 3, -1)[:tokens]


@pytest.mark.parametrize("bits", [2, 3])
def test_levels_are_those_of_lloyd(bits):
    want = oracle_head_codes.lloyd_levels(bits)
    np.testing.assert_allclose(rotation.levels(bits), want, atol=1e-6)


@pytest.mark.parametrize("dim", [4, 24, 80, 128])
def test_the_rotation_is_the_oracle_s(dim):
    turn = rotation.rotation(dim)
    np.testing.assert_allclose(turn, oracle_head_codes.turn(dim), atol=1e-5)
    np.testing.assert_allclose(turn @ turn.T, np.eye(dim), atol=1e-5)


def coded(codec, keys, lengths, calls=run):
    """The code of keys in 13 chunks of 3, in NumPy."""
    return jax.tree.map(np.asarray, calls.encode(codec, keys, np.array(lengths), 13, 3))


@pytest.mark.parametrize(
    ("bits", "heads", "dim", "block"),
    one_of(4, [(bits, *size, block) for size in SIZES for bits in (2, 3) for block in (5, 2048)]),
)
def test_a_rotated_number_has_its_nearest_level(bits, heads, dim, block, monkeypatch):
    monkeypatch.setattr(per_head, "BLOCK", block)
    lengths, levels = [37, 12], np.array(oracle_head_codes.lloyd_levels(bits))
    keys = random_keys(lengths, heads, dim, seed=bits)
    code = coded(RotationCodec(bits), keys, lengths, fresh())
    for (row, length), head in [(pair, head) for pair in enumerate(lengths) for head in range(heads)]:
        plain = keys[row, :length, head].astype(float)
        norms = np.linalg.norm(plain, axis=1, keepdims=True)
        turned = plain / norms @ oracle_head_codes.turn(dim) * np.sqrt(dim)
        far = np.sort(np.abs(turned[..., None] - levels), axis=-1)
        rows = rows_of(code, row, head, length)
        codes, sure = oracle_head_codes.unpacked(rows[:, :-2], bits), far[..., 1] - far[..., 0] > 2e-3
        np.testing.assert_array_equal(codes[sure], np.abs(turned[..., None] - levels).argmin(axis=-1)[sure])
        assert sure.mean() > 0.97
        lost = np.linalg.norm(oracle_head_codes.rotated_keys(rows, bits) - plain, axis=1) / norms[:, 0]
        assert lost.mean() < {2: 0.4, 3: 0.25}[bits]  # sqrt(0.1175) and sqrt(0.0345) for Gaussian numbers
        assert not code.left[row, head].reshape(39, -1)[length:].any()


@pytest.mark.parametrize(
    ("bits", "heads", "dim", "block"),
    one_of(5, [(bits, *size, block) for size in SIZES for bits in (2, 4) for block in (5, 2048)]),
)
def test_a_channel_s_error_is_half_a_step(bits, heads, dim, block, monkeypatch):
    """The ranges are those of the real tokens. Later keys beyond them are clipped."""
    monkeypatch.setattr(per_head, "BLOCK", block)
    lengths, codec, calls = [37, 12], ChannelCodec(bits), fresh()
    keys = random_keys(lengths, heads, dim, seed=bits)
    code = coded(codec, keys, lengths, calls)
    later = np.asarray(calls.project(codec, keys[:, :1] * 100, code.right))
    for (row, length), head in [(pair, head) for pair in enumerate(lengths) for head in range(heads)]:
        plain = keys[row, :length, head].astype(float)
        least, most = plain.min(axis=0), plain.max(axis=0)
        step = (most - least) / (2**bits - 1)
        np.testing.assert_allclose(code.right.least[row, head], least, rtol=1e-6)
        np.testing.assert_allclose(code.right.step[row, head], step, rtol=1e-5)
        rebuilt = oracle_head_codes.unpacked(rows_of(code, row, head, length), bits) * step + least
        assert (np.abs(rebuilt - plain) <= step / 2 + 1e-4).all()
        assert (np.abs(rebuilt - plain).max(axis=0) > step / 20).all()  # not the keys themselves
        clipped = oracle_head_codes.unpacked(later[row, :, head], bits)[0] * step + least
        np.testing.assert_allclose(clipped, np.clip(keys[row, 0, head] * 100.0, least, most), atol=step.max() / 2)
        assert not code.left[row, head].reshape(39, -1)[length:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_awkward_keys(name, dtype):
    """Keys of zeros, equal keys, one token and no token give finite keys, and one very long key harms no other head."""
    codec = CODECS[name]
    keys = np.zeros((4, 9, 2, 8), np.float32)
    keys[1] = np.linspace(-3, 3, 8)
    keys[2, 0], keys[3] = 7.0, 1e30
    lengths = np.array([9, 9, 1, 0])
    code = run.encode(codec, array(keys, dtype), lengths, 3, 3)
    got = np.asarray(run.decode(codec, code, every_chunk(4, 2, 3), 3))
    assert np.isfinite(got).all()
    assert not got[0].any()
    assert not got[3].any()
    if name.startswith("channel"):
        np.testing.assert_allclose(got[1], keys[1].astype(dtype).astype(float).swapaxes(0, 1), rtol=1e-6)
    keys[:, :, 1] *= 1e3
    other = run.encode(codec, array(keys, dtype), lengths, 3, 3)
    np.testing.assert_array_equal(np.asarray(other.left)[:, 0], np.asarray(code.left)[:, 0])


def test_more_bits_lose_less():
    keys = random_keys([200], 2, 16, seed=5)[:, :200]
    lost = {}
    for name, codec in CODECS.items():
        code = run.encode(codec, keys, np.array([200]), 50, 4)
        got = np.asarray(run.decode(codec, code, every_chunk(1, 2, 50), 4))
        lost[name] = float(((got.swapaxes(1, 2) - keys) ** 2).sum() / (keys**2).sum())
    assert lost["rotation3"] < lost["rotation2"] / 2
    assert lost["channel4"] < lost["channel2"] / 8


BAD = {
    "rotation_bits": (RotationCode(bits=4), 16, r"keys\.bits must be one of \(2, 3\), got 4"),
    "channel_bits": (ChannelCode(bits=3), 16, r"keys\.bits must be one of \(2, 4\), got 3"),
    "no_number": (ChannelCode(bits="2"), 16, r"keys\.bits must be one of \(2, 4\), got '2'"),  # type: ignore[arg-type]
    "bool": (ChannelCode(bits=True), 16, r"keys\.bits must be one of \(2, 4\), got True"),
    "width_of_2_bits": (RotationCode(bits=2), 18, "keys='rotation' with keys.bits=2 .* multiple of 4, got 18"),
    "width_of_3_bits": (RotationCode(bits=3), 20, "keys='rotation' with keys.bits=3 .* multiple of 8, got 20"),
    "channel_width": (ChannelCode(), 14, "keys='channel' with keys.bits=2 .* multiple of 4, got 14"),
}


@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
@pytest.mark.parametrize("case", BAD)
def test_refusals(case, kind):
    keys, dim, message = BAD[case]
    later = {"later_keys": "int4"} if kind is ShadowKVPlus else {}  # the default needs heads of other widths
    with pytest.raises(ConfigError, match=message):
        kind(keys=keys, **later).resolve(dataclasses.replace(TINY, head_dim=dim), 96)


@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
@pytest.mark.parametrize("name", ["rotation", "channel"])
def test_settings_that_these_codes_lack(name, kind):
    with pytest.raises(ConfigError, match=f"rank must be None with keys='{name}'.* got 8"):
        with_settings(kind(rank=8), {"keys": name}).resolve(TINY, 96)
    with pytest.raises(ConfigError, match=rf"keys='{name}' has the settings \['bits'\], got 'weights'"):
        with_settings(kind(), {"keys": name, "keys.weights": "queries"})
    both = with_settings(kind(choice=Choice(outlier_rule="both")), {"keys": name, "keys.bits": 2})
    assert both.resolve(TINY, 96).codec.bits == 2
