"""The fetch mode that `fetch="auto"` stands for on this machine. Nothing is allocated or run."""

import dataclasses
import functools

import jax

from jshadow.cache import host_memory, offload
from jshadow.cache.accounting import state_nbytes
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of, prefill_peak
from jshadow.planner.fetch_choice import FetchChoice, ModeFigures, choose_fetch, kernel_refusal, offloads
from jshadow.planner.gpu import PAPERS_REPEATS, Planner
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GIB, GPUS, Gpu, gpu_of_device
from jshadow.policies import Policy

UNKNOWN = GPUS["a100-80gb"]  # whose rates stand for those of a device that is not in the table
SPARE = GIB // 2  # device memory that XLA's allocator may lose between large arrays
XLA_SHARE = 0.75  # of a GPU's memory, which XLA takes when it starts


@dataclasses.dataclass(frozen=True)
class Batch:
    """The requests of one call.

    Attributes:
        rows: number of requests.
        capacity: maximum number of tokens that a request can hold.
        shortest: number of tokens by which windows are sized, at most those of the shortest prompt.
        width: number of tokens to which the prompts are padded.
        dtype: name of the dtype of keys and values.
        states: number of states of this size that the call makes. They share the memory equally.
        room: number of tokens that a request may take after its prompt, by which windows are sized. None: up to the
            capacity.
    """

    rows: int
    capacity: int
    shortest: int
    width: int
    dtype: str
    states: int = 1
    room: int | None = None


def fetch_here(fetch: str, config: ModelConfig, policy: Policy, batch: Batch, *, loading: int = 0) -> FetchChoice:
    """Return the fetch mode of a setting on this machine, and the reason if the setting is "auto".

    On a CPU, "auto" is "resident". On an accelerator, it is the fastest mode, as predicted, of those that fit into the
    memory that is free now: that of the device beside all arrays that it holds, and host memory.

    Args:
        fetch: "auto" or a fetch mode.
        config: the model.
        policy: the policy. Settings that are None are resolved for the capacity.
        batch: the requests.
        loading: bytes of weights that the device does not hold yet.

    Raises:
        ConfigError: `fetch` is neither "auto" nor a fetch mode, or a setting is out of range.
    """
    mode = offload.resolve_fetch(fetch)
    if fetch != "auto":
        return FetchChoice(mode, None)
    if mode != "auto":
        return FetchChoice(mode, f"{mode}: on a CPU, host memory and device memory are the same memory")
    (rates, free), limit = device_here(), host_memory.least_limit()
    free = max(0, free - loading)
    one = dataclasses.replace(batch, states=1)
    figures = mode_figures(config, policy, one, rates, jax.default_backend() == "gpu")
    return choose_fetch(figures, free // batch.states, None if limit is None else limit.free // batch.states)


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
    config: ModelConfig, policy: Policy, batch: Batch, rates: Gpu, has_kernels: bool
) -> tuple[ModeFigures, ...]:
    """Return the figures of each fetch mode for one call, without the bytes of weights, which are loaded already.

    Args:
        config: the model.
        policy: the policy.
        batch: the requests.
        rates: the figures of the device, of which the memory is not read.
        has_kernels: whether the device runs the kernels of this project.
    """
    new = batch.capacity - batch.shortest
    serving = Serving(
        batch.shortest, new, batch=batch.rows, dtype=batch.dtype, repeat_share=PAPERS_REPEATS, room=batch.room
    )
    policy = policy.resolve(config, batch.capacity)
    planner = Planner(config, config, rates, serving)
    specs = planner.specs(policy, batch.rows)
    refusal = kernel_refusal(specs) if has_kernels else "a device that is not a GPU"
    figures = []
    for mode in offload.FETCH_MODES if offloads(specs) else ("resident",):
        if mode == "zero_copy" and refusal:
            figures.append(ModeFigures(mode, batch.rows, 0, 0, 0.0, refusal))
            continue
        now = planner.with_fetch(mode)
        state = state_nbytes(abstract_of(now.specs(policy, batch.rows), policy)).values()
        step = sum(device for device, _ in state) + sum(now.temporaries(policy, batch.rows).values())
        peak = prefill_peak(
            config,
            policy,
            batch=batch.rows,
            tokens=batch.width,
            capacity=batch.capacity,
            shortest=batch.shortest,
            dtype=batch.dtype,
            fetch=mode,
            room=batch.room,
        )
        needed, host = max(step, sum(peak.values()) - peak["weights"]), sum(host for _, host in state)
        figures.append(ModeFigures(mode, batch.rows, needed, host, now.step(policy, batch.rows).tokens_per_second))
    return tuple(figures)
