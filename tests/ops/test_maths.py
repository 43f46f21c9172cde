"""The maths modules against plain NumPy: RoPE, attention, factors, chunks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import LLAMA3_ROPE
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jshadow.cache.records import Rebuild
from jshadow.models.config import RopeConfig
from jshadow.ops import attention, rope
from jshadow.ops import layout as chunking
from jshadow.policies.shadowkv import landmarks, selection
from jshadow.policies.shadowkv.key_codecs import LowRankCodec, lowrank
from jshadow.policies.shadowkv.selection import Scoring


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def wide(x):
    return np.asarray(x, np.float64)


# RoPE

ROPES = (
    RopeConfig(),
    RopeConfig(theta=5e5),
    RopeConfig(kind="linear", factor=4.0),
    LLAMA3_ROPE,
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192),
    RopeConfig(theta=5e5, kind="llama3", factor=32.0, low_freq_factor=1.5, high_freq_factor=2.5, original_context=128),
)


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("config", ROPES)
def test_frequencies_follow_the_formula(config, dim):
    np.testing.assert_allclose(
        rope.inverse_frequencies(config, dim), oracle.inverse_frequencies(config, dim), rtol=2e-6
    )


@pytest.mark.parametrize("config", ROPES)
def test_frequencies_are_those_of_transformers(config):
    torch = pytest.importorskip("torch", reason="transformers computes its frequencies with torch")
    assert torch
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": config.kind, "rope_theta": config.theta, "factor": config.factor,
        "low_freq_factor": config.low_freq_factor, "high_freq_factor": config.high_freq_factor,
        "original_max_position_embeddings": config.original_context,
    }  # fmt: skip
    if config.kind == "default":
        parameters = {"rope_type": "default", "rope_theta": config.theta}
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=parameters, max_position_embeddings=131072
    )
    if config.kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        want, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        want, _ = ROPE_INIT_FUNCTIONS[config.kind](theirs, "cpu")
    np.testing.assert_allclose(rope.inverse_frequencies(config, 64), want.numpy(), rtol=1e-6)


def test_cosines_and_sines_are_exact_to_a_million_and_a_half_radians():
    rng = np.random.default_rng(3)
    angle = np.concatenate([rng.uniform(0, 1.6e6, 200_000), rng.uniform(0, 10, 50_000), np.arange(200_000)])
    angle = np.concatenate([angle, np.arange(1000) * np.pi / 4, [0.0, 1.6e6]]).astype(np.float32)
    for run in (rope.cos_sin_of, jax.jit(rope.cos_sin_of)):
        cos, sin = run(jnp.asarray(angle))
        np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), atol=2e-7, rtol=0)
        np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), atol=2e-7, rtol=0)


def test_rotation_keeps_length_and_knows_distances_only():
    q, k, inverse = normal(80, seed=1), normal(80, seed=2), jnp.asarray(rope.inverse_frequencies(RopeConfig(), 80))

    def turn(x, position):
        return rope.rotate(x, *rope.cos_sin(jnp.array(position), inverse))

    np.testing.assert_allclose(jnp.linalg.norm(turn(q, 1234)), jnp.linalg.norm(q), rtol=1e-5)
    for near, far in ((0, 5), (100, 105), (1000, 1005)):
        np.testing.assert_allclose(turn(q, far) @ turn(k, near), turn(q, 5) @ turn(k, 0), atol=2e-3)
    np.testing.assert_array_equal(turn(q, 0), q)
    np.testing.assert_allclose(
        turn(q, 77), oracle.apply_rope(wide(q)[None, None], np.array([77]), RopeConfig())[0, 0], atol=1e-5
    )


# Attention


def naive(q, k, v):
    """One row's causal attention in float64, and the log-sum-exp of its scores [h_q, S]."""
    q, k, v = wide(q), wide(k), wide(v)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.triu(np.ones(scores.shape[1:], bool), 1), -np.inf, scores)
    top = scores.max(-1)
    return oracle.causal_attention(q, k, np.repeat(v, q.shape[1] // v.shape[1], axis=1)), top + np.log(
        np.exp(scores - top[..., None]).sum(-1)
    )


@pytest.mark.parametrize(
    ("length", "dim", "group", "dtype"),
    [(27, 64, 1, "float32"), (61, 80, 2, "float32"), (113, 96, 3, "float32"), (300, 64, 8, "float32"),
     (513, 80, 1, "float32"), (1, 64, 4, "float32"), (61, 96, 8, "bfloat16"), (300, 80, 3, "bfloat16"),
     (113, 64, 5, "bfloat16")],
)  # fmt: skip
def test_blockwise_attention_is_attention(length, dim, group, dtype):
    """Lengths that no block divides, over one and several blocks of queries and keys."""
    q = normal(2, length, 2 * group, dim, seed=1, dtype=dtype)
    k, v = (normal(2, length, 2, dim, seed=seed, dtype=dtype) for seed in (2, 3))
    out, lse = jax.jit(lambda *x: attention.causal_attention(*x, float(1 / np.sqrt(dim))))(q, k, v)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for row in range(2):
        want, want_lse = naive(q[row], k[row], v[row])
        np.testing.assert_allclose(wide(out[row]), want, atol=tolerance)
        np.testing.assert_allclose(wide(lse[row]), want_lse, atol=2e-5 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize(("rows", "group", "dtype"), [(1, 1, "float32"), (2, 3, "float32"), (1, 4, "bfloat16")])
def test_attention_over_pieces_is_attention_over_all(rows, group, dtype):
    q = normal(2, rows, 2 * group, 16, seed=1, dtype=dtype)
    k, v = (normal(2, 2, 23, 16, seed=seed, dtype=dtype) for seed in (2, 3))
    valid = jnp.asarray(np.random.default_rng(4).random((2, 2, rows, 23)) < 0.6).at[:, :, :, 0].set(True)
    cuts = [0, 5, 6, 17, 23]
    pieces = [
        attention.Piece(k[:, :, a:b], v[:, :, a:b], valid[..., a:b]) for a, b in itertools.pairwise(cuts)
    ]  # fmt: skip
    got = attention.attend(q, pieces, 0.25)
    whole = attention.attend(q, [attention.Piece(k, v, valid)], 0.25)
    np.testing.assert_allclose(wide(got), wide(whole), atol=1e-6 if dtype == "float32" else 2e-2)
    got, q, k, v, valid = wide(got), wide(q), wide(k), wide(v), np.asarray(valid)
    for b, t, h in np.ndindex(2, rows, 2 * group):
        seen = valid[b, h // group, t]
        want = oracle.attention(q[b, t, h][None], k[b, h // group][seen], v[b, h // group][seen])
        np.testing.assert_allclose(got[b, t, h], want[0], atol=1e-5 if dtype == "float32" else 2e-2)


def test_attention_over_nothing_is_zero_and_masked_rows_may_hold_anything():
    q, k = normal(1, 1, 2, 8, seed=1), normal(1, 2, 3, 8, seed=2)
    none = attention.Piece(k, k, jnp.zeros((1, 1, 1, 3), bool))
    assert not np.asarray(attention.attend(q, [none], 1.0)).any()
    good = attention.Piece(k, k, jnp.ones((1, 1, 1, 3), bool))
    np.testing.assert_array_equal(
        attention.attend(q, [good, attention.Piece(k * 1e6, k * 1e6, none.valid)], 1.0),
        attention.attend(q, [good], 1.0),
    )
    probs = attention.attention_probs(q, good, 1.0)
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-6)


# Factors


@pytest.mark.parametrize(("length", "rank"), [(61, 12), (61, 32), (27, 20), (5, 16), (1, 8)])
def test_factors_are_the_truncated_svd(length, rank):
    """In a padded batch, against a direct SVD of the real rows; a rank above the length loses nothing."""
    keys = normal(2, 64, 2, 16, seed=length)
    lengths = jnp.array([length, 64])
    left, right = lowrank.key_factors(keys, lengths, rank)
    assert (left.shape, right.shape) == ((2, 64, rank), (2, 2, rank, 16))
    for row, count in enumerate((length, 64)):
        u, s, vt = np.linalg.svd(wide(keys[row, :count]).reshape(count, 32), full_matrices=False)
        want = (u[:, :rank] * s[:rank]) @ vt[:rank]
        got = np.einsum("sr,hrd->shd", wide(left[row]), wide(right[row])).reshape(64, 32)
        np.testing.assert_allclose(got[:count], want, atol=2e-4)
        assert not got[count:].any()
    assert not np.asarray(left[0, :, length:]).any()  # no more columns than tokens


def test_a_large_mean_does_not_spoil_the_factors():
    """Key biases make the first singular value huge; the Gram matrix squares it."""
    keys = normal(1, 61, 2, 16, seed=3) + 30.0 * normal(1, 1, 2, 16, seed=4)
    left, right = lowrank.key_factors(keys, jnp.array([61]), 12)
    u, s, vt = np.linalg.svd(wide(keys[0]).reshape(61, 32), full_matrices=False)
    want = (u[:, :12] * s[:12]) @ vt[:12]
    got = np.einsum("sr,hrd->shd", wide(left[0]), wide(right[0])).reshape(61, 32)
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-3


def test_rebuilt_keys_are_the_rotated_product():
    """Chunk-major factors, a set of its own for each head, positions from the chunk ids."""
    keys, lengths, ids = normal(2, 24, 2, 16), jnp.array([24, 24]), jnp.array([[[5, 0], [2, 2]], [[1, 4], [3, 5]]])
    left, right = lowrank.key_factors(keys, lengths, 32)
    inverse = jnp.asarray(rope.inverse_frequencies(RopeConfig(), 16))
    got = Rebuild(left.reshape(2, 6, 4 * 32), right, inverse, codec=LowRankCodec(32), unit=4).keys(ids)
    for b, h in np.ndindex(2, 2):
        tokens = oracle.tokens_of(np.asarray(ids[b, h]), 4)
        want = oracle.apply_rope(wide(keys[b]), np.arange(24), RopeConfig())[tokens, h]
        np.testing.assert_allclose(wide(got[b, h]), want, atol=1e-4)


# Chunks


@settings(max_examples=25)  # every example is a shape of its own, so a compilation
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 8))
def test_chunks_hold_the_tokens_in_order(length, size, count):
    x = np.arange(2 * length * 3 * 2, dtype=np.float32).reshape(2, length, 3, 2)
    chunks = np.asarray(chunking.to_chunks(jnp.asarray(x), count, size))
    assert chunks.shape == (2, 3, count, size, 2)
    for token in range(count * size):
        want = x[:, token] if token < length else np.zeros((2, 3, 2))
        np.testing.assert_array_equal(chunks[:, :, token // size, token % size], want)


def test_gathers_and_writes():
    x = normal(2, 12, 3, 4)
    ids = jnp.array([[[2, 0], [1, 1], [0, 2]], [[0, 0], [2, 1], [1, 0]]])
    there = jnp.array([[[True, True]], [[True, False]]])
    picked = chunking.take_chunks(x, ids, there, 4)
    for b, h in np.ndindex(2, 3):
        own = np.asarray(ids[b, h])[np.asarray(there[b, 0])]
        np.testing.assert_array_equal(picked[b, h, : 4 * len(own)], x[b, oracle.tokens_of(own, 4), h])
        assert not np.asarray(picked[b, h, 4 * len(own) :]).any()
    span = chunking.take_span(x, jnp.array([3, 10]), 5)
    np.testing.assert_array_equal(span[0].transpose(1, 0, 2), x[0, 3:8])
    np.testing.assert_array_equal(span[1, :, :2].transpose(1, 0, 2), x[1, 10:])
    assert not np.asarray(span[1, :, 2:]).any()
    buffer = jnp.zeros((2, 3, 5, 4))
    valid = jnp.array([[True, False], [True, True]])
    written = chunking.write_rows(buffer, x[:, :2], jnp.array([[4, 1], [0, 7]]), valid)
    np.testing.assert_array_equal(written[0, :, 4], x[0, 0])
    np.testing.assert_array_equal(written[1, :, 0], x[1, 0])
    assert np.count_nonzero(np.asarray(written).any(axis=(1, 3))) == 2  # neither the invalid nor the far one


def test_ties_go_to_the_lower_index():
    scores = jnp.array([[1.0, 3.0, 3.0, -1.0, 3.0, 1.0], [-jnp.inf] * 6])
    assert chunking.top_k(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert chunking.top_k(scores, 0).shape == (2, 0)


def test_landmarks_and_their_scores():
    keys = normal(1, 2, 5, 4, 16, seed=5)
    means, worst = landmarks.chunk_landmarks(keys)
    want = wide(keys).mean(axis=3)
    np.testing.assert_allclose(means, want, atol=1e-6)
    cosine = np.einsum("bhncd,bhnd->bhnc", wide(keys), want)
    cosine /= np.linalg.norm(wide(keys), axis=-1) * np.linalg.norm(want, axis=-1)[..., None]
    np.testing.assert_allclose(worst, cosine.min(-1), atol=1e-6)
    # two query rows of which only the first counts; a chunk that is no candidate takes no mass
    q, candidates = normal(1, 2, 6, 16, seed=6), jnp.ones((1, 2, 5), bool).at[0, 1, 3].set(False)
    logits = landmarks.landmark_logits(q, means, candidates[:, :, None], 0.25)
    shared = selection.chunk_scores(logits, jnp.array([[True, False]]), Scoring(0.25, shared=True))
    each = selection.chunk_scores(logits, jnp.array([[True, True]]), Scoring(0.25))
    rounded = selection.chunk_scores(logits, jnp.array([[True, True]]), Scoring(0.25, True, "bfloat16"))
    for head in range(2):
        open_to = np.asarray(candidates[0, head])
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
    means, worst = landmarks.prompt_landmarks(keys, chunks, size, block)
    assert means.shape == (2, 3, chunks, 16)
    there = min(chunks, tokens // size)
    whole = landmarks.chunk_landmarks(chunking.to_chunks(keys, there, size))
    np.testing.assert_allclose(means[:, :, :there], whole[0], atol=1e-6)
    np.testing.assert_allclose(worst[:, :, :there], whole[1], atol=1e-6)
    assert not np.asarray(means[:, :, there:]).any()


@pytest.mark.parametrize("block", [7, 16, 61, 2048])
def test_factors_do_not_depend_on_the_block(block):
    """Each token counts once, though the last block overlaps the one before."""
    keys, lengths = normal(2, 61, 2, 16, seed=8), jnp.array([61, 22])
    want, got = lowrank.key_factors(keys, lengths, 12), lowrank.key_factors(keys, lengths, 12, block=block)
    product = [np.einsum("bsr,bhrd->bshd", wide(left), wide(right)) for left, right in (want, got)]
    np.testing.assert_allclose(product[0], product[1], atol=2e-5)


def test_a_whole_basis_keeps_keys_that_no_token_had():
    """At full rank a later token's key survives the projection, though the prompt is shorter than the keys are wide."""
    _, right = lowrank.key_factors(normal(1, 5, 2, 16, seed=9), jnp.array([5]), 32)
    basis, key = wide(right[0]).transpose(0, 2, 1).reshape(32, 32), wide(normal(32, seed=10))
    np.testing.assert_allclose(key @ basis @ basis.T, key, atol=1e-4)


def test_shapes_are_checked():
    """The suite's import hook is on: a wrong rank is refused by the annotation, before JAX sees it."""
    with pytest.raises(TypeCheckError):
        chunking.to_chunks(jnp.zeros((2, 3)), 1, 1)
