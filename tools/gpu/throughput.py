"""Tokens per second of a whole model with full attention and with ShadowKV, on synthetic states instead of prompts."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax

from gpu.baseline import Baseline
from gpu.room import Room
from gpu.runner import Late, NotHere, Task, brief, errors
from gpu.sizes import Sizes
from gpu.steered import PHASE, SHARE
from gpu.steps import FULL, Setup, Steps, built, temporaries
from gpu.synthetic import free, refetched, state, weights
from gpu.timing import Built, side_by_side
from jshadow.cache.state import KVState

# Groups of configurations (code, fetch mode) that are compiled together, the most important first.
LONGEST = (
    ((FULL, "resident"), ("packed small", "resident")),
    (("packed", "zero_copy"), ("paper", "zero_copy"), ("paper", "device_put"), ("int4", "resident")),
)
SHORTER = (((FULL, "resident"), ("packed small", "resident"), ("packed", "zero_copy"), ("paper", "zero_copy")),)
SINGLE = (((FULL, "resident"), ("packed small", "resident"), ("paper", "zero_copy")),)  # of one row
PROFILED = (LONGEST[0], LONGEST[1][:2])
Group = tuple[tuple[str, str], ...]


class Throughput:
    """Measures configurations. Programs are compiled in parallel. Weights are created once. One state exists.

    Args:
        sizes: all sizes.
        room: the memory of the machine.
        left: returns the seconds until the deadline.
        baseline: the best speed of full attention, also of earlier calls.
    """

    def __init__(self, sizes: Sizes, room: Room, left: Callable[[], float], baseline: Baseline) -> None:
        self.sizes, self.room, self.left, self.baseline = sizes, room, left, baseline
        self.programs: dict[Setup, Future] = {}
        self.tensors: dict | None = None
        self.held: tuple[Setup, KVState] | None = None
        self.fallen: dict[Setup, int] = {}  # batch to try next, after a larger one did not fit
        # Estimates that measurements replace: seconds to compile a group, and bytes per second into pinned memory while
        # its pool grows and afterwards.
        self.compiling, self.filling, self.grown = 70.0, {False: 3e9, True: 10e9}, False

    def setups(self, group: Group, capacity: int, batch: int | None = None) -> list[Setup]:
        """Return the configurations of a group with `batch` rows, or with as many rows as fit. 0 rows: none fits."""
        made = [Setup(code, fetch, capacity) for code, fetch in group]
        # Modes that share the rows in host memory have the same batch, that of "zero_copy".
        most = {one: one._replace(fetch="zero_copy") if one.fetch == "device_put" else one for one in made}
        return [
            one._replace(batch=batch or self.room.largest(most[one].policy(self.sizes), capacity, most[one].fetch))
            for one in made
        ]

    def longest(self) -> Iterator[Task]:
        """Yield the tasks of the longest context with the largest batch, which matter most."""
        return self.tasks([self.setups(group, self.sizes.capacities[0]) for group in LONGEST])

    def others(self) -> Iterator[Task]:
        """Yield the tasks of shorter contexts with the largest batch, and then of single rows."""
        first, *shorter = self.sizes.capacities
        groups = [self.setups(group, capacity) for capacity in shorter for group in SHORTER]
        return self.tasks(groups + [self.setups(group, first, 1) for group in SINGLE])

    def tasks(self, groups: list[list[Setup]], measure: Callable[..., dict] | None = None) -> Iterator[Task]:
        """Yield one task for each configuration. If not one row fits, the task reports this.

        Args:
            groups: configurations that are compiled together.
            measure: measure(setup, steps) returns further entries of the row. None: the phases.
        """
        measure = measure or self.phases
        try:
            for group in groups:
                fits = [setup for setup in group if setup.batch]
                for setup in group:
                    if setup.batch:
                        run = functools.partial(self.measured, setup, fits, measure)
                    else:
                        run = functools.partial(self.refused, setup)
                    yield Task(str(setup), self.needs(setup) if setup.batch else 0, run)
        finally:
            self.drop()
            free(self.tensors)
            self.tensors = None

    def refused(self, setup: Setup) -> dict[str, Any]:
        """Raise NotHere with the reason why not one row fits."""
        row = self.host_row(setup)
        raise NotHere(
            f"not one row fits: it takes {row / 1e9:.2f} GB of pinned memory, {self.room.host_bytes / 1e9:.2f} "
            f"GB of it may be taken, and its step must fit {self.room.device_bytes / 1e9:.2f} GB of the device"
        )

    def host_row(self, setup: Setup) -> int:
        """Return the bytes of one row of a configuration in host memory."""
        return self.room.host_row(setup.policy(self.sizes), setup.capacity, setup.fetch)

    def needs(self, setup: Setup) -> float:
        """Estimate the seconds of a configuration."""
        if self.sizes.dry:
            return 0.0
        filled = self.held is not None and setup.shares_rows(self.held[0])
        host = 0 if filled else setup.batch * self.host_row(setup)
        return 20 + host / self.filling[self.grown] + (0 if setup in self.programs else self.compiling)

    def drop(self) -> None:
        """Free the current state."""
        if self.held is not None:
            free(self.held[1])
            self.held = None

    def program(self, setup: Setup, group: list[Setup]) -> Built:
        """Return the program of a configuration. All programs of its group are compiled together."""
        if setup not in self.programs:
            self.drop()  # XLA times kernels while it compiles, and needs device memory for that
            jobs = {one: functools.partial(built, one, self.sizes) for one in group if one not in self.programs}
            start = time.perf_counter()
            self.programs |= side_by_side(jobs, self.sizes.workers)
            self.compiling = time.perf_counter() - start
        done: Built = self.programs[setup].result()
        return done

    def state(self, setup: Setup) -> KVState:
        """Create the state of a configuration. If only the fetch mode changes, offloaded rows are not moved."""
        sizes = self.sizes
        if self.held is not None:
            other, held = self.held
            if setup.shares_rows(other):
                return refetched(held, setup.fetch)
            self.drop()
        return state(
            sizes.config, setup.policy(sizes), setup.batch, setup.capacity, sizes.prompt(setup.capacity), setup.fetch
        )

    def measured(self, setup: Setup, group: list[Setup], measure: Callable[..., dict]) -> dict[str, Any]:
        """Measure a configuration. If memory runs out, try a smaller batch."""
        if self.tensors is None:
            self.tensors = weights(self.sizes.config)
        while True:
            batch = min(setup.batch, self.fallen.get(alike(setup), setup.batch))
            now = setup._replace(batch=batch)
            try:
                return self.figures(now, group if now in group else [now], measure)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or batch == 1:
                    raise
                self.drop()
                less = max(1, math.floor(batch * 0.8))
                self.fallen[alike(setup)] = less
                if self.left() < self.needs(setup._replace(batch=less)):
                    raise Late(f"{brief(error)}; no time to try {less} rows") from error

    def figures(self, setup: Setup, group: list[Setup], measure: Callable[..., dict]) -> dict[str, Any]:
        """Measure a configuration with exactly this batch."""
        program, seconds = self.program(setup, group)
        try:
            row, steps = self.filled(setup, program)
            try:
                found = measure(setup, steps)
            finally:
                self.held = (setup, steps.state)
        except BaseException:
            self.drop()
            raise
        if errors(found):
            self.drop()  # the failed step may have consumed its arrays
        return row | {"compile_seconds": seconds} | self.room.peak() | found

    def filled(self, setup: Setup, program: Any) -> tuple[dict[str, Any], Steps]:
        """Create and hold the state. Returns the entries that are known before the first step, and the Steps."""
        start = time.perf_counter()
        made, fresh = self.state(setup), self.held is None
        self.held = (setup, made)
        seconds = time.perf_counter() - start
        row: dict[str, Any] = self.room.in_use() | setup._asdict()
        row |= {"fill_seconds": seconds, "program_temporary_bytes": temporaries(program)}
        if fresh and row["host_bytes"] and setup.batch > 1:
            self.filling[self.grown], self.grown = max(1e8, row["host_bytes"] / seconds), True
        return row, Steps(program, self.tensors or {}, made, self.sizes.prompt(setup.capacity))

    def phases(self, setup: Setup, steps: Steps) -> dict[str, Any]:
        """Measure each phase. If the second phase raises, its error is stored and the first phase is kept."""
        full = setup.code == FULL
        shares: list[tuple[int, float | None]] = [(0, None)] if full else [(0, 0.0), (PHASE, SHARE)]
        phases: list[dict[str, Any]] = []
        for first, share in shares:
            try:
                phase = steps.phase(first, self.sizes)
                phases.append({"share_set": share} | phase | self.bound(setup, phase))
            except Exception as error:
                if not phases:
                    raise
                phases.append({"share_set": share, "error": brief(error)})
        return {"phases": self.compared(setup, phases)}

    def compared(self, setup: Setup, phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the phases with the ratio to the best speed of full attention."""
        if setup.code == FULL:
            self.baseline.remember(setup.capacity, setup.batch, phases[0]["tokens_per_second"])
        best = self.baseline.best(setup.capacity)
        for phase in phases:
            if "error" not in phase:
                phase["ratio_to_full"] = phase["tokens_per_second"] / best if best else None
        return phases

    def bound(self, setup: Setup, phase: dict[str, Any]) -> dict[str, Any]:
        """Return the planner's roofline of this step with the measured peak rates, and the reached share of it."""
        share = phase["share"] if setup.fetch == "zero_copy" else None
        step = self.room.bound(setup.policy(self.sizes), setup.capacity, setup.batch, setup.fetch, share)
        return {
            "bound_tokens_per_second": step.bound_tokens_per_second,
            "bound_hbm_seconds": step.hbm_seconds,
            "bound_pcie_seconds": step.pcie_seconds,
            "share_of_bound": phase["tokens_per_second"] / step.bound_tokens_per_second,
        }


def alike(setup: Setup) -> Setup:
    """Return what the configurations have in common that need the same memory."""
    return setup._replace(batch=0, fetch="resident" if setup.fetch == "resident" else "zero_copy")
