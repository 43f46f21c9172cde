"""The specs, shapes and bytes of a KV state, computed without allocating it and without weights."""

import dataclasses
import functools
import math
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState, of_layer, with_room
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.prefill_pieces import (
    most_rows,
    pieces_of,
    second_pass_bytes,
    tile_numbers,
    token_numbers,
    whole_or_pieces,
)
from jshadow.policies.base import LayerCache, Policy
from jshadow.policies.capabilities import attention_of, first_shared
from jshadow.policies.costs import costs_of
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.sliding_window import SlidingWindow


@functools.lru_cache(maxsize=256)
def cache_specs(
    config: ModelConfig, policy: Policy, batch: int, capacity: int, shortest: int, dtype: str, fetch: str
) -> tuple[CacheSpec, ...]:
    """Return the static description of each layer's cache.

    Args:
        config: the model.
        policy: the policy, resolved for this capacity.
        batch: number of rows.
        capacity: maximum number of tokens that a row can hold.
        shortest: number of tokens in the shortest prompt. It decides how many tokens the windows must hold.
        dtype: name of the dtype of keys and values.
        fetch: fetch mode, not "auto".
    """
    specs = []
    for layer in range(config.num_layers):
        kind = config.attention_kind(layer)
        cache: LayerCache = policy.for_layer(layer, config) if kind.window is None else SlidingWindow(kind.window)
        specs.append(
            CacheSpec(
                layer=layer,
                num_layers=config.num_layers,
                batch=batch,
                capacity=capacity,
                window=cache.window_slots(capacity, shortest),
                q_heads=config.q_heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                model_dim=config.model_dim,
                dtype=dtype,
                scale=config.attention_scale,
                rope=kind.rope,
                sliding_window=kind.window,
                fetch=fetch,
                policy=cache,
                keep=offload.keeps(fetch, jax.default_backend()),
            )
        )
    return tuple(specs)


def on_backend(specs: tuple[CacheSpec, ...], backend: str) -> tuple[CacheSpec, ...]:
    """Return the specs as a process with another backend makes them. `backend` is as in `offload.keeps`."""
    return tuple(dataclasses.replace(spec, keep=offload.keeps(spec.fetch, backend)) for spec in specs)


def abstract_state(
    config: ModelConfig,
    policy: Policy,
    *,
    batch: int,
    capacity: int,
    prompt: int,
    dtype: str = "bfloat16",
    fetch: str = "auto",
    room: int | None = None,
) -> KVState:
    """Return the state of `batch` prompts of `prompt` tokens, with ShapeDtypeStructs in place of arrays.

    The other arguments are those of `footprint`.

    Raises:
        CapacityError: room is not an integer of at least 0.
        ConfigError: a setting or the fetch mode is out of range.
    """
    policy = policy.resolve(config, capacity)
    mode = offload.resolve_fetch(fetch)
    if mode == "auto":
        from jshadow.planner.machine import Batch, fetch_here  # this module is imported there

        mode = fetch_here(fetch, config, policy, Batch(batch, capacity, prompt, prompt, dtype, room=room)).fetch
    specs = cache_specs(config, policy, batch, capacity, prompt, dtype, mode)
    return abstract_of(with_room(specs, room), policy)


def abstract_of(specs: tuple[CacheSpec, ...], policy: Policy, fitted: Any = None) -> KVState:
    """Return the state that the specs describe, with ShapeDtypeStructs in place of arrays.

    Args:
        specs: the spec of each layer.
        policy: the resolved policy.
        fitted: arrays that the policy learned, or their ShapeDtypeStructs, or None.
    """
    layers, shapes = [], {}
    for spec in specs:
        alike = dataclasses.replace(spec, layer=None)  # layers that differ in their index alone have the same shapes
        if alike not in shapes:
            init = functools.partial(lambda spec, fitted: spec.policy.init(spec, of_layer(fitted, spec.layer)), spec)
            shapes[alike] = jax.eval_shape(init, fitted).replace(
                host=offload.tier_shapes(spec.policy.host_layout(spec), spec)
            )
        layers.append(shapes[alike])
    batch = specs[0].batch
    shared, lengths, counters, fitted = jax.eval_shape(
        lambda fitted: (
            first_shared(policy, specs, fitted),
            jnp.zeros(batch, jnp.int32),
            Counters.zeros(batch),
            fitted,
        ),
        fitted,
    )
    return KVState(tuple(layers), shared, lengths, lengths, counters, fitted, specs, policy)


