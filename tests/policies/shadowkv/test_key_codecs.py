"""Key codecs against an independent oracle, on keys of awkward widths and ragged lengths; bytes, ranges, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import LENGTHS, PLUS, PROMPT, SMALL, STEPS, TINY, model, run_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_maths import apply_rope

from jshadow.cache import offload
from jshadow.cache.accounting import leaf_bytes
from jshadow.cache.records import Rebuild
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.ops import packing
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import abstract_state, footprint
from jshadow.policies import ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import ExactKeys, Landmarks, Quirks, TransformCode, Values, landmarks, selection
from jshadow.policies.shadowkv.costs import landmark_bytes
from jshadow.policies.shadowkv.key_codecs import (
    ExactCodec,
    KeyCodec,
    LowRankCodec,
    Sizes,
    TransformCodec,
    midrise,
)
from jshadow.policies.sizing import device_share

# KV heads, their width, and a profile. No width is a power of two. Some columns have no bits, and some profiles lack
# columns of some bits.
SHAPES = {
    "all_kinds": (2, 22, (3, 10, 8)),
    "odd_head": (3, 7, (5, 2, 4)),
    "four_bits_alone": (1, 18, (0, 18, 0)),
    "two_bits_alone": (2, 6, (0, 0, 12)),
    "eight_bits_alone": (1, 5, (5, 0, 0)),
}
CODECS: dict[str, KeyCodec] = {
    "lowrank": LowRankCodec(9),
    "transform": TransformCodec((3, 10, 8)),
    "exact": ExactCodec(),
}
CHUNK = 4


def spread_keys(tokens: int, heads: int, dim: int, seed: int = 0, spread: float = 0.93) -> np.ndarray:
    """Keys [T, h, d] with a large mean, whose variances in the eigenbasis fall by a fixed ratio."""
    rng, width = np.random.default_rng(seed), heads * dim
    rank = min(tokens - 1, width)
    rows = rng.standard_normal((tokens, rank))
    rows = np.linalg.qr(rows - rows.mean(axis=0))[0] * np.sqrt(tokens)
    turn = np.linalg.qr(rng.standard_normal((width, width)))[0][:rank]
    keys = rows * spread ** np.arange(rank) @ turn + 3 * rng.standard_normal(width)
    return keys.reshape(tokens, heads, dim)


def batch_of(rows: list[np.ndarray], dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Keys of rows, padded on the right with numbers that must not be read, and their lengths."""
    most = max(map(len, rows)) + 3
    padded = [np.concatenate([row, np.full((most - len(row), *row.shape[1:]), 99.0)]) for row in rows]
    return jnp.asarray(np.stack(padded), dtype), jnp.asarray([len(row) for row in rows])


def lefts(code, row: int, chunk: int = CHUNK) -> np.ndarray:
    """The left rows of one row of the batch, one for each token [n * c, w]."""
    left = np.asarray(code.left)[row]
    return left.reshape(left.shape[0] * chunk, -1)


