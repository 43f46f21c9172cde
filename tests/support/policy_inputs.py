"""What a policy is tested on alone: a layer's spec, a random prompt, a deep model, Llama-3.1-8B's shape."""

import dataclasses
import functools

import numpy as np
from cases import TINY

from jshadow.cache.records import PromptKV
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import cache_specs
from jshadow.policies import Policy

DEEP = dataclasses.replace(TINY, num_layers=8)


@functools.cache
def llama():
    """Llama-3.1-8B's shape."""
    return dataclasses.replace(
        TINY,
        num_layers=32,
        model_dim=4096,
        ffn_dim=14336,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        context=2**20,
    )


def spec_of(policy: Policy, config: ModelConfig = TINY, capacity: int = 96, prompt: int = 64):
    """The spec of the last layer."""
    return cache_specs(config, policy.resolve(config, capacity), 1, capacity, prompt, "float32", "resident")[-1]


def prompt_of(config: ModelConfig, tokens: int, seed: int = 0, tail: int = 0) -> PromptKV:
    """Random keys, values and queries of one row."""
    rng = np.random.default_rng(seed)

    def rows(heads: int) -> np.ndarray:
        return np.float32(rng.standard_normal((1, tokens, heads, config.head_dim)))

    q, k, v = rows(config.q_heads), rows(config.kv_heads), rows(config.kv_heads)
    groups = np.repeat(k[0], config.group, axis=1)
    logits = np.einsum("thd,shd->hts", q[0], groups, dtype=np.float64) * config.attention_scale
    lse = np.log(np.where(np.tril(np.ones((tokens, tokens), bool)), np.exp(logits), 0).sum(axis=2))
    at = np.arange(tokens, dtype=np.int32)[None]
    tails = q[:, tokens - tail :] if tail else None
    return PromptKV(k, k, v, np.array([tokens], np.int32), at, tails, q, np.float32(lse)[None])
