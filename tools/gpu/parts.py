"""The sections of each part of a run, the most important first. Nothing is allocated before a section begins."""

import functools
from collections.abc import Iterator
from typing import Any

from gpu import compress, dense, environment, features, generation, kernel_times, kernels, stages
from gpu.baseline import Baseline
from gpu.fetches import Fetches
from gpu.room import Room
from gpu.runner import Runner, Sections, Task, brief
from gpu.sizes import Sizes
from gpu.throughput import Throughput
from jshadow.evaluation import speed as bench
from jshadow.planner.gpu_specs import GPUS


class Ceilings:
    """The peak rates of this machine. They are measured once in a part.

    Args:
        sizes: all sizes.
        runner: its results hold the rates.
    """

    def __init__(self, sizes: Sizes, runner: Runner) -> None:
        self.sizes, self.runner = sizes, runner

    def rates(self) -> dict[str, float]:
        """Return the rates. If the measurement fails or kills the process, they are those of a data sheet."""
        results = self.runner.results
        if "ceilings" not in results:
            sheet = GPUS["h200"]
            results["ceilings"] = {
                "read": sheet.hbm_bytes_per_second,
                "matmul_bfloat16": sheet.flops,
                "host_to_device": sheet.pcie_bytes_per_second,
            }
            results["ceilings_from"] = "data sheet of the H200: measuring did not end"
            self.runner.write()
            try:
                sizes = self.sizes
                results["ceilings"] = bench.ceilings(sizes.repeats, sizes.ceiling_bytes, sizes.ceiling_side)
                results["ceilings_from"] = "measured"
            except Exception as error:
                results["ceilings_from"] = f"data sheet of the H200: {brief(error)}"
        found: dict[str, float] = results["ceilings"]
        return found

    def row(self) -> dict[str, Any]:
        """Return the rates as a row. It has an error if they were not measured."""
        found, origin = self.rates(), self.runner.results["ceilings_from"]
        return {"per_second": found, "from": origin} | ({} if origin == "measured" else {"error": origin})

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks that measure the machine."""
        yield Task("ceilings", 5, self.row)
        yield Task("bus and clocks", 5, functools.partial(environment.bus_and_clocks, self.sizes.ceiling_bytes))


def sections(part: str, sizes: Sizes, runner: Runner, baseline: Baseline) -> Sections:
    """Return the sections of a part for `Runner.run`."""
    ceilings = Ceilings(sizes, runner)

    @functools.cache
    def room() -> Room:
        return Room(sizes, environment.pool(), ceilings.rates)

    @functools.cache
    def throughput() -> Throughput:
        return Throughput(sizes, room(), lambda: runner.left, baseline)

    every: dict[str, Sections] = {
        "checks": {
            "kernels": lambda: kernels.tasks(sizes),
            "features": lambda: features.tasks(sizes),
            "ceilings": ceilings.tasks,
            "fetch": lambda: Fetches(sizes, room()).tasks(),
        },
        "decode": {
            "decode": lambda: throughput().longest(),
            "generate": lambda: generation.tasks(sizes, room()),
            "decode-more": lambda: throughput().others(),
        },
        "layers": {
            "profile": lambda: kernel_times.tasks(throughput()),
            "dense": lambda: dense.tasks(sizes, runner),
            "stages": lambda: stages.tasks(sizes),
            "compress": lambda: compress.tasks(sizes),
        },
    }
    return every[part]
