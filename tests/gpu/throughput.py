"""Tokens per second of a whole model with full attention and with ShadowKV, on synthetic states instead of prompts."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from gpu.room import Room
from gpu.runner import Late, NotHere, Task, brief
from gpu.sizes import Sizes
from gpu.steered import PHASE, SHARE
from gpu.steps import Setup, Steps, built, temporaries
from gpu.synthetic import free, refetched, state, steered, weights
from gpu.timing import Built, side_by_side
from jshadow.cache.state import KVState
from jshadow.policies import Full


class Throughput:
    """The decode parts. Programs are compiled in parallel. Weights are created once for each part. One state exists.

    Args:
        sizes: all sizes.
        room: the memory of the machine.
        left: returns the seconds until the deadline.
        earlier: rows that an earlier process measured.
    """

    def __init__(self, sizes: Sizes, room: Room, left: Callable[[], float], earlier: Sequence[dict] = ()) -> None:
        self.sizes, self.room, self.left = sizes, room, left
        self.programs: dict[Setup, Future] = {}
        self.tensors: dict | None = None
        self.held: tuple[Setup, KVState] | None = None
        self.best: dict[int, float] = {}  # tokens per second of full attention, by capacity
        self.fallen: dict[tuple[str, int], int] = {}  # batch to try next, after a larger one did not fit
        for row in earlier:
            if row.get("kind") == "full" and row.get("phases"):
                self.remember(row["capacity"], row["phases"])
        # Estimates that measurements replace: seconds to compile a group, and bytes per second into pinned memory while
        # its pool grows and afterwards.
        self.compiling, self.filling, self.grown = 70.0, {False: 3e9, True: 10e9}, False

    def setups(self, capacity: int, packed: bool = False) -> list[list[Setup]]:
        """Return the groups of configurations that are compiled together: the largest batches, then single rows.

        The first group includes full attention, except for packed numbers, because it is measured before those.
        """
        sizes = self.sizes
        policy = steered(sizes.packed if packed else sizes.policy, sizes.prompt(capacity))
        most = self.room.largest(policy, capacity, "zero_copy")
        kinds = ("zero_copy", "device_put")
        many, one = ([Setup(kind, capacity, batch, packed) for kind in kinds] for batch in (most, 1))
        if not packed:
            many.insert(0, Setup("full", capacity, self.room.largest(Full(), capacity, "resident")))
        return [many, one] if most > 1 else [many]

    def longest(self) -> Iterator[Task]:
        """Yield the tasks of the longest context with the largest batch, which matter most."""
        return self.tasks([self.setups(self.sizes.capacities[0])[0]])

    def others(self) -> Iterator[Task]:
        """Yield the tasks of shorter contexts with the largest batch, and then of single rows."""
        first, *shorter = [self.setups(capacity) for capacity in self.sizes.capacities]
        single = [group for groups in (first, *shorter) for group in groups[1:]]
        return self.tasks([groups[0] for groups in shorter] + single)

    def packed(self) -> Iterator[Task]:
        """Yield the tasks of packed keys, landmarks and values at every context with the largest batch."""
        return self.tasks([self.setups(capacity, packed=True)[0] for capacity in self.sizes.capacities])

    def tasks(self, groups: list[list[Setup]]) -> Iterator[Task]:
        """Yield one task for each configuration. If not one row fits, the task reports this."""
        try:
            for group in groups:
                fits = [setup for setup in group if setup.batch]
                for setup in group:
                    run = (
                        functools.partial(self.measured, setup, fits)
                        if setup.batch
                        else functools.partial(self.refused, setup)
                    )
                    yield Task(str(setup), self.needs(setup) if setup.batch else 0, run)
        finally:
            self.drop()
            free(self.tensors)
            self.tensors = None

    def refused(self, setup: Setup) -> dict[str, Any]:
        """Raise NotHere with the reason why not one row fits."""
        row = self.room.host_row(setup.policy(self.sizes), setup.capacity, setup.fetch)
        raise NotHere(
            f"not one row fits: it takes {row / 1e9:.2f} GB of pinned memory, {self.room.host_bytes / 1e9:.2f} "
            f"GB of it may be taken, and its step must fit {self.room.device_bytes / 1e9:.2f} GB of the device"
        )

    def remember(self, capacity: int, phases: list[dict]) -> None:
        """Store the best rate of full attention, which all other rates are compared with."""
        self.best[capacity] = max(self.best.get(capacity, 0.0), phases[0]["tokens_per_second"])

    def needs(self, setup: Setup) -> float:
        """Estimate the seconds of a configuration."""
        if self.sizes.dry:
            return 0.0
        filled = self.held is not None and setup.shares_rows(self.held[0])
        host = (
            0
            if filled or setup.kind == "full"
            else setup.batch * self.room.host_row(setup.policy(self.sizes), setup.capacity, setup.fetch)
        )
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
                return refetched(held, setup.kind)
            self.drop()
        return state(
            sizes.config, setup.policy(sizes), setup.batch, setup.capacity, sizes.prompt(setup.capacity), setup.fetch
        )

    def measured(self, setup: Setup, group: list[Setup]) -> dict[str, Any]:
        """Measure a configuration. If memory runs out, try a smaller batch."""
        if self.tensors is None:
            self.tensors = weights(self.sizes.config)
        while True:
            batch = min(setup.batch, self.fallen.get((setup.label, setup.capacity), setup.batch))
            now = dataclasses.replace(setup, batch=batch)
            try:
                return self.figures(now, group if now in group else [now])
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or batch == 1:
                    raise
                self.drop()
                kinds = ("full",) if setup.kind == "full" else ("zero_copy", "device_put")
                less = max(1, math.floor(batch * 0.8))
                self.fallen |= {(dataclasses.replace(setup, kind=kind).label, setup.capacity): less for kind in kinds}
                needs = self.needs(dataclasses.replace(setup, batch=less))
                if self.left() < needs:
                    raise Late(f"{brief(error)}; no time to try {less} rows") from error

    def figures(self, setup: Setup, group: list[Setup]) -> dict[str, Any]:
        """Measure a configuration with exactly this batch."""
        program, seconds = self.program(setup, group)
        try:
            row, steps = self.filled(setup, program)
            phases = self.phases(setup, steps)
        except BaseException:
            self.drop()
            raise
        if any("error" in phase for phase in phases):
            self.drop()  # the failed step may have consumed its arrays
        if setup.kind == "full":
            self.remember(setup.capacity, phases)
        best = self.best.get(setup.capacity)
        for phase in phases:
            if "error" not in phase:
                phase["ratio_to_full"] = phase["tokens_per_second"] / best if best else None
        return row | {"compile_seconds": seconds} | self.room.peak() | {"phases": phases}

    def filled(self, setup: Setup, program: Any) -> tuple[dict[str, Any], Steps]:
        """Create and hold the state. Returns the entries that are known before the first step, and the Steps."""
        start = time.perf_counter()
        made, fresh = self.state(setup), self.held is None
        self.held = (setup, made)
        seconds = time.perf_counter() - start
        row: dict[str, Any] = self.room.in_use() | {
            "kind": setup.label,
            "capacity": setup.capacity,
            "batch": setup.batch,
            "fill_seconds": seconds,
            "program_temporary_bytes": temporaries(program),
        }
        if fresh and setup.kind != "full" and setup.batch > 1:
            self.filling[self.grown], self.grown = max(1e8, (row["host_bytes"] or 0) / seconds), True
        return row, Steps(program, self.tensors or {}, made, self.sizes.prompt(setup.capacity))

    def phases(self, setup: Setup, steps: Steps) -> list[dict[str, Any]]:
        """Measure each phase. If the second phase raises, its error is stored and the first phase is kept."""
        shares: list[tuple[int, float | None]] = [(0, None)] if setup.kind == "full" else [(0, 0.0), (PHASE, SHARE)]
        phases: list[dict[str, Any]] = []
        try:
            for first, share in shares:
                phases.append({"share_set": share})
                phases[-1] |= steps.phase(first, self.sizes)
                phases[-1] |= self.bound(setup, phases[-1])
        except Exception as error:
            if len(phases) == 1:
                raise
            phases[-1] = {"share_set": phases[-1]["share_set"], "error": brief(error)}
        finally:
            self.held = (setup, steps.state)
        return phases

    def bound(self, setup: Setup, phase: dict[str, Any]) -> dict[str, Any]:
        """Return the planner's roofline of this step with the measured peak rates, and the reached share of it."""
        share = phase["share"] if setup.kind == "zero_copy" else None
        step = self.room.bound(setup.policy(self.sizes), setup.capacity, setup.batch, setup.fetch, share)
        return {
            "bound_tokens_per_second": step.bound_tokens_per_second,
            "bound_hbm_seconds": step.hbm_seconds,
            "bound_pcie_seconds": step.pcie_seconds,
            "share_of_bound": phase["tokens_per_second"] / step.bound_tokens_per_second,
        }
