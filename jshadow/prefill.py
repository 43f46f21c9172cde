"""Prefill: a ragged batch of prompts through the model, layer by layer, each layer compiled once for all of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow import offload
from jshadow.attention import causal_attention
from jshadow.checks import check_capacity, check_logits, check_tokens
from jshadow.config import ModelConfig
from jshadow.models.transformer import Heads, apply_block, embed
from jshadow.models.transformer import logits as model_logits
from jshadow.planning import cache_specs
from jshadow.policies import Policy, ShadowKV
from jshadow.rope import cos_sin, inverse_frequencies, rotate
from jshadow.state import CacheSpec, Counters, HostTier, KVState, LayerState, PromptKV

Logits = str | Callable[[Array], Any]
LOGITS_PIECE = 256  # tokens of float32 logits that exist at once for a callable


@functools.partial(jax.jit, static_argnames=("config", "needs_all", "q_tail"))
def _prefill_layer(
    weights: dict, x: Array, lengths: Array, *, config: ModelConfig, needs_all: bool, q_tail: int
) -> tuple[Array, PromptKV]:
    """One block over the whole prompt: hidden states [B, S, D] on, and the prompt's keys and values."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)
    cos, sin = cos_sin(positions, jnp.asarray(inverse_frequencies(config.rope, config.head_dim)))
    cos, sin = cos[:, None], sin[:, None]

    def cache(heads: Heads) -> tuple[Array, PromptKV]:
        q, k = rotate(heads.q_pre, cos, sin), rotate(heads.k_pre, cos, sin)
        out, lse = prompt_attention(q, k, heads.v, needs_all)
        tail = None
        if q_tail:
            index = jnp.maximum(lengths[:, None] - q_tail + jnp.arange(q_tail), 0)
            tail = jnp.take_along_axis(q, index[:, :, None, None], axis=1, mode="clip")
        prompt = PromptKV(
            heads.k_pre, k, heads.v, lengths, jnp.broadcast_to(positions, x.shape[:2]), tail,
            q if needs_all else None, lse if needs_all else None,
        )  # fmt: skip
        return out, prompt

    return apply_block({"layer_0": weights}, config, 0, x, cache)


def prompt_attention(q: Array, k: Array, v: Array, with_lse: bool) -> tuple[Array, Array | None]:
    """Causal attention of a prompt: cuDNN's on a GPU where it applies, blockwise elsewhere."""
    scale = float(1 / np.sqrt(q.shape[-1]))
    if jax.default_backend() == "gpu" and not with_lse and q.dtype in (jnp.bfloat16, jnp.float16):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale, implementation="cudnn"), None
    return causal_attention(q, k, v, scale)


def needed(prompt: PromptKV, spec: CacheSpec) -> PromptKV:
    """What one policy asked for of a prompt that several share, so that none sees another's needs."""
    tail = None if prompt.q_tail is None or not spec.policy.q_tail else prompt.q_tail[:, -spec.policy.q_tail :]
    everything = "q_all" in spec.policy.needs
    return prompt.replace(
        q_tail=tail, q_post=prompt.q_post if everything else None, lse=prompt.lse if everything else None
    )


@functools.partial(jax.jit, static_argnames=("spec",))
def _compress(prompt: PromptKV, fitted: Any, *, spec: CacheSpec) -> tuple[LayerState, Any]:
    state, write = spec.policy.compress(spec, spec.policy.init(spec, fitted), prompt, fitted)
    return state.replace(host=HostTier()), write


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(weights: dict, tokens: Array, *, config: ModelConfig) -> Array:
    return embed(weights, config, tokens)


