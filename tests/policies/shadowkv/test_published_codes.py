"""A plugin of key codes, benchmarks/published_codes.py: its codes beside an oracle, and how the library takes them."""

import dataclasses

import jax
import numpy as np
import oracle_head_codes
import published_codes
import pytest
from codec_calls import fresh, lost_by, run
from few import one_of, pairwise
from published_codes import ChannelCode, ChannelCodec, RotationCode, RotationCodec
from random_arrays import array, wide
from small_state import SMALL, equal

from jshadow import ShadowKV, ShadowKVPlus, load_state, save_state
from jshadow.cache.accounting import leaf_bytes
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation.laws.law import TINY, random_tokens
from jshadow.policies import parse_policy
from jshadow.policies.settings import dotted_settings, with_settings
from jshadow.policies.shadowkv import Choice
from jshadow.policies.shadowkv.key_codecs import KeyCodec, Sizes
from jshadow.weights.params import init_params

CODECS: dict[str, KeyCodec] = {
    "rotation2": RotationCodec(2),
    "rotation3": RotationCodec(3),
    "channel2": ChannelCodec(2),
    "channel4": ChannelCodec(4),
}
DTYPES = ("float32", "bfloat16")


SIZES = [(1, 8), (2, 16), (3, 40)]  # KV heads and their width


