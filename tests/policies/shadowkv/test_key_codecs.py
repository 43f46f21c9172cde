"""Key codecs against independent oracles, on keys of unusual widths and rows of different lengths; their bytes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import oracle_head_codes
import pytest
from codec_calls import fresh, lost_by, run
from few import one_of, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from oracle_maths import apply_rope
from oracle_shadowkv import query_weights as wanted
from random_arrays import array, normal, wide

from jshadow.cache.accounting import leaf_bytes
from jshadow.cache.records import Rebuild
from jshadow.models.config import RopeConfig
from jshadow.ops.rope import inverse_frequencies
from jshadow.policies.shadowkv.key_codecs import (
    ExactCodec,
    KeyCodec,
    LowRankCodec,
    Sizes,
    TokenCodec,
    TransformCodec,
    ValueCodec,
    lowrank,
)
from jshadow.policies.shadowkv.key_codecs import transform as midrise
from jshadow.policies.shadowkv.key_codecs.lowrank import PromptKeys, query_weights

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
    "token4": TokenCodec(4),
    "token6": TokenCodec(6),
}
CHUNK = 4
DTYPES = ("float32", "bfloat16")


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
    return array(np.stack(padded), dtype), array([len(row) for row in rows])


def own_coder(right, row: int, profile, weights=1.0) -> oracle_codec.Coder:
    """The oracle's coder for keys times weights [W], with the basis, mean and steps of the library."""
    columns, step = wide(right.columns)[row], wide(right.step)[row]
    columns = columns / np.where(step > 0, step, 1)[:, None]
    basis = (columns.transpose(0, 2, 1).reshape(-1, columns.shape[1]).T * weights).T
    return oracle_codec.Coder(wide(right.mean)[row].ravel() * weights, basis, np.repeat((8, 4, 2), profile), step)


@pytest.mark.parametrize(("name", "block", "weighed"), one_of(5, pairwise(SHAPES, (16, 2048), (False, True))))
def test_the_transform_is_the_oracle_s(name, block, weighed, monkeypatch):
    """Mean, basis, steps and codes equal the oracle's, except codes of coefficients next to the edge of a step.

    With weights, they are those of the weighted keys, and the rebuilt keys are unweighted.
    """
    heads, dim, profile = SHAPES[name]
    weights = np.random.default_rng(6).uniform(0.1, 3, (2, heads, dim)) if weighed else np.ones((2, heads, dim))
    monkeypatch.setattr("jshadow.policies.shadowkv.key_codecs.transform.BLOCK", block)
    rows = [spread_keys(61, heads, dim, 1), spread_keys(97, heads, dim, 2)]
    given = array(weights, np.float32) if weighed else None
    made = fresh().there_and_back(TransformCodec(profile), *batch_of(rows), 26, CHUNK, given)
    code, decoded, projected = jax.tree.map(np.asarray, made)
    compared = skipped = 0
    for row, plain in enumerate(rows):
        tokens, flat = len(plain), (plain * weights[row]).reshape(len(plain), -1)
        want, got = oracle_codec.coder_of(flat, profile), own_coder(code.right, row, profile, weights[row].ravel())
        np.testing.assert_allclose(got.mean, want.mean, atol=1e-5)
        np.testing.assert_allclose(got.step, want.step, rtol=2e-4)
        along = (want.basis * got.basis).sum(axis=0)
        np.testing.assert_allclose(np.abs(along), 1, atol=1e-4)
        want = dataclasses.replace(want, basis=want.basis * np.sign(along))
        left, sure = code.left[row].reshape(26 * CHUNK, -1), want.margin(flat) > 0.01
        codes = oracle_codec.unpacked(left[:tokens], profile)
        np.testing.assert_array_equal(codes[sure], want.codes(flat)[sure])
        np.testing.assert_array_equal(oracle_codec.packed(codes, profile), left[:tokens])
        assert not left[tokens:].any()  # padding
        rebuilt = got.keys(codes) / weights[row].ravel()
        np.testing.assert_allclose(decoded[row, :tokens].reshape(tokens, -1), rebuilt, atol=1e-4)
        again = oracle_codec.unpacked(projected[row, :tokens, 0], profile)
        np.testing.assert_array_equal(again[sure], codes[sure])
        compared, skipped = compared + sure.sum(), skipped + (~sure).sum()
    assert skipped < 0.05 * compared


