"""The records of a GPU plan: the requests, the batch that fits, and the predicted time of a decode step."""

import dataclasses
from typing import Any

from jshadow.planner.fetch_choice import ModeFigures
from jshadow.planner.gpu_specs import HOST_GATHER, Gpu
from jshadow.planner.mesh import ONE_GPU, MeshSizes
from jshadow.planner.prefill_time import PrefillTime
from jshadow.policies import Policy
from jshadow.policies.base import Links
from jshadow.policies.settings import policy_settings


@dataclasses.dataclass(frozen=True)
class Serving:
    """The requests to be served by one GPU, or by several GPUs that share one model.

    Attributes:
        context: number of tokens in each prompt.
        max_new_tokens: number of tokens that each request may hold beyond its prompt.
        batch: number of requests. None: as many as fit.
        dtype: dtype of weights, keys and values.
        fetch: fetch mode. "auto" stands for the mode with the most predicted tokens per second, for each policy.
        repeat_share: share of the selected units that are still on the device from the previous step, in [0, 1]. It
            counts where a kernel fetches with "zero_copy" or "resident"; every other fetch moves all units. None: 0.6,
            as in the ShadowKV paper.
        host_limit: bytes of host memory that all requests together may take in one process. None: no limit.
        gather_bytes_per_second: rate at which the host gathers rows of one GPU for "device_put".
        room: number of tokens that a request may take after its prompt, by which windows are sized as in `prefill`.
            None: windows are sized for `context` and `max_new_tokens`.
        mesh: the GPUs that share the model.
    """

    context: int
    max_new_tokens: int = 64
    batch: int | None = None
    dtype: str = "bfloat16"
    fetch: str = "device_put"
    repeat_share: float | None = None
    host_limit: int | None = None
    gather_bytes_per_second: float = HOST_GATHER
    room: int | None = None
    mesh: MeshSizes = ONE_GPU

    @property
    def capacity(self) -> int:
        """Number of tokens that each request may hold: its prompt and its new tokens."""
        return self.context + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class StepBound:
    """The bytes and operations of one decode step of a batch on one GPU, and the times that follow from them.

    Several GPUs that share a model make the step together, and these are the figures of each.

    The prediction is that the five times follow one another. The bound is that they overlap completely. No step was
    shown to overlap them: a compiled "zero_copy" step runs one kernel after the other, and a compiled "device_put" step
    allows no more than that the fetch overlaps with the rebuilding of keys.

    Attributes:
        hbm_bytes: bytes read from and written to device memory, by part.
        pcie_bytes: bytes moved from the host.
        flops: number of floating-point operations.
        hbm_seconds, pcie_seconds, flop_seconds: the time of each of these at the full rate of the GPU.
        gather_seconds: the time in which the host gathers the rows that "device_put" moves. 0 in other modes.
        tokens_per_second: predicted tokens per second of the whole batch, from the sum of the five times.
        bound_tokens_per_second: an upper bound on the tokens per second, from the largest of the five times.
        link_bytes: bytes that the GPU sends to others, by part.
        link_seconds: the time of these.
    """

    hbm_bytes: dict[str, int]
    pcie_bytes: int
    flops: int
    hbm_seconds: float
    pcie_seconds: float
    flop_seconds: float
    gather_seconds: float
    tokens_per_second: float
    bound_tokens_per_second: float
    link_bytes: Links = dataclasses.field(default_factory=dict)
    link_seconds: float = 0.0

    @property
    def sent(self) -> int:
        """Bytes that the GPU sends to others."""
        return sum(self.link_bytes.values())


def step_bound(
    gpu: Gpu,
    hbm: dict[str, int],
    moved: int,
    flops: int,
    batch: int,
    gather: float | None = None,
    links: Links | None = None,
) -> StepBound:
    """Return the times of a step that moves each byte once and does each operation once.

    Args:
        gpu: the GPU, whose full rates are taken.
        hbm: bytes read from and written to device memory, by part.
        moved: bytes moved from the host.
        flops: number of floating-point operations.
        batch: number of tokens that the step generates.
        gather: bytes per second at which the host gathers `moved`. None: no gathering, because a kernel reads the rows.
        links: what the GPU sends to others. None: nothing.
    """
    links = links or {}
    linked = sum(links.values()) / gpu.nvlink_bytes_per_second
    seconds = (
        sum(hbm.values()) / gpu.hbm_bytes_per_second,
        moved / gpu.pcie_bytes_per_second,
        flops / gpu.flops,
        0.0 if gather is None else moved / gather,
    )
    times = (*seconds, linked)
    return StepBound(hbm, moved, flops, *seconds, batch / sum(times), batch / max(times), links, linked)


