"""A layer of ShadowKV after a random prompt, and steps after it. Each operation of the policy is one program."""

import dataclasses
from typing import Any

import jax
import numpy as np
from cases import TINY
from codec_calls import run
from random_arrays import array

from jshadow.cache.records import LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import cache_specs
from jshadow.policies import Policy

BATCH, HEADS, GROUP, DIM, CONTEXT = 2, 2, 3, 16, 157
CONFIG = dataclasses.replace(TINY, num_layers=1, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=DIM)


def layer_of(policy: Policy, dtype: str, scale: Any = 1.0) -> tuple[CacheSpec, LayerState]:
    """The spec of a resident layer, and its state after a random prompt. Keys after RoPE are multiplied by `scale`."""
    capacity = CONTEXT + 64
    spec = cache_specs(CONFIG, policy.resolve(CONFIG, capacity), BATCH, capacity, CONTEXT, dtype, "resident")[0]
    rng, shape = np.random.default_rng(0), (BATCH, CONTEXT, HEADS, DIM)
    k, v = (rng.standard_normal(shape) for _ in range(2))
    positions, lengths = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), shape[:2]), np.full(BATCH, CONTEXT)
    tail = spec.policy.reads.last_queries
    queries = array(rng.standard_normal((BATCH, tail, HEADS * GROUP, DIM)), dtype) if tail else None
    prompt = PromptKV(array(k, dtype), array(k * scale, dtype), array(v, dtype), array(lengths), positions, queries)
    return spec, jax.tree.map(np.asarray, run.compress(spec.policy, spec, prompt))


def step_of(queries: int, dtype: str) -> StepKV:
    """Random tokens after the prompt. In the second row the last of several is not valid."""
    rng = np.random.default_rng(queries)
    q, k, v = (
        array(rng.standard_normal((BATCH, queries, heads, DIM)), dtype) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    positions = np.broadcast_to(np.arange(CONTEXT, CONTEXT + queries, dtype=np.int32), (BATCH, queries))
    inverse = np.asarray(inverse_frequencies(CONFIG.rope, DIM), np.float32)
    angles, valid = positions[..., None] * inverse, np.arange(queries) < np.array([[queries], [max(1, queries - 1)]])
    lengths = np.full(BATCH, CONTEXT, np.int32)
    return StepKV(q, q, k, k, v, positions, valid, lengths, inverse, np.cos(angles), np.sin(angles))


def _best(spec: CacheSpec, state: LayerState, step: StepKV, count: int) -> Any:
    return spec.policy.finalists(spec, state, step, count).best(count)


def _scores(spec: CacheSpec, state: LayerState, step: StepKV) -> Any:
    return spec.policy.scores(spec, state, step)


def _keys(spec: CacheSpec, state: LayerState, step: StepKV, ids: Any) -> Any:
    return spec.policy.rebuild(spec, state, step).keys(ids)


best = jax.jit(_best, static_argnums=(0, 3))
scores = jax.jit(_scores, static_argnums=0)
keys = jax.jit(_keys, static_argnums=0)
