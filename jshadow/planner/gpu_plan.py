"""The records of a GPU plan: what is to be served, what fits, and how fast a decode step can be at best."""

import dataclasses
from typing import Any

from jshadow.planner.gpu_specs import Gpu
from jshadow.policies import Policy
from jshadow.policies.settings import policy_settings


@dataclasses.dataclass(frozen=True)
class Serving:
    """What is to be served by one GPU, or by several that share weights and KV heads.

    Attributes:
        context: tokens of each prompt.
        max_new_tokens: tokens that each request may hold beyond its prompt.
        count: GPUs.
        batch: requests; None: as many as fit.
        dtype: of weights, keys and values.
        fetch: fetch mode; "auto" means what it means on a GPU.
        repeat_share: share of the selected units that the step before had fetched already; None: the paper's where
            the mode keeps them, else 0.
        host_limit: bytes of host memory that all requests together may take; None: as many as they need.
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
        """Tokens that each request may ever hold."""
        return self.context + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class StepBound:
    """One decode step of a batch on one GPU, at best.

    Attributes:
        hbm_bytes: read from device memory, by part.
        pcie_bytes: moved from the host.
        flops: operations.
        hbm_seconds, pcie_seconds, flop_seconds: each at the GPU's full rate.
        tokens_per_second: of the whole batch, where the three overlap: the slowest counts.
        serial_tokens_per_second: where none overlaps: their sum counts.
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
    """The time of a step at best: each byte is moved once and each operation done once, at the GPU's full rates.

    Args:
        gpu: its rates.
        hbm: bytes read from device memory, by part.
        moved: bytes of all units that are selected in host memory.
        flops: operations.
        batch: tokens that the step makes.
        repeat_share: share of `moved` that is on the device already.
    """
    moved = round(moved * (1 - repeat_share))
    seconds = (sum(hbm.values()) / gpu.hbm_bytes_per_second, moved / gpu.pcie_bytes_per_second, flops / gpu.flops)
    return StepBound(hbm, moved, flops, *seconds, batch / max(seconds), batch / sum(seconds))


@dataclasses.dataclass(frozen=True)
class PolicyPlan:
    """A policy on one GPU, or on one of several that share the model's heads.

    Attributes:
        policy: resolved.
        fallback: why a cache of this capacity gives the policy nothing to do, or None.
        row_parts: bytes (device, host) of one request's state on one GPU, by part.
        largest_batch: most requests whose decode step fits; 0: none does.
        prefill_batch: most requests whose prefill fits in one call (`prefill_peak`); None for several GPUs.
        batch: requests of the figures below: what was asked, or the largest; 0 where nothing fits.
        fits: whether that batch does.
        temporaries: device bytes of a step beside weights and state, at most, by part.
        device_bytes: weights, states, temporaries and reserve of one GPU.
        host_bytes: of all GPUs together.
        step: None for an empty batch.
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
    """A policy, other policies to compare it with, and full attention, on the same GPUs.

    Attributes:
        gpu: its figures.
        count: GPUs that share weights and KV heads.
        dtype: of weights, keys and values.
        fetch: fetch mode.
        context: tokens of each prompt.
        capacity: tokens that each request may ever hold.
        repeat_share: share of the selected units that is assumed not to move.
        weights_bytes: on one GPU.
        reserve_bytes: on one GPU, for memory outside of arrays.
        host_limit: bytes of host memory that requests may take; None: as many as they need.
        chosen: the policy that was asked for.
        beside: other policies by name, as `chosen`.
        full: full attention, its batch no larger than was asked for.
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
        """`ratio_of` the policy that was asked for."""
        return self.ratio_of(self.chosen)

    def ratio_of(self, side: PolicyPlan) -> float | None:
        """Overlapped tokens a second, a policy's to full attention's; None where one of them does not fit."""
        step, full = side.step, self.full.step
        return step.tokens_per_second / full.tokens_per_second if step and full else None

    def to_json(self) -> dict[str, Any]:
        """Plain values; policies as their names and settings."""
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
