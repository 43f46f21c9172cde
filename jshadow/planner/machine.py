"""The bytes of states on this machine, and what `fetch="auto"` stands for here. Nothing is allocated or run."""

import dataclasses
import functools
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jshadow.cache import host_memory, offload
from jshadow.cache.accounting import ByteCount, state_nbytes, total
from jshadow.cache.state import KVState
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import Workload, abstract_of, full_bytes, prefill_parts
from jshadow.planner.fetch_choice import FetchChoice, ModeFigures, choose_fetch, kernel_refusal, offloads
from jshadow.planner.gpu import PAPERS_REPEATS, Planner
from jshadow.planner.gpu_specs import GIB, GPUS, XLA_SHARE, Gpu, gpu_of_device
from jshadow.planner.limits import MemoryLimits
from jshadow.planner.mesh import mesh_shards, share_of
from jshadow.policies import Policy
from jshadow.policies.prefill_attention import PrefillAttention

UNKNOWN = GPUS["a100-80gb"]  # whose rates stand for those of a device that is not in the table
SPARE = GIB // 2  # device memory that XLA's allocator may lose between large arrays


def fetch_here(
    config: ModelConfig, policy: Policy, workload: Workload, *, states: int = 1, loading: int = 0
) -> FetchChoice:
    """Return the fetch mode of a workload on this machine, and the reason if its setting is "auto".

    On a CPU, "auto" is "resident". On an accelerator, it is the fastest mode, as predicted, of those that fit into the
    memory that is free now: that of the device beside all arrays that it holds, and host memory.

    Args:
        policy: the policy. Settings that are None are resolved for the capacity.
        states: number of states of this size that the call makes. They share the memory equally.
        loading: bytes of weights that the device does not hold yet.

    Raises:
        ConfigError: the setting is neither "auto" nor a fetch mode, or a setting of the policy is out of range.
    """
    mode = offload.resolve_fetch(workload.fetch)
    if workload.fetch != "auto":
        return FetchChoice(mode, None)
    if mode != "auto":
        return FetchChoice(mode, f"{mode}: on a CPU, host memory and device memory are the same memory")
    (rates, free), limit = device_here(), host_memory.least_limit()
    free = max(0, free - loading)
    figures = mode_figures(config, policy, workload, rates, jax.default_backend() == "gpu")
    return choose_fetch(figures, MemoryLimits(free // states, None if limit is None else limit.free // states))


def device_here() -> tuple[Gpu, int]:
    """Return the figures of the first device, and the bytes of its memory that new arrays can take.

    The memory is that of XLA's allocator, or else XLA's share of the memory in the table, minus SPARE.
    """
    device = jax.local_devices()[0]
    known = gpu_of_device(device.device_kind) or UNKNOWN
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", int(XLA_SHARE * known.memory_bytes))
    return known, max(0, limit - stats.get("bytes_in_use", 0) - SPARE)


@functools.lru_cache(maxsize=256)
def mode_figures(
    config: ModelConfig, policy: Policy, workload: Workload, rates: Gpu, has_kernels: bool
) -> tuple[ModeFigures, ...]:
    """Return the figures of each fetch mode for one call, without the bytes of weights, which are loaded already.

    On a mesh, they are the device bytes of one device and the host bytes of this process. The temporaries of a prefill
    are then bounded by those of the whole model on one device.

    Args:
        rates: the figures of the device, of which the memory is not read.
        has_kernels: whether the device runs the kernels of this project.
    """
    shards, rows = workload.shards, workload.batch or 1
    if shards is not None:
        rows, shards = rows // shards.data, mesh_shards(shards.tp, shards.left)
    policy = policy.resolve(config, workload.capacity)
    own = dataclasses.replace(workload, batch=rows, repeat_share=PAPERS_REPEATS, shards=shards)
    planner = Planner(share_of(config, workload.tp), config, rates, own)
    specs = planner.specs(policy, rows)
    refusal = kernel_refusal(specs) if has_kernels else "a device that is not a GPU"
    figures = []
    for mode in offload.FETCH_MODES if offloads(specs) else ("resident",):
        if mode == "zero_copy" and refusal:
            figures.append(ModeFigures(mode, rows, 0, 0, 0.0, refusal))
            continue
        now = planner.with_fetch(mode)
        held, host = total(state_nbytes(abstract_of(now.specs(policy, rows), policy)).values())
        step = held + sum(now.temporaries(policy, rows).values())
        peak = prefill_parts(config, policy, dataclasses.replace(own, fetch=mode, shards=None))
        if shards is not None:
            peak["state"] = held
        needed = max(step, sum(peak.values()) - peak["weights"])
        speed = now.step(policy, rows).tokens_per_second
        figures.append(ModeFigures(mode, rows, needed, host * _devices_here(workload), speed))
    return tuple(figures)


def _devices_here(workload: Workload) -> int:
    if workload.shards is None:
        return 1
    mesh = workload.shards.mesh
    return len(mesh.local_devices) if isinstance(mesh, Mesh) else mesh.size


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
    workload = Workload(prompt, capacity - prompt, batch, dtype, fetch, room=room)
    policy, workload = _resolved(config, policy, workload)
    return abstract_of(workload.specs(config, policy), policy)


def _resolved(config: ModelConfig, policy: Policy, workload: Workload) -> tuple[Policy, Workload]:
    policy = policy.resolve(config, workload.capacity)
    return policy, workload.with_fetch(fetch_here(config, policy, workload).fetch)


class _Footprint(TypedDict):
    """The bytes of one row's KV state.

    Attributes:
        parts: for each part of the state, its bytes on the device and in host memory.
        device_bytes: sum over the parts on the device.
        host_bytes: sum over the parts in host memory.
        full_bytes: bytes of full attention's cache at the same capacity.
    """

    parts: dict[str, ByteCount]
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
) -> _Footprint:
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
    _check_prompt(prompt, capacity)
    state = abstract_state(
        config, policy, batch=1, capacity=capacity, prompt=prompt, dtype=dtype, fetch=fetch, room=room
    )
    parts = state_nbytes(state)
    device, host = total(parts.values())
    return {
        "parts": parts,
        "device_bytes": device,
        "host_bytes": host,
        "full_bytes": full_bytes(config, capacity, jnp.dtype(dtype).itemsize),
    }


def _check_prompt(prompt: int, capacity: int) -> None:
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
    _check_prompt(prompt, capacity)
    state = abstract_state(config, policy, batch=1, capacity=capacity, prompt=prompt, **options)
    layers = zip(state.specs, state.layers, strict=True)
    read, moved = total(size for spec, layer in layers for size in spec.policy.step_bytes(spec, layer).values())
    return {"bytes_moved": moved, "bytes_read": read}


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
    workload = Workload(prompt, capacity - prompt, batch, dtype, fetch, room=room, width=tokens)
    policy, workload = _resolved(config, policy, workload)
    return prefill_parts(config, policy, workload, prefill_chunk=prefill_chunk, attention=attention, backend=backend)
