"""Ada-KV keeps the tokens that a NumPy oracle keeps, and attends to exactly these, on random ragged batches."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from cases import TINY
from few import quick

from jshadow.cache.records import PromptKV, StepKV
from jshadow.errors import ConfigError
from jshadow.planner.bytes import cache_specs
from jshadow.policies import AdaKV
from jshadow.policies.head_budgets import BLOCK

MODELS = {
    "group2": TINY,
    "group1": dataclasses.replace(TINY, q_heads=5, kv_heads=5, head_dim=6),
    "group5": dataclasses.replace(TINY, q_heads=5, kv_heads=1, head_dim=8),
}
LENGTHS = (83, 40, 7, 1)
POLICIES = {
    "few": AdaKV(kept=3, scores="keydiff"),
    "blocks": AdaKV(kept=33, scores="keydiff", safeguard=0.5),
    "not safe": AdaKV(kept=21, scores="keydiff", safeguard=0.0),
    "equal": AdaKV(kept=16, scores="keydiff", safeguard=1.0),
    "snapkv scores": AdaKV(kept=24),
    "expected": AdaKV(kept=20, scores="expected_attention"),
    "all": AdaKV(kept=90),
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


def prompt_of(config, dtype, seed):
    """A random ragged batch."""
    rng, rows, tokens = np.random.default_rng(seed), len(LENGTHS), max(LENGTHS)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    k, v = (normal(rows, tokens, config.kv_heads, config.head_dim) for _ in range(2))
    q = normal(rows, tokens, config.q_heads, config.head_dim)
    lengths, where = np.array(LENGTHS, np.int32), np.broadcast_to(np.arange(tokens), (rows, tokens))
    return PromptKV(k, k, v, lengths, where, q, q, np.zeros((rows, config.q_heads, tokens), np.float32))


def with_tail(prompt, count):
    """The prompt with the queries of each row's last `count` tokens, padded in front."""
    if not count:
        return prompt.replace(q_tail=None)
    rows = [
        np.pad(prompt.q_post[row, max(0, n - count) : n], ((max(0, count - n), 0), (0, 0), (0, 0)))
        for row, n in enumerate(LENGTHS)
    ]
    return prompt.replace(q_tail=np.stack(rows))


