"""Attention sinks: every function of attention, beside NumPy. Each query head has a logit more, which has no value."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few import quick
from prefill_cases import PROMPTS, prefill_inputs, prefill_truth
from random_arrays import normal, wide

from jshadow.cache.records import PromptKV, StepKV
from jshadow.engine.sparse_prefill import AShape
from jshadow.evaluation.laws.law import TINY
from jshadow.ops import attention
from jshadow.ops.attention import Piece, Stream
from jshadow.planner.bytes import cache_specs
from jshadow.policies import TOVA, AdaKV
from jshadow.policies.infllm import InfLLMPrefill
from jshadow.policies.prefill_attention import PrefillPiece
from pallas_kernels import sparse_attention, sparse_prefill

ROWS, HEADS, GROUP, DIM, SCALE = 2, 2, 3, 16, 0.3
SINKS = np.array([-40.0, -1.0, 0.5, 2.0, 4.0, 60.0], np.float32)  # from nothing to nearly all of a softmax
TOKENS, QUERIES = 47, 5
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2}


def expected(q, k, v, seen):
    """Attention [B, T, h_q, d] and log-sum-exps [B, T, h_q] of queries [B, T, h_q, d] over rows [B, h_kv, N, d].

    `seen` is bool [B, T, N].
    """
    q, k, v = wide(q), *(np.repeat(wide(x), GROUP, axis=1) for x in (k, v))
    scores = np.einsum("bthd,bhnd->bthn", q, k) * SCALE
    scores = np.where(seen[:, :, None], scores, -np.inf)
    scores = np.concatenate([scores, np.broadcast_to(SINKS[:, None], (*scores.shape[:3], 1))], axis=3)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bthn,bhnd->bthd", weights[..., :-1] / total, v)
    return out, (top + np.log(total))[..., 0]


def inputs(dtype):
    """Queries, two places with rows, what each query sees of them, and rows of each query's own."""
    rng = np.random.default_rng(3)
    shapes = {"q": (ROWS, QUERIES, HEADS * GROUP, DIM), "own": (ROWS, HEADS, QUERIES, 4, DIM)}
    first, second = (ROWS, HEADS, 67, DIM), (ROWS, HEADS, 9, DIM)
    given = {
        "q": normal(*shapes["q"], seed=1, dtype=dtype),
        "k": [normal(*shape, seed=seed, dtype=dtype) for seed, shape in ((2, first), (3, second))],
        "v": [normal(*shape, seed=seed, dtype=dtype) for seed, shape in ((4, first), (5, second))],
        "own": [normal(*shapes["own"], seed=seed, dtype=dtype) for seed in (6, 7)],
        "counts": rng.integers(0, 68, (ROWS, 1, QUERIES, 1), np.int32),
        "flags": rng.random((ROWS, 1, QUERIES, 9)) < 0.5,
        "mine": rng.random((ROWS, HEADS, QUERIES, 4)) < 0.5,
    }
    given["counts"][0, 0, 1], given["flags"][0, 0, 1], given["mine"][0, :, 1] = 0, False, False  # it sees nothing
    return given