def full_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """Return the KV bytes of one row of full attention at this capacity. `itemsize` is the bytes of one number.

    A layer with a sliding window holds only its window.
    """
    slots = [
        capacity if window is None else SlidingWindow(window).slots(capacity)
        for window in (config.attention_kind(layer).window for layer in range(config.num_layers))
    ]
    return 2 * sum(slots) * config.key_columns * itemsize


class Footprint(TypedDict):
    """The bytes of one row's KV state.

    Attributes:
        parts: for each part of the state, its bytes on the device and in host memory.
        device_bytes: sum over the parts on the device.
        host_bytes: sum over the parts in host memory.
        full_bytes: bytes of full attention's cache at the same capacity.
    """

    parts: dict[str, tuple[int, int]]
    device_bytes: int
    host_bytes: int
    full_bytes: int


def footprint(
    config: ModelConfig,
    policy: Policy,
    *,
    capacity: int,
    prompt: int,
    dtype: str = "bfloat16",
    fetch: str = "auto",
    room: int | None = None,
) -> Footprint:
    """Return the bytes of one row's KV state, by part, and those of full attention at the same capacity.

    Args:
        config: the model.
        policy: the policy. Settings that are None are resolved for this capacity.
        capacity: maximum number of tokens that the row can hold.
        prompt: number of tokens in its prompt.
        dtype: name of the dtype of keys and values.
        fetch: fetch mode.
        room: number of tokens that the row may take after its prompt, as in `prefill`. None: it may grow to the
            capacity.

    Raises:
        CapacityError: the prompt has no token, or more tokens than the capacity; or room is not an integer of at least
            0.
        ConfigError: a setting or the fetch mode is out of range.
    """
    check_prompt(prompt, capacity)
    state = abstract_state(
        config, policy, batch=1, capacity=capacity, prompt=prompt, dtype=dtype, fetch=fetch, room=room
    )
    parts = state_nbytes(state)
    return {
        "parts": parts,
        "device_bytes": sum(device for device, _ in parts.values()),
        "host_bytes": sum(host for _, host in parts.values()),
        "full_bytes": full_bytes(config, capacity, jnp.dtype(dtype).itemsize),
    }


def check_prompt(prompt: int, capacity: int) -> None:
    """Raise CapacityError unless the prompt fits into the capacity."""
    if not 1 <= prompt <= capacity:
        raise CapacityError(f"prompt must have 1 to capacity={capacity} tokens, got {prompt}")


def step_footprint(
    config: ModelConfig, policy: Policy, *, capacity: int, prompt: int, **options: Any
) -> dict[str, int]:
    """Return the bytes that one decode step of one row moves from the host, and those that it reads on the device.

    The bytes of all layers are added. The arguments are those of `footprint`; `options` are dtype, fetch and room.

    Returns:
        {"bytes_moved", "bytes_read"}. Bytes from the host count only in the first.

    Raises:
        CapacityError, ConfigError: as in `footprint`.
    """
    check_prompt(prompt, capacity)
    state = abstract_state(config, policy, batch=1, capacity=capacity, prompt=prompt, **options)
    layers = zip(state.specs, state.layers, strict=True)
    steps = [costs_of(spec.policy).step_bytes(spec, layer) for spec, layer in layers]
    moved = sum(host for step in steps for _, host in step.values())
    return {"bytes_moved": moved, "bytes_read": sum(device for step in steps for device, _ in step.values())}