@pytest.mark.parametrize(("length", "dtype"), one_of(4, [(n, dtype) for n in (1, 2, 7, 21) for dtype in DTYPES]))
def test_rows_shorter_than_the_columns(length, dtype):
    """All numbers are finite, the other row is not affected, and directions without tokens decode to zero."""
    heads, dim, profile = SHAPES["all_kinds"]
    keys, lengths = batch_of([spread_keys(length, heads, dim, 3), spread_keys(61, heads, dim, 4)], dtype)
    code, got, later = run.there_and_back(TransformCodec(profile), keys, lengths, 16, CHUNK)
    assert all(np.isfinite(wide(leaf)).all() for leaf in jax.tree.leaves((code, later)))
    keys, lengths, got = np.asarray(keys), np.asarray(lengths), wide(got)
    want = run.there_and_back(TransformCodec(profile), keys[1:, :61], lengths[1:], 16, CHUNK)[1]
    np.testing.assert_allclose(got[1], wide(want)[0], atol=1e-3 if dtype == "float32" else 0.2)
    step = np.asarray(code.right.step)[0]
    # In bfloat16 the mean is rounded, which may add one direction.
    assert (step > 0).sum() in {min(length - 1, 21), min(length - (dtype == "float32"), 21)}
    # The error of each number is half a step of its column, or larger if the number is clipped.
    real = wide(keys[0, :length])
    off = np.linalg.norm(got[0, :length] - real, axis=(1, 2))
    lost = np.linalg.norm(real - real.mean(axis=0), axis=(1, 2)).max() if length > 1 else 0.0
    assert off.max() <= lost + np.linalg.norm(step / 2) + 0.05


def test_constant_keys_are_their_mean():
    keys = np.broadcast_to(np.arange(12, dtype=np.float32).reshape(1, 1, 2, 6), (1, 9, 2, 6))
    some = keys.copy()
    some[0, 3, 1, 2] += 1  # one channel is not constant
    same, other = (run.there_and_back(TransformCodec((1, 4, 4)), x, np.array([9]), 2, CHUNK)[1] for x in (keys, some))
    np.testing.assert_array_equal(same, keys[:, :8])
    assert np.isfinite(other).all()


@functools.partial(jax.jit, static_argnums=1)
def quantized(x, profile):
    """The steps of the columns, the packed codes, and the numbers that they stand for."""
    step = midrise.steps(jnp.sqrt((x**2).mean(axis=0)), jnp.abs(x).max(axis=0), profile)
    packed = midrise.quantize(x, step, profile)
    return step, packed, midrise.dequantize(packed, step, profile)


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.sampled_from([(4, 0, 0), (0, 4, 0), (0, 0, 4), (1, 2, 4)]), st.floats(1e-3, 1e3))
def test_an_error_is_half_a_step_at_most(seed, profile, scale):
    """|a - a'| <= step / 2, unless a is clipped. Then a' is half a step below the end of the range."""
    rng, bits = np.random.default_rng(seed), np.repeat((8, 4, 2), profile)
    x = (rng.standard_t(3, (50, sum(profile))) * scale).astype(np.float32)
    step, packed, got = map(np.asarray, quantized(x, profile))
    assert packed.shape == (50, midrise.packed_width(profile))
    most, reach = step * 2.0 ** (bits - 1), np.array([oracle_codec.REACH[int(b)] for b in bits])
    np.testing.assert_allclose(step, oracle_codec.column_steps(x, bits), rtol=1e-5)
    assert (most >= (1 - 1e-6) * reach * np.abs(x).max(axis=0)).all()  # also if only a few tokens are large
    inside = np.abs(x) < most
    assert (np.abs(got - x) <= step / 2 + 1e-5 * most)[inside].all()
    clipped = np.broadcast_to(np.sign(x) * (most - step / 2), x.shape)
    np.testing.assert_allclose(got[~inside], clipped[~inside], rtol=1e-5)