def own_coder(right, row: int, profile, weights=1.0) -> oracle_codec.Coder:
    """The oracle's coder for keys times weights [W], with the basis, mean and steps of the library."""
    columns = np.asarray(right.columns, np.float64)[row]
    basis = (columns.transpose(0, 2, 1).reshape(-1, columns.shape[1]).T * weights).T
    bits, mean = np.repeat((8, 4, 2), profile), np.asarray(right.mean, np.float64)[row].ravel()
    return oracle_codec.Coder(mean * weights, basis, bits, np.asarray(right.step, np.float64)[row])


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("block", [16, 2048])
@pytest.mark.parametrize("name", SHAPES)
def test_the_transform_is_the_oracle_s(name, block, weighed, monkeypatch):
    """Mean, basis, steps and codes equal the oracle's, except codes of coefficients next to the edge of a step.

    With weights, they are those of the weighted keys, and the rebuilt keys are unweighted.
    """
    heads, dim, profile = SHAPES[name]
    weights = np.random.default_rng(6).uniform(0.1, 3, (2, heads, dim)) if weighed else np.ones((2, heads, dim))
    monkeypatch.setattr("jshadow.policies.shadowkv.key_codecs.transform.BLOCK", block)
    rows = [spread_keys(61, heads, dim, 1), spread_keys(97, heads, dim, 2)]
    keys, lengths = batch_of(rows)
    given = jnp.asarray(weights, jnp.float32) if weighed else None
    code = jax.jit(lambda k, n: TransformCodec(profile).encode(k, n, 26, CHUNK, given))(keys, lengths)
    ids = jnp.arange(26)[None, None].repeat(2, 0).repeat(heads, 1)
    decoded = np.asarray(TransformCodec(profile).decode(code, ids, CHUNK)).swapaxes(1, 2)
    projected = np.asarray(TransformCodec(profile).project(keys, code.right, given))[:, :, 0]
    compared = skipped = 0
    for row, plain in enumerate(rows):
        flat = (plain * weights[row]).reshape(len(plain), -1)
        want, got = oracle_codec.coder_of(flat, profile), own_coder(code.right, row, profile, weights[row].ravel())
        np.testing.assert_allclose(got.mean, want.mean, atol=1e-5)
        np.testing.assert_allclose(got.step, want.step, rtol=2e-4)
        along = (want.basis * got.basis).sum(axis=0)
        np.testing.assert_allclose(np.abs(along), 1, atol=1e-4)
        want = dataclasses.replace(want, basis=want.basis * np.sign(along))
        left = lefts(code, row)
        sure = want.margin(flat) > 0.01
        codes = oracle_codec.unpacked(left[: len(plain)], profile)
        np.testing.assert_array_equal(codes[sure], want.codes(flat)[sure])
        np.testing.assert_array_equal(oracle_codec.packed(codes, profile), left[: len(plain)])
        assert not left[len(plain) :].any()  # padding
        rebuilt = got.keys(codes) / weights[row].ravel()
        np.testing.assert_allclose(decoded[row, : len(plain)].reshape(len(plain), -1), rebuilt, atol=1e-4)
        np.testing.assert_array_equal(oracle_codec.unpacked(projected[row, : len(plain)], profile)[sure], codes[sure])
        compared, skipped = compared + sure.sum(), skipped + (~sure).sum()
    assert skipped < 0.05 * compared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 2, 7, 21])
def test_rows_shorter_than_the_columns(length, dtype):
    """All numbers are finite, the other row is not affected, and directions without tokens decode to zero."""
    heads, dim, profile = SHAPES["all_kinds"]
    rows = [spread_keys(length, heads, dim, 3), spread_keys(61, heads, dim, 4)]
    codec = TransformCodec(profile)
    keys, lengths = batch_of(rows, dtype)
    code = codec.encode(keys, lengths, 16, CHUNK)
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(code))
    alone = codec.encode(keys[1:, :61], lengths[1:], 16, CHUNK)
    ids = jnp.arange(16)[None, None].repeat(heads, 1)
    got, want = codec.decode(code, ids.repeat(2, 0), CHUNK), codec.decode(alone, ids, CHUNK)
    np.testing.assert_allclose(got[1], want[0], atol=1e-3 if dtype == "float32" else 0.2)
    step = np.asarray(code.right.step)[0]
    # In bfloat16 the mean is rounded, which may add one direction.
    assert (step > 0).sum() in {min(length - 1, 21), min(length - (dtype == "float32"), 21)}
    # The error of each number is half a step of its column, or larger if the number is clipped.
    real = np.asarray(keys[0, :length], np.float64)
    off = np.linalg.norm(np.asarray(got[0], np.float64).transpose(1, 0, 2)[:length] - real, axis=(1, 2))
    lost = np.linalg.norm(real - real.mean(axis=0), axis=(1, 2)).max() if length > 1 else 0.0
    assert off.max() <= lost + np.linalg.norm(step / 2) + 0.05
    assert np.isfinite(np.asarray(codec.project(keys, code.right))).all()


