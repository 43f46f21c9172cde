"""The fetch mode that `fetch="auto"` stands for on this machine. Nothing is allocated or run."""

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from jshadow.cache import host_memory, offload
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.spec import Shards
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of, prefill_peak
from jshadow.planner.fetch_choice import FetchChoice, ModeFigures, choose_fetch, kernel_refusal, offloads
from jshadow.planner.gpu import PAPERS_REPEATS, Planner
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GIB, GPUS, Gpu, gpu_of_device
from jshadow.planner.mesh import ONE_GPU, MeshSizes, share_of
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
        shards: the mesh over which the states are split, or None for one device.
    """

    rows: int
    capacity: int
    shortest: int
    width: int
    dtype: str
    states: int = 1
    room: int | None = None
    shards: Shards | None = None

    @property
    def mesh(self) -> MeshSizes:
        """The mesh, as a plan has it."""
        return ONE_GPU if self.shards is None else MeshSizes(self.shards.tp, self.shards.left)

    @property
    def device_rows(self) -> int:
        """Number of requests of which a device has a part."""
        return self.rows // (1 if self.shards is None else self.shards.data)

    @property
    def devices_here(self) -> int:
        """Number of devices of this process that have a part."""
        if self.shards is None:
            return 1
        mesh = self.shards.mesh
        return len(mesh.local_devices) if isinstance(mesh, Mesh) else mesh.size


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

    On a mesh, they are the device bytes of one device and the host bytes of this process. The temporaries of a prefill
    are then bounded by those of the whole model on one device.

    Args:
        config: the model.
        policy: the policy.
        batch: the requests.
        rates: the figures of the device, of which the memory is not read.
        has_kernels: whether the device runs the kernels of this project.
    """
    new = batch.capacity - batch.shortest
    rows, mesh = batch.device_rows, batch.mesh
    serving = Serving(
        batch.shortest, new, batch=rows, dtype=batch.dtype, repeat_share=PAPERS_REPEATS, room=batch.room, mesh=mesh
    )
    policy = policy.resolve(config, batch.capacity)
    planner = Planner(share_of(config, mesh.tp), config, rates, serving)
    specs = planner.specs(policy, rows)
    refusal = kernel_refusal(specs) if has_kernels else "a device that is not a GPU"
    figures = []
    for mode in offload.FETCH_MODES if offloads(specs) else ("resident",):
        if mode == "zero_copy" and refusal:
            figures.append(ModeFigures(mode, rows, 0, 0, 0.0, refusal))
            continue
        now = planner.with_fetch(mode)
        state = state_nbytes(abstract_of(now.specs(policy, rows), policy)).values()
        held, host = (sum(part[place] for part in state) for place in (0, 1))
        step = held + sum(now.temporaries(policy, rows).values())
        peak = prefill_peak(
            config,
            policy,
            batch=rows,
            tokens=batch.width,
            capacity=batch.capacity,
            shortest=batch.shortest,
            dtype=batch.dtype,
            fetch=mode,
            room=batch.room,
        )
        if batch.shards is not None:
            peak["state"] = held
        needed = max(step, sum(peak.values()) - peak["weights"])
        speed = now.step(policy, rows).tokens_per_second
        figures.append(ModeFigures(mode, rows, needed, host * batch.devices_here, speed))
    return tuple(figures)
