"""Random weights and states. The device generates all numbers, so none is copied from NumPy.

A state is like that after a prompt which fills all but 64 tokens of the capacity. Its lengths, chunks and candidates
are consistent.
"""

import dataclasses
import functools
import gc
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gpu.steered import Steered
from jshadow.cache import offload
from jshadow.cache.records import HostArray, HostTier, LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.machine import abstract_state
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.shadowkv.state import fields_of

DTYPE = "bfloat16"
CODES = {"uint8": 256, "uint16": 2**14}  # the dtypes of packed codes, and what random ones are below


def sharding(memory: str) -> SingleDeviceSharding:
    """Return the sharding of the first device in "device" or "pinned_host" memory."""
    device = jax.devices()[0]
    return SingleDeviceSharding(device, memory_kind=device.default_memory().kind if memory == "device" else memory)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def drawn(seed: int, scale: float, *, shape: tuple[int, ...], dtype: str) -> Array:
    """Draw normal numbers of standard deviation `scale`, or codes in bytes or words.

    Words are below 2**14, so that each is a float16 number below 2.
    """
    if dtype in CODES:
        return jax.random.randint(jax.random.key(seed), shape, 0, CODES[dtype], jnp.int32).astype(dtype)
    return scale * jax.random.normal(jax.random.key(seed), shape, dtype)


@functools.partial(jax.jit, static_argnames=("count",))
def spread(row: Array, *, count: int) -> Array:
    """Stack `count` slightly different multiples of an array. So only one row of numbers is drawn for any batch."""
    if row.dtype.name in CODES:
        return jnp.broadcast_to(row, (count, *row.shape))
    factors = 1 + jnp.arange(count, dtype=row.dtype).reshape(-1, *[1] * row.ndim) / (8 * count)
    return row * factors


def on_device(seed: int, scale: float, shape: tuple[int, ...], dtype: Any = DTYPE) -> Array:
    """Return normal numbers of standard deviation about `scale` on the device. Rows are multiples of one another."""
    row = drawn(seed, scale, shape=shape[1:], dtype=str(dtype))
    return jax.device_put(spread(row, count=shape[0]), sharding("device"))


def on_host(seed: int, shape: tuple[int, ...], dtype: Any = DTYPE) -> Array:
    """Return numbers like `on_device` in pinned host memory, without keeping them on the device."""
    here = on_device(seed, 1.0, shape, dtype)
    away = jax.block_until_ready(jax.device_put(here, sharding("pinned_host")))
    if here.sharding.memory_kind != "pinned_host":
        here.delete()
    return away