def test_constant_keys_are_their_mean():
    keys = jnp.broadcast_to(jnp.arange(12.0).reshape(1, 1, 2, 6), (1, 9, 2, 6))
    for codec in (TransformCodec((1, 4, 4)),):
        code = codec.encode(keys, jnp.array([9]), 2, CHUNK)
        got = codec.decode(code, jnp.array([[[1, 0], [0, 1]]]), CHUNK)
        np.testing.assert_array_equal(got, jnp.broadcast_to(keys[:, :1].swapaxes(1, 2), got.shape))
        some = keys.at[0, 3, 1, 2].add(1.0)  # one channel is not constant
        assert np.isfinite(codec.decode(codec.encode(some, jnp.array([9]), 2, CHUNK), jnp.array([[[0], [0]]]), 4)).all()


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.sampled_from([(4, 0, 0), (0, 4, 0), (0, 0, 4), (1, 2, 4)]), st.floats(1e-3, 1e3))
def test_an_error_is_half_a_step_at_most(seed, profile, scale):
    """|a - a'| <= step / 2, unless a is clipped. Then a' is half a step below the end of the range."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(3, (50, sum(profile))) * scale).astype(np.float32)
    sigma, largest = jnp.sqrt((x**2).mean(axis=0)), jnp.abs(x).max(axis=0)
    step = midrise.steps(sigma, largest, profile)
    packed = midrise.quantise(jnp.asarray(x), step, profile)
    assert packed.shape == (50, midrise.packed_width(profile))
    got, step = np.asarray(midrise.dequantise(packed, step, profile)), np.asarray(step)
    bits = np.repeat((8, 4, 2), profile)
    most = step * 2.0 ** (bits - 1)
    np.testing.assert_allclose(step, oracle_codec.column_steps(x, bits), rtol=1e-5)
    reach = np.array([oracle_codec.REACH[int(b)] for b in bits])
    assert (most >= (1 - 1e-6) * reach * np.abs(x).max(axis=0)).all()  # also if only a few tokens are large
    inside = np.abs(x) < most
    slack = 1e-5 * most
    assert (np.abs(got - x) <= step / 2 + slack)[inside].all()
    clipped = np.broadcast_to(np.sign(x) * (most - step / 2), x.shape)
    np.testing.assert_allclose(got[~inside], clipped[~inside], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_chunks_come_back_rotated_at_their_places(name, dtype):
    """Selected chunks of the prompt and of a tail are rebuilt at their positions, as NumPy rebuilds them."""
    codec, heads, dim = CODECS[name], 2, 22
    rows = [spread_keys(40, heads, dim, 5), spread_keys(33, heads, dim, 6)]
    keys, lengths = batch_of(rows, dtype)
    code = codec.encode(keys, lengths, 6, CHUNK)
    later = jnp.asarray(np.stack([spread_keys(8, heads, dim, 7), spread_keys(8, heads, dim, 8)]), dtype)
    tail = codec.project(later, code.right).swapaxes(1, 2)
    tail = tail.reshape(2, tail.shape[1], 2, -1) if code.left.ndim == 4 else tail[:, 0].reshape(2, 2, -1)
    ids = jnp.array([[[5, 0, 7], [2, 6, 2]], [[1, 4, 6], [3, 5, 0]]], jnp.int32)
    starts = jnp.array([9, 7], jnp.int32)
    inverse = jnp.asarray(inverse_frequencies(RopeConfig(), dim))
    got = Rebuild(code.left, code.right, inverse, tail, starts, codec=codec, unit=CHUNK).keys(ids)
    for b, h in np.ndindex(2, heads):
        chunks = [int(i) if i < 6 else int(i) - 6 + int(starts[b]) for i in ids[b, h]]
        plain = kept_keys(codec, code, tail, b, h)[np.asarray(ids[b, h])].reshape(-1, 1, dim)
        positions = np.concatenate([np.arange(c * CHUNK, (c + 1) * CHUNK) for c in chunks])
        want = apply_rope(plain, positions, RopeConfig())[:, 0]
        # Coefficients and basis have the model's dtype.
        tolerance = 1e-4 if dtype == "float32" else 0.02 * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got[b, h], np.float64), want, atol=tolerance)


def kept_keys(codec: KeyCodec, code, tail, b: int, h: int) -> np.ndarray:
    """The keys of one head before RoPE [chunks, c, d], of prompt and tail, rebuilt by NumPy."""
    left = np.concatenate([np.asarray(x[b] if x.ndim == 3 else x[b, h]) for x in (code.left, tail)])
    rows = left.reshape(len(left) * CHUNK, -1)
    if isinstance(codec, ExactCodec):
        keys = rows.astype(np.float64)
    elif isinstance(codec, LowRankCodec):
        keys = rows.astype(np.float64) @ np.asarray(code.right, np.float64)[b, h]
    else:
        coder = own_coder(code.right, b, codec.profile)
        dim = code.right.mean.shape[2]
        keys = coder.keys(oracle_codec.unpacked(rows, codec.profile))[:, h * dim : (h + 1) * dim]
    return keys.reshape(len(left), CHUNK, -1)


@pytest.mark.parametrize("name", CODECS)
def test_a_prompt_s_own_tokens_are_projected_to_their_rows(name):
    """Projected rows equal the coded rows, except codes of numbers next to the edge of a step."""
    codec, keys = CODECS[name], spread_keys(24, 2, 22, 9)
    batch, lengths = jnp.asarray(keys[None], jnp.float32), jnp.array([24])
    code = codec.encode(batch, lengths, 6, CHUNK)
    rows = np.asarray(codec.project(batch, code.right))[0]  # [T, heads, w]
    left = np.asarray(code.left)[0]
    left = left.reshape(left.shape[0], 24, -1).swapaxes(0, 1) if left.ndim == 3 else left.reshape(24, 1, -1)
    assert rows.shape == left.shape
    same = np.isclose(rows.astype(np.float64), left.astype(np.float64), atol=1e-4)
    assert same.mean() > (0.995 if rows.dtype == np.uint8 else 0.9999)


def test_the_same_bits_lose_less():
    """If variances fall by a power law, the transform code has less than half of the error of low rank."""
    rng, width = np.random.default_rng(0), 64
    keys = rng.standard_normal((512, width)) * (1 + np.arange(width)) ** -0.7
    keys = jnp.asarray(keys @ np.linalg.qr(rng.standard_normal((width, width)))[0], jnp.float32).reshape(1, 512, 2, 32)
    ids, lost = jnp.arange(64)[None, None].repeat(2, 1), {}
    codecs = {"lowrank": LowRankCodec(8), "transform": TransformCodec((4, 16, 16)), "exact": ExactCodec()}
    for name, codec in codecs.items():
        got = codec.decode(codec.encode(keys, jnp.array([512]), 64, 8), ids, 8)
        lost[name] = float(((got.swapaxes(1, 2) - keys) ** 2).mean() / keys.var())
    sizes = Sizes(2, 32, "bfloat16")
    assert codecs["lowrank"].read_bytes(sizes) == codecs["transform"].read_bytes(sizes) == 16
    assert lost["exact"] == 0
    assert lost["transform"] < 0.5 * lost["lowrank"]


# Bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_a_code_has_the_bytes_that_it_tells(name, dtype):
    codec, sizes = CODECS[name], Sizes(2, 22, dtype)
    keys, lengths = batch_of([spread_keys(40, 2, 22, 5)], dtype)
    code = codec.encode(keys, lengths, 6, CHUNK)
    empty = codec.empty(1, 6, CHUNK, sizes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), code) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)
    assert codec.nbytes(6, CHUNK, sizes) == sum(map(leaf_bytes, jax.tree.leaves(code)))
    row_bytes = {
        "lowrank": 9 * leaf_bytes(keys[0, 0, 0, 0]),
        "transform": 3 + 10 // 2 + 8 // 4,
        "exact": 22 * leaf_bytes(keys[0, 0, 0, 0]),
    }[name]
    assert codec.read_bytes(sizes) == row_bytes
    heads = 2 if name == "exact" else 1
    assert leaf_bytes(code.left) == 6 * CHUNK * heads * row_bytes


LLAMA = ModelConfig("llama", 256, 2, 4096, 256, 32, 8, 128, 1e-5, 2**20)
PACKED = dict(landmarks=Landmarks(tokens=2, dtype="int4"), values=Values(dtype="int4"))


@pytest.mark.parametrize(
    "policy",
    [
        ShadowKV(),
        ShadowKV(keys=TransformCode(), **PACKED),
        ShadowKV(landmarks=Landmarks(dtype="int8")),
        ShadowKV(keys=ExactKeys(), landmarks=Landmarks(tokens=4), values=Values("int8")),
    ],
    ids=lambda policy: f"{policy.keys.name}-{policy.landmarks.dtype}-{policy.values.dtype}",
)
def test_planned_bytes_are_the_state_s(policy):
    """The counts of the codec and of the costs equal the bytes of a state's arrays."""
    planned = footprint(LLAMA, policy, capacity=32768, prompt=32768, fetch="device_put")
    resolved = policy.resolve(LLAMA, 32768)
    parts, sizes = planned["parts"], Sizes(LLAMA.kv_heads, LLAMA.head_dim, "bfloat16")
    code = parts["left"][0] + parts.get("right", (0, 0))[0]
    chunks = resolved.max_chunks(32768)
    assert code == LLAMA.num_layers * resolved.codec.nbytes(chunks, resolved.chunk_size, sizes)
    assert parts["landmarks"][0] == LLAMA.num_layers * landmark_bytes(resolved, chunks, sizes)
    assert device_share(resolved, 32768, LLAMA) == planned["device_bytes"] / planned["full_bytes"]
    row = {"model": 8 * 128 * 2, "int8": 8 * (128 + 2), "int4": 8 * (64 + 2)}[policy.values.dtype]
    assert planned["host_bytes"] == LLAMA.num_layers * 8 * resolved.max_chunks(32768) * row


