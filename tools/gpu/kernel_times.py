"""A profile of a few decode steps as a table of kernels: names, counts and total times."""

import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from gpu.runner import NotHere, Task
from gpu.steps import Setup, Steps
from gpu.throughput import PROFILED, Throughput

STEPS = 3
DEVICE, STREAM = "/device:GPU:", "Stream"  # how the names of a GPU's planes, and of the lines of its kernels, begin


def kernels(data: ProfileData, gpu: bool) -> list[dict[str, Any]]:
    """Return the kernels and copies of a profile, those with the longest total time first.

    Args:
        data: the profile.
        gpu: whether to take the events of a GPU's streams. Otherwise the operations of XLA's programs on the host.

    Returns:
        Rows with "name", "count" and "seconds", the total of all events of this name.

    Raises:
        NotHere: the profile has no such events.
    """
    lines = [(plane.name, line) for plane in data.planes for line in plane.lines]
    found: dict[str, list[float]] = {}
    for plane, line in lines:
        if gpu and not (plane.startswith(DEVICE) and line.name.startswith(STREAM)):
            continue
        for event in line.events:
            if gpu or is_operation(event):
                found.setdefault(event.name, []).append(event.duration_ns / 1e9)
    if not found:
        told = sorted({f"{plane} {line.name}" for plane, line in lines})
        raise NotHere(f"the profile has no kernels, only {told}; JAX needs NVIDIA's library CUPTI to see them")
    rows = [{"name": name, "count": len(times), "seconds": sum(times)} for name, times in found.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def is_operation(event: Any) -> bool:
    """Return whether an event on the host is an operation of XLA's programs."""
    # In JAX 0.12 the type of `stats` has no __module__. Python 3.12 warns of that, and as an error it ends the process.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return any(name == "hlo_op" for name, _ in event.stats)


def profiled(setup: Setup, steps: Steps) -> dict[str, Any]:
    """Profile STEPS steps in which nothing of the selection stays. Returns the entries of a row."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    steps.at(0)
    for _ in range(2):
        steps.step()
    steps.wait()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(STEPS):
                steps.step()
            steps.wait()
            seconds = time.perf_counter() - start
        [path] = Path(folder).rglob("*.xplane.pb")
        rows = kernels(ProfileData.from_file(str(path)), jax.default_backend() == "gpu")
    return {"steps": STEPS, "wall_seconds": seconds, "kernels": rows}


def tasks(throughput: Throughput) -> Iterator[Task]:
    """Yield one task for each of the most important configurations, at the longest context."""
    groups = [throughput.setups(group, throughput.sizes.capacities[0]) for group in PROFILED]
    for task in throughput.tasks(groups, profiled):
        yield task._replace(name=f"profile, {task.name}")