@dataclasses.dataclass(frozen=True)
class PolicyPlan:
    """The plan of one policy on one GPU, or on each of several that share the model.

    Attributes:
        policy: the policy with all settings resolved.
        fetch: the fetch mode.
        fetch_reason: a sentence that says why "auto" chose the mode, or None if the mode was given.
        repeat_share: share of the selected units that are assumed to be on the device already.
        fallback: the reason why full attention runs in place of the policy at this capacity, or None.
        row_parts: bytes (device, host) of one request's state on one GPU, by part.
        largest_batch: maximum number of requests whose decode step fits, or 0.
        prefill_batch: maximum number of requests whose prefill fits in one call (`prefill_peak`). None for several
            GPUs.
        batch: number of requests for the figures below: the requested number, or the largest batch.
        fits: whether `batch` fits and is not 0.
        temporaries: upper bound on the device bytes of a step in addition to weights and state, by part.
        device_bytes: bytes of weights, states, temporaries and reserve on one GPU.
        host_bytes: bytes in host memory for all GPUs together.
        step: the bytes and times of a decode step; None for an empty batch.
        prefill: the times of the prefill of one request, and of its first token after its state was stored.
    """

    policy: Policy
    fetch: str
    fetch_reason: str | None
    repeat_share: float
    fallback: str | None
    row_parts: dict[str, tuple[int, int]]
    largest_batch: int
    prefill_batch: int | None
    batch: int
    fits: bool
    temporaries: dict[str, int]
    device_bytes: int
    host_bytes: int
    step: StepBound | None
    prefill: PrefillTime

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of one request on one GPU."""
        return sum(device for device, _ in self.row_parts.values()), sum(host for _, host in self.row_parts.values())

    @property
    def figures(self) -> ModeFigures:
        """The figures by which "auto" compares this plan with those of other fetch modes."""
        speed = 0.0 if self.step is None else self.step.tokens_per_second
        return ModeFigures(self.fetch, self.batch, self.device_bytes, self.host_bytes, speed)


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """The plans of a policy, of other policies to compare it with, and of full attention, on the same GPUs.

    Attributes:
        gpu: the figures of each GPU.
        mesh: the GPUs that share the model.
        dtype: dtype of weights, keys and values.
        fetch: the requested fetch mode, which may be "auto". Each PolicyPlan has its own mode.
        context: number of tokens in each prompt.
        capacity: number of tokens that each request may hold.
        gather_bytes_per_second: rate at which the host gathers rows for "device_put".
        weights_bytes: bytes of the weights on one GPU.
        reserve_bytes: bytes on one GPU for memory outside of arrays.
        host_limit: bytes of host memory that all requests together may take in one process. None: no limit.
        chosen: the plan of the requested policy.
        beside: the plans of the other policies, by name.
        full: the plan of full attention. Its batch is at most the requested one, and not more than fits.
    """

    gpu: Gpu
    mesh: MeshSizes
    dtype: str
    fetch: str
    context: int
    capacity: int
    gather_bytes_per_second: float
    weights_bytes: int
    reserve_bytes: int
    host_limit: int | None
    chosen: PolicyPlan
    beside: dict[str, PolicyPlan]
    full: PolicyPlan

    @property
    def count(self) -> int:
        """Number of GPUs that share the model."""
        return self.mesh.tp

    @property
    def ratio(self) -> float | None:
        """The result of `ratio_of` for the requested policy."""
        return self.ratio_of(self.chosen)

    def ratio_of(self, side: PolicyPlan) -> float | None:
        """Return the ratio of a plan's predicted speed to that of full attention, or None if a batch is empty."""
        step, full = side.step, self.full.step
        return step.tokens_per_second / full.tokens_per_second if step and full else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON, with each policy as its name and settings."""
        values = dataclasses.asdict(self)
        sides = [(values, "chosen", self.chosen), (values, "full", self.full)]
        for place, name, side in sides + [(values["beside"], name, side) for name, side in self.beside.items()]:
            device, host = side.row_bytes
            settings = policy_settings(side.policy)
            place[name] |= {
                "policy": {"name": side.policy.name, **settings},
                "row_device_bytes": device,
                "row_host_bytes": host,
                "ratio": self.ratio_of(side),
            }
        return values | {"count": self.count, "ratio": self.ratio}