def chosen_by_oracle(scores, reserved, kept, safeguard):
    """The kept tokens of one row as a set of (head, position), from scores [h, n]."""
    heads, count = scores.shape
    budget = min(kept, count)
    scores = scores.astype(np.float64).copy()
    scores[:, count - min(reserved, budget) :] = np.inf
    safe = max(1, int(budget * safeguard)) if safeguard else 0
    for head in range(heads):
        for position in np.argsort(-scores[head], kind="stable")[:safe]:
            scores[head, position] = np.inf
    order = np.argsort(-scores.reshape(-1), kind="stable")[: heads * budget]
    return {(int(at) // count, int(at) % count) for at in order}


def blocks_of(frozen, row):
    """The kept keys and values of one row by head, [n, d] each, from the blocks."""
    found = {}
    for owner, held, k, v in zip(
        *(np.asarray(x[row]) for x in (frozen.owner, frozen.held, frozen.kept.k, frozen.kept.v)), strict=True
    ):
        if held:
            found.setdefault(int(owner), []).append((k[:held], v[:held]))
    return {
        head: tuple(np.concatenate([np.float64(part[i]) for part in parts]) for i in range(2))
        for head, parts in found.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def compressed(spec, prompt):
    """The state after a prompt, and the scores of its tokens."""
    policy = spec.policy
    return policy.compress(spec, policy.init(spec), prompt)[0], policy.score(spec, prompt)


@functools.partial(jax.jit, static_argnums=0)
def attended(spec, state, step):
    """The result of a turn."""
    state, _ = spec.policy.append(spec, state, step)
    return spec.policy.attend(spec, state, step, None)[0]


def layer(config, policy, dtype, seed):
    """The spec of a layer, a prompt, the state after it, and the scores, in NumPy."""
    prompt, capacity = prompt_of(config, dtype, seed), max(LENGTHS) + 9
    policy = policy.resolve(config, capacity)
    spec = cache_specs(config, policy, len(LENGTHS), capacity, 1, dtype, "resident")[0]
    prompt = with_tail(prompt, policy.reads.last_queries)
    return spec, prompt, *jax.tree.map(np.asarray, compressed(spec, prompt))


@pytest.mark.parametrize(
    ("name", "dtype"), quick([("snapkv scores", "float32")], itertools.product(POLICIES, ["float32", "bfloat16"]))
)
def test_the_kept_tokens_and_their_attention_are_the_oracle_s(name, dtype):
    for seed, config in enumerate(MODELS.values()):
        spec, prompt, state, (scores, reserved) = layer(config, POLICIES[name], dtype, seed)
        policy, rng = spec.policy, np.random.default_rng(seed)
        q, k, v = (
            rng.standard_normal((len(LENGTHS), 2, heads, config.head_dim)).astype(dtype)
            for heads in (config.q_heads, config.kv_heads, config.kv_heads)
        )
        positions = prompt.lengths[:, None] + np.arange(2, dtype=np.int32)
        rows = {"q_pre": q, "q_post": q, "k_pre": k, "k_post": k, "v": v, "positions": positions}
        angles = dict.fromkeys(("inverse", "cos", "sin"), np.zeros(1, np.float32))
        step = StepKV(**rows, valid=np.ones((len(LENGTHS), 2), bool), lengths=prompt.lengths, **angles)
        out = np.asarray(attended(spec, state, step))
        for row, count in enumerate(LENGTHS):
            want = chosen_by_oracle(scores[row, :, :count], int(reserved[row]), policy.kept, policy.safeguard)
            held = blocks_of(state.frozen, row)
            assert sum(len(keys) for keys, _ in held.values()) == len(want) == config.kv_heads * min(policy.kept, count)
            for head in range(config.kv_heads):
                at = sorted(position for one, position in want if one == head)
                every = [np.float64(x[row, at, head]) for x in (prompt.k_post, prompt.v)]
                if at:
                    for got, right in zip(held[head], every, strict=True):
                        np.testing.assert_array_equal(got, right)
                group = config.q_heads // config.kv_heads
                for query, one in np.ndindex(2, group):
                    new = [np.float64(x[row, : query + 1, head]) for x in (k, v)]
                    keys, values = (np.concatenate(pair) for pair in zip(every, new, strict=True))
                    logits = keys @ np.float64(q[row, query, head * group + one]) * spec.scale
                    shares = np.exp(logits - logits.max())
                    np.testing.assert_allclose(
                        np.float64(out[row, query, head * group + one]),
                        shares @ values / shares.sum(),
                        atol=TOLERANCE[dtype],
                        rtol=TOLERANCE[dtype],
                    )


def test_heads_keep_different_numbers_in_the_memory_of_the_budget():
    config, kept = MODELS["group1"], 32
    frozen = layer(config, AdaKV(kept=kept, scores="keydiff"), "float32", 0)[2].frozen
    numbers = [len(keys) for keys, _ in blocks_of(frozen, 0).values()]
    assert sum(numbers) == config.kv_heads * kept
    assert len(set(numbers)) > 1
    assert min(numbers) >= int(0.2 * kept)
    assert frozen.kept.k.shape[1] * BLOCK <= config.kv_heads * (kept + BLOCK)


SETTINGS = {
    "adakv.kept must be an integer at least 1, got 0": AdaKV(kept=0),
    "adakv.safeguard must be at most 1, got 1.5": AdaKV(safeguard=1.5),
    "adakv.safeguard must be a finite number of at least 0, got -1": AdaKV(safeguard=-1),
    "adakv.scores must be one of ('snapkv', 'expected_attention', 'keydiff', 'kvzip'), got 'h2o'": AdaKV(scores="h2o"),
}


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_are_checked(message):
    with pytest.raises(ConfigError) as raised:
        SETTINGS[message].resolve(TINY, 96)
    assert str(raised.value) == message