@jax.jit
def steps(given, sinks):
    """The attention of a few queries, as steps and turns compute it."""
    q, (k, k_more), (v, v_more) = given["q"], given["k"], given["v"]
    prefix, flagged = Piece(k, v, given["counts"]), Piece(k_more, v_more, given["flags"])
    rows = [(piece.k, piece.v, piece.valid) for piece in (prefix, flagged)]
    before = attention.attend_prefixes(q, rows[:1], SCALE, 32, sinks)
    stream = Stream(lambda at: (k[:, :, :34], v[:, :, :34]), jnp.int32(1), jnp.minimum(given["counts"], 34))
    scores = attention.masked_scores(attention.group_queries(q, HEADS), flagged, SCALE)
    return {
        "attend": attention.attend(q, [prefix, flagged], SCALE, sinks),
        "kernel": sparse_attention(q, rows, scale=SCALE, sinks=sinks, implementation="interpret"),
        "prefixes": before[0],
        "prefixes lse": before[1],
        "stream": attention.attend_stream(q, stream, [(k_more, v_more, jnp.full((1, 1, 1, 1), 4))], SCALE, sinks),
        "own rows": attention.add_rows(q, (*given["own"], given["mine"]), SCALE, before),
        "probabilities": attention.attention_probs(q, flagged, SCALE, sinks),
        "lse": attention.lse_with(scores, sinks),
    }


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_step_starts_its_softmax_with_the_sink(dtype):
    given = inputs(dtype)
    got = {name: wide(x) for name, x in steps(given, SINKS).items()}
    q, tolerance = given["q"], TOLERANCES[dtype]
    counts, flags = np.asarray(given["counts"])[:, 0], np.asarray(given["flags"])[:, 0]
    prefix = np.arange(67) < counts
    both = [np.concatenate([np.asarray(x, np.float64) for x in given[name]], axis=2) for name in "kv"]
    want, _ = expected(q, *both, np.concatenate([prefix, flags], axis=2))
    for name in ("attend", "kernel"):
        np.testing.assert_allclose(got[name], want, atol=tolerance, err_msg=name)
    assert not got["attend"][0, 1].any()
    want, lse = expected(q, given["k"][0], given["v"][0], prefix)
    np.testing.assert_allclose(got["prefixes"], want, atol=tolerance)
    np.testing.assert_allclose(got["prefixes lse"], lse, rtol=1e-5, atol=1e-2 if dtype == "bfloat16" else 1e-5)
    np.testing.assert_allclose(got["prefixes lse"][0, 1], SINKS)
    seen = np.concatenate([prefix[:, :, :34], np.broadcast_to(np.arange(9) < 4, flags.shape)], axis=2)
    streamed = (np.concatenate([wide(one)[:, :, :34], wide(two)], axis=2) for one, two in (given["k"], given["v"]))
    want, _ = expected(q, *streamed, seen)
    np.testing.assert_allclose(got["stream"], want, atol=tolerance)
    for t in range(QUERIES):
        shared = given["k"][0], given["v"][0]
        pairs = zip(shared, given["own"], strict=True)
        rows = [np.concatenate([wide(x), wide(own)[:, :, t]], axis=2) for x, own in pairs]
        for head in range(HEADS):
            seen = np.concatenate([prefix[:, t : t + 1], given["mine"][:, head, t : t + 1]], axis=2)
            mine = slice(head * GROUP, (head + 1) * GROUP)
            want = expected(q[:, t : t + 1], *rows, seen)[0][:, 0, mine]
            np.testing.assert_allclose(got["own rows"][:, t, mine], want, atol=tolerance)
    _, lse = expected(q, given["k"][1], given["v"][1], flags)
    np.testing.assert_allclose(got["lse"].transpose(0, 3, 1, 2).reshape(lse.shape), lse, rtol=1e-5, atol=1e-2)
    whole = got["probabilities"].sum(-1).transpose(0, 3, 1, 2).reshape(lse.shape)
    np.testing.assert_allclose(whole, -np.expm1(SINKS - lse), atol=1e-2 if dtype == "bfloat16" else 1e-5)


LENGTHS = np.array([TOKENS, 20], np.int32)
CONFIG = dataclasses.replace(TINY, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM, query_scalar=SCALE**-2)


