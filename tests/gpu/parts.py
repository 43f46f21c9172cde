"""The parts of a run, the most important first. The peak rates come first of all, because all bounds use them."""

import functools
from collections.abc import Iterator
from typing import Any

from gpu import compress, features, kernels, stages
from gpu.fetches import Fetches
from gpu.room import Room
from gpu.runner import Parts, Runner, Task, brief
from gpu.sizes import Sizes
from gpu.throughput import Throughput
from jshadow.evaluation import speed as bench
from jshadow.planner.gpu_specs import GPUS


def all_parts(sizes: Sizes, runner: Runner, pool: int) -> Parts:
    """Return the parts for `Runner.run`. Nothing is allocated before a part begins."""

    def ceilings() -> dict[str, float]:
        """Return the peak rates of this machine. They are measured once.

        If the measurement fails or kills the process, the rates of the data sheet are used and marked.
        """
        results = runner.results
        if "ceilings" not in results:
            sheet = GPUS["h200"]
            results["ceilings"] = {
                "read": sheet.hbm_bytes_per_second,
                "matmul_bfloat16": sheet.flops,
                "host_to_device": sheet.pcie_bytes_per_second,
            }
            results["ceilings_from"] = "data sheet of the H200: measuring did not end"
            runner.write()
            try:
                results["ceilings"] = bench.ceilings(sizes.repeats, sizes.ceiling_bytes, sizes.ceiling_side)
                results["ceilings_from"] = "measured"
            except Exception as error:
                results["ceilings_from"] = f"data sheet of the H200: {brief(error)}"
        found: dict[str, float] = results["ceilings"]
        return found

    @functools.cache
    def throughput() -> Throughput:
        done = ("decode", "decode-more", "decode-packed")
        earlier = [row for part in done for row in runner.results["parts"].get(part, [])]
        return Throughput(sizes, Room(sizes, pool, ceilings), lambda: runner.left, earlier)

    def correctness() -> Iterator[Task]:
        yield from features.tasks(sizes)
        yield from kernels.tasks(sizes)

    def measure_ceilings() -> Iterator[Task]:
        def rows() -> dict[str, Any]:
            found, origin = ceilings(), runner.results["ceilings_from"]
            return {"per_second": found, "from": origin} | ({} if origin == "measured" else {"error": origin})

        yield Task("ceilings", 5, rows)

    def fetch() -> Iterator[Task]:
        yield from Fetches(sizes, Room(sizes, pool, ceilings)).tasks()

    return {
        "ceilings": measure_ceilings,
        "correctness": correctness,
        "fetch": fetch,
        "decode": lambda: throughput().longest(),
        "layer": lambda: stages.tasks(sizes),
        "decode-more": lambda: throughput().others(),
        "decode-packed": lambda: throughput().packed(),
        "compress": lambda: compress.tasks(sizes),
    }
