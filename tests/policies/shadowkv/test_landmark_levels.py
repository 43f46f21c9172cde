"""Landmarks in one and in two levels, of few bits, of order 2: scores, the spread, the choice, bytes; packed rows."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_codec
import pytest
import shadow_layers
from cases import SMALL, TINY
from few import one_of, quick
from oracle_shadowkv import worst_of
from random_arrays import normal, wide
from shadow_layers import layer_of, step_of

from jshadow.ops import packing
from jshadow.ops.packing import ROW_BITS, dequantize_rows
from jshadow.planner.bytes import footprint, step_footprint
from jshadow.policies import ShadowKV
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, Landmarks, landmarks, selection
from jshadow.policies.shadowkv.landmark_levels import GROUP, mean_kind, store_levels
from jshadow.policies.shadowkv.landmarks import prompt_spread, store_landmarks
from jshadow.policies.shadowkv.selection import Scoring
from pallas_kernels import hadamard


@functools.partial(jax.jit, static_argnums=4)
def scores_of(q, means, candidates, valid, scoring):
    logits = landmarks.landmark_logits(q, means, candidates[:, :, None], 0.25)
    return selection.chunk_scores(logits, valid, scoring)


def test_the_scores_of_separate_shared_and_rounded_choices():
    """A chunk that is not a candidate gets no mass, and of a shared choice the first of two queries alone is valid."""
    means, q = np.asarray(normal(1, 2, 5, 16, seed=5)), np.asarray(normal(1, 2, 6, 16, seed=6))
    candidates, both = np.ones((1, 2, 5), bool), np.array([[True, True]])
    candidates[0, 1, 3] = False
    choices = (
        (both & [True, False], Scoring(0.25, shared=True)),
        (both, Scoring(0.25)),
        (both, Scoring(0.25, True, "bfloat16")),
    )
    shared, each, rounded = (np.asarray(scores_of(q, means, candidates, *choice)) for choice in choices)
    for head in range(2):
        open_to = candidates[0, head]
        products = [wide(q[0, t, head * 3 : head * 3 + 3]) @ wide(means[0, head]).T * 0.25 for t in range(2)]
        mass = [oracle.softmax(np.where(open_to, product, -np.inf)) for product in products]
        np.testing.assert_allclose(shared[0, head, 0], np.where(open_to, mass[0].max(axis=0), -1.0), atol=1e-6)
        for t in range(2):
            np.testing.assert_allclose(each[0, head, t], np.where(open_to, mass[t].max(axis=0), -1.0), atol=1e-6)
        coarse = sum(m.astype(np.float32).astype(jnp.bfloat16).astype(np.float64) for m in mass).max(axis=0)
        np.testing.assert_allclose(rounded[0, head, 0], np.where(open_to, coarse, -1.0), rtol=0.01)


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


dequantized = jax.jit(dequantize_rows, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=(1, 2))
def rows_and_back(values, bits, dtype):
    """Host rows of chunks of 4 tokens with 6 numbers each, and their values."""
    rows = packing.quantize_chunks(values, bits, dtype)
    return rows, packing.dequantize_chunks(rows, 4, 6, bits, dtype)


@functools.partial(jax.jit, static_argnums=1)
def scale_and_back(values, bits):
    """The scales of quantized rows of bfloat16 numbers, and their values."""
    rows = packing.quantize_rows(values, bits, "bfloat16")
    return rows.scale, dequantize_rows(rows, bits, "float32")


@pytest.mark.parametrize(("bits", "dtype"), one_of(2, itertools.product((8, 4), ("float32", "bfloat16", "float16"))))
def test_host_rows_are_the_oracle_s(bits, dtype):
    values = np.random.default_rng(bits).standard_normal((1, 1, 5, 4, 6)).astype(dtype)
    values[0, 0, 1, 2] = 0
    rows, back = map(np.asarray, rows_and_back(values, bits, dtype))
    assert rows.shape == (1, 1, 5, packing.row_words(4, 6, bits, dtype))
    assert rows.shape[3] == (32 if (bits, dtype) == (8, "float32") else 16)  # of 20, 16, 16 and 12 words
    want, real = oracle_codec.host_row_values(rows[0, 0], 4, 6, bits, dtype), wide(values)[0, 0]
    np.testing.assert_allclose(want, oracle_codec.rounded_rows(real, bits, dtype), atol=1e-6)
    np.testing.assert_array_equal(back[0, 0], want.astype(back.dtype))
    assert not want[1, 2].any()
    scale = np.abs(real).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(want - real) <= scale * 0.51).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_past_their_scale_are_clipped(bits):
    """Numbers of a bfloat16 model may exceed the range of their float16 scales."""
    most = 2 ** (bits - 1) - 1
    values = np.array([[3e9, -1e9, 70000.0 * most, 1.0], [60000.0 * most, -9e4, 1.0, 0.0]]).astype(jnp.bfloat16)
    scale, back = map(np.asarray, scale_and_back(values, bits))
    assert (scale.dtype, float(scale[0, 0])) == (np.float16, 65504.0)
    np.testing.assert_array_equal(back[0], 65504.0 * most * np.array([1, -1, 1, 0]))
    assert (np.abs(back[1] - np.asarray(values, np.float32)[1]) <= 32_000).all()
    np.testing.assert_allclose(back, oracle_codec.rounded_rows(wide(values), bits, "bfloat16"))


@pytest.mark.parametrize(
    ("tokens", "size", "chunks", "block"), [(61, 4, 15, 16), (61, 4, 20, 12), (27, 8, 3, 5), (5, 8, 2, 64)]
)
def test_landmarks_of_a_prompt_do_not_depend_on_the_block(tokens, size, chunks, block):
    keys = normal(2, tokens, 3, 16, seed=7)
    made = jax.jit(landmarks.prompt_landmarks, static_argnums=(1, 2, 3))(keys, chunks, size, block)
    means, worst = map(np.asarray, made)
    assert means.shape == (2, 3, chunks, 16)
    there = min(chunks, tokens // size)
    for row, real in enumerate(wide(keys)[:, : there * size]):
        want = real.reshape(there, size, 3, 16).mean(axis=1).swapaxes(0, 1)
        np.testing.assert_allclose(means[row, :, :there], want, atol=1e-6)
        np.testing.assert_allclose(worst[row, :, :there], worst_of(real, size, 1), atol=1e-6)
    assert not means[:, :, there:].any()


BASE = ShadowKV(rank=24, chunk_size=4, budget=12, outlier_chunks=3, local_chunks=2)
POLICY = dataclasses.replace(BASE, landmarks=Landmarks(tokens=1, levels=2))


def varied(**landmarks):
    return dataclasses.replace(POLICY, landmarks=dataclasses.replace(POLICY.landmarks, **landmarks))


SHARED = {"quirks.turn_selection": "shared"}
SETTINGS = {
    "model": POLICY,
    "int4": varied(dtype="int4", tokens=2),
    "int8": varied(dtype="int8"),
    "few_chunks": dataclasses.replace(POLICY, budget=60),  # the budget exceeds the number of groups
    "variance": varied(levels=1, tokens=2, order=2),
    "levels_variance": varied(tokens=2, dtype="int4", order=2),
    "shared_variance": with_settings(varied(dtype="int8", tokens=2, order=2), SHARED),
    "one_variance": varied(tokens=None, order=2),
    "shared": with_settings(POLICY, SHARED),
    "shared_int4": with_settings(varied(dtype="int4"), SHARED),
}


def kept(levels, parts, kind):
    """The rows of the levels, float64 [B, h, n, s, d], with a chunk's mean first."""
    found = []
    for rows, row_kind, each in ((levels.means, mean_kind(kind), 1), (levels.details, kind, parts - 1)):
        if row_kind != "model":
            rows = jax.tree.map(lambda x, each=each: np.asarray(x).reshape(*x.shape[:3], each, -1), rows)
            rows = dequantized(rows, ROW_BITS[row_kind], "float32")
        shape = rows.shape[:3]
        found.append(np.asarray(rows, np.float64).reshape(*shape, each, -1))
    return np.concatenate(found, axis=3)


