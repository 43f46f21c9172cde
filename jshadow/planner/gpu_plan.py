"""The records of a GPU plan: the requests, the batch that fits, and the lower bound on the time of a decode step."""

import dataclasses
from typing import Any

from jshadow.planner.gpu_specs import Gpu
from jshadow.policies import Policy
from jshadow.policies.settings import policy_settings


@dataclasses.dataclass(frozen=True)
class Serving:
    """The requests to be served by one GPU, or by several GPUs that share weights and KV heads.

    Attributes:
        context: number of tokens in each prompt.
        max_new_tokens: number of tokens that each request may hold beyond its prompt.
        count: number of GPUs.
        batch: number of requests. None: as many as fit.
        dtype: dtype of weights, keys and values.
        fetch: fetch mode. "auto" is resolved as on a GPU.
        repeat_share: share of the selected units that are still on the device from the previous step, in [0, 1]. None:
            0.6, as in the ShadowKV paper, in a fetch mode that keeps units on the device, and else 0.
        host_limit: bytes of host memory that all requests together may take. None: no limit.
    """

    context: int
    max_new_tokens: int = 64
    count: int = 1
    batch: int | None = None
    dtype: str = "bfloat16"
    fetch: str = "device_put"
    repeat_share: float | None = None
    host_limit: int | None = None

    @property
    def capacity(self) -> int:
        """Number of tokens that each request may hold: its prompt and its new tokens."""
        return self.context + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class StepBound:
    """A lower bound on the time of one decode step of a batch on one GPU.

    Attributes:
        hbm_bytes: bytes read from device memory, by part.
        pcie_bytes: bytes moved from the host.
        flops: number of floating-point operations.
        hbm_seconds, pcie_seconds, flop_seconds: the time of each of these at the full rate of the GPU.
        tokens_per_second: tokens per second of the whole batch, if the three times overlap completely.
        serial_tokens_per_second: tokens per second of the whole batch, if the three times do not overlap at all.
    """

    hbm_bytes: dict[str, int]
    pcie_bytes: int
    flops: int
    hbm_seconds: float
    pcie_seconds: float
    flop_seconds: float
    tokens_per_second: float
    serial_tokens_per_second: float


def step_bound(gpu: Gpu, hbm: dict[str, int], moved: int, flops: int, batch: int, repeat_share: float) -> StepBound:
    """Return the bound of a step that moves each byte once and does each operation once, at the full rates of the GPU.

    Args:
        gpu: the GPU.
        hbm: bytes read from device memory, by part.
        moved: bytes of all selected units in host memory.
        flops: number of floating-point operations.
        batch: number of tokens that the step generates.
        repeat_share: share of `moved` that is already on the device, in [0, 1].
    """
    moved = round(moved * (1 - repeat_share))
    seconds = (sum(hbm.values()) / gpu.hbm_bytes_per_second, moved / gpu.pcie_bytes_per_second, flops / gpu.flops)
    return StepBound(hbm, moved, flops, *seconds, batch / max(seconds), batch / sum(seconds))


@dataclasses.dataclass(frozen=True)
class PolicyPlan:
    """The plan of one policy on one GPU, or on one of several that share the model's heads.

    Attributes:
        policy: the policy with all settings resolved.
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
        step: the bound of a decode step; None for an empty batch.
    """

    policy: Policy
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

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of one request on one GPU."""
        return sum(device for device, _ in self.row_parts.values()), sum(host for _, host in self.row_parts.values())


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """The plans of a policy, of other policies to compare it with, and of full attention, on the same GPUs.

    Attributes:
        gpu: the figures of each GPU.
        count: number of GPUs that share weights and KV heads.
        dtype: dtype of weights, keys and values.
        fetch: fetch mode.
        context: number of tokens in each prompt.
        capacity: number of tokens that each request may hold.
        repeat_share: share of the selected units that are assumed to be on the device already.
        weights_bytes: bytes of the weights on one GPU.
        reserve_bytes: bytes on one GPU for memory outside of arrays.
        host_limit: bytes of host memory that all requests together may take. None: no limit.
        chosen: the plan of the requested policy.
        beside: the plans of the other policies, by name.
        full: the plan of full attention. Its batch is at most the requested one, and not more than fits.
    """

    gpu: Gpu
    count: int
    dtype: str
    fetch: str
    context: int
    capacity: int
    repeat_share: float
    weights_bytes: int
    reserve_bytes: int
    host_limit: int | None
    chosen: PolicyPlan
    beside: dict[str, PolicyPlan]
    full: PolicyPlan

    @property
    def ratio(self) -> float | None:
        """The result of `ratio_of` for the requested policy."""
        return self.ratio_of(self.chosen)

    def ratio_of(self, side: PolicyPlan) -> float | None:
        """Return the ratio of a plan's `tokens_per_second` to those of full attention, or None if a batch is empty."""
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
        return values | {"ratio": self.ratio}