@jax.jit
def prompts(q, k, v, sinks):
    """The attention of a prompt, as every prefill computes it."""
    kind = CONFIG.attention_kind(0)
    rows, keys, values = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    positions = jnp.broadcast_to(jnp.arange(TOKENS + 1, dtype=jnp.int32), (ROWS, TOKENS + 1))
    prompt = PromptKV(keys, keys, values, jnp.asarray(LENGTHS), positions)
    piece = PrefillPiece(rows, rows, jnp.int32(0), jnp.zeros(DIM // 2), sinks)  # angles of 0: nothing is rotated

    def own(method):
        aux = method.begin(CONFIG, kind, prompt, None, None)
        return method.attend(CONFIG, kind, piece, prompt, aux)[0][:, :TOKENS]

    def after_the_prompt(policy):
        """Two more tokens, which have the keys and values of the first ones."""
        spec = cache_specs(CONFIG, policy.resolve(CONFIG, 64), ROWS, 64, min(LENGTHS), q.dtype.name, "resident")[0]
        tail = jnp.take_along_axis(rows, prompt.lengths[:, None, None, None] - 1, axis=1)
        given = prompt.replace(q_tail=jnp.repeat(tail, policy.reads.last_queries, axis=1), sinks=sinks)
        state, _ = policy.compress(spec, policy.init(spec), given)
        places, valid, none = prompt.lengths[:, None] + jnp.arange(2), jnp.ones((ROWS, 2), bool), jnp.zeros(0)
        new = [x[:, :2] for x in (q, q, k, k, v)]
        step = StepKV(*new, places, valid, prompt.lengths, none, none, none, sinks=sinks)
        state, _ = policy.append(spec, state, step)
        return policy.attend(spec, state, step, None)[0], policy.score(spec, given)[0]

    infllm = dict(sinks=2, count=1, unit=4, representatives=2, multiple=8)
    pieces = attention.causal_attention(q[:, 7:], k, v, SCALE, 7, None, sinks)
    lse = attention.causal_attention(q, k, v, SCALE, sinks=sinks)[1]
    return {
        "pieces": pieces,
        "mass": attention.key_mass(q, k, lse, prompt.lengths, SCALE),
        "adakv": after_the_prompt(AdaKV(kept=64)),
        "tova": after_the_prompt(TOVA(kept=64)),
        "window": attention.causal_attention(q, k, v, SCALE, 0, 6, sinks),
        "whole": attention.whole_with_sinks(q, k, v, prompt.lengths, SCALE, "xla", sinks),
        "infllm": own(InfLLMPrefill(window=64, **infllm)),
        "a shape": own(AShape(block=16, initial=3, local=6)),
    }


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_prompt_starts_its_softmax_with_the_sink(dtype):
    q = normal(ROWS, TOKENS, HEADS * GROUP, DIM, seed=1, dtype=dtype)
    k, v = (normal(ROWS, TOKENS, HEADS, DIM, seed=seed, dtype=dtype) for seed in (2, 3))
    got = prompts(q, k, v, SINKS)
    query, key = np.arange(TOKENS)[:, None], np.arange(TOKENS)
    causal = key <= query
    masks = {"whole": causal, "infllm": causal, "window": causal & (key > query - 6)}
    masks["a shape"] = causal & ((key > query - 6) | (key < 3))
    keys, values = (np.asarray(x).swapaxes(1, 2) for x in (k, v))
    for row, length in enumerate(LENGTHS):  # what stands after a row's last token has no meaning
        real = slice(0, length)
        for name, mask in masks.items():
            want, _ = expected(q, keys, values, np.broadcast_to(mask, (ROWS, TOKENS, TOKENS)))
            out = wide(got[name][0] if name == "window" else got[name])
            np.testing.assert_allclose(out[row, real], want[row, real], atol=TOLERANCES[dtype], err_msg=name)
    want, lse = expected(q, keys, values, np.broadcast_to(causal, (ROWS, TOKENS, TOKENS)))
    np.testing.assert_allclose(wide(got["pieces"][0]), want[:, 7:], atol=TOLERANCES[dtype])
    np.testing.assert_allclose(wide(got["pieces"][1]), lse[:, 7:].swapaxes(1, 2), rtol=1e-5, atol=1e-2)
    scores = np.einsum("bthd,bhnd->bthn", wide(q), np.repeat(wide(keys), GROUP, axis=1)) * SCALE
    shares = np.where(causal[:, None], np.exp(scores - lse[..., None]), 0)  # of each query's attention
    for row, length in enumerate(LENGTHS):
        mass = shares[row, :length].sum(axis=0).reshape(HEADS, GROUP, TOKENS).sum(axis=1)
        np.testing.assert_allclose(wide(got["mass"])[row], mass, atol=0.1 if dtype == "bfloat16" else 1e-4)
        last = shares[row, length - 1].mean(axis=0)
        np.testing.assert_allclose(wide(got["tova"][1])[row, 0, :TOKENS], last, atol=TOLERANCES[dtype])
        both = (np.concatenate([x[:, :, :length], x[:, :, :2]], axis=2)[row : row + 1] for x in (keys, values))
        seen = np.arange(length + 2) <= length + np.arange(2)[:, None]
        want, _ = expected(np.asarray(q)[row : row + 1, :2], *both, seen[None])
        for name in ("adakv", "tova"):
            np.testing.assert_allclose(wide(got[name][0])[row], want[0], atol=TOLERANCES[dtype], err_msg=name)


@pytest.mark.parametrize("implementation", quick(["interpret"], ["interpret", "xla"]))
def test_lists_of_keys_have_a_sink_too(implementation):
    """Some queries see no key, and padding sees nothing."""
    given = prefill_inputs(PROMPTS[1])
    sinks = np.linspace(-2, 3, given["q"].shape[2], dtype=np.float32)
    attend = functools.partial(sparse_prefill, scale=0.3, sinks=sinks, implementation=implementation)
    got = jax.jit(attend)(*(given[name] for name in ("q", "keys", "lists", "first")))
    np.testing.assert_allclose(wide(got), prefill_truth(**given, sinks=sinks), atol=2e-5)