def landmarks_of(levels, parts, kind):
    """The landmarks that the levels represent, float64 [B, h, n, s, d]."""
    signs = np.array([[(-1) ** bin(i & k).count("1") for i in range(parts)] for k in range(parts)])
    return np.einsum("ks,bhnkd->bhnsd", signs, kept(levels, parts, kind))


def test_the_transform_s_rows_are_orthogonal_and_the_first_is_the_sum():
    for matrix in map(np.asarray, jax.jit(lambda: [hadamard(jnp.eye(size)) for size in (1, 2, 4, 8, 16)])()):
        assert set(np.unique(matrix)) <= {1.0, -1.0}
        assert (matrix[0] == 1).all()
        np.testing.assert_array_equal(matrix @ matrix.T, len(matrix) * np.eye(len(matrix)))


@pytest.mark.parametrize(
    ("parts", "kind"), quick([(2, "model"), (4, "int4")], itertools.product([2, 4, 8], ["model", "int8", "int4"]))
)
def test_levels_are_the_landmarks(parts, kind):
    """The first row is the chunk's mean, and the error of each landmark is at most half a step.

    The levels take as many bytes as the landmarks, except that quantized means have 8 bits.
    """
    marks = normal(2, 3, 5 * parts, 16, seed=parts)
    levels = jax.jit(store_levels, static_argnums=(1, 2, 3))(marks, parts, kind, "float32")
    wanted = np.asarray(marks, np.float64).reshape(2, 3, 5, parts, 16)
    first = kept(levels, parts, kind)[:, :, :, 0]
    np.testing.assert_allclose(first, wanted.mean(axis=3), atol=1e-6 if kind == "model" else 0.02)
    assert levels.parts == parts
    steps = 1e-6 if kind == "model" else np.abs(wanted).sum(axis=3).max() / (2 ** (ROW_BITS[kind] - 1) - 1)
    assert np.abs(landmarks_of(levels, parts, kind) - wanted).max() <= steps / 2 + 1e-5
    plain = jax.eval_shape(lambda x: store_landmarks(x, kind, "float32"), marks)
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(x)) for x in (levels, plain)]
    assert sizes[0] - sizes[1] == (2 * 3 * 5 * 16 // 2 if kind == "int4" else 0)


def scored(q, rows, spread):
    """Scores [n] of chunks for queries [t, group, d], from their landmarks [n, s, d] and spreads [n, s]."""
    half = (np.linalg.norm(q, axis=2)[..., None, None] * spread / 4) ** 2 / 2
    weight = np.exp(np.einsum("tgd,nsd->tgns", q, rows) / 4 + half)
    mass = weight / weight.sum(axis=(2, 3), keepdims=True)
    return mass.sum(axis=(0, 3)).max(axis=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(
        [("levels_variance", "float32"), ("shared", "bfloat16")],
        itertools.product(SETTINGS, ["float32", "bfloat16"]),
    ),
)
def test_chosen_are_the_best_by_landmarks_of_the_best_by_their_mean(name, dtype):
    """With one level, the best of all chunks. One query, and three of a turn that choose separately or together.

    Invalid queries have no effect.
    """
    spec, state = layer_of(SETTINGS[name], dtype)
    policy, count = spec.policy, spec.policy.max_selected(spec.capacity)
    parts, shared = policy.landmark_parts, policy.quirks.turn_selection == "shared"
    levels, kind = policy.landmarks.levels, policy.landmarks.dtype
    kept_marks = state.frozen.landmarks
    marks = landmarks_of(kept_marks, parts, kind) if levels == 2 else np.asarray(kept_marks, np.float64)
    marks = marks.reshape(2, 2, -1, parts, 16)
    chunks = marks.shape[2]
    first_spread, spread = np.zeros((2, 2, chunks, 1)), np.zeros((2, 2, chunks, parts))
    if policy.landmarks.order == 2:
        stored = state.frozen.spread if levels == 2 else (first_spread, state.frozen.spread)
        first_spread, spread = (np.asarray(x, np.float64).reshape(2, 2, chunks, -1) for x in stored)
    assert (GROUP * count < chunks) == (name != "few_chunks")
    assert chunks % GROUP
    for queries in (1, 3):
        step = step_of(queries, dtype)
        ids, best = map(np.asarray, shadow_layers.best(spec, state, step, count))
        assert ids.shape == best.shape == (2, 2, 1 if shared else queries, count)
        q, valid = np.asarray(step.q_post, np.float64), np.asarray(step.valid)
        free = np.asarray(state.frozen.candidates)
        for b, h, chooser in np.ndindex(ids.shape[:3]):
            asking = [t for t in range(queries) if valid[b, t]] if shared else [chooser]
            if not valid[b, chooser]:
                continue
            open_to = np.flatnonzero(free[b, h])
            ours = q[b, asking, 3 * h : 3 * h + 3]
            first = scored(ours, marks[b, h, open_to].mean(axis=1, keepdims=True), first_spread[b, h, open_to])
            groups = np.unique(open_to // GROUP)
            most = np.array([first[open_to // GROUP == group].max() for group in groups])
            wanted_groups = groups[np.argsort(-most, kind="stable")[:count]]
            near = open_to[np.isin(open_to // GROUP, wanted_groups)] if levels == 2 else open_to
            wanted = scored(ours, marks[b, h, near], spread[b, h, near])
            order = np.argsort(-wanted, kind="stable")[:count]
            real, rtol = best[b, h, chooser] >= 0, 3e-4 if dtype == "float32" else 0.05
            assert real.sum() == len(order)
            np.testing.assert_allclose(best[b, h, chooser][real], wanted[order], rtol=rtol)
            if dtype == "float32":
                assert set(ids[b, h, chooser][real]) == set(near[order])


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


def test_a_spread_that_float16_cannot_hold_is_its_largest_number():
    huge = np.where(np.arange(shadow_layers.CONTEXT) % 2, 1e6, -1e6)[:, None, None]
    spec, state = layer_of(with_settings(POLICY, {"landmarks.order": 2}), "bfloat16", scale=huge)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in state.frozen.spread)
    best = shadow_layers.best(spec, state, step_of(1, "bfloat16"), spec.policy.max_selected(spec.capacity))[1]
    assert np.isfinite(np.asarray(best)).all()


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
