"""Landmarks in one and in two levels, and of order 2: their scores, the spread, the choice, and the bytes of a step."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import shadow_layers
from cases import LENGTHS, PROMPT, SMALL, STEPS, TINY, model, run_steps
from few import quick
from random_arrays import normal, wide
from shadow_layers import layer_of, step_of

from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.ops import layout as chunking
from jshadow.ops.packing import ROW_BITS, dequantize_rows
from jshadow.planner.bytes import footprint, step_footprint
from jshadow.policies import ShadowKV, ShadowKVPlus
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, Landmarks, landmarks, selection
from jshadow.policies.shadowkv.landmark_levels import GROUP, mean_kind, store_levels
from jshadow.policies.shadowkv.landmarks import prompt_spread, store_landmarks
from jshadow.policies.shadowkv.selection import Scoring
from pallas_kernels import hadamard


def test_landmarks_and_their_scores():
    keys = np.asarray(normal(1, 2, 5, 4, 16, seed=5))
    means, worst = jax.jit(landmarks.chunk_landmarks)(keys)
    want = wide(keys).mean(axis=3)
    np.testing.assert_allclose(means, want, atol=1e-6)
    cosine = np.einsum("bhncd,bhnd->bhnc", wide(keys), want)
    cosine /= np.linalg.norm(wide(keys), axis=-1) * np.linalg.norm(want, axis=-1)[..., None]
    np.testing.assert_allclose(worst, cosine.min(-1), atol=1e-6)
    # only the first of two queries is valid, and a chunk that is not a candidate gets no mass
    q, candidates = np.asarray(normal(1, 2, 6, 16, seed=6)), np.ones((1, 2, 5), bool)
    candidates[0, 1, 3] = False

    @functools.partial(jax.jit, static_argnums=4)
    def scored(q, means, candidates, valid, scoring):
        logits = landmarks.landmark_logits(q, means, candidates[:, :, None], 0.25)
        return selection.chunk_scores(logits, valid, scoring)

    def scores(valid, scoring):
        return scored(q, means, candidates, valid, scoring)

    both = np.array([[True, True]])
    shared = np.asarray(scores(np.array([[True, False]]), Scoring(0.25, shared=True)))
    each, rounded = (np.asarray(scores(both, one)) for one in (Scoring(0.25), Scoring(0.25, True, "bfloat16")))
    for head in range(2):
        open_to = candidates[0, head]
        products = [wide(q[0, t, head * 3 : head * 3 + 3]) @ want[0, head].T * 0.25 for t in range(2)]
        mass = [oracle.softmax(np.where(open_to, product, -np.inf)) for product in products]
        np.testing.assert_allclose(shared[0, head, 0], np.where(open_to, mass[0].max(axis=0), -1.0), atol=1e-6)
        for t in range(2):
            np.testing.assert_allclose(each[0, head, t], np.where(open_to, mass[t].max(axis=0), -1.0), atol=1e-6)
        coarse = sum(m.astype(np.float32).astype(jnp.bfloat16).astype(np.float64) for m in mass).max(axis=0)
        np.testing.assert_allclose(rounded[0, head, 0], np.where(open_to, coarse, -1.0), rtol=0.01)


@pytest.mark.parametrize(
    ("tokens", "size", "chunks", "block"), [(61, 4, 15, 16), (61, 4, 20, 12), (27, 8, 3, 5), (5, 8, 2, 64)]
)
def test_landmarks_of_a_prompt_do_not_depend_on_the_block(tokens, size, chunks, block):
    keys = normal(2, tokens, 3, 16, seed=7)
    made = jax.jit(landmarks.prompt_landmarks, static_argnums=(1, 2, 3))(keys, chunks, size, block)
    means, worst = map(np.asarray, made)
    assert means.shape == (2, 3, chunks, 16)
    there = min(chunks, tokens // size)
    whole = jax.jit(lambda keys: landmarks.chunk_landmarks(chunking.to_chunks(keys, there, size)))(keys)
    np.testing.assert_allclose(means[:, :, :there], whole[0], atol=1e-6)
    np.testing.assert_allclose(worst[:, :, :there], whole[1], atol=1e-6)
    assert not np.asarray(means[:, :, there:]).any()


POLICY = ShadowKV(
    rank=24, chunk_size=4, budget=12, outlier_chunks=3, local_chunks=2, landmarks=Landmarks(tokens=1, levels=2)
)
SETTINGS = {
    "model": POLICY,
    "int4": with_settings(POLICY, {"landmarks.dtype": "int4", "landmarks.tokens": 2}),
    "int8": with_settings(POLICY, {"landmarks.dtype": "int8"}),
    "few_chunks": dataclasses.replace(POLICY, budget=60),  # the budget exceeds the number of groups
    "variance": with_settings(POLICY, {"landmarks.levels": 1, "landmarks.tokens": 2, "landmarks.order": 2}),
    "levels_variance": with_settings(POLICY, {"landmarks.tokens": 2, "landmarks.dtype": "int4", "landmarks.order": 2}),
    "shared_variance": with_settings(
        POLICY,
        {"quirks.turn_selection": "shared", "landmarks.dtype": "int8", "landmarks.tokens": 2, "landmarks.order": 2},
    ),
    "one_variance": with_settings(POLICY, {"landmarks.tokens": None, "landmarks.order": 2}),
    "shared": with_settings(POLICY, {"quirks.turn_selection": "shared"}),
    "shared_int4": with_settings(POLICY, {"quirks.turn_selection": "shared", "landmarks.dtype": "int4"}),
}


def kept(levels, parts, kind):
    """The rows of the levels, float64 [B, h, n, s, d], with a chunk's mean first."""
    found = []
    for rows, row_kind, each in ((levels.means, mean_kind(kind), 1), (levels.details, kind, parts - 1)):
        if row_kind != "model":
            rows = jax.tree.map(lambda x, each=each: np.asarray(x).reshape(*x.shape[:3], each, -1), rows)
            rows = jax.jit(dequantize_rows, static_argnums=(1, 2))(rows, ROW_BITS[row_kind], "float32")
        shape = rows.shape[:3]
        found.append(np.asarray(rows, np.float64).reshape(*shape, each, -1))
    return np.concatenate(found, axis=3)