def prefill_peak(
    config: ModelConfig,
    policy: Policy,
    *,
    batch: int,
    tokens: int,
    capacity: int,
    prefill_chunk: int = 2048,
    shortest: int | None = None,
    dtype: str = "bfloat16",
    fetch: str = "auto",
    attention: PrefillAttention | None = None,
    backend: str | None = None,
    room: int | None = None,
) -> dict[str, int]:
    """Return an upper bound on the device bytes at the peak of a prefill, by part. The peak is in the last layer.

    Only "weights" and "state" grow with the number of layers. Only "piece" grows with prefill_chunk, and on an NVIDIA
    GPU "attention" too if several short prompts fit into a piece. The bound leaves out the logits, and the copies of
    weights that exist while they are loaded. It also leaves out the workspace of cuDNN.

    Args:
        config: the model.
        policy: the policy. Settings that are None are resolved for this capacity.
        batch: number of rows.
        tokens: width of the right-padded prompts.
        capacity: maximum number of tokens that a row can hold.
        prefill_chunk: number of tokens that go through a layer at once.
        shortest: number of tokens in the shortest prompt, which decides the windows. None: all have `tokens` tokens.
        dtype: name of the dtype of weights, keys and values.
        fetch: fetch mode.
        attention: the sparse attention of the prompt. None: the policy's own attention, or exact attention.
        backend: "gpu" for an NVIDIA GPU, or the name of another backend. None: that of this process.
        room: number of tokens that a row may take after its prompt, as in `prefill`. None: up to the capacity.

    Raises:
        ConfigError: tokens or prefill_chunk is below 1, a pattern is for another model, or a setting is out of range.

    Returns:
        {"weights", "hidden", "keys_values", "attention", "piece", "second_pass", "compress", "in_flight", "state"}. The
        peak is their sum. "attention" has the queries and the output of whole prompts, where one call computes their
        attention. For a sparse attention that needs all keys first, it has the queries.
    """
    for name, value in (("tokens", tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    prompt = tokens if shortest is None else shortest
    item, columns = jnp.dtype(dtype).itemsize, config.key_columns
    sparse_attention = attention or attention_of(policy.resolve(config, capacity))
    sparse_attention = sparse_attention.prepared(config)[0] if sparse_attention else None
    count, size = pieces_of(tokens, prefill_chunk, sparse_attention.multiple if sparse_attention else 1)
    sizes: dict[str, Any] = {"capacity": capacity, "prompt": prompt, "dtype": dtype, "fetch": fetch, "room": room}
    state = abstract_state(config, policy, batch=batch, **sizes)
    parts = state_nbytes(state)
    queries = config.q_heads * config.head_dim
    token, tile = token_numbers(config), tile_numbers(config)  # attention in pieces has a tile
    sparse = sparse_attention.piece_bytes(config, batch, count * size, size) if sparse_attention else 0
    ways, rows = set[bool](), min(batch, most_rows(size, prefill_chunk))
    for spec in state.specs:
        exact = sparse_attention is None or (attention is not None and spec.sliding_window is not None)
        exact = exact and not spec.policy.reads.all_queries
        ways |= whole_or_pieces(config, dtype, backend) if exact else {False}
    in_pieces = batch * (tile + size * token) * 4 + sparse if False in ways else 0
    # The keys and values of some of the rows are copied.
    whole = rows * count * size * (2 * queries + (2 * columns if rows < batch else 0)) * item if True in ways else 0
    if sparse_attention and sparse_attention.ahead:
        whole = max(whole, batch * count * size * queries * item)
    second = {spec.policy.reads.second_pass for spec in state.specs} - {None}
    return {
        "weights": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(config))) * item,
        "hidden": batch * count * size * config.model_dim * item,
        "keys_values": 3 * batch * count * size * columns * item,  # keys before and after RoPE, values
        "attention": whole,
        "piece": max(in_pieces, rows * size * token * 4),
        "second_pass": max((second_pass_bytes(config, one, batch, count * size, item) for one in second), default=0),
        "compress": max(costs_of(spec.policy).compress_bytes(spec, count * size) for spec in state.specs),
        "in_flight": batch * capacity * columns * item if parts.get("host rows", (0, 0))[1] else 0,
        "state": sum(device for device, _ in parts.values()),
    }