def test_the_usual_profile_has_the_bits_of_the_usual_rank():
    policy = ShadowKV(keys=TransformCode(), **PACKED).resolve(LLAMA, 4096)
    assert (policy.rank, policy.keys.profile) == (None, (80, 320, 320))
    sizes = Sizes(8, 128, "bfloat16")
    assert policy.codec.read_bytes(sizes) == LowRankCodec(160).read_bytes(sizes) == 320
    small = dataclasses.replace(LLAMA, kv_heads=3, q_heads=9, head_dim=64)
    policy = ShadowKV(keys=TransformCode(), **PACKED).resolve(small, 4096)
    assert policy.keys.profile == (16, 64, 64)
    parts = footprint(small, policy, capacity=4096, prompt=4096, fetch="device_put")["parts"]
    tokens = 2 * 8 * policy.max_chunks(4096)
    # A token has its code, half a landmark of 4 bits, and half a scale for each head.
    assert (parts["left"][0], parts["landmarks"][0]) == (64 * tokens, (48 + 3) * tokens)
    for heads, dim in ((1, 8), (1, 6), (2, 16), (5, 64), (8, 256)):
        one = dataclasses.replace(LLAMA, kv_heads=heads, q_heads=heads, head_dim=dim)
        profile = ShadowKV(keys=TransformCode()).resolve(one, 4096).keys.profile
        assert 1 <= sum(profile) <= heads * dim
        assert profile[1] % 2 == profile[2] % 4 == 0