@functools.partial(jax.jit, static_argnames="codec")
def rebuilt(code, later, inverse, starts, ids, *, codec):
    """The rotated keys of chunks of a prompt and of a tail, whose rows are returned too."""
    tail = codec.project(later, code.right).swapaxes(1, 2)
    tail = tail.reshape(2, tail.shape[1], 2, -1) if code.left.ndim == 4 else tail[:, 0].reshape(2, 2, -1)
    return Rebuild(code.left, code.right, inverse, tail, starts, codec=codec, unit=CHUNK).keys(ids), tail


@pytest.mark.parametrize(("name", "dtype"), one_of(6, [(name, dtype) for name in CODECS for dtype in DTYPES]))
def test_chunks_come_back_rotated_at_their_places(name, dtype):
    """Selected chunks of the prompt and of a tail are rebuilt at their positions, as NumPy rebuilds them.

    A prompt's own tokens are projected to their rows, except codes of numbers next to the edge of a step.
    """
    codec, heads, dim = CODECS[name], 2, 24
    keys, lengths = batch_of([spread_keys(40, heads, dim, 5), spread_keys(33, heads, dim, 6)], dtype)
    code, _, own = run.there_and_back(codec, keys, lengths, 6, CHUNK)
    left, rows = np.asarray(code.left)[0], np.asarray(own)[0, :24]
    left = left.reshape(left.shape[0], 24, -1).swapaxes(0, 1) if left.ndim == 3 else left.reshape(24, 1, -1)
    assert rows.shape == left.shape
    if dtype == "float32":
        same = np.isclose(wide(rows), wide(left), atol=1e-4)
        assert same.mean() > (0.995 if rows.dtype == np.uint8 else 0.9999)
    later = array(np.stack([spread_keys(8, heads, dim, 7), spread_keys(8, heads, dim, 8)]), dtype)
    ids = np.array([[[5, 0, 7], [2, 6, 2]], [[1, 4, 6], [3, 5, 0]]], np.int32)
    starts, inverse = np.array([9, 7], np.int32), inverse_frequencies(RopeConfig(), dim)
    got, tail = rebuilt(code, later, inverse, starts, ids, codec=codec)
    for b, h in np.ndindex(2, heads):
        chunks = [int(i) if i < 6 else int(i) - 6 + int(starts[b]) for i in ids[b, h]]
        plain = kept_keys(codec, code, np.asarray(tail), b, h)[ids[b, h]].reshape(-1, 1, dim)
        positions = np.concatenate([np.arange(c * CHUNK, (c + 1) * CHUNK) for c in chunks])
        want = apply_rope(plain, positions, RopeConfig())[:, 0]
        # Coefficients and basis have the model's dtype.
        tolerance = 1e-4 if dtype == "float32" else 0.02 * np.abs(want).max()
        np.testing.assert_allclose(wide(got)[b, h], want, atol=tolerance)


