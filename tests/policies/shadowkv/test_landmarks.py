"""The landmarks of chunks and their scores, against plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from random_arrays import normal, wide

from jshadow.ops import layout as chunking
from jshadow.policies.shadowkv import landmarks, selection
from jshadow.policies.shadowkv.selection import Scoring


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
