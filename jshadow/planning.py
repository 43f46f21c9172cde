"""What a state will be before it exists: static specs, shapes, bytes. Allocates nothing, needs no weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshadow import offload
from jshadow.config import ModelConfig
from jshadow.policies import Policy
from jshadow.policies.base import state_nbytes
from jshadow.state import CacheSpec, Counters, KVState


@functools.lru_cache(maxsize=256)
def cache_specs(
    config: ModelConfig, policy: Policy, batch: int, capacity: int, shortest: int, dtype: str, fetch: str
) -> tuple[CacheSpec, ...]:
    """Static description of every layer's cache.

    Args:
        config: the model.
        policy: resolved for this capacity.
        batch: rows.
        capacity: tokens that a row may ever hold.
        shortest: tokens of the shortest prompt, which decides how many tokens the windows must hold.
        dtype: dtype of keys and values.
        fetch: resolved fetch mode.
    """
    specs = []
    for layer in range(config.num_layers):
        own = policy.for_layer(layer, config)
        specs.append(
            CacheSpec(
                layer=layer, num_layers=config.num_layers, batch=batch, capacity=capacity,
                window=own.window_slots(capacity, shortest), q_heads=config.q_heads, kv_heads=config.kv_heads,
                head_dim=config.head_dim, model_dim=config.model_dim, dtype=dtype,
                scale=float(1 / np.sqrt(config.head_dim)), rope=config.rope, sliding_window=None, fetch=fetch,
                policy=own,
            )
        )  # fmt: skip
    return tuple(specs)


def abstract_state(
    config: ModelConfig, policy: Policy, *, batch: int, capacity: int, prompt: int, dtype: str, fetch: str
) -> KVState:
    """The state of `batch` prompts of `prompt` tokens as ShapeDtypeStructs: nothing is allocated, no weights needed."""
    policy = policy.resolve(config, capacity)
    specs = cache_specs(config, policy, batch, capacity, prompt, dtype, offload.resolve_fetch(fetch))
    return abstract_of(specs, policy)


def abstract_of(specs: tuple[CacheSpec, ...], policy: Policy, fitted: Any = None) -> KVState:
    """The state of the given specs as ShapeDtypeStructs.

    Args:
        specs: one a layer.
        policy: resolved.
        fitted: arrays that the policy learned, or ShapeDtypeStructs of them.
    """
    layers = []
    for spec in specs:
        layer = jax.eval_shape(lambda fitted, spec=spec: spec.policy.init(spec, fitted), fitted)
        layers.append(layer.replace(host=offload.tier_shapes(spec.policy.host_layout(spec), spec)))
    batch = specs[0].batch
    shared, lengths, counters, fitted = jax.eval_shape(
        lambda fitted: (
            policy.init_shared(specs, fitted), jnp.zeros(batch, jnp.int32), Counters.zeros(batch), fitted
        ),
        fitted,
    )  # fmt: skip
    return KVState(tuple(layers), shared, lengths, lengths, counters, fitted, specs, policy)


def full_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """KV bytes of one row of full attention."""
    return 2 * capacity * config.key_columns * itemsize * config.num_layers


def footprint(
    config: ModelConfig, policy: Policy, *, capacity: int, prompt: int, dtype: str = "bfloat16", fetch: str = "auto"
) -> dict[str, Any]:
    """Bytes of one row's KV state, by part, beside full attention's at the same capacity.

    Args:
        config: the model.
        policy: its settings; None in them is resolved for this capacity.
        capacity: tokens that the row may ever hold.
        prompt: tokens of its prompt.
        dtype: of keys and values.
        fetch: fetch mode.

    Returns:
        {"parts": {name: (device, host)}, "device_bytes", "host_bytes", "full_bytes"}.
    """
    state = abstract_state(config, policy, batch=1, capacity=capacity, prompt=prompt, dtype=dtype, fetch=fetch)
    parts = state_nbytes(state)
    return {
        "parts": parts,
        "device_bytes": sum(device for device, _ in parts.values()),
        "host_bytes": sum(host for _, host in parts.values()),
        "full_bytes": full_bytes(config, capacity, jnp.dtype(dtype).itemsize),
    }