def kept_keys(codec: KeyCodec, code, tail, b: int, h: int) -> np.ndarray:
    """The keys of one head before RoPE [chunks, c, d], of prompt and tail, rebuilt by NumPy."""
    left = np.concatenate([x[b] if x.ndim == 3 else x[b, h] for x in (np.asarray(code.left), tail)])
    rows = left.reshape(len(left) * CHUNK, -1)
    if isinstance(codec, ExactCodec):
        keys = wide(rows)
    elif isinstance(codec, LowRankCodec):
        keys = wide(rows) @ wide(code.right)[b, h]
    elif isinstance(codec, TokenCodec):
        mean, unit = (wide(x)[b, h] for x in (code.right.mean, code.right.unit))
        keys = oracle_head_codes.token_keys(rows, codec.bits, 24) * unit + mean
    else:
        coder, dim = own_coder(code.right, b, codec.profile), code.right.mean.shape[2]
        keys = coder.keys(oracle_codec.unpacked(rows, codec.profile))[:, h * dim : (h + 1) * dim]
    return keys.reshape(len(left), CHUNK, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_made_from_values(dtype):
    """The weights are found to the precision of a rounded key, and each value times them is rotated to its position."""
    rng, (heads, dim) = np.random.default_rng(9), (2, 22)
    rows = [rng.standard_normal((tokens, heads, dim)) for tokens in (29, 1)]
    values, lengths = batch_of(rows, dtype)
    weight = rng.uniform(0.5, 2, dim)
    keys, _ = batch_of([wide(array(row, dtype)) * weight for row in rows], dtype)
    codec, inverse = ValueCodec(), inverse_frequencies(RopeConfig(), dim)
    code = jax.jit(codec.encode, static_argnums=(2, 3))(keys, lengths, 7, CHUNK, values=values)
    assert code.left.shape == (2, heads, 7, 0)
    np.testing.assert_allclose(
        code.right, np.broadcast_to(weight, (2, heads, dim)), rtol=1e-6 if dtype == "float32" else 4e-3
    )
    ids = np.array([[[5, 0, 6], [2, 6, 1]]] * 2, np.int32)
    chosen = array(rng.standard_normal((2, heads, 3 * CHUNK, dim)), dtype)
    rebuilt = jax.jit(
        lambda left, right, *asked: Rebuild(left, right, array(inverse), codec=codec, unit=CHUNK).keys(*asked)
    )
    got = rebuilt(code.left, code.right, ids, chosen)
    for b, h in np.ndindex(2, heads):
        positions = (ids[b, h][:, None] * CHUNK + np.arange(CHUNK)).ravel()
        plain = wide(chosen)[b, h] * wide(code.right)[b, h]
        want = apply_rope(plain[:, None], positions, RopeConfig())[:, 0]
        np.testing.assert_allclose(got[b, h], want, atol=1e-5)


@pytest.mark.parametrize(("bits", "most", "dtype", "slack"), [(4, 7, "float32", 1e-5), (6, 31, "bfloat16", 0.02)])
def test_rounded_keys_are_off_by_half_a_step_at_most(dtype, slack, bits, most):
    """A step is the largest distance from the mean, in units, of a token and head, divided by `most`."""
    rows = [spread_keys(40, 3, 12, 11), spread_keys(5, 3, 12, 12), np.full((1, 3, 12), 7.0)]
    keys, lengths = batch_of(rows, dtype)
    code, got, _ = run.there_and_back(TokenCodec(bits), keys, lengths, 10, CHUNK)
    for row, (length, real) in enumerate(zip([40, 5, 1], wide(keys), strict=True)):
        mean, variance = real[:length].mean(axis=0), real[:length].var(axis=0)
        unit = (variance + variance.mean(axis=1, keepdims=True) / 10) ** 0.25 if length > 1 else np.ones_like(mean)
        np.testing.assert_allclose(wide(code.right.mean)[row], mean, atol=slack)
        np.testing.assert_allclose(wide(code.right.unit)[row], unit, rtol=slack)
        step = np.abs((real[:length] - mean) / unit).max(axis=2, keepdims=True) / most * unit
        assert (np.abs(wide(got)[row, :length] - real[:length]) <= (step / 2 + slack) * (1 + slack)).all()
        assert not np.asarray(code.left)[row, :, -(-length // CHUNK) :].any()  # padding


def test_a_better_code_or_more_bits_lose_less():
    """If variances fall by a power law, the transform code has less than half of the error of low rank."""
    rng, width, sizes = np.random.default_rng(0), 64, Sizes(2, 32, "bfloat16")
    keys = rng.standard_normal((512, width)) * (1 + np.arange(width)) ** -0.7
    keys = np.float32(keys @ np.linalg.qr(rng.standard_normal((width, width)))[0]).reshape(1, 512, 2, 32)
    lowrank, transform = LowRankCodec(8), TransformCodec((4, 16, 16))
    assert lowrank.read_bytes(sizes) == transform.read_bytes(sizes) == 16
    assert lost_by(transform, keys, 8) < 0.5 * lost_by(lowrank, keys, 8)
    assert lost_by(ExactCodec(), keys, 8) == 0


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_a_code_has_the_bytes_that_it_tells(dtype, item):
    sizes, (keys, lengths) = Sizes(2, 24, dtype), batch_of([spread_keys(40, 2, 24, 5)], dtype)
    row_bytes = {
        "lowrank": 9 * item,
        "transform": 3 + 10 // 2 + 8 // 4,
        "exact": 24 * item,
        "token4": 24 // 2 + item,
        "token6": 24 * 6 // 8 + item,
    }
    for name, codec in CODECS.items():
        code = jax.eval_shape(lambda *x, codec=codec: codec.encode(*x, 6, CHUNK), keys, lengths)
        empty = jax.eval_shape(lambda codec=codec: codec.empty(1, 6, CHUNK, sizes))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), code) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)
        assert codec.nbytes(6, CHUNK, sizes) == sum(map(leaf_bytes, jax.tree.leaves(code))), name
        assert codec.read_bytes(sizes) == row_bytes[name], name
        assert leaf_bytes(code.left) == 6 * CHUNK * (1 if codec.joint else 2) * row_bytes[name], name