def landmarks_of(levels, parts, kind):
    """The landmarks that the levels represent, float64 [B, h, n, s, d]."""
    signs = np.array([[(-1) ** bin(i & k).count("1") for i in range(parts)] for k in range(parts)])
    return np.einsum("ks,bhnkd->bhnsd", signs, kept(levels, parts, kind))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_transform_s_rows_are_orthogonal_and_the_first_is_the_sum(size):
    matrix = np.asarray(jax.jit(hadamard)(np.eye(size, dtype=np.float32)))
    assert set(np.unique(matrix)) <= {1.0, -1.0}
    assert (matrix[0] == 1).all()
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


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
    spread = jax.jit(prompt_spread, static_argnums=(1, 2), static_argnames=("block", "parts"))
    got = np.asarray(spread(keys, 9, 4, block=block, parts=2))
    assert got.shape == (2, 3, 18)
    rows = np.asarray(keys, np.float64)[:, : tokens // 4 * 4].reshape(2, -1, 2, 3, 16)[:, :18]
    want = np.sqrt(rows.var(axis=2).mean(axis=3)).swapaxes(1, 2)
    np.testing.assert_allclose(got[:, :, : want.shape[2]], want, rtol=1e-5)
    assert not got[:, :, want.shape[2] :].any()
    assert not np.asarray(spread(keys, 9, 4, parts=4)).any()


def test_a_spread_that_float16_cannot_hold_is_its_largest_number():
    huge = np.where(np.arange(shadow_layers.CONTEXT) % 2, 1e6, -1e6)[:, None, None]
    spec, state = layer_of(with_settings(POLICY, {"landmarks.order": 2}), "bfloat16", scale=huge)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in state.frozen.spread)
    best = shadow_layers.best(spec, state, step_of(1, "bfloat16"), spec.policy.max_selected(spec.capacity))[1]
    assert np.isfinite(np.asarray(best)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
def test_all_chunks_are_all_chunks(kind):
    """Two levels of exact landmarks choose as one level does only if the landmarks of all chunks are read."""
    for budget, same in ((24, True), (4, False)):
        policies = [
            kind(rank=12, budget=budget, landmarks=Landmarks(tokens=1, levels=levels), **SMALL) for levels in (1, 2)
        ]
        states = [decode.prefill(model(), PROMPT, LENGTHS, one, capacity=96, fetch="resident")[1] for one in policies]
        one, two = (np.asarray(run_steps(model(), state, STEPS[:, :3])[0]) for state in states)
        assert np.allclose(one, two, atol=1e-5) == same


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("kind", ["model", "int4"])
def test_a_step_reads_all_means_and_the_landmarks_of_few_chunks(kind, rounds):
    sizes = dict(capacity=1024, prompt=1000, dtype="bfloat16", fetch="device_put")
    policies = [
        ShadowKV(
            budget=32, **SMALL, landmarks=Landmarks(tokens=1, dtype=kind, levels=levels), choice=Choice(rounds=rounds)
        )
        for levels in (1, 2)
    ]
    kept = [footprint(TINY, policy, **sizes)["device_bytes"] for policy in policies]
    chunks, near = 1024 // 4 - 2, GROUP * rounds * 32 // 4
    heads, more = TINY.kv_heads * TINY.num_layers, 0 if kind == "model" else TINY.head_dim // 2
    assert kept[1] - kept[0] == chunks * more * heads
    one, two = (step_footprint(TINY, policy, **sizes)["bytes_read"] for policy in policies)
    row = TINY.head_dim * 2 if kind == "model" else TINY.head_dim // 2 + 2
    assert one - two == ((4 * chunks - (chunks + 4 * near)) * row - (chunks + near) * more) * heads


@pytest.mark.parametrize(("tokens", "levels", "first", "each"), [(None, 1, 1, 0), (1, 1, 4, 0), (2, 2, 1, 2)])
def test_the_variance_takes_a_number_for_each_landmark(tokens, levels, first, each):
    """A step reads the spreads of all chunks, and with two levels those of the landmarks of a few chunks."""
    sizes = dict(capacity=1024, prompt=1000, dtype="bfloat16", fetch="device_put")
    policies = [
        ShadowKV(budget=32, **SMALL, landmarks=Landmarks(tokens=tokens, levels=levels, order=order)) for order in (1, 2)
    ]
    chunks, near, heads = 1024 // 4 - 2, GROUP * 32 // 4, TINY.kv_heads * TINY.num_layers
    held = [footprint(TINY, policy, **sizes)["device_bytes"] for policy in policies]
    assert held[1] - held[0] == 2 * chunks * (first + each) * heads
    one, two = (step_footprint(TINY, policy, **sizes)["bytes_read"] for policy in policies)
    assert two - one == 2 * (chunks * first + near * each) * heads
    for policy in policies:
        assert dataclasses.replace(policy, budget=None).resolve(TINY, 96).landmarks.order == policy.landmarks.order


@pytest.mark.parametrize("value", [0, 3, 2.0, True])
@pytest.mark.parametrize("field", ["levels", "order"])
def test_levels_and_order_are_one_or_two(field, value):
    for kind in (ShadowKV, ShadowKVPlus):
        with pytest.raises(ConfigError, match=rf"\.landmarks\.{field} must be an integer in \[1, 2\]"):
            kind(landmarks=Landmarks(**{field: value})).resolve(TINY, 96)


def test_a_chunk_s_landmarks_are_a_power_of_two():
    with pytest.raises(ConfigError, match=r"a power of two of landmarks a chunk with landmarks\.levels=2, got 3"):
        ShadowKV(chunk_size=6, landmarks=Landmarks(tokens=2, levels=2)).resolve(TINY, 96)
    # a chunk with a single landmark has one level, because the landmark is the mean
    assert ShadowKV(landmarks=Landmarks(levels=2)).resolve(TINY, 96).landmarks.levels == 1
