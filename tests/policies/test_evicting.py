"""The methods that drop tokens: what they keep, and what they attend to, is what a NumPy oracle says."""

import dataclasses
import functools

import jax
import numpy as np
import oracle
import pytest
from cases import TINY, model, random_tokens, run_steps
from codec_calls import run
from few import each_once, one_of, pairwise, quick
from oracle_maths import softmax
from random_arrays import array, normal, wide

from jshadow.cache.records import PromptKV, StepKV
from jshadow.engine import decode
from jshadow.models.config import RopeConfig
from jshadow.planner.bytes import cache_specs
from jshadow.policies import TOVA, AdaKV, ExpectedAttention, KeyDiff, StreamingLLM, eviction
from jshadow.policies.expected_attention import BLOCK, expected_logits


def test_streaming_llm_is_stable_far_beyond_its_window():
    """On a text of ten windows, with rebased positions, the logits stay equal to the oracle's."""
    policy, prompt, steps = StreamingLLM(sinks=2, window=10), random_tokens(1, 20, seed=16), random_tokens(100, seed=17)
    theirs = oracle.Oracle(model().weights, TINY, oracle.StreamingLLM(2, 10))
    theirs.prefill(prompt[0].tolist())
    want = np.stack([theirs.step(int(token)) for token in steps])
    _, state = decode.prefill(model(), prompt, [20], policy, capacity=128)
    got, state = run_steps(model(), state, steps[None])
    np.testing.assert_allclose(got[0], want, atol=1e-4)
    assert state.layers[0].live.cache.k.shape[2] == 12


PARTIAL = RopeConfig(theta=100.0, rotary_share=0.5, attention_factor=1.3)
MODELS = {
    "group2": dataclasses.replace(TINY, rope=RopeConfig(theta=50.0)),
    "group1": dataclasses.replace(TINY, q_heads=5, kv_heads=5, head_dim=6),
    "group5": dataclasses.replace(TINY, q_heads=5, kv_heads=1, head_dim=8, rope=PARTIAL),
}
# Rows of fewer tokens than the sinks, of one block, of a block and a part, and of many tokens of padding.
SIZES = {"short": (9, 3, 1), "one": (61, 40, 7), "blocks": (BLOCK + 77, BLOCK, 130)}
POLICIES = {
    "tova few": TOVA(kept=6),
    "tova many": TOVA(kept=33),
    "keydiff few": KeyDiff(kept=6),
    "keydiff many": KeyDiff(kept=35),
    "expected few": ExpectedAttention(kept=6, sinks=4, future=5),
    "expected many": ExpectedAttention(kept=37, sinks=2, future=64, epsilon=0.05),
    "expected sinks": ExpectedAttention(kept=3, sinks=5, future=1),
}


def test_expected_logits_are_those_of_gaussian_queries():
    """E exp(s q . k) of Gaussian queries is exp(s m . k + s^2 k . C k / 2)."""
    config = dataclasses.replace(TINY, q_heads=4, kv_heads=2, head_dim=6, rope=RopeConfig(theta=50.0))
    spec = cache_specs(config, POLICIES["expected few"], 2, 64, 1, "float32", "resident")[0]
    keys, mean, root = normal(2, 48, 2, 6), normal(2, 4, 6, seed=1), normal(2, 4, 6, 6, seed=2)
    covariance = array(np.asarray(root) @ np.asarray(root).swapaxes(2, 3))
    got = jax.jit(lambda *given: expected_logits(spec, PromptKV(None, given[0], None, None, None), *given[1:]))(
        keys, mean, covariance
    )
    each = np.repeat(np.asarray(keys, np.float64), 2, axis=2)  # of each query head
    want = spec.scale * np.einsum("bhd,bshd->bhs", mean, each)
    want += spec.scale**2 / 2 * np.einsum("bshd,bhde,bshe->bhs", each, covariance, each)
    np.testing.assert_allclose(np.asarray(got).reshape(2, 4, 48), want, rtol=1e-5, atol=1e-5)


