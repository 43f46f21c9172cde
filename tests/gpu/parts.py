"""The parts of a run, in the order of what matters: correctness first."""

import functools
from collections.abc import Iterator
from typing import Any

from gpu import compress, features, kernels, stages
from gpu.fetches import Fetches
from gpu.room import Room
from gpu.runner import Parts, Runner, Task
from gpu.sizes import Sizes
from gpu.throughput import Throughput
from jshadow import bench


def all_parts(sizes: Sizes, runner: Runner, pool: int) -> Parts:
    """What `Runner.run` takes; nothing is allocated before a part begins."""

    @functools.cache
    def ceilings() -> dict[str, float]:
        found = bench.ceilings(sizes.repeats, sizes.ceiling_bytes, sizes.ceiling_side)
        runner.results["ceilings"] = found
        return found

    def correctness() -> Iterator[Task]:
        yield from features.tasks(sizes)
        yield from kernels.tasks(sizes)

    def measure_ceilings() -> Iterator[Task]:
        def rows() -> dict[str, Any]:
            return {"per_second": ceilings()}

        yield Task("ceilings", 5, rows)

    def fetch() -> Iterator[Task]:
        yield from Fetches(sizes, Room(sizes, pool, ceilings)).tasks()

    def decode() -> Iterator[Task]:
        yield from Throughput(sizes, Room(sizes, pool, ceilings)).tasks()

    return {
        "correctness": correctness, "ceilings": measure_ceilings, "fetch": fetch, "decode": decode,
        "layer": lambda: stages.tasks(sizes), "compress": lambda: compress.tasks(sizes),
    }  # fmt: skip
