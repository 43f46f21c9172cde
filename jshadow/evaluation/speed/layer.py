"""The time of one decode step of one layer's attention. The state is a random prompt compressed by the policy."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache import offload
from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import HostTier, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine.prefill.layer import compress_layer
from jshadow.engine.step import AllLayers, step_layer
from jshadow.errors import ConfigError
from jshadow.evaluation.speed.timing import compiled, measure
from jshadow.models.config import ModelConfig
from jshadow.ops.rope import cos_sin, inverse_frequencies
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import Batch, fetch_here
from jshadow.policies import LayerCache, Policy
from jshadow.policies.capabilities import attention_of
from jshadow.policies.costs import costs_of, query_rows

LEFT = 64  # number of tokens that a cache can hold in addition to the prompt
QUERIES = 4  # number of different random queries


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention.

    Attributes:
        context: number of prompt tokens.
        batch: number of rows.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: width of a head.
        dtype: dtype of keys and values.

    Raises:
        ConfigError: a number is below 1, heads is not a multiple of kv_heads, or head_dim is odd.
    """

    context: int
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("context", "batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads={self.kv_heads}, got {self.heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, got {self.head_dim}")

    def config(self) -> ModelConfig:
        """Return the config of a model with one such layer. Only its attention ever runs."""
        return ModelConfig(
            model_type="llama",
            vocab_size=2,
            num_layers=1,
            model_dim=self.heads * self.head_dim,
            ffn_dim=1,
            q_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-5,
            context=self.context + LEFT,
        )


def random_prompt(shape: Shape, policy: LayerCache, seed: int = 0) -> PromptKV:
    """Return random keys and values [B, S, h_kv, d] of a prompt, and the random queries that a policy needs.

    The log-sum-exps are those of uniform attention. If the policy has its own prefill attention, `extra` is the initial
    value that its `begin` returns.
    """
    reads = policy.reads
    keys, made = prompt_arrays(shape, reads.all_queries, reads.last_queries, reads.second_pass, np.uint32(seed))
    prompt = PromptKV(k_pre=keys, k_post=keys, **made)
    attention, config = attention_of(policy), shape.config()
    extra = None if attention is None else attention.begin(config, config.attention_kind(0), prompt, None, None)
    return prompt.replace(extra=extra)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def prompt_arrays(
    shape: Shape, everything: bool, last: int, second_pass: bool, seed: Array
) -> tuple[Array, dict[str, Array | None]]:
    """Return the keys and all other arrays of `random_prompt`. One program makes them."""
    k, v, q, tail = jax.random.split(jax.random.key(seed), 4)
    positions = jnp.arange(shape.context, dtype=jnp.int32)
    even, rows = jnp.log(positions + 1.0), (shape.batch, shape.kv_heads, shape.context)
    return normal(k, shape, shape.context, shape.kv_heads), {
        "v": normal(v, shape, shape.context, shape.kv_heads),
        "lengths": jnp.full(shape.batch, shape.context, jnp.int32),
        "positions": jnp.broadcast_to(positions, (shape.batch, shape.context)),
        "q_tail": normal(tail, shape, last, shape.heads) if last else None,
        "q_post": normal(q, shape, shape.context, shape.heads) if everything else None,
        "lse": jnp.broadcast_to(even, (shape.batch, shape.heads, shape.context)) if everything else None,
        "second_pass": jax.random.uniform(tail, rows) if second_pass else None,
    }


def normal(key: Array, shape: Shape, count: int, heads: int) -> Array:
    """Return random numbers [B, count, heads, d] in the dtype of a shape."""
    return jax.random.normal(key, (shape.batch, count, heads, shape.head_dim), shape.dtype)