def query_turn(config, position):
    """The matrix by which RoPE multiplies a query, with both factors on the rotated columns, float64 [d, d]."""
    rope, width = config.rope, config.head_dim
    rotated = int(width * rope.rotary_share)
    half, matrix = rotated // 2, np.eye(width)
    for pair in range(half):
        angle = position * rope.theta ** (-2 * pair / rotated)
        matrix[pair, pair] = matrix[pair + half, pair + half] = np.cos(angle)
        matrix[pair, pair + half], matrix[pair + half, pair] = -np.sin(angle), np.sin(angle)
    factor = np.ones(width)
    factor[:rotated] = rope.attention_factor**2
    return matrix * factor[:, None]


def ragged(config, lengths, dtype, seed, last=1):
    """A random ragged batch with the last queries of each row. Keys and values of padding are zeros, queries not."""
    rng, rows, tokens = np.random.default_rng(seed), len(lengths), max(lengths)
    q_pre = rng.standard_normal((rows, tokens, config.q_heads, config.head_dim))
    q_pre += rng.standard_normal((config.q_heads, config.head_dim))
    turns = np.stack([query_turn(config, position) for position in range(tokens)])
    q = np.einsum("sde,bshe->bshd", turns, q_pre).astype(dtype)
    real = (np.arange(tokens) < np.array(lengths)[:, None])[..., None, None]
    shape = (rows, tokens, config.kv_heads, config.head_dim)
    k, v = (np.where(real, rng.standard_normal(shape), 0).astype(dtype) for _ in range(2))
    before = [((max(0, last - n), 0), (0, 0), (0, 0)) for n in lengths]
    tails = [np.pad(row[max(0, n - last) : n], pad) for row, n, pad in zip(q, lengths, before, strict=True)]
    where, lse = np.broadcast_to(np.arange(tokens), shape[:2]), np.zeros((rows, config.q_heads, tokens), np.float32)
    return PromptKV(k, k, v, np.array(lengths, np.int32), where, np.stack(tails) if last else None, q, lse)


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
        return -np.einsum("nhd,hd->hn", unit, unit.mean(axis=0))
    scores, sinks = np.full((heads, tokens), np.inf), policy.sinks
    if tokens <= sinks:
        return scores
    back = [np.linalg.inv(query_turn(config, position)) for position in range(sinks, tokens)]
    ahead = np.mean([query_turn(config, tokens + i) for i in range(policy.future)], axis=0)
    for head in range(heads):
        shares = []
        for one in range(head * group, (head + 1) * group):
            before = np.stack([back[i] @ q[sinks + i, one] for i in range(tokens - sinks)])
            mean, covariance = ahead @ before.mean(axis=0), ahead @ np.cov(before.T, bias=True) @ ahead.T
            logits = [key @ mean * scale + key @ covariance @ key * scale**2 / 2 for key in k[sinks:, head]]
            shares.append(softmax(np.array(logits)))
        norms = np.linalg.norm(v[sinks:, head], axis=-1)
        scores[head, sinks:] = (np.mean(shares, axis=0) + policy.epsilon) * norms
    return scores


def layer_spec(policy, config, rows, tokens, dtype="float32"):
    """The spec of the first layer, with the resolved policy."""
    return cache_specs(config, policy.resolve(config, tokens), rows, tokens, 1, dtype, "resident")[0]


