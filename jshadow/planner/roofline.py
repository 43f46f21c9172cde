"""The time of a decode step at best: each byte moved once, each operation done once, at a GPU's full rates."""

import dataclasses

from jshadow.planner.gpu_specs import Gpu


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
    """The roofline of a step.

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
