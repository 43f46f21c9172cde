"""Landmarks in one and in two levels, of few bits, of order 2: scores, the spread, the choice, bytes; packed rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import SMALL, TINY
from few import one_of
from random_arrays import normal, wide

from jshadow.ops import packing
from jshadow.ops.packing import ROW_BITS
from jshadow.planner.machine import footprint, step_footprint
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Choice, Landmarks, landmarks, selection
from jshadow.policies.shadowkv.landmarks import GROUP, mean_kind, prompt_spread, store_landmarks, store_levels

STORED = ((2, "int4"), (8, "int8"), (4, "model"), (1, "int8"))  # tokens of a landmark, and its dtype


@functools.partial(jax.jit, static_argnames=("kind", "dtype", "parts"))
def marks_and_scores(keys, q, candidates, *, kind, dtype, parts):
    """The landmarks of four chunks of eight, the worst cosine of a chunk, and the scores by the stored landmarks."""
    means, worst = landmarks.prompt_landmarks(keys, 4, 8, block=16, parts=parts)
    stored, there = landmarks.store_landmarks(means, kind, dtype), jnp.repeat(candidates, parts, axis=2)[:, :, None]
    logits = landmarks.landmark_logits(q, stored, there, 0.3)
    return means, worst, selection.chunk_scores(logits, jnp.ones((1, 2), bool), selection.Scoring(0.3), parts)


@pytest.mark.parametrize(
    ("tokens", "kind", "dtype"), one_of(4, [(*k, d) for k in STORED for d in ("bfloat16", "float32")])
)
def test_landmarks_and_scores_are_the_oracle_s(tokens, kind, dtype):
    """33 tokens are four chunks of eight. The fourth is not a candidate in the second KV head."""
    rng, parts = np.random.default_rng(tokens), 8 // tokens
    keys = rng.standard_normal((1, 33, 2, 12)).astype(dtype)
    q = (2 * rng.standard_normal((1, 2, 6, 12))).astype(dtype)
    candidates = np.ones((1, 2, 4), bool)
    candidates[0, 1, 3] = False
    made = marks_and_scores(keys, q, candidates, kind=kind, dtype=dtype, parts=parts)
    means, worst, scores = map(np.asarray, made)
    for head in range(2):
        rows, kept = wide(keys)[0, :32, head].reshape(4, parts, tokens, 12), wide(means)[0, head]
        want = rows.mean(axis=2)
        np.testing.assert_allclose(kept, want.reshape(-1, 12), rtol=0.01, atol=1e-2)
        cosine = (rows * want[:, :, None]).sum(-1)
        cosine /= np.linalg.norm(rows, axis=-1) * np.linalg.norm(want, axis=-1)[:, :, None]
        np.testing.assert_allclose(worst[0, head], cosine.min(axis=(1, 2)), atol=1e-5)
        kept = kept.reshape(4, parts, 12)
        if kind != "model":
            kept = oracle_codec.rounded_rows(kept, ROW_BITS[kind], dtype)
        for t in range(2):
            group = wide(q)[0, t, 3 * head : 3 * head + 3]
            want = oracle_codec.chunk_scores(group, kept, candidates[0, head], 0.3)
            np.testing.assert_allclose(scores[0, head, t], want, atol=1e-5)


def test_host_rows_are_the_oracle_s():
    """Chunks of 4 tokens with 6 numbers each."""
    cases = list(itertools.product((8, 4), ("float32", "bfloat16", "float16")))
    numbers = np.random.default_rng(8).standard_normal((1, 1, 5, 4, 6))
    numbers[0, 0, 1, 2] = 0
    values = {case: numbers.astype(case[1]) for case in cases}
    rows = jax.jit(lambda x: {case: packing.quantize_chunks(x[case], *case) for case in cases})(values)
    back = jax.jit(lambda x: {case: packing.dequantize_chunks(x[case], 4, 6, *case) for case in cases})(rows)
    for bits, dtype in cases:
        own, got, real = (np.asarray(x[bits, dtype])[0, 0] for x in (rows, back, values))
        assert own.shape == (5, packing.row_words(4, 6, bits, dtype))
        assert own.shape[1] == (32 if (bits, dtype) == (8, "float32") else 16)  # of 20, 16, 16 and 12 words
        want, real = oracle_codec.host_row_values(own, 4, 6, bits, dtype), wide(real)
        np.testing.assert_allclose(want, oracle_codec.rounded_rows(real, bits, dtype), atol=1e-6)
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        assert not want[1, 2].any()
        scale = np.abs(real).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
        assert (np.abs(want - real) <= scale * 0.51).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_past_their_scale_are_clipped(bits):
    """Numbers of a bfloat16 model may exceed the range of their float16 scales."""
    most = 2 ** (bits - 1) - 1
    values = np.array([[3e9, -1e9, 70000.0 * most, 1.0], [60000.0 * most, -9e4, 1.0, 0.0]]).astype(jnp.bfloat16)

    @jax.jit
    def scale_and_back(values):
        rows = packing.quantize_rows(values, bits, "bfloat16")
        return rows.scale, packing.dequantize_rows(rows, bits, "float32")

    scale, back = map(np.asarray, scale_and_back(values))
    assert (scale.dtype, float(scale[0, 0])) == (np.float16, 65504.0)
    np.testing.assert_array_equal(back[0], 65504.0 * most * np.array([1, -1, 1, 0]))
    assert (np.abs(back[1] - np.asarray(values, np.float32)[1]) <= 32_000).all()
    np.testing.assert_allclose(back, oracle_codec.rounded_rows(wide(values), bits, "bfloat16"))


def kept(levels, parts, kind):
    """The rows of the levels [B, h, n, s, d], with a chunk's mean first."""
    found = []
    for rows, row_kind, each in ((levels.means, mean_kind(kind), 1), (levels.details, kind, parts - 1)):
        if row_kind != "model":
            rows = jax.tree.map(lambda x, each=each: x.reshape(*x.shape[:3], each, -1), rows)
            rows = packing.dequantize_rows(rows, ROW_BITS[row_kind], "float32")
        found.append(rows.reshape(*rows.shape[:3], each, -1))
    return jnp.concatenate(found, axis=3)