compiled = jax.jit(lowrank.key_factors, static_argnums=2, static_argnames="block")


def factors(keys, lengths, rank, block=2048):
    """The factors, and the keys [B, S, h, d] of their product."""
    left, right = map(np.asarray, compiled(keys, np.array(lengths), rank, block=block))
    return left, right, np.einsum("bsr,bhrd->bshd", wide(left), wide(right))


def truncated(keys, rank: int) -> np.ndarray:
    """The best approximation of keys [S, h, d] of a rank."""
    u, s, vt = np.linalg.svd(wide(keys).reshape(len(keys), -1), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ vt[:rank]).reshape(keys.shape)


@pytest.mark.parametrize(
    ("length", "rank", "block"), [(61, 12, 2048), (61, 32, 2048), (27, 20, 7), (5, 16, 61), (1, 8, 16)]
)
def test_factors_are_the_truncated_svd(length, rank, block):
    """In a padded batch, the factors equal a direct SVD of the real rows. A rank above the length is exact.

    Each token is counted once, although the last block overlaps the previous one.
    """
    keys = np.asarray(normal(2, 64, 2, 16, seed=length))
    left, right, product = factors(keys, [length, 64], rank, block)
    assert (left.shape, right.shape) == ((2, 64, rank), (2, 2, rank, 16))
    for row, got, count in zip(keys, product, (length, 64), strict=True):
        np.testing.assert_allclose(got[:count], truncated(row[:count], rank), atol=2e-4)
        assert not got[count:].any()
    assert not left[0, :, length:].any()  # columns beyond the number of tokens are zero


def test_a_large_mean_does_not_spoil_the_factors():
    """Key biases make the first singular value large, and the Gram matrix squares it."""
    keys = np.asarray(normal(2, 64, 2, 16, seed=3)) + 30 * np.asarray(normal(2, 1, 2, 16, seed=4))
    got, want = factors(keys, [61, 64], 12)[2][0, :61], truncated(keys[0, :61], 12)
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-3


def test_a_whole_basis_keeps_keys_that_no_token_had():
    """At full rank the projection keeps every key, although the prompt has fewer tokens than key columns."""
    right = factors(normal(2, 64, 2, 16, seed=9), [5, 64], 32)[1]
    basis, key = wide(right[0]).transpose(0, 2, 1).reshape(32, 32), wide(normal(32, seed=10))
    np.testing.assert_allclose(key @ basis @ basis.T, key, atol=1e-4)