def random_keys(lengths: list[int], heads: int, dim: int, seed: int) -> np.ndarray:
    """Keys [B, S, h, d] whose channels have other means and sizes, padded with numbers that must not be read."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((len(lengths), max(lengths) + 3, heads, dim))
    keys = keys * rng.uniform(0.1, 5, (heads, dim)) + rng.uniform(-9, 9, (heads, dim))
    for row, length in enumerate(lengths):
        keys[row, length:] = 1e4
    return keys.astype(np.float32)


def test_the_levels_and_the_rotation_are_the_oracle_s():
    for bits in (2, 3):
        np.testing.assert_allclose(published_codes.levels(bits), oracle_head_codes.lloyd_levels(bits), atol=1e-6)
    for dim in (4, 24, 80, 128):
        turn = published_codes.rotation(dim)
        np.testing.assert_allclose(turn, oracle_head_codes.turn(dim), atol=1e-5)
        np.testing.assert_allclose(turn @ turn.T, np.eye(dim), atol=1e-5)


def coded(codec, heads, dim, bits, later=None):
    """Random keys of 37 and 12 tokens and, for each row and head, the keys and the rows of their code; the code."""
    keys, lengths = random_keys([37, 12], heads, dim, seed=bits), np.array([37, 12])
    later = None if later is None else keys[:, :1] * later
    code, _, rows = jax.tree.map(np.asarray, fresh().there_and_back(codec, keys, lengths, 13, 3, None, later))
    parts = []
    for (row, length), head in [(pair, head) for pair in enumerate(lengths) for head in range(heads)]:
        left = code.left[row, head].reshape(39, -1)
        assert not left[length:].any()
        parts.append((row, head, wide(keys[row, :length, head]), left[:length]))
    return parts, code, rows


@pytest.mark.parametrize(("size", "bits", "block"), one_of(3, pairwise(SIZES, (2, 3), (5, 2048))))
def test_a_rotated_number_has_its_nearest_level(bits, size, block, monkeypatch):
    monkeypatch.setattr(published_codes, "BLOCK", block)
    levels, dim = np.array(oracle_head_codes.lloyd_levels(bits)), size[1]
    for _, _, plain, rows in coded(RotationCodec(bits), *size, bits)[0]:
        norms = np.linalg.norm(plain, axis=1, keepdims=True)
        far = np.abs((plain / norms @ oracle_head_codes.turn(dim) * np.sqrt(dim))[..., None] - levels)
        nearest = np.sort(far, axis=-1)
        codes, sure = oracle_head_codes.unpacked(rows[:, :-2], bits), nearest[..., 1] - nearest[..., 0] > 2e-3
        np.testing.assert_array_equal(codes[sure], far.argmin(axis=-1)[sure])
        assert sure.mean() > 0.97
        lost = np.linalg.norm(oracle_head_codes.rotated_keys(rows, bits) - plain, axis=1) / norms[:, 0]
        assert lost.mean() < {2: 0.4, 3: 0.25}[bits]  # sqrt(0.1175) and sqrt(0.0345) for Gaussian numbers


@pytest.mark.parametrize(("size", "bits", "block"), one_of(3, pairwise(SIZES, (2, 4), (5, 2048))))
def test_a_channel_s_error_is_half_a_step(bits, size, block, monkeypatch):
    """The ranges are those of the real tokens. Later keys beyond them are clipped."""
    monkeypatch.setattr(published_codes, "BLOCK", block)
    parts, code, later = coded(ChannelCodec(bits), *size, bits, later=100)
    for row, head, plain, rows in parts:
        least, most = plain.min(axis=0), plain.max(axis=0)
        step = (most - least) / (2**bits - 1)
        np.testing.assert_allclose(code.right.least[row, head], least, rtol=1e-6)
        np.testing.assert_allclose(code.right.step[row, head], step, rtol=1e-5)
        off = np.abs(oracle_head_codes.unpacked(rows, bits) * step + least - plain)
        assert (off <= step / 2 + 1e-4).all()
        assert (off.max(axis=0) > step / 20).all()  # not the keys themselves
        clipped = oracle_head_codes.unpacked(later[row, :, head], bits)[0] * step + least
        np.testing.assert_allclose(clipped, np.clip(plain[0] * 100.0, least, most), atol=step.max() / 2)


@pytest.mark.parametrize(("name", "dtype"), one_of(3, [(name, dtype) for name in CODECS for dtype in DTYPES]))
def test_awkward_keys(name, dtype):
    """Keys of zeros, equal keys, one token and no token give finite keys, and one very long key harms no other head."""
    keys = np.zeros((4, 9, 2, 8), np.float32)
    keys[1] = np.linspace(-3, 3, 8)
    keys[2, 0], keys[3] = 7.0, 1e30
    longer = keys * np.array([1, 1e3], np.float32)[:, None]
    (code, got, _), (other, _, _) = (
        run.there_and_back(CODECS[name], array(x, dtype), np.array([9, 9, 1, 0]), 3, 3) for x in (keys, longer)
    )
    got = wide(got)
    assert np.isfinite(got).all()
    assert not got[[0, 3]].any()
    if name.startswith("channel"):
        np.testing.assert_allclose(got[1], wide(keys[1].astype(dtype)), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(other.left)[:, 0], np.asarray(code.left)[:, 0])


def test_more_bits_lose_less():
    keys = random_keys([200], 2, 16, seed=5)[:, :200]
    lost = {name: lost_by(codec, keys, 4) for name, codec in CODECS.items()}
    assert lost["rotation3"] < lost["rotation2"] / 2
    assert lost["channel4"] < lost["channel2"] / 8


@pytest.mark.parametrize(("codec", "size"), [(RotationCodec(3), 24 * 3 // 8 + 2), (ChannelCodec(2), 24 * 2 // 8)])
def test_a_code_has_the_bytes_that_it_tells(codec, size):
    keys, lengths = jax.ShapeDtypeStruct((1, 40, 2, 24), "float32"), jax.ShapeDtypeStruct((1,), "int32")
    code = jax.eval_shape(lambda *x: codec.encode(*x, 6, 4), keys, lengths)
    sizes = Sizes(2, 24, "float32")
    assert codec.nbytes(6, 4, sizes) == sum(map(leaf_bytes, jax.tree.leaves(code)))
    assert codec.read_bytes(sizes) == size
    assert leaf_bytes(code.left) == 6 * 4 * 2 * size


# What the library makes of them

REFUSED = [
    (RotationCode(), r"\.rank must be None with keys='rotation'.* got 8", {"rank": 8}),
    (ChannelCode(), r"\.rank must be None with keys='channel'.* got 8", {"rank": 8}),
    (RotationCode(bits=4), r"\.keys\.bits must be one of \(2, 3\), got 4", {}),
    (ChannelCode(bits=3), r"\.keys\.bits must be one of \(2, 4\), got 3", {}),
    (ChannelCode(bits="2"), r"\.keys\.bits must be one of \(2, 4\), got '2'", {}),  # type: ignore[arg-type]
    (ChannelCode(bits=True), r"\.keys\.bits must be one of \(2, 4\), got True", {}),
    (RotationCode(bits=2), "keys='rotation' with keys.bits=2 .* multiple of 4, got 18", {"head_dim": 18}),
    (RotationCode(bits=3), "keys='rotation' with keys.bits=3 .* multiple of 8, got 20", {"head_dim": 20}),
    (ChannelCode(), "keys='channel' with keys.bits=2 .* multiple of 4, got 14", {"head_dim": 14}),
]


@pytest.mark.parametrize(("keys", "message", "changes"), REFUSED)
def test_bad_settings_are_told(keys, message, changes):
    config = dataclasses.replace(TINY, head_dim=changes.get("head_dim", TINY.head_dim))
    with pytest.raises(ConfigError, match=message):
        ShadowKV(keys=keys, rank=changes.get("rank")).resolve(config, 96)


@pytest.mark.parametrize("place", ["rotation", "published_codes.RotationCode"])
def test_a_code_from_outside_is_chosen_as_any_other(place):
    """By its place, or by its name once it is imported. Its settings are listed with those of the others."""
    policy = parse_policy("shadowkv", [f"keys={place}", "keys.bits=3", "choice.outlier_rule=both"])
    assert policy == ShadowKV(keys=RotationCode(3), choice=Choice(outlier_rule="both"))
    assert policy.resolve(TINY, 96).codec == RotationCodec(3)
    assert dotted_settings(policy).items() >= {"keys": "rotation", "keys.bits": 3}.items()
    assert with_settings(ShadowKVPlus(), {"keys": place, "keys.bits": 2}).keys == RotationCode()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_module.Code", "a record of Keys must be module.Class with a module that can be imported"),
        ("published_codes.NoCode", "published_codes.NoCode must be a subclass of Keys with a name, got None"),
        ("published_codes.HeadCode", "must be a subclass of Keys with a name"),
        ("published_codes.RotationCodec", "must be a subclass of Keys with a name"),
        ("zip", r"keys must be one of \('lowrank', 'transform', 'exact', .*'rotation', 'channel'.*got 'zip'"),
    ],
)
def test_what_is_no_code_is_refused(place, message):
    with pytest.raises(ConfigError, match=message):
        parse_policy("shadowkv", [f"keys={place}"])
    with pytest.raises(ConfigError, match=message):
        with_settings(ShadowKV(), {"keys": place})


@pytest.mark.parametrize("keys", [RotationCode(), ChannelCode()])
def test_a_state_is_saved_and_loaded(tmp_path, keys):
    policy = ShadowKV(budget=4, chunk_size=4, outlier_chunks=1, local_chunks=1, keys=keys)
    params, tokens = init_params(SMALL), random_tokens(1, 13, config=SMALL)
    state = decode.prefill(params, tokens, np.array([13]), policy, capacity=16)[1]
    save_state(tmp_path / "state", state, params)
    loaded = load_state(tmp_path / "state", params)
    assert loaded.policy.keys == keys
    assert equal(loaded, state)
