"""The compiled decode step of a configuration, and the times of many steps."""

import dataclasses
import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpu.sizes import Sizes
from gpu.steered import PHASE
from gpu.synthetic import abstract, placed, sharding, steered
from gpu.timing import Built, build
from jshadow.cache.accounting import FETCH_QUANTUM
from jshadow.cache.state import Counters, KVState, Reads, Writes
from jshadow.engine.step import step_writes
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.machine import abstract_state
from jshadow.policies import Full, Policy

FULL = "full"  # the code of full attention


class Setup(NamedTuple):
    """One configuration.

    Attributes:
        code: FULL, or settings of ShadowKV by name, a key of `Sizes.policies`.
        fetch: the fetch mode.
        capacity: maximum tokens of a row.
        batch: number of rows.
    """

    code: str
    fetch: str
    capacity: int
    batch: int = 1

    def policy(self, sizes: Sizes) -> Policy:
        """Return full attention, or ShadowKV with a given share of repeated chunks."""
        if self.code == FULL:
            return Full()
        return steered(sizes.policies[self.code], sizes.prompt(self.capacity), self.capacity)

    @property
    def label(self) -> str:
        """The name in tables."""
        return FULL if self.code == FULL else f"{self.code}, {self.fetch}"

    def shares_rows(self, other: "Setup") -> bool:
        """Whether both configurations have the same rows in host memory."""
        return "resident" not in (self.fetch, other.fetch) and self._replace(fetch=other.fetch) == other

    def __str__(self) -> str:
        return f"{self.label}, {self.batch} x {self.capacity:,}"


def greedy_step(
    weights: dict, token: Array, reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Array, Writes]:
    """Run one step of all rows.

    Returns:
        The most likely next tokens int32 [B], whether all logits are finite, and the new `writes`.
    """
    logits, writes = step_writes(weights, config, token[:, None], jnp.ones_like(token), reads, writes)
    return logits.argmax(-1).astype(jnp.int32), jnp.isfinite(logits).all(), writes


def built(setup: Setup, sizes: Sizes) -> Built:
    """Compile the step of a configuration from abstract arguments."""
    shapes = abstract_state(
        sizes.config,
        setup.policy(sizes),
        batch=setup.batch,
        capacity=setup.capacity,
        prompt=sizes.prompt(setup.capacity),
        dtype="bfloat16",
        fetch=setup.fetch,
    )
    halves = (abstract(half) for half in shapes.split())
    tensors = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_weights(sizes.config))
    token = placed(jax.ShapeDtypeStruct((setup.batch,), jnp.int32), "device")
    step = functools.partial(greedy_step, config=sizes.config)
    return build(step, abstract(tensors), token, *halves, donate=(3,))


class Steps:
    """A state that a compiled step advances. It can be set to any position after the prompt."""

    def __init__(self, program: Any, tensors: dict, state: KVState, prompt: int) -> None:
        self.program, self.tensors, self.state, self.prompt = program, tensors, state, prompt
        self.token = jax.device_put(jnp.zeros(state.batch, jnp.int32), sharding("device"))
        self.finite: Array | None = None

    def step(self) -> None:
        """Dispatch one step."""
        reads, writes = self.state.split()
        self.token, self.finite, writes = self.program(self.tensors, self.token, reads, writes)
        self.state = self.state.join(writes)

    def wait(self) -> None:
        """Wait for all dispatched steps."""
        jax.block_until_ready((self.token, self.state.lengths))

    def at(self, token: int) -> None:
        """Continue as if `token` tokens had followed the prompt."""
        lengths = jnp.full(self.state.batch, self.prompt + token, jnp.int32)
        self.state = self.state.replace(lengths=jax.device_put(lengths, sharding("device")))

    def counters(self) -> dict[str, np.ndarray]:
        """Return the counters of the state as NumPy arrays [B]."""
        counters: Counters = self.state.counters
        return {field.name: np.asarray(getattr(counters, field.name)) for field in dataclasses.fields(counters)}

    def phase(self, first: int, sizes: Sizes) -> dict[str, Any]:
        """Time single steps and runs of steps, starting `first` tokens after the prompt, and count their chunks."""
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
            "tokens_per_second": batch / statistics.median(together),
            "least": batch / max(together),
            "most": batch / min(together),
            "single_tokens_per_second": batch / statistics.median(alone),
            "single_least": batch / max(alone),
            "single_most": batch / min(alone),
            "step_seconds": statistics.median(together),
            "share": float(taken["hits"] / taken["selected"]) if taken["selected"] else None,
            "fetched_bytes_per_step": int(taken["fetched"]) * FETCH_QUANTUM / steps,
        }


def temporaries(program: Any) -> int | None:
    """Return the device bytes of a program's temporaries as XLA reports them, or None."""
    memory = program.memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes)
