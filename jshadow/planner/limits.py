"""The memory that may be taken, and the search for what fits into it."""

import bisect
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """The memory that may be taken.

    Attributes:
        device: bytes of device memory. None: no limit.
        host: bytes of host memory for states. None: no limit.
        reserve: bytes of device memory outside of arrays.
    """

    device: int | None = None
    host: int | None = None
    reserve: int = 0

    def excess(self, needed: tuple[int, int]) -> list[tuple[str, int, int]]:
        """Return the memories that are too small, each as its name, the bytes needed and the limit.

        `needed` has the bytes (device, host), with the reserve.
        """
        memories = zip(("device", "host"), needed, (self.device, self.host), strict=True)
        return [(name, size, limit) for name, size, limit in memories if limit is not None and size > limit]

    def fits(self, needed: tuple[int, int]) -> bool:
        """Return whether the bytes fit into both memories."""
        return not self.excess(needed)

    def most(self, needed: Callable[[int], tuple[int, int]], most: int) -> int:
        """Return the largest number of at most `most` whose bytes fit, or 0. More never need fewer bytes."""
        return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not self.fits(needed(count)))
