"""Tokens a second of whole models on synthetic states: full attention and ShadowKV, short of nothing but a prompt."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpu.room import Room
from gpu.runner import Task
from gpu.sizes import Sizes
from gpu.steered import PHASE, SHARE
from gpu.synthetic import abstract, free, placed, refetched, sharding, state, steered, weights
from gpu.timing import Built, build, side_by_side
from jshadow.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.offload import FETCH_QUANTUM
from jshadow.planning import abstract_state
from jshadow.policies import Full, Policy
from jshadow.state import Counters, KVState, Reads, Writes
from jshadow.step import step_writes


@dataclasses.dataclass(frozen=True)
class Setup:
    """One configuration: "full" or a fetch mode of ShadowKV, tokens a row may hold, rows."""

    kind: str
    capacity: int
    batch: int

    @property
    def fetch(self) -> str:
        """Fetch mode."""
        return "resident" if self.kind == "full" else self.kind

    def policy(self, sizes: Sizes) -> Policy:
        """Full attention, or ShadowKV with a set repeat share."""
        return Full() if self.kind == "full" else steered(sizes.policy, sizes.prompt(self.capacity))

    def __str__(self) -> str:
        return f"{self.kind}, {self.batch} x {self.capacity:,}"


def greedy_step(
    weights: dict, token: Array, reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Array, Writes]:
    """One step of all rows: the likeliest next tokens int32 [B], whether all logits are finite, the changing half."""
    logits, writes = step_writes(weights, config, token[:, None], jnp.ones_like(token), reads, writes)
    return logits.argmax(-1).astype(jnp.int32), jnp.isfinite(logits).all(), writes


def built(setup: Setup, sizes: Sizes) -> Built:
    """The step of a configuration, compiled from shapes alone."""
    shapes = abstract_state(
        sizes.config, setup.policy(sizes), batch=setup.batch, capacity=setup.capacity,
        prompt=sizes.prompt(setup.capacity), dtype="bfloat16", fetch=setup.fetch,
    )  # fmt: skip
    halves = (abstract(half) for half in shapes.split())
    tensors = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_weights(sizes.config))
    token = placed(jax.ShapeDtypeStruct((setup.batch,), jnp.int32), "device")
    step = functools.partial(greedy_step, config=sizes.config)
    return build(step, abstract(tensors), token, *halves, donate=(3,))


class Steps:
    """A state that moves on by a compiled program; the prompt may begin anew at any token."""

    def __init__(self, program: Any, tensors: dict, state: KVState, prompt: int) -> None:
        self.program, self.tensors, self.state, self.prompt = program, tensors, state, prompt
        self.token = jax.device_put(jnp.zeros(state.batch, jnp.int32), sharding("device"))
        self.finite: Array | None = None

    def step(self) -> None:
        """Dispatch one."""
        reads, writes = self.state.split()
        self.token, self.finite, writes = self.program(self.tensors, self.token, reads, writes)
        self.state = self.state.join(writes)

    def wait(self) -> None:
        """For all that was dispatched."""
        jax.block_until_ready((self.token, self.state.lengths))

    def at(self, token: int) -> None:
        """Go on as if that many tokens had followed the prompt."""
        lengths = jnp.full(self.state.batch, self.prompt + token, jnp.int32)
        self.state = self.state.replace(lengths=jax.device_put(lengths, sharding("device")))

    def counters(self) -> dict[str, np.ndarray]:
        """As NumPy arrays [B]."""
        counters: Counters = self.state.counters
        return {field.name: np.asarray(getattr(counters, field.name)) for field in dataclasses.fields(counters)}

    def phase(self, first: int, sizes: Sizes) -> dict[str, Any]:
        """Times of steps from that token after the prompt on, single ones and runs; what they selected and fetched."""
        self.at(first)
        for _ in range(2):
            self.step()
        self.wait()
        before, alone, together = self.counters(), [], []
        for _ in range(sizes.singles):
            start = time.perf_counter()
            self.step()
            self.wait()
            alone.append(time.perf_counter() - start)
        for _ in range(sizes.runs):
            start = time.perf_counter()
            for _ in range(sizes.run_steps):
                self.step()
            self.wait()
            together.append((time.perf_counter() - start) / sizes.run_steps)
        after, steps = self.counters(), sizes.singles + sizes.runs * sizes.run_steps
        assert 2 + steps <= PHASE, f"{2 + steps} steps are more than a phase of {PHASE}"
        if not bool(self.finite):
            raise ArithmeticError("logits are not finite")
        taken = {name: (after[name] - before[name]).sum(dtype=np.int64) for name in ("selected", "hits", "fetched")}
        batch = self.state.batch
        return {
            "tokens_per_second": batch / statistics.median(together), "least": batch / max(together),
            "most": batch / min(together), "single_tokens_per_second": batch / statistics.median(alone),
            "single_least": batch / max(alone), "single_most": batch / min(alone),
            "step_seconds": statistics.median(together),
            "share": float(taken["hits"] / taken["selected"]) if taken["selected"] else None,
            "fetched_bytes_per_step": int(taken["fetched"]) * FETCH_QUANTUM / steps,
        }  # fmt: skip


class Throughput:
    """The decode part: programs compiled side by side, weights made once, one state at a time."""

    def __init__(self, sizes: Sizes, room: Room) -> None:
        self.sizes, self.room = sizes, room
        self.programs: dict[Setup, Future] = {}
        self.tensors: dict | None = None
        self.held: tuple[Setup, KVState] | None = None
        self.best: dict[int, float] = {}  # tokens a second of full attention, by capacity
        self.fallen: dict[tuple[str, int], int] = {}  # largest batches that did not fit after all
        # Guesses until they were measured: seconds to compile a group, bytes a second into pinned memory.
        self.compiling, self.filling = 70.0, 3e9

    def setups(self, capacity: int) -> list[list[Setup]]:
        """Groups that are compiled together: largest batches first, then single rows."""
        policy = steered(self.sizes.policy, self.sizes.prompt(capacity))
        full = Setup("full", capacity, self.room.largest(Full(), capacity, "resident"))
        most = self.room.largest(policy, capacity, "zero_copy")
        kinds = ("zero_copy", "device_put")
        many, one = ([Setup(kind, capacity, batch) for kind in kinds] for batch in (most, 1))
        groups = [[full, *many], one] if most > 1 else [[full, *many]]
        return [[setup for setup in group if setup.batch] for group in groups]

    def tasks(self) -> Iterator[Task]:
        """One task a configuration."""
        try:
            for capacity in self.sizes.capacities:
                for group in self.setups(capacity):
                    for setup in group:
                        yield Task(str(setup), self.needs(setup), functools.partial(self.measured, setup, group))
        finally:
            self.drop()
            free(self.tensors)

    def needs(self, setup: Setup) -> float:
        """Seconds that a configuration will take."""
        if self.sizes.dry:
            return 0.0
        filled = self.held is not None and self.held[0].kind != "full" and setup.kind != "full" and (
            (self.held[0].capacity, self.held[0].batch) == (setup.capacity, setup.batch)
        )  # fmt: skip
        host = 0 if filled or setup.kind == "full" else setup.batch * self.room.host_row(
            setup.policy(self.sizes), setup.capacity, setup.fetch
        )  # fmt: skip
        return 20 + host / self.filling + (0 if setup in self.programs else self.compiling)

    def drop(self) -> None:
        """Free the state that is held."""
        if self.held is not None:
            free(self.held[1])
            self.held = None

    def program(self, setup: Setup, group: list[Setup]) -> Built:
        """A configuration's program; those of its group are compiled with it."""
        if setup not in self.programs:
            self.drop()  # compilers measure too, and want room for that
            jobs = {one: functools.partial(built, one, self.sizes) for one in group if one not in self.programs}
            start = time.perf_counter()
            self.programs |= side_by_side(jobs, self.sizes.workers)
            self.compiling = time.perf_counter() - start
        done: Built = self.programs[setup].result()
        return done

    def state(self, setup: Setup) -> KVState:
        """Its state; offloaded rows stay where they are when only the fetch mode changes."""
        sizes = self.sizes
        if self.held is not None:
            other, held = self.held
            if "full" not in (setup.kind, other.kind) and (other.capacity, other.batch) == (
                setup.capacity, setup.batch
            ):  # fmt: skip
                return refetched(held, setup.kind)
            self.drop()
        return state(
            sizes.config, setup.policy(sizes), setup.batch, setup.capacity, sizes.prompt(setup.capacity), setup.fetch
        )

    def measured(self, setup: Setup, group: list[Setup]) -> dict[str, Any]:
        """A configuration's figures; with fewer rows where memory runs out."""
        if self.tensors is None:
            self.tensors = weights(self.sizes.config)
        while True:
            batch = min(setup.batch, self.fallen.get((setup.kind, setup.capacity), setup.batch))
            now = dataclasses.replace(setup, batch=batch)
            try:
                return self.figures(now, group if now in group else [now])
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or batch == 1:
                    raise
                self.drop()
                kinds = ("full",) if setup.kind == "full" else ("zero_copy", "device_put")
                self.fallen |= {(kind, setup.capacity): max(1, math.floor(batch * 0.8)) for kind in kinds}

    def figures(self, setup: Setup, group: list[Setup]) -> dict[str, Any]:
        """As `measured`, for exactly that batch."""
        program, seconds = self.program(setup, group)
        start = time.perf_counter()
        made, fresh = self.state(setup), self.held is None
        self.held = (setup, made)
        filled = time.perf_counter() - start
        row: dict[str, Any] = self.room.in_use() | {
            "kind": setup.kind, "capacity": setup.capacity, "batch": setup.batch, "compile_seconds": seconds,
            "fill_seconds": filled, "program_temporary_bytes": temporaries(program),
        }  # fmt: skip
        if fresh and setup.kind != "full" and setup.batch > 1:
            self.filling = (row["host_bytes"] or 0) / filled
        steps = Steps(program, self.tensors or {}, made, self.sizes.prompt(setup.capacity))
        shares: list[tuple[int, float | None]] = [(0, None)] if setup.kind == "full" else [(0, 0.0), (PHASE, SHARE)]
        phases = []
        try:
            for first, share in shares:
                phases.append({"share_set": share} | steps.phase(first, self.sizes))
                phases[-1] |= self.bound(setup, phases[-1])
        finally:
            self.held = (setup, steps.state)
        if setup.kind == "full":
            self.best[setup.capacity] = max(self.best.get(setup.capacity, 0.0), phases[0]["tokens_per_second"])
        best = self.best.get(setup.capacity)
        for phase in phases:
            phase["ratio_to_full"] = phase["tokens_per_second"] / best if best else None
        return row | self.room.peak() | {"phases": phases}

    def bound(self, setup: Setup, phase: dict[str, Any]) -> dict[str, Any]:
        """The planner's roofline of this step, with the measured ceilings, and the share of it that was reached."""
        share = phase["share"] if setup.kind == "zero_copy" else None
        step = self.room.bound(setup.policy(self.sizes), setup.capacity, setup.batch, setup.fetch, share)
        return {
            "bound_tokens_per_second": step.tokens_per_second, "bound_hbm_seconds": step.hbm_seconds,
            "bound_pcie_seconds": step.pcie_seconds,
            "share_of_bound": phase["tokens_per_second"] / step.tokens_per_second,
        }  # fmt: skip


def temporaries(program: Any) -> int | None:
    """Device bytes that a program takes beside its arguments, by XLA; None where it does not tell."""
    memory = program.memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes)