def queries_of(batch: int, count: int, heads: int, dim: int) -> np.ndarray:
    """Queries [B, w, h, d] in which each number has its own scale."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((batch, count, heads, dim)) * rng.uniform(0.05, 3, (heads, dim))


weights_of = jax.jit(query_weights, static_argnums=(2, 3))


def turned(x, positions, inverse) -> np.ndarray:
    """RoPE at positions [S] of rows [B, S, h, d], of which the first numbers are rotated."""
    angles, half = np.float64(positions)[:, None, None] * inverse, len(inverse)
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
    return np.concatenate([*parts, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated", "dtype"),
    [(4, 2, 12, 12, "float32"), (3, 3, 10, 6, "bfloat16"), (6, 1, 16, 4, "float32")],
)
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


@pytest.mark.parametrize("codec", [LowRankCodec(6), TransformCodec((2, 10, 12))], ids=["lowrank", "transform"])
def test_less_is_lost_of_the_products(codec):
    """If keys are large in all numbers and queries in few, weights reduce the error of the products by half."""
    rng, dim, tokens = np.random.default_rng(2), 16, 512
    size = np.tile(2.0 ** np.linspace(2, -2, dim // 2), 2)
    keys = np.float32(rng.standard_normal((1, tokens, 2, dim)))
    queries = np.float32(rng.standard_normal((1, 64, 4, dim)) * size)
    lengths, inverse = np.array([tokens]), 1.0 / 100 ** (np.arange(dim // 2) / 8)
    asked = turned(queries, tokens + np.arange(64), inverse).reshape(1, 64, 2, 2, dim)

    def lost(weights) -> float:
        """The mean squared error of the products of queries after the prompt with all keys."""
        decoded = run.there_and_back(codec, keys, lengths, tokens // 8, 8, weights)[1]
        off = turned(wide(decoded) - keys, np.arange(tokens), inverse)
        return (np.einsum("bthgd,bshd->bhgts", asked, off) ** 2).mean()

    assert lost(np.asarray(weights_of(queries, lengths, 2, dim))) < 0.5 * lost(np.ones((1, 2, dim), np.float32))


WIDTH, COUNT = 288, 136  # more columns than a leaf
NUMBER = np.arange(1, WIDTH + 1)
SPECTRA = {
    "slow": 1 / NUMBER,
    "fast": 0.95**NUMBER,
    "steep": 1.0 / NUMBER**4,
    "flat": np.ones(WIDTH),
    "clusters": np.where(NUMBER <= 30, 10, np.where(NUMBER <= 100, 1, 0.1)),
    "a large mean": np.where(NUMBER == 1, 3e3, NUMBER**-1.2),
    "rank 30": np.where(NUMBER <= 30, 1 / NUMBER, 0),
    "rank 1": np.where(NUMBER == 1, 1e6, 0),
    "zero": np.zeros(WIDTH),
}


@pytest.fixture(scope="module", params=["float32", "six products"])
def iterated(request):
    """The iteration with products as on a CPU, or with the bfloat16 products of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "six products":
            patch.setattr(lowrank, "product", six_products)
        program = jax.jit(functools.partial(lowrank.iterated, count=COUNT))
        return program.lower(jax.ShapeDtypeStruct((1, WIDTH, WIDTH), jnp.float32)).compile()