# Landmarks and values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "kind"), [(8, "int8"), (4, "model"), (2, "int4"), (1, "int8")])
def test_landmarks_and_scores_are_the_oracle_s(tokens, kind, dtype):
    """33 tokens are four chunks of eight. The fourth is not a candidate in the second KV head."""
    rng, parts = np.random.default_rng(tokens), 8 // tokens
    keys = jnp.asarray(rng.standard_normal((1, 33, 2, 12)), dtype)
    q = jnp.asarray(2 * rng.standard_normal((1, 2, 6, 12)), dtype)
    means, worst = landmarks.prompt_landmarks(keys, 4, 8, block=16, parts=parts)
    stored = landmarks.store_landmarks(means, kind, dtype)
    candidates = jnp.ones((1, 2, 4), bool).at[0, 1, 3].set(False)
    logits = landmarks.landmark_logits(q, stored, jnp.repeat(candidates, parts, axis=2)[:, :, None], 0.3)
    scores = selection.chunk_scores(logits, jnp.ones((1, 2), bool), selection.Scoring(0.3), parts)
    for head in range(2):
        rows = np.asarray(keys, np.float64)[0, :32, head].reshape(4, parts, tokens, 12)
        want = rows.mean(axis=2)
        np.testing.assert_allclose(np.asarray(means, np.float64)[0, head], want.reshape(-1, 12), rtol=0.01, atol=1e-2)
        cosine = (rows * want[:, :, None]).sum(-1)
        cosine /= np.linalg.norm(rows, axis=-1) * np.linalg.norm(want, axis=-1)[:, :, None]
        np.testing.assert_allclose(worst[0, head], cosine.min(axis=(1, 2)), atol=1e-5)
        kept = np.asarray(means, np.float64)[0, head].reshape(4, parts, 12)
        if kind != "model":
            kept = oracle_codec.rounded_rows(kept, packing.ROW_BITS[kind], dtype)
        for t in range(2):
            group = np.asarray(q, np.float64)[0, t, 3 * head : 3 * head + 3]
            want = oracle_codec.chunk_scores(group, kept, np.asarray(candidates)[0, head], 0.3)
            np.testing.assert_allclose(scores[0, head, t], want, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_host_rows_are_the_oracle_s(bits, dtype):
    values = jnp.asarray(np.random.default_rng(bits).standard_normal((1, 1, 5, 4, 6)), dtype).at[0, 0, 1, 2].set(0)
    rows = packing.join_rows(packing.quantise_rows(values, bits, dtype))
    assert rows.shape == (1, 1, 5, packing.row_bytes(4, 6, bits, dtype))
    assert rows.shape[3] == 4 * (6 * bits // 8 + (4 if dtype == "float32" else 2))
    want = oracle_codec.host_row_values(rows[0, 0], 4, 6, bits, dtype)
    wide = np.asarray(values, np.float64)[0, 0]
    np.testing.assert_allclose(want, oracle_codec.rounded_rows(wide, bits, dtype), atol=1e-6)
    back = packing.dequantise_rows(packing.split_rows(rows, 4, dtype), bits, dtype)
    np.testing.assert_array_equal(np.asarray(back[0, 0]), want.astype(back.dtype))
    assert not want[1, 2].any()
    scale = np.abs(wide).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(want - wide) <= scale * 0.51).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_past_their_scale_are_clipped(bits):
    """Numbers of a bfloat16 model may exceed the range of their float16 scales."""
    most = 2 ** (bits - 1) - 1
    values = jnp.asarray([[3e9, -1e9, 70000.0 * most, 1.0], [60000.0 * most, -9e4, 1.0, 0.0]], jnp.bfloat16)
    rows = packing.quantise_rows(values, bits, "bfloat16")
    assert (rows.scale.dtype, float(rows.scale[0, 0])) == (jnp.float16, 65504.0)
    back = np.asarray(packing.dequantise_rows(rows, bits, "float32"))
    np.testing.assert_array_equal(back[0], 65504.0 * most * np.array([1, -1, 1, 0]))
    assert (np.abs(back[1] - np.asarray(values, np.float32)[1]) <= 32_000).all()
    np.testing.assert_allclose(back, oracle_codec.rounded_rows(np.asarray(values, np.float64), bits, "bfloat16"))


# A policy's settings

BAD = {
    "codec": (dict(keys="zip"), r"shadowkv\.keys must be LowRank or TransformCode or ExactKeys, got 'zip'"),
    "other_codec": (dict(keys=Values()), r"shadowkv\.keys must be LowRank or .*, got Values"),
    "other_record": (dict(landmarks=2), r"shadowkv\.landmarks must be Landmarks, got 2"),
    "rank": (dict(keys=TransformCode(), rank=8), "rank must be None with keys='transform'.*got 8"),
    "odd": (dict(keys=TransformCode(profile=(4, 3, 4))), r"multiple of 2 and the third of 4, got \(4, 3, 4\)"),
    "third": (dict(keys=TransformCode(profile=(4, 4, 2))), r"the third of 4, got \(4, 4, 2\)"),
    "wide": (dict(keys=TransformCode(profile=(9, 16, 8))), r"together 1 to 32, .*got \(9, 16, 8\)"),
    "none": (dict(keys=TransformCode(profile=(0, 0, 0))), r"got \(0, 0, 0\)"),
    "two": (dict(keys=TransformCode(profile=(8, 8))), r"must be three numbers of columns.*got \(8, 8\)"),
    "bool": (dict(keys=TransformCode(profile=(True, 8, 8))), "must be three numbers"),
    "negative": (dict(keys=TransformCode(profile=(-1, 8, 8))), "must be three numbers"),
    "landmark": (dict(landmarks=Landmarks(tokens=3)), r"shadowkv\.landmarks\.tokens must divide chunk_size=8, got 3"),
    "long_landmark": (
        dict(landmarks=Landmarks(tokens=16)),
        r"shadowkv\.landmarks\.tokens must be an integer in \[1, 8\], got 16",
    ),
    "landmark_dtype": (
        dict(landmarks=Landmarks(dtype="int2")),
        r"shadowkv\.landmarks\.dtype must be one of \('model', 'int8', 'int4'\)",
    ),
    "value_dtype": (dict(values=Values(dtype=4)), r"shadowkv\.values\.dtype must be one of .*'int4'\), got 4"),
    "landmark_fp8": (
        dict(landmarks=Landmarks(dtype="fp8")),
        r"shadowkv\.landmarks\.dtype must be one of .*'int4'\), got 'fp8'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_told(case):
    given, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        ShadowKV(**given).resolve(TINY, 96)


@pytest.mark.parametrize("given", [{"landmarks": Landmarks(dtype="int4")}, {"values": Values("int4")}])
def test_four_bits_need_an_even_head(given):
    odd = dataclasses.replace(TINY, head_dim=15, rope=RopeConfig(rotary_share=0.8))
    with pytest.raises(ConfigError, match="='int4' must have an even head_dim, got 15"):
        ShadowKV(**given).resolve(odd, 96)


def test_settings_as_text():
    policy = parse_policy("shadowkv", ["keys=transform", "keys.profile=16,64,64", "landmarks.tokens=2"])
    assert policy == ShadowKV(keys=TransformCode(profile=(16, 64, 64)), landmarks=Landmarks(tokens=2))
    assert hash(policy) != hash(ShadowKV())
    plus = parse_policy("shadowkv_plus", ["keys.profile=16+64+64", "keys=transform"])
    assert plus == ShadowKVPlus(keys=TransformCode(profile=(16, 64, 64)))


@pytest.mark.parametrize("policy", [ShadowKV, ShadowKVPlus])
def test_zero_copy_is_refused_where_no_kernel_rebuilds_the_keys(policy, monkeypatch):
    """It is refused on a GPU, before anything runs. Other modes and packed numbers are not refused."""
    sizes = dict(batch=1, capacity=96, prompt=90, dtype="float32")
    exact = policy(**SMALL, keys=ExactKeys(), values=Values(dtype="int4"))
    abstract_state(TINY, exact, **sizes, fetch="zero_copy")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    message = f"fetch must be 'device_put' or 'resident' for {policy.name} with keys='exact' on a GPU"
    with pytest.raises(ConfigError, match=message):
        abstract_state(TINY, exact, **sizes, fetch="zero_copy")
    abstract_state(TINY, exact, **sizes, fetch="device_put")
    for codec, kind in (("lowrank", "int4"), ("transform", "model"), ("transform", "int4")):
        packed = with_settings(
            policy(**SMALL, values=Values(dtype=kind), landmarks=Landmarks(tokens=2, dtype="int4")), {"keys": codec}
        )
        assert abstract_state(TINY, packed, **sizes, fetch="zero_copy").fetch == "zero_copy"


MODES = {
    "transform": ShadowKV(keys=TransformCode(), budget=24, **SMALL, **PACKED),
    "int8": ShadowKV(rank=12, budget=24, **SMALL, landmarks=Landmarks(dtype="int8"), values=Values("int8")),
    "plus": ShadowKVPlus(keys=TransformCode(), budget=24, **PLUS, **PACKED),
    "lowrank": ShadowKV(rank=12, budget=24, **SMALL, values=Values(dtype="int4")),
}


@pytest.mark.parametrize("name", MODES)
def test_packed_rows_come_alike_in_every_fetch_mode(name):
    """All modes give the same logits. With `zero_copy`, only the bytes of missing chunks are moved and counted."""
    modes = ["resident", "device_put", "zero_copy"]
    prefilled = decode.prefill_many(model(), PROMPT, LENGTHS, [MODES[name]] * 3, capacity=96, fetch=modes)
    fetched = [np.asarray(state.counters.fetched, np.int64) for _, state in prefilled]
    runs = [run_steps(model(), state, STEPS[:, :4]) for _, state in prefilled]
    for logits, _ in runs[1:]:
        np.testing.assert_allclose(logits, runs[0][0], atol=1e-5)
    states = [state for _, state in runs]
    assert states[2].layers[0].live.values.dtype == jnp.float32
    counters, spec = states[2].counters, states[2].specs[0]
    needed = (np.asarray(counters.selected, np.int64) - np.asarray(counters.hits)) * offload.unit_bytes(
        spec, spec.policy.host_layout(spec)
    )
    moved = [
        (np.asarray(state.counters.fetched, np.int64) - before) * offload.FETCH_QUANTUM
        for state, before in zip(states, fetched, strict=True)
    ]
    assert not moved[0].any()
    assert ((needed - 4 * 3 * offload.FETCH_QUANTUM < moved[2]) & (moved[2] <= needed)).all()  # each layer rounds down
    assert (moved[2] < moved[1]).all()


SHORT = {
    "small": ShadowKV.packed(small=True),
    "multiple": ShadowKV(
        landmarks=Landmarks(dtype="int8"),
        values=Values(dtype="int8"),
        quirks=Quirks(chunk_multiple=16, exact_preload=True),
    ),
    "plus": ShadowKVPlus.packed(),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_capacity_without_a_whole_chunk(name):
    """There is no chunk to select or to pack, because all tokens are in the window."""
    wanted, dense = decode.prefill(model(), PROMPT[:, :12], [12, 3, 1], capacity=39)
    logits, state = decode.prefill(model(), PROMPT[:, :12], [12, 3, 1], SHORT[name], capacity=39, fetch="device_put")
    assert state.specs[0].policy.max_chunks(39) == 0
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    steps = [run_steps(model(), one, STEPS[:, :4])[0] for one in (state, dense)]
    np.testing.assert_allclose(*steps, atol=1e-4)


# A code with left rows for each head, and tokens after the prompt; the law tests do not have this case.
LATER = {
    "plus_exact": ShadowKVPlus(
        keys=ExactKeys(), budget=16, **PLUS, landmarks=Landmarks(tokens=1), values=Values("int8")
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_later_tokens_in_other_codes(name):
    """A turn gives the logits of single steps, and an offloaded state those of a resident one."""
    prefilled = decode.prefill_many(
        model(), PROMPT, LENGTHS, [LATER[name]] * 2, capacity=96, fetch=["resident", "device_put"]
    )
    (_, resident), (_, offloaded) = prefilled
    turn, extended = decode.extend(model(), STEPS[:, :7], [7, 7, 7], resident.fork(), logits="all")
    steps, stepped = run_steps(model(), offloaded, STEPS[:, :7])
    np.testing.assert_allclose(turn, steps, atol=1e-4)
    for one, other in zip(extended.layers, stepped.layers, strict=True):
        if one.live.left.size:
            assert (np.asarray(one.live.left) == np.asarray(other.live.left)).mean() > 0.999
            assert np.asarray(one.live.left).any()
    assert offload.host_bytes(offloaded.specs) > 0