@pytest.mark.parametrize(
    ("name", "size", "dtype", "of"), one_of(4, each_once(POLICIES, SIZES, ["float32", "bfloat16"], MODELS))
)
def test_the_kept_tokens_are_the_oracle_s(name, size, dtype, of):
    lengths, config = SIZES[size], MODELS[of]
    prompt = ragged(config, lengths, dtype, config.kv_heads)
    spec = layer_spec(POLICIES[name], config, len(lengths), lengths[0], dtype)
    frozen = jax.tree.map(np.asarray, run.compress(spec.policy, spec, prompt).frozen)
    k, v, q = map(wide, (prompt.k_post, prompt.v, prompt.q_post))
    for row, count in enumerate(lengths):
        scores = scores_of(spec.policy, config, k[row, :count], v[row, :count], q[row, :count])
        kept = min(spec.policy.kept, count)
        assert int(frozen.count[row]) == kept
        for head, own in enumerate(scores):
            want = np.sort(np.argsort(-own, kind="stable")[:kept])
            for got, every in ((frozen.kept.k, prompt.k_post), (frozen.kept.v, prompt.v)):
                np.testing.assert_array_equal(got[row, head, :kept], every[row, want, head])


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(
        [("expected many", "bfloat16")],
        pairwise(["tova many", "keydiff many", "expected many"], ["float32", "bfloat16"]),
    ),
)
def test_the_compiled_compression_keeps_to_the_bound(name, dtype):
    """What XLA reserves beyond the keys and values: its temporaries and the queries."""
    config, tokens = dataclasses.replace(TINY, q_heads=9, kv_heads=3, head_dim=64), 6 * BLOCK + 5
    spec = layer_spec(POLICIES[name], config, 1, tokens, dtype)
    reads, shape = spec.policy.reads, jax.ShapeDtypeStruct

    def rows(count, heads):
        return shape((1, count, heads, config.head_dim), dtype)

    q_tail = rows(reads.last_queries, 9) if reads.last_queries else None
    q_post, lse = (rows(tokens, 9), shape((1, 9, tokens), "float32")) if reads.all_queries else (None, None)
    prompt = PromptKV(*[rows(tokens, 3)] * 3, shape((1,), "int32"), shape((1, tokens), "int32"), q_tail, q_post, lse)
    queries = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((q_tail, q_post, lse)))
    program = run.compress.lower(spec.policy, spec, prompt).compile()
    assert program.memory_analysis().temp_size_in_bytes + queries <= spec.policy.compress_bytes(spec, tokens)


@pytest.mark.parametrize("name", ["tova few", "keydiff few", "expected few"])
def test_padding_changes_nothing_and_all_heads_of_tova_keep_the_same_tokens(name):
    """Padding beyond a block, so that the last block begins elsewhere. Heads of the others keep other tokens."""
    config, lengths = MODELS["group2"], SIZES["one"]
    prompt, more = ragged(config, lengths, "float32", 3), ((0, 0), (0, BLOCK), (0, 0), (0, 0))
    padded = {name: np.pad(getattr(prompt, name), more) for name in ("k_pre", "k_post", "v")}
    padded["q_post"] = np.pad(prompt.q_post, more, constant_values=7)
    padded["positions"] = np.broadcast_to(np.arange(61 + BLOCK), (len(lengths), 61 + BLOCK))
    padded["lse"] = np.pad(prompt.lse, ((0, 0), (0, 0), (0, BLOCK)))
    spec = layer_spec(POLICIES[name], config, len(lengths), 61)
    first, second = (run.compress(spec.policy, spec, one).frozen for one in (prompt, prompt.replace(**padded)))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    keys, every = np.asarray(first.kept.k)[0], prompt.k_post[0].swapaxes(0, 1)
    found = (keys[:, :, None] == every[:, None]).all(axis=-1).argmax(axis=-1)
    assert (len(set(map(tuple, found.tolist()))) == 1) is (name == "tova few")


RAGGED = (83, 40, 7, 1)
BUDGETS = {
    "few": AdaKV(kept=3, scores="keydiff"),
    "snapkv scores": AdaKV(kept=24),
    "blocks": AdaKV(kept=33, scores="keydiff", safeguard=0.5),
    "not safe": AdaKV(kept=21, scores="keydiff", safeguard=0.0),
    "equal": AdaKV(kept=16, scores="keydiff", safeguard=1.0),
    "expected": AdaKV(kept=20, scores="expected_attention"),
    "all": AdaKV(kept=90),
}