def free(*trees: Any) -> None:
    """Free the memory of all arrays now."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, Array) and not leaf.is_deleted():
            leaf.delete()
    gc.collect()


def weights(config: ModelConfig, dtype: str = DTYPE) -> dict:
    """Return random weights. Kernels have standard deviation 1 / sqrt(fan_in), and norm scales are one."""
    leaves, structure = jax.tree.flatten(abstract_weights(config))
    made = []
    for seed, leaf in enumerate(leaves):
        if len(leaf.shape) == 1:
            made.append(jax.device_put(jnp.ones(leaf.shape, dtype), sharding("device")))
            continue
        whole = drawn(seed, leaf.shape[0] ** -0.5, shape=leaf.shape, dtype=dtype)
        made.append(jax.device_put(whole, sharding("device")))
    return jax.block_until_ready(jax.tree.unflatten(structure, made))


def steered(policy: ShadowKV, prompt: int, capacity: int) -> Steered:
    """Return a Steered policy with the settings of `policy`, for prompts of `prompt` tokens."""
    return Steered(**fields_of(policy), prompt=prompt, capacity=capacity)


def state(config: ModelConfig, policy: Policy, batch: int, capacity: int, prompt: int, fetch: str) -> KVState:
    """Create the state of `batch` prompts under Full or Steered.

    Raises:
        jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED. The layers created so far are freed.
    """
    shapes = abstract_state(config, policy, batch=batch, capacity=capacity, prompt=prompt, dtype=DTYPE, fetch=fetch)
    layers: list[LayerState] = []
    try:
        for spec, layer in zip(shapes.specs, shapes.layers, strict=True):
            layers.append(fill(layer, spec.policy, 1000 * (1 + len(layers))))
            jax.block_until_ready(layers[-1])
    except Exception:
        free(layers)
        raise
    lengths, last = (jax.device_put(jnp.full(batch, n, jnp.int32), sharding("device")) for n in (prompt, 0))
    counters = jax.device_put(Counters.zeros(batch), sharding("device"))
    return shapes.replace(layers=tuple(layers), lengths=lengths, last=last, counters=counters)


def fill(layer: LayerState, policy: Policy, seed: int) -> LayerState:
    """Fill the state of one layer with random numbers, leaf by leaf."""

    def one(leaf: Any, seed: int) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.name in CODES:
            return on_device(seed, 1.0, leaf.shape, leaf.dtype)
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), sharding("device"))

    leaves, structure = jax.tree.flatten((layer.frozen, layer.live))
    frozen, live = jax.tree.unflatten(structure, [one(leaf, seed + n) for n, leaf in enumerate(leaves)])
    if isinstance(policy, Steered):
        batch = frozen.candidates.shape[0]
        frozen = frozen.replace(
            right=basis(frozen.right, seed + 90),
            candidates=jax.device_put(
                jnp.broadcast_to(policy.eligible(), frozen.candidates.shape).copy(), sharding("device")
            ),
            chunks=jax.device_put(jnp.full(batch, policy.chunks, jnp.int32), sharding("device")),
        )
        live = live.replace(resident=live.resident - 1)
    prompt = layer.host.prompt
    if prompt is None:
        return LayerState(frozen, live, HostTier())
    make = on_host if prompt.memory == "pinned_host" else functools.partial(on_device, scale=1.0)
    array = make(seed=seed + 99, shape=prompt.array.shape, dtype=prompt.array.dtype)
    return LayerState(frozen, live, HostTier(HostArray(array, prompt.memory)))


def basis(right: Any, seed: int) -> Any:
    """Return a right factor or a basis of codes that gives rebuilt keys a standard deviation of about one."""
    if isinstance(right, Array):
        return on_device(seed, math.sqrt(1 / right.shape[2]), right.shape)
    columns = on_device(seed, 0.1 * math.sqrt(1 / right.columns.shape[2]), right.columns.shape)
    return right.replace(columns=columns)


def in_mode(spec: CacheSpec, fetch: str) -> CacheSpec:
    """Return the spec in another fetch mode."""
    return dataclasses.replace(spec, fetch=fetch, keep=offload.keeps(fetch, jax.default_backend()))


def relaid(layer: LayerState, spec: CacheSpec) -> LayerState:
    """Return a layer whose `live` part has the arrays of the fetch mode of `spec`.

    Arrays that this fetch mode does not have are left out. If one is added, no chunk is marked as kept on the device.
    """
    live = layer.live
    wanted = fields_of(jax.eval_shape(lambda: spec.policy.init(spec)).live)
    for name, want in wanted.items():
        held = getattr(live, name)
        if want is None:
            live = live.replace(**{name: None})
        elif held is None:
            live = live.replace(**{name: on_device(7, 1.0, want.shape, want.dtype)})
            live = live.replace(resident=jax.device_put(jnp.full_like(live.resident, -1), sharding("device")))
    return layer.replace(live=live)


def refetched(state: KVState, fetch: str) -> KVState:
    """Return the same state in the other offloading fetch mode. Rows in host memory are not moved."""
    assert "resident" not in (fetch, state.fetch), "resident rows lie elsewhere"
    specs = tuple(in_mode(spec, fetch) for spec in state.specs)
    layers = tuple(relaid(layer, spec) for layer, spec in zip(state.layers, specs, strict=True))
    gone = jax.tree.leaves(state.layers)
    held = {id(leaf) for leaf in jax.tree.leaves(layers)}
    free([leaf for leaf in gone if id(leaf) not in held])
    return state.replace(layers=layers, specs=specs)


def abstract(tree: Any) -> Any:
    """Return the arrays of a state or of weights as ShapeDtypeStructs with their memory kinds."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, HostArray):
            return HostArray(placed(leaf.array, leaf.memory), leaf.memory)
        return placed(leaf, "device")

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, HostArray))


def placed(leaf: Any, memory: str) -> jax.ShapeDtypeStruct:
    """Return a ShapeDtypeStruct with a memory kind. With a SingleDeviceSharding, JAX 0.10 loses it while tracing."""
    kind = sharding(memory).memory_kind
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(), memory_kind=kind))
