"""How many rows fit into this machine, and the roofline of a step with the measured rates of this machine."""

from collections.abc import Callable
from typing import Any

import jax

from gpu.environment import GIB
from gpu.sizes import Sizes
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import StepBound, capacity_plan
from jshadow.planner.gpu_specs import Gpu
from jshadow.planner.machine import footprint
from jshadow.policies import Policy

SPARE = GIB  # device memory that the allocator may lose between large arrays
# The share of the pool of pinned memory that can be used. The pool grows by regions of doubling size, and wastes the
# end of each.
POOL_SHARE = 0.92


class Room:
    """The memory of device and host, and the measured peak rates.

    Args:
        sizes: the sizes of the run. They may set both memories.
        pool: bytes of the pool of pinned memory.
        ceilings: returns the peak rates. They are measured on the first call.
    """

    def __init__(self, sizes: Sizes, pool: int, ceilings: Callable[[], dict[str, float]]) -> None:
        self.sizes, self.ceilings = sizes, ceilings
        stats = jax.devices()[0].memory_stats() or {}
        self.device_bytes = sizes.device_bytes or stats["bytes_limit"] - SPARE
        self.host_bytes = sizes.host_bytes or int(pool * POOL_SHARE)

    def gpu(self) -> Gpu:
        """Describe this machine for the planner."""
        found = self.ceilings()
        return Gpu("this", self.device_bytes, found["read"], bus(found), found["matmul_bfloat16"], bus(found))

    def plan(self, policy: Policy, capacity: int, batch: int | None, fetch: str, share: float | None) -> Any:
        """Return the planner's result for a policy with prompts that fill all but 64 tokens of the capacity."""
        prompt = self.sizes.prompt(capacity)
        serving = Workload(prompt, max_new_tokens=capacity - prompt, batch=batch, fetch=fetch, repeat_share=share)
        return capacity_plan(self.sizes.config, policy, self.gpu(), serving).chosen

    def largest(self, policy: Policy, capacity: int, fetch: str) -> int:
        """Return the largest batch whose step fits the device and whose offloaded rows fit the host."""
        rows: int = self.plan(policy, capacity, 1, fetch, 0.0 if fetch == "zero_copy" else None).largest_batch
        host = self.host_row(policy, capacity, fetch)
        if self.sizes.dry:
            rows = min(rows, 4)  # a dry run fills no memory
        return min(rows, self.host_bytes // host) if host else rows

    def host_row(self, policy: Policy, capacity: int, fetch: str) -> int:
        """Return the bytes of one row of the batch in host memory."""
        prompt = self.sizes.prompt(capacity)
        return int(footprint(self.sizes.config, policy, capacity=capacity, prompt=prompt, fetch=fetch)["host_bytes"])

    def bound(self, policy: Policy, capacity: int, batch: int, fetch: str, share: float | None) -> StepBound:
        """Return the roofline of a step with the measured peak rates."""
        bound: StepBound = self.plan(policy, capacity, batch, fetch, share).step
        return bound

    def in_use(self) -> dict[str, int | None]:
        """Return the bytes of all arrays on the device and in pinned memory."""
        stats = jax.devices()[0].memory_stats() or {}
        host = sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host")
        return {"device_bytes": stats.get("bytes_in_use"), "host_bytes": host}

    def peak(self) -> dict[str, int | None]:
        """Return the peak device bytes of this process so far."""
        return {"peak_device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}


def bus(ceilings: dict[str, float]) -> float:
    """Return the bytes per second from host to device, or the read rate of memory if both share it."""
    return ceilings.get("host_to_device", ceilings["read"])
