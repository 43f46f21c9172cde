"""Attention in blocks and in pieces, and the mass of keys, compared with plain NumPy."""

import jax
import numpy as np
import oracle_maths as oracle
import pytest
from cases import TINY
from few import one_of, slow
from random_arrays import normal, wide

from jshadow.ops import attention
from jshadow.ops.attention import add_rows, attend_prefixes, key_mass


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


causal = jax.jit(attention.causal_attention, static_argnums=3)
attend = jax.jit(attention.attend, static_argnums=2)


SIZES = [  # length, head size, query heads of a KV head, dtype: not multiples of a block; one and several blocks
    (27, 64, 1, "float32"),
    (61, 80, 2, "float32"),
    (113, 96, 3, "float32"),
    (300, 64, 8, "float32"),
    (513, 80, 1, "float32"),
    (1, 64, 4, "float32"),
    (61, 96, 8, "bfloat16"),
    (300, 80, 3, "bfloat16"),
    (113, 64, 5, "bfloat16"),
]


@pytest.mark.parametrize(("length", "dim", "group", "dtype"), one_of(3, SIZES))
def test_blockwise_attention_is_attention(length, dim, group, dtype):
    q = normal(2, length, 2 * group, dim, seed=1, dtype=dtype)
    k, v = (normal(2, length, 2, dim, seed=seed, dtype=dtype) for seed in (2, 3))
    out, lse = causal(q, k, v, float(1 / np.sqrt(dim)))
    assert out.dtype == q.dtype
    assert lse.dtype == np.float32
    q, k, v, out, lse = map(np.asarray, (q, k, v, out, lse))
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for row in range(2):
        want, want_lse = naive(q[row], k[row], v[row])
        np.testing.assert_allclose(wide(out[row]), want, atol=tolerance)
        np.testing.assert_allclose(wide(lse[row]), want_lse, atol=2e-5 if dtype == "float32" else 1e-3)


def prefixes(rng, dtype):
    """Each query and row sees another number of rows of several blocks and of one, and some see none."""
    pieces = []
    for size, shape in ((1100, (2, 1, 70, 1)), (5, (2, 3, 1, 1))):
        k, v = (rng.normal(size=(2, 3, size, 8)).astype(dtype) for _ in range(2))
        pieces.append(attention.Piece(k, v, rng.integers(0, size + 1, shape, np.int32)))
    pieces[0].valid[0, 0, 3], pieces[0].valid[1, 0, 9], pieces[1].valid[0] = 0, 2000, 0
    return pieces


def listed(rng, dtype):
    """A list of places, whose last entry no query sees."""
    k, v = (rng.normal(size=(2, 3, 11, 5 * 8)).astype(dtype) for _ in range(2))
    places = np.argsort(rng.random((2, 3, 11)))[..., :7].astype(np.int32)
    places[..., 6] = 11
    pieces = [attention.Piece(k, v, rng.integers(0, 7, (2, 3, 300, 1), np.int32), places)]
    pieces[0].valid[0, :, 3] = 0
    return pieces


@pytest.mark.parametrize(
    ("queries", "pieces_of", "dtype"),
    one_of(3, [(n, of, dtype) for n, of in ((70, prefixes), (300, listed)) for dtype in ("float32", "bfloat16")]),
)
def test_a_long_turn_attends_as_its_queries_alone(queries, pieces_of, dtype):
    """`attend` over several pieces at once is the kernels' op, with tests of its own."""
    rng, tenth = np.random.default_rng(5), queries // 10
    q, pieces = rng.normal(size=(2, queries, 6, 8)).astype(dtype), pieces_of(rng, dtype)
    out, parts = np.asarray(attend(q, pieces, 0.3)), [(a, a + tenth) for a in range(0, queries, tenth)]
    alone = [attend(q[:, a:b], [piece.of_queries(a, b) for piece in pieces], 0.3) for a, b in parts]
    near = 2e-6 if dtype == "float32" else 0.02
    np.testing.assert_allclose(wide(out), np.concatenate([wide(x) for x in alone], axis=1), atol=near)
    assert not out[0, 3].any()
    assert out.any()


@pytest.mark.parametrize("dtype", one_of(2, ["float32", "bfloat16"]))
def test_own_rows_are_added_to_attention_over_shared_ones(dtype):
    """It is one softmax. Query 3 sees no shared row, query 4 no row of its own, and query 5 none at all."""
    rng = np.random.default_rng(6)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    q, seen, chosen = draw(2, 20, 6, 8), rng.integers(1, 600, (2, 1, 20, 1)), rng.random((2, 3, 20, 4)) < 0.5
    seen[:, :, [3, 5]], chosen[:, :, 3], chosen[:, :, 4:6] = 0, True, False
    shared = attention.Piece(draw(2, 3, 600, 8), draw(2, 3, 600, 8), seen.astype(np.int32))
    own = attention.Piece(draw(2, 3, 20, 12, 8), draw(2, 3, 20, 12, 8), chosen)

    @jax.jit
    def in_two(q, shared, own):
        return add_rows(q, own[:3], 0.3, attend_prefixes(q, [shared[:3]], 0.3))

    got, want = (np.asarray(x) for x in (in_two(q, shared, own), attend(q, [shared, own], 0.3)))
    np.testing.assert_allclose(wide(got), wide(want), atol=2e-6 if dtype == "float32" else 0.02)
    assert not got[:, 5].any()


def test_attention_over_nothing_is_zero_and_masked_rows_may_hold_anything():
    q, k = (np.asarray(normal(*shape, seed=shape[1])) for shape in ((1, 1, 2, 8), (1, 2, 3, 8)))
    good, none = (attention.Piece(k, k, np.full((1, 1, 1, 3), seen)) for seen in (True, False))
    wild = attention.Piece(k * np.float32(1e6), k * np.float32(1e6), none.valid)
    assert not np.asarray(attend(q, [none, none], 1.0)).any()
    np.testing.assert_array_equal(attend(q, [good, wild], 1.0), attend(q, [good, none], 1.0))
    probs = jax.jit(attention.attention_probs, static_argnums=2)(q, good, 1.0)
    np.testing.assert_allclose(np.asarray(probs).sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("tokens", [slow(1), 5, slow(256), 300, slow(613)])
def test_key_mass_is_the_column_sums(tokens):
    """Compared with the whole matrix of probabilities, for lengths beyond the size of a tile and with padding."""
    length, scale = max(1, tokens - 3), TINY.attention_scale
    q, k = (normal(1, tokens, heads, TINY.head_dim, seed=heads) for heads in (TINY.q_heads, TINY.kv_heads))
    mass = jax.jit(key_mass, static_argnums=4)(q, k, causal(q, k, k, scale)[1], np.array([length]), scale)
    mass, q, k = np.asarray(mass), wide(q)[0], wide(k)[0]
    want = np.zeros((TINY.kv_heads, tokens))
    for head in range(TINY.q_heads):
        logits = q[:, head] @ k[:, head // TINY.group].T * TINY.attention_scale
        logits[np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        want[head // TINY.group] += (probs / probs.sum(axis=1, keepdims=True))[:length].sum(axis=0)
    np.testing.assert_allclose(mass[0], want, rtol=1e-4, atol=1e-5)
    assert mass[0].sum() == pytest.approx(length * TINY.q_heads, rel=1e-5)