def six_products(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute in bfloat16 parts what `basis.product` asks a GPU for. Smaller products are added first."""
    (a1, a2, a3), (b1, b2, b3) = (three_parts(x) for x in (a, b))
    pairs = [(a2, b2), (a1, b3), (a3, b1), (a1, b2), (a2, b1), (a1, b1)]
    return sum(jnp.einsum(equation, x, y, preferred_element_type=jnp.float32) for x, y in pairs)


def three_parts(x: jax.Array) -> list[jax.Array]:
    """Return three bfloat16 arrays with the sum x."""
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


@pytest.mark.parametrize("name", one_of(4, SPECTRA))
def test_subspace_iteration_loses_at_most_one_percent_more_than_the_optimum(name, iterated):
    """Or a millionth of all variance more, which is the rounding error of the Gram matrix. Columns are orthonormal."""
    spectrum = SPECTRA[name]
    turn = np.linalg.qr(wide(normal(WIDTH, WIDTH, seed=7)))[0]
    columns = wide(iterated(np.float32(turn * spectrum @ turn.T)[None]))[0]
    missed = turn - columns @ (columns.T @ turn)
    lost = (missed**2 * spectrum).sum()
    assert lost <= 1.01 * spectrum[COUNT:].sum() + 3e-6 * spectrum.sum()
    variances = ((columns.T @ turn) ** 2 * spectrum).sum(axis=1)
    assert (np.diff(variances) <= 1e-6 * spectrum[0]).all(), "columns do not fall by variance"
    if name != "zero":
        np.testing.assert_allclose(columns.T @ columns, np.eye(COUNT), atol=5e-6)


@pytest.mark.slow
def test_steep_variances_of_a_wide_matrix_have_a_basis():
    """At the width of an 8B model, some of these left a matrix without a Cholesky factor, and then NaN for all keys."""
    width, count = 1024, 432
    number = np.arange(1, width + 1)
    turn = np.linalg.qr(wide(normal(width, width, seed=7)))[0]
    spectra = [1.0 / number**3, 1.0 / number**4, np.where(number == 1, 3e3, number**-1.2), 1.0 / number]
    grams, iterated = (
        np.stack([np.float32(turn * one @ turn.T) for one in spectra]),
        functools.partial(lowrank.iterated, count=count),
    )
    bases, alone = wide(jax.jit(iterated)(grams)), wide(jax.jit(iterated)(grams[3:]))[0]
    for spectrum, columns in zip(spectra, bases, strict=True):
        missed = turn - columns @ (columns.T @ turn)
        assert (missed**2 * spectrum).sum() <= 1.01 * spectrum[count:].sum() + 1e-5 * spectrum.sum()
        np.testing.assert_allclose(columns.T @ columns, np.eye(count), atol=5e-6)
    np.testing.assert_allclose(alone, bases[3], atol=1e-5)


def test_the_platform_and_the_width_choose_the_algorithm():
    """On a GPU, a wide matrix goes through products; narrow ones, and nearly all columns, through eigenvectors."""

    def calls(width: int, count: int, platform: str) -> bool:
        gram = jax.ShapeDtypeStruct((1, width, width), jnp.float32)
        traced = jax.jit(lambda gram: lowrank.leading_columns(gram, count)).trace(gram)
        return "syevd" in traced.lower(lowering_platforms=(platform,)).as_text()

    assert not calls(WIDTH, COUNT, "cuda")
    assert calls(WIDTH, COUNT, "cpu")
    assert calls(WIDTH, WIDTH, "cuda")
    assert calls(64, 16, "cuda")


def keys_of(seed: int) -> PromptKeys:
    """Keys in bfloat16 with a mean, in rows of different lengths. Padding is NaN, which must not be read."""
    shapes = (2, 61, 2, 16), (1, 1, 2, 16), (2, 2, 16)
    keys, mean, sizes = (np.asarray(normal(*shape, seed=seed + i)) for i, shape in enumerate(shapes))
    lengths = array([61, 22])
    keys = np.where((np.arange(61) < np.array([[61], [22]]))[..., None, None], keys + 3 * mean, np.float32(np.nan))
    return PromptKeys(array(keys, jnp.bfloat16), lengths, 16, array(np.abs(sizes) + np.float32(0.5)))


def of_keys(function, keys):
    """A function of keys, as one program."""
    arrays = {name: x for name, x in vars(keys).items() if isinstance(x, jax.Array)}
    fixed = {name: x for name, x in vars(keys).items() if name not in arrays}
    return jax.jit(lambda arrays: function(PromptKeys(**arrays, **fixed)))(arrays)


@pytest.mark.parametrize("centered", one_of(2, [True, False]))
def test_bfloat16_keys_have_the_products_of_float32_keys(centered):
    """The mean and the weights are applied to the Gram matrix and to the basis instead of the keys."""
    narrow = keys_of(5)
    if centered:
        narrow = dataclasses.replace(narrow, mean=of_keys(PromptKeys.mean_key, narrow))
    full = dataclasses.replace(narrow, k_pre=array(narrow.k_pre, np.float32))
    assert narrow.narrow
    assert not full.narrow
    columns = normal(2, 32, 9, seed=4)

    def products(keys):
        """The Gram matrix, and the coefficients of each block."""
        blocks = [keys.coefficients(columns)(jnp.int32(index))[0] for index in range(narrow.blocks)]
        return keys.gram(), *blocks

    (want, *ones), (got, *others) = (map(wide, of_keys(products, keys)) for keys in (full, narrow))
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    for one, two in zip(ones, others, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4 * np.abs(one).max() + 1e-6)


def test_a_large_mean_costs_little():
    """The mean is 50 standard deviations. The products of bfloat16 keys with it are much larger than the variances."""
    tokens, width, rank = 4096, 64, 24
    turn = np.linalg.qr(wide(normal(width, width, seed=3)))[0]
    numbers = wide(normal(tokens, width, seed=1)) * 0.9 ** np.arange(width) @ turn.T
    mean = 50 * numbers.std() * (1 + np.arange(width) % 3) / 2
    narrow = PromptKeys(array((numbers + mean).reshape(1, tokens, 2, 32), jnp.bfloat16), array([tokens]), 512)
    narrow = dataclasses.replace(narrow, mean=of_keys(PromptKeys.mean_key, narrow))
    centered = wide(narrow.k_pre).reshape(tokens, width) - wide(narrow.mean).reshape(width)
    least = np.linalg.svd(centered, compute_uv=False)[rank:]
    columns = wide(of_keys(lambda keys: lowrank.eigenvectors(keys.gram(), rank), narrow))[0]
    assert np.linalg.norm(centered - centered @ columns @ columns.T) ** 2 <= 1.01 * (least**2).sum()


codecs = pytest.mark.parametrize("codec", [LowRankCodec(9), TransformCodec((6, 6, 4))], ids=["lowrank", "transform"])


def dots(jaxpr, runs=1):
    """Yield the matrix products of a jaxpr, each with how often it runs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation, runs
        for inner in jaxprs_in_params(equation.params):
            yield from dots(inner, runs * equation.params.get("length", 1))


def operations(function, *args) -> int:
    """Count the operations of the matrix products of a function."""

    def one(dot) -> int:
        (summed, _), _ = dot.params["dimension_numbers"]
        return 2 * dot.outvars[0].aval.size * math.prod(dot.invars[0].aval.shape[axis] for axis in summed)

    return sum(runs * one(dot) for dot, runs in dots(jax.make_jaxpr(function)(*args).jaxpr))


def test_the_operations_of_the_basis():
    """A GPU runs each product as six."""
    counted = operations(functools.partial(lowrank.iterated, count=COUNT), np.zeros((1, WIDTH, WIDTH), np.float32))
    library = (lowrank.ITERATIONS + 2) * lowrank.inverse_operations(lowrank.columns_of(WIDTH, COUNT))[1]
    assert lowrank.basis_operations(WIDTH, COUNT) == 6 * counted + library
    assert lowrank.basis_operations(64, 9) == 9 * 64**3


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float32])
@codecs
def test_the_operations_of_a_code(codec, kind):
    """Only the product of the mean and the basis is not counted. 2,050 tokens take two whole blocks."""
    keys = jax.ShapeDtypeStruct((1, 2050, 2, 16), kind)
    counted = operations(lambda keys: codec.encode(keys, array([2050]), 500, 4), keys)
    want = codec.encode_flops(Sizes(2, 16, jnp.dtype(kind).name), 2050) - lowrank.basis_operations(32, codec.rank)
    assert want == pytest.approx(counted, rel=1e-3)


@codecs
def test_bfloat16_keys_are_multiplied_in_bfloat16(codec):
    """No large product of the compression has float32 operands. The compiled programs are checked by `make aot`."""
    keys = keys_of(8)
    jaxpr = jax.make_jaxpr(lambda k: codec.encode(k, keys.lengths, 15, 4, keys.weights))(keys.k_pre)

    found = [[(x.aval.dtype.name, x.aval.size) for x in dot.invars] for dot, _ in dots(jaxpr.jaxpr)]
    block = keys.k_pre.size  # one block holds the whole prompt
    large = [operands for operands in found if any(size == block for _, size in operands)]
    assert large, found
    assert all(kind == "bfloat16" for operands in large for kind, _ in operands), large
