"""How much fits into this machine, and how fast a step could be by what the machine itself can do."""

from collections.abc import Callable
from typing import Any

import jax

from gpu.environment import GIB
from gpu.sizes import Sizes
from jshadow.planner.bytes import footprint
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_plan import Serving, StepBound
from jshadow.planner.gpu_specs import Gpu
from jshadow.policies import Full, Policy

SPARE = GIB  # of the device, for what the allocator cannot use between large arrays
# The pool of pinned memory grows by regions, each twice the one before, and wastes their ends.
POOL_SHARE = 0.92


class Room:
    """Memory of device and host, and the measured ceilings.

    Args:
        sizes: may set both memories.
        pool: bytes of the pool of pinned memory.
        ceilings: measures them when first asked, or gives what was measured.
    """

    def __init__(self, sizes: Sizes, pool: int, ceilings: Callable[[], dict[str, float]]) -> None:
        self.sizes, self.ceilings = sizes, ceilings
        stats = jax.devices()[0].memory_stats() or {}
        self.device_bytes = sizes.device_bytes or stats["bytes_limit"] - SPARE
        self.host_bytes = sizes.host_bytes or int(pool * POOL_SHARE)

    def gpu(self) -> Gpu:
        """This machine, as the planner sees it."""
        found = self.ceilings()
        return Gpu("this", self.device_bytes, found["read"], bus(found), found["matmul_bfloat16"])

    def plan(self, policy: Policy, capacity: int, batch: int | None, fetch: str, share: float | None) -> Any:
        """The planner's word on a policy with prompts that fill the capacity."""
        prompt = self.sizes.prompt(capacity)
        serving = Serving(prompt, max_new_tokens=capacity - prompt, batch=batch, fetch=fetch, repeat_share=share)
        return capacity_plan(self.sizes.config, policy, self.gpu(), serving).chosen

    def largest(self, policy: Policy, capacity: int, fetch: str) -> int:
        """Most rows whose step fits the device and whose offloaded rows fit the host."""
        rows: int = self.plan(policy, capacity, 1, fetch, 0.0 if fetch == "zero_copy" else None).largest_batch
        host = self.host_row(policy, capacity, fetch)
        if self.sizes.dry and isinstance(policy, Full):
            rows = min(rows, 3)  # a dry run has no device whose end it could reach
        return min(rows, self.host_bytes // host) if host else rows

    def host_row(self, policy: Policy, capacity: int, fetch: str) -> int:
        """Bytes of a row in host memory."""
        prompt = self.sizes.prompt(capacity)
        return int(footprint(self.sizes.config, policy, capacity=capacity, prompt=prompt, fetch=fetch)["host_bytes"])

    def bound(self, policy: Policy, capacity: int, batch: int, fetch: str, share: float | None) -> StepBound:
        """The roofline of a step with the measured ceilings."""
        bound: StepBound = self.plan(policy, capacity, batch, fetch, share).step
        return bound

    def in_use(self) -> dict[str, int | None]:
        """Bytes of arrays on the device and in pinned memory."""
        stats = jax.devices()[0].memory_stats() or {}
        host = sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host")
        return {"device_bytes": stats.get("bytes_in_use"), "host_bytes": host}

    def peak(self) -> dict[str, int | None]:
        """Most device bytes that this process has taken so far."""
        return {"peak_device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}


def bus(ceilings: dict[str, float]) -> float:
    """Bytes a second from the host; where the host's memory is the device's, what can be read of it."""
    return ceilings.get("host_to_device", ceilings["read"])