def chosen_by_oracle(scores, reserved, kept, safeguard):
    """The kept tokens of one row as a set of (head, position), from scores [h, n]."""
    heads, count = scores.shape
    budget, scores = min(kept, count), wide(scores).copy()
    scores[:, count - min(reserved, budget) :] = np.inf
    safe = max(1, int(budget * safeguard)) if safeguard else 0
    for own in scores:
        own[np.argsort(-own, kind="stable")[:safe]] = np.inf
    order = np.argsort(-scores.reshape(-1), kind="stable")[: heads * budget]
    return {(int(at) // count, int(at) % count) for at in order}


def blocks_of(frozen, row):
    """The kept keys and values of one row by head, [n, d] each, from the blocks."""
    found = {}
    for owner, held, k, v in zip(
        *(x[row] for x in (frozen.owner, frozen.held, frozen.kept.k, frozen.kept.v)), strict=True
    ):
        if held:
            found.setdefault(int(owner), []).append((k[:held], v[:held]))
    return {head: [np.concatenate(rows) for rows in zip(*parts, strict=True)] for head, parts in found.items()}


@functools.partial(jax.jit, static_argnums=0)
def scored_and_attended(spec, prompt, step):
    """The state after a prompt, the scores of its tokens, and the result of a turn after it."""
    policy = spec.policy
    state = policy.compress(spec, policy.init(spec), prompt)[0]
    later, _ = policy.append(spec, state, step)
    return state.frozen, policy.score(spec, prompt), policy.attend(spec, later, step, None)[0]


@pytest.mark.parametrize(
    ("name", "dtype", "of"),
    quick([("snapkv scores", "bfloat16", "group1")], each_once(BUDGETS, ["float32", "bfloat16"], MODELS)),
)
def test_ada_kv_keeps_and_attends_to_the_tokens_of_the_oracle(name, dtype, of):
    """Heads of a layer keep different numbers of tokens, at least the safe ones, in the memory of the budget."""
    config, tolerance = MODELS[of], 2e-6 if dtype == "float32" else 2e-2
    spec = layer_spec(BUDGETS[name], config, len(RAGGED), max(RAGGED) + 9, dtype)
    policy, group, rng = spec.policy, config.group, np.random.default_rng(config.kv_heads)
    prompt = ragged(config, RAGGED, dtype, config.kv_heads, policy.reads.last_queries)
    q, k, v = (
        rng.standard_normal((len(RAGGED), 2, heads, config.head_dim)).astype(dtype)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    )
    positions, valid = prompt.lengths[:, None] + np.arange(2, dtype=np.int32), np.ones((len(RAGGED), 2), bool)
    step = StepKV(q, q, k, k, v, positions, valid, prompt.lengths, *[np.zeros(1, np.float32)] * 3)
    frozen, (scores, reserved), out = jax.tree.map(np.asarray, scored_and_attended(spec, prompt, step))
    for row, count in enumerate(RAGGED):
        budget = min(policy.kept, count)
        want = chosen_by_oracle(scores[row, :, :count], int(reserved[row]), policy.kept, policy.safeguard)
        held = blocks_of(frozen, row)
        numbers = [len(keys) for keys, _ in held.values()]
        assert sum(numbers) == len(want) == config.kv_heads * budget
        assert len(numbers) < config.kv_heads or min(numbers) >= int(policy.safeguard * budget)
        for head in range(config.kv_heads):
            at = sorted(position for one, position in want if one == head)
            every = [x[row, at, head] for x in (prompt.k_post, prompt.v)]
            if at:
                jax.tree.map(np.testing.assert_array_equal, held[head], every)
            for query, one in np.ndindex(2, group):
                keys, values = (
                    wide(np.concatenate([old, new[row, : query + 1, head]]))
                    for old, new in zip(every, (k, v), strict=True)
                )
                shares = softmax(keys @ wide(q[row, query, head * group + one]) * spec.scale)
                got = wide(out[row, query, head * group + one])
                np.testing.assert_allclose(got, shares @ values, atol=tolerance, rtol=tolerance)
    assert frozen.kept.k.shape[1] * eviction.BLOCK <= config.kv_heads * (policy.kept + eviction.BLOCK)
    if config.kv_heads == 5 and name == "snapkv scores":
        assert len({len(keys) for keys, _ in blocks_of(frozen, 0).values()}) > 1