@functools.partial(jax.jit, static_argnames=("config", "want"))
def _prompt_logits(weights: dict, x: Array, lengths: Array, *, config: ModelConfig, want: Logits) -> Any:
    if want == "last":
        x = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return model_logits(weights, config, x)
    if want == "all":
        return model_logits(weights, config, x)
    assert callable(want)
    pieces = [x[:, start : start + LOGITS_PIECE] for start in range(0, x.shape[1], LOGITS_PIECE)]
    results = [want(model_logits(weights, config, piece)) for piece in pieces]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def prefill_many(
    params: Any, tokens: Any, lengths: Any, policies: Sequence[Policy | None], *, capacity: int, fetch: str = "auto",
    fitted: Any = None, logits: Logits = "last", shortest: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[Any, KVState]]:  # fmt: skip
    """Prefill once, exactly, and let every policy compress each layer.

    Args:
        params: Params.
        tokens, lengths: as in `prefill`.
        policies: one state is made for each.
        capacity, fetch, fitted, logits: as in `prefill`.
        shortest: size the windows as if the shortest prompt had this many tokens (a bucket, so that near lengths
            share one compiled step); None: its real length.
        progress: called with (layers done, layers) as they finish.

    Returns:
        (logits, state) for each policy; the logits are the same array.
    """
    config: ModelConfig = params.config
    tokens, lengths = check_tokens(config, tokens, lengths, least=1)
    check_logits(logits)
    check_capacity(config, capacity, int(lengths.max()))
    dtype, mode = str(params.dtype), offload.resolve_fetch(fetch)
    resolved = [(policy or ShadowKV()).resolve(config, capacity) for policy in policies]
    floor = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
    plans = [cache_specs(config, policy, len(lengths), capacity, floor, dtype, mode) for policy in resolved]
    offload.check_host_memory(sum(offload.host_bytes(specs) for specs in plans))
    row_lengths = jnp.asarray(lengths)
    x = _embed(params.weights, jnp.asarray(tokens), config=config)
    layers: list[list[LayerState]] = [[] for _ in resolved]
    for index in range(config.num_layers):
        specs = [plan[index] for plan in plans]
        x, prompt = _prefill_layer(
            params.weights[f"layer_{index}"], x, row_lengths, config=config,
            needs_all=any("q_all" in spec.policy.needs for spec in specs),
            q_tail=max(spec.policy.q_tail for spec in specs),
        )  # fmt: skip
        for done, spec in zip(layers, specs, strict=True):
            state, write = _compress(needed(prompt, spec), fitted, spec=dataclasses.replace(spec, layer=None))
            done.append(state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write)))
        if progress is not None:
            jax.block_until_ready(x)
            progress(index + 1, config.num_layers)
    out = _prompt_logits(params.weights, x, row_lengths, config=config, want=logits)
    batch = len(lengths)
    return [
        (out, commit(KVState(tuple(done), policy.init_shared(plan, fitted), jnp.array(lengths), Counters.zeros(batch),
                             fitted, plan, policy)))
        for done, policy, plan in zip(layers, resolved, plans, strict=True)
    ]  # fmt: skip


def commit(state: KVState) -> KVState:
    """The state with every leaf bound to its device and memory, as a step returns it; nothing is copied.

    Fresh arrays are bound to no device, and JAX compiles one program for such and another for bound ones: without
    this, the first and the second step after a prefill would each be compiled.
    """
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding) if isinstance(leaf, Array) else leaf, state)


def prefill(
    params: Any, tokens: Any, lengths: Any, policy: Policy | None = None, *, capacity: int, fetch: str = "auto",
    fitted: Any = None, logits: Logits = "last",
) -> tuple[Any, KVState]:  # fmt: skip
    """Run a ragged batch of prompts through the model and make its KV state.

    Args:
        params: Params.
        tokens: int32 [B, S], right padded.
        lengths: int32 [B], real tokens of each row, at least 1.
        policy: None: ShadowKV().
        capacity: tokens that a row may ever hold.
        fetch: "auto", "resident" or "device_put".
        fitted: arrays that the policy learned.
        logits: "last": [B, V] at each row's last real token; "all": [B, S, V]; or a callable that is given the
            float32 logits [B, P, V] of one piece of tokens after another and whose results [B, P, ...] are joined.

    Returns:
        float32 logits, and the state.

    Raises:
        PromptError: empty batch or row, misshaped tokens or lengths, a token id out of range.
        CapacityError: a prompt is longer than the capacity, or the capacity than the model's context.
        ConfigError: a policy setting, fetch mode or logits choice is out of range.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    return prefill_many(
        params, tokens, lengths, [policy], capacity=capacity, fetch=fetch, fitted=fitted, logits=logits
    )[0]