@pytest.mark.parametrize("kind", ["model", "int8", "int4"])
def test_levels_are_the_landmarks(kind):
    """The first row is the chunk's mean, and the error of each landmark is at most half a step.

    The levels take as many bytes as the landmarks, except that quantized means have 8 bits.
    """
    marks = {parts: np.asarray(normal(2, 3, 5 * parts, 16, seed=parts)) for parts in (2, 4, 8)}

    @jax.jit
    def stored(marks):
        levels = {parts: store_levels(x, parts, kind, "float32") for parts, x in marks.items()}
        return {parts: (one, kept(one, parts, kind)) for parts, one in levels.items()}

    for parts, (levels, rows) in stored(marks).items():
        wanted = wide(marks[parts]).reshape(2, 3, 5, parts, 16)
        np.testing.assert_allclose(
            np.asarray(rows)[:, :, :, 0], wanted.mean(axis=3), atol=1e-6 if kind == "model" else 0.02
        )
        assert levels.parts == parts
        signs = np.array([[(-1) ** (i & k).bit_count() for i in range(parts)] for k in range(parts)])
        steps = 1e-6 if kind == "model" else np.abs(wanted).sum(axis=3).max() / (2 ** (ROW_BITS[kind] - 1) - 1)
        assert np.abs(np.einsum("ks,bhnkd->bhnsd", signs, wide(rows)) - wanted).max() <= steps / 2 + 1e-5
        plain = jax.eval_shape(lambda x: store_landmarks(x, kind, "float32"), marks[parts])
        sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(x)) for x in (levels, plain)]
        assert sizes[0] - sizes[1] == (2 * 3 * 5 * 16 // 2 if kind == "int4" else 0)


@pytest.mark.parametrize(("tokens", "block"), [(53, 8), (64, 1000), (3, 8)])
def test_the_spread_is_the_deviation_from_the_landmark(tokens, block):
    """The spread of whole chunks does not depend on the block, and is 0 if each key is its own landmark."""
    keys = 3 + np.asarray(normal(2, tokens, 3, 16, seed=tokens))
    spread = jax.jit(lambda keys: [prompt_spread(keys, 9, 4, block=block, parts=parts) for parts in (2, 4)])
    got, none = map(np.asarray, spread(keys))
    assert got.shape == (2, 3, 18)
    rows = np.asarray(keys, np.float64)[:, : tokens // 4 * 4].reshape(2, -1, 2, 3, 16)[:, :18]
    want = np.sqrt(rows.var(axis=2).mean(axis=3)).swapaxes(1, 2)
    np.testing.assert_allclose(got[:, :, : want.shape[2]], want, rtol=1e-5)
    assert not got[:, :, want.shape[2] :].any()
    assert not none.any()


def held_and_read(**changed):
    """Bytes on the device, and bytes that a step reads."""
    sizes = dict(capacity=1024, prompt=1000, dtype="bfloat16", fetch="device_put")
    policy = ShadowKV(budget=32, **SMALL, **changed)
    return footprint(TINY, policy, **sizes)["device_bytes"], step_footprint(TINY, policy, **sizes)["bytes_read"]


CHUNKS, HEADS = 1024 // 4 - 2, TINY.kv_heads * TINY.num_layers


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("kind", "row", "more"), [("model", TINY.head_dim * 2, 0), ("int4", 10, TINY.head_dim // 2)])
def test_a_step_reads_all_means_and_the_landmarks_of_few_chunks(kind, row, more, rounds):
    (held, read), (held_two, read_two) = (
        held_and_read(landmarks=Landmarks(tokens=1, dtype=kind, levels=levels), choice=Choice(rounds=rounds))
        for levels in (1, 2)
    )
    near = GROUP * rounds * 32 // 4
    assert held_two - held == CHUNKS * more * HEADS
    assert read - read_two == ((4 * CHUNKS - (CHUNKS + 4 * near)) * row - (CHUNKS + near) * more) * HEADS


@pytest.mark.parametrize(("tokens", "levels", "first", "each"), [(None, 1, 1, 0), (1, 1, 4, 0), (2, 2, 1, 2)])
def test_the_variance_takes_a_number_for_each_landmark(tokens, levels, first, each):
    """A step reads the spreads of all chunks, and with two levels those of the landmarks of a few chunks."""
    marks = [Landmarks(tokens=tokens, levels=levels, order=order) for order in (1, 2)]
    (held, read), (held_two, read_two) = (held_and_read(landmarks=mark) for mark in marks)
    assert held_two - held == 2 * CHUNKS * (first + each) * HEADS
    assert read_two - read == 2 * (CHUNKS * first + GROUP * 32 // 4 * each) * HEADS
    for mark in marks:
        assert ShadowKV(**SMALL, landmarks=mark).resolve(TINY, 96).landmarks.order == mark.order
