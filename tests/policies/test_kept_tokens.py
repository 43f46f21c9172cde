"""TOVA, KeyDiff and ExpectedAttention keep the tokens that a NumPy oracle keeps, on random ragged batches."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY
from few import one_of, pairwise, quick

from jshadow.cache.records import PromptKV
from jshadow.errors import ConfigError
from jshadow.models.config import RopeConfig
from jshadow.planner.bytes import cache_specs
from jshadow.policies import TOVA, ExpectedAttention, KeyDiff, Pyramid
from jshadow.policies.expected_attention import BLOCK

PARTIAL = RopeConfig(theta=100.0, rotary_share=0.5, attention_factor=1.3)
MODELS = {
    "group2": dataclasses.replace(TINY, rope=RopeConfig(theta=50.0)),
    "group1": dataclasses.replace(TINY, q_heads=3, kv_heads=3, head_dim=6),
    "group5": dataclasses.replace(TINY, q_heads=5, kv_heads=1, head_dim=8, rope=PARTIAL),
}
# Rows of fewer tokens than the sinks, of one block, of a block and a part, and of many tokens of padding.
SIZES = {"short": (9, (9, 3, 1)), "one": (61, (61, 40, 7)), "blocks": (BLOCK + 77, (BLOCK + 77, BLOCK, 130))}
POLICIES = {
    "tova few": TOVA(kept=6),
    "tova many": TOVA(kept=33),
    "keydiff few": KeyDiff(kept=6),
    "keydiff many": KeyDiff(kept=35),
    "expected few": ExpectedAttention(kept=6, sinks=4, future=5),
    "expected many": ExpectedAttention(kept=37, sinks=2, future=64, epsilon=0.05),
    "expected sinks": ExpectedAttention(kept=3, sinks=5, future=1),
}


def turn(config, position):
    """The matrix by which RoPE multiplies a query or key, without its factor, float64 [d, d]."""
    rope, width = config.rope, config.head_dim
    rotated = int(width * rope.rotary_share)
    half, matrix = rotated // 2, np.eye(width)
    for pair in range(half):
        angle = position * rope.theta ** (-2 * pair / rotated)
        matrix[pair, pair] = matrix[pair + half, pair + half] = np.cos(angle)
        matrix[pair, pair + half], matrix[pair + half, pair] = -np.sin(angle), np.sin(angle)
    return matrix


def query_turn(config, position):
    """The same for queries, whose rotated columns have both factors."""
    factor = np.ones(config.head_dim)
    factor[: int(config.head_dim * config.rope.rotary_share)] = config.rope.attention_factor**2
    return turn(config, position) * factor[:, None]


def prompt_of(config, size, dtype, seed):
    """A random ragged batch. Keys and values of padding are zeros; its queries are not."""
    tokens, lengths = SIZES[size]
    rng, rows = np.random.default_rng(seed), len(lengths)
    shape = (rows, tokens)
    bias = rng.standard_normal((config.q_heads, config.head_dim))
    q_pre = rng.standard_normal((*shape, config.q_heads, config.head_dim)) + bias
    turns = np.stack([query_turn(config, position) for position in range(tokens)])
    q = np.einsum("sde,bshe->bshd", turns, q_pre).astype(dtype)
    real = (np.arange(tokens) < np.array(lengths)[:, None])[..., None, None]
    k, v = (
        np.where(real, rng.standard_normal((*shape, config.kv_heads, config.head_dim)), 0).astype(dtype)
        for _ in range(2)
    )
    last = np.stack([q[row, count - 1 : count] for row, count in enumerate(lengths)])
    where, lse = np.broadcast_to(np.arange(tokens), shape), np.zeros((rows, config.q_heads, tokens), np.float32)
    return PromptKV(k, k, v, np.array(lengths, np.int32), where, last, q, lse)


def softmax(x):
    """Along the last axis."""
    x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def scores_of(policy, config, k, v, q):
    """Scores of a row's tokens [h_kv, n] from its keys, values and queries, float64 [n, h, d]; inf: always kept."""
    tokens, heads, width = k.shape
    group, scale = config.q_heads // heads, width**-0.5
    if isinstance(policy, TOVA):
        given = [softmax(k[:, head // group] @ q[-1, head] * scale) for head in range(config.q_heads)]
        scores = np.tile(np.mean(given, axis=0), (heads, 1))
        scores[:, -1] = np.inf
        return scores
    if isinstance(policy, KeyDiff):
        unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
        mean = unit.mean(axis=0)
        return -np.stack([unit[:, head] @ mean[head] for head in range(heads)])
    scores = np.full((heads, tokens), np.inf)
    sinks = policy.sinks
    if tokens <= sinks:
        return scores
    back = [np.linalg.inv(query_turn(config, position)) for position in range(sinks, tokens)]
    ahead = np.mean([query_turn(config, tokens + i) for i in range(policy.future)], axis=0)
    for head in range(heads):
        shares = []
        for one in range(head * group, (head + 1) * group):
            before = np.stack([back[i] @ q[sinks + i, one] for i in range(tokens - sinks)])
            mean, covariance = ahead @ before.mean(axis=0), ahead @ np.cov(before.T, bias=True) @ ahead.T
            keys = k[sinks:, head]
            shares.append(softmax([key @ mean * scale + key @ covariance @ key * scale**2 / 2 for key in keys]))
        norms = np.linalg.norm(v[sinks:, head], axis=-1)
        scores[head, sinks:] = (np.mean(shares, axis=0) + policy.epsilon) * norms
    return scores


def kept_of(scores, count):
    """Positions of the highest scores, of equal ones the lower, in rising order."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


@functools.cache
def compressed(policy, config, capacity, dtype, rows):
    """The compiled `compress` and the spec of a layer."""
    policy = policy.resolve(config, capacity)
    spec = cache_specs(config, policy, rows, capacity, 1, dtype, "resident")[0]
    return jax.jit(lambda prompt: policy.compress(spec, policy.init(spec), prompt)[0]), policy


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    one_of(7, pairwise(POLICIES, SIZES, ["float32", "bfloat16"])),
)
def test_the_kept_tokens_are_the_oracle_s(name, size, dtype):
    tokens, lengths = SIZES[size]
    for seed, config in enumerate(MODELS.values()):
        prompt = prompt_of(config, size, dtype, seed)
        compress, policy = compressed(POLICIES[name], config, tokens, dtype, len(lengths))
        frozen = jax.tree.map(np.asarray, compress(prompt).frozen)
        k, v, q, last = (x.astype(np.float64) for x in (prompt.k_post, prompt.v, prompt.q_post, prompt.q_tail))
        for row, count in enumerate(lengths):
            np.testing.assert_array_equal(q[row, count - 1], last[row, 0])
            scores = scores_of(policy, config, k[row, :count], v[row, :count], q[row, :count])
            kept = min(policy.kept, count)
            assert int(frozen.count[row]) == kept
            for head in range(config.kv_heads):
                want = kept_of(scores[head], kept)
                for got, every in ((frozen.kept.k, prompt.k_post), (frozen.kept.v, prompt.v)):
                    np.testing.assert_array_equal(got[row, head, :kept], every[row, want, head])


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(
        [("expected many", "bfloat16")],
        itertools.product(["tova many", "keydiff many", "expected many"], ["float32", "bfloat16"]),
    ),
)
def test_the_compiled_compression_keeps_to_the_bound(name, dtype):
    """What XLA reserves beyond the keys and values: its temporaries and the queries."""
    config = dataclasses.replace(TINY, q_heads=9, kv_heads=3, head_dim=64)
    tokens = 6 * BLOCK + 5
    policy = POLICIES[name].resolve(config, tokens)
    spec = cache_specs(config, policy, 1, tokens, tokens, dtype, "resident")[0]

    def rows(count, heads):
        return jax.ShapeDtypeStruct((1, count, heads, config.head_dim), dtype)

    every, reads = rows(tokens, 3), policy.reads
    prompt = PromptKV(
        *(every, every, every, jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, tokens), jnp.int32)),
        q_tail=rows(reads.last_queries, 9) if reads.last_queries else None,
        q_post=rows(tokens, 9) if reads.all_queries else None,
        lse=jax.ShapeDtypeStruct((1, 9, tokens), jnp.float32) if reads.all_queries else None,
    )
    queries = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((prompt.q_tail, prompt.q_post, prompt.lse))
    )
    program = jax.jit(lambda prompt: policy.compress(spec, policy.init(spec), prompt)[0]).lower(prompt).compile()
    assert program.memory_analysis().temp_size_in_bytes + queries <= policy.compress_bytes(spec, tokens)


@pytest.mark.parametrize("name", ["tova few", "keydiff few", "expected few"])
def test_padding_changes_nothing(name):
    """Beyond a block, so that the last block begins elsewhere."""
    config, (tokens, lengths) = MODELS["group2"], SIZES["one"]
    prompt = prompt_of(config, "one", "float32", 3)
    wide = {}
    for field in ("k_pre", "k_post", "v", "q_post"):
        x = getattr(prompt, field)
        wide[field] = np.pad(x, ((0, 0), (0, BLOCK), (0, 0), (0, 0)), constant_values=7 if field == "q_post" else 0)
    wide["positions"] = np.broadcast_to(np.arange(tokens + BLOCK), (len(lengths), tokens + BLOCK))
    wide["lse"] = np.pad(prompt.lse, ((0, 0), (0, 0), (0, BLOCK)))
    compress, _ = compressed(POLICIES[name], config, tokens, "float32", len(lengths))
    first, second = (compress(one).frozen for one in (prompt, prompt.replace(**wide)))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_heads_of_tova_keep_the_same_tokens():
    """And heads of the others do not."""
    config, (tokens, lengths) = MODELS["group1"], SIZES["one"]
    prompt = prompt_of(config, "one", "float32", 5)
    every = prompt.k_post[0].swapaxes(0, 1)
    for name, same in (("tova few", True), ("keydiff few", False), ("expected few", False)):
        compress, _ = compressed(POLICIES[name], config, tokens, "float32", len(lengths))
        keys = np.asarray(compress(prompt).frozen.kept.k)[0]
        found = (keys[:, :, None] == every[:, None]).all(axis=-1).argmax(axis=-1)
        assert (len(set(map(tuple, found.tolist()))) == 1) is same


SETTINGS = {
    "tova.kept must be an integer at least 1, got 0": TOVA(kept=0),
    "keydiff.kept must be an integer at least 1, got True": KeyDiff(kept=True),
    "expected_attention.kept must be an integer at least 1, got 2.0": ExpectedAttention(kept=2.0),
    "expected_attention.sinks must be an integer at least 0, got -1": ExpectedAttention(sinks=-1),
    "expected_attention.future must be an integer in [1, 65536], got 0": ExpectedAttention(future=0),
    "expected_attention.epsilon must be a finite number of at least 0, got -0.1": ExpectedAttention(epsilon=-0.1),
}


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_are_checked(message):
    with pytest.raises(ConfigError) as raised:
        SETTINGS[message].resolve(TINY, 96)
    assert str(raised.value) == message


def test_a_pyramid_may_leave_fewer_tokens_than_sinks():
    layers = Pyramid(ExpectedAttention(kept=4, sinks=4), steepness=4.0).resolve(TINY, 96)
    assert [layers.for_layer(layer, TINY).kept for layer in range(3)] == [7, 4, 1]