def layer_state(shape: Shape, policy: Policy, fetch: str) -> tuple[CacheSpec, LayerState]:
    """Return the spec of a layer, and its state after a random prompt.

    Raises:
        ConfigError: a setting of the policy or the fetch mode is out of range.
    """
    config = shape.config()
    policy = policy.resolve(config, shape.context + LEFT)
    sizes = (shape.batch, shape.context + LEFT, shape.context)
    mode = fetch_here(fetch, config, policy, Batch(*sizes, shape.context, shape.dtype)).fetch
    spec = cache_specs(config, policy, *sizes, shape.dtype, mode)[0]
    state, write = compress_layer(random_prompt(shape, spec.policy), None, spec=dataclasses.replace(spec, layer=None))
    return spec, state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write))


def random_step(shape: Shape, seed: int, rows: int = 1) -> StepKV:
    """Return random queries, keys and values of the token after the prompt. Rows after the first are guesses."""
    inverse = jax.device_put(inverse_frequencies(shape.config().rope, shape.head_dim))
    q, k, v, positions, valid, lengths, *turns = step_arrays(shape, rows, np.uint32(seed), inverse)
    return StepKV(q, q, k, k, v, positions, valid, lengths, inverse, *turns)


@functools.partial(jax.jit, static_argnums=(0, 1))
def step_arrays(shape: Shape, rows: int, seed: Array, inverse: Array) -> tuple[Array, ...]:
    """Return q, k, v, positions, valid, lengths, cosines and sines of `random_step`. One program makes them."""
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    lengths = jnp.full(shape.batch, shape.context, jnp.int32)
    positions = lengths[:, None] + jnp.arange(rows, dtype=jnp.int32)
    valid = jnp.broadcast_to(jnp.arange(rows) == 0, positions.shape)
    made = (normal(key, shape, rows, count) for key, count in zip(keys, heads, strict=True))
    return *made, positions, valid, lengths, *cos_sin(positions, inverse)


def bench_layer(shape: Shape, policy: Policy, fetch: str = "auto", repeats: int = 10) -> dict[str, Any]:
    """Time one decode step of one layer's attention. Each repeat continues with the state of the previous one.

    The queries are random and alternate, so that consecutive steps rarely select the same tokens.

    Returns:
        A row with policy, fetch, context, batch and dtype; step_seconds (median), least, most and compile_seconds;
        bytes_device and bytes_host of the layer's state; the bytes that a step must read on the device (bytes_read) and
        fetch from the host (bytes_fetched), their sum (bytes_moved), and its operations (flops).
    """
    spec, state = layer_state(shape, policy, fetch)
    steps = itertools.cycle([random_step(shape, seed, query_rows(spec.policy)) for seed in range(1, 1 + QUERIES)])

    def run(reads: Any, writes: Any, step: StepKV) -> tuple[Array, Any]:
        layer = LayerState(reads[0], writes[0], HostTier(reads[1], writes[1]))
        out, layer, _ = step_layer(spec, layer, step, AllLayers((spec,), [layer.host]))
        return out, (layer.live, layer.host.tail)

    reads, writes = (state.frozen, state.host.prompt), (state.live, state.host.tail)
    program, seconds = compiled(run, reads, writes, next(steps), donate=(1,))
    latest = [writes]

    def once() -> None:
        out, latest[0] = program(reads, latest[0], next(steps))
        jax.block_until_ready((out, latest[0]))

    times = measure(once, repeats, seconds)
    sizes = np.array(list(layer_nbytes(state).values())).sum(axis=0)
    moved = np.array(list(costs_of(spec.policy).step_bytes(spec, state).values())).sum(axis=0)
    return {
        "policy": spec.policy.name,
        "fetch": spec.fetch,
        "context": shape.context,
        "batch": shape.batch,
        "dtype": shape.dtype,
        "step_seconds": times.median,
        "least": times.least,
        "most": times.most,
        "compile_seconds": times.compile,
        "bytes_device": int(sizes[0]),
        "bytes_host": int(sizes[1]),
        "bytes_read": int(moved[0]),
        "bytes_fetched": int(moved[1]),
        "bytes_moved": int(moved.sum()),
        "flops": int(costs_of(spec.policy).step_flops(spec, state)),
    }
