"""InfLLM's settings, their ranges, and the sizes that follow from them (arXiv 2402.04617, section 3)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.policies.base import UniformPolicy
from jshadow.policies.capabilities import Budgeted, OwnPrefill, Sized
from jshadow.policies.checks import check_range
from jshadow.policies.infllm.prefill import InfLLMPrefill
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.sizing import Falling


@dataclasses.dataclass(frozen=True)
class InfLLMSettings(UniformPolicy, OwnPrefill, Budgeted, Sized):
    """What `InfLLM` can be told, and the sizes that follow from it.

    Attributes:
        window: newest tokens, attended with their true distance.
        sinks: first tokens, attended always.
        budget: tokens of the blocks that a query attends to.
        unit: tokens of a block.
        representatives: tokens of a block whose mean key stands for it.
        cached: tokens of blocks that stay on the device. None: twice the budget.
        fetched: tokens of blocks that a step fetches at most, the best ones that are not in the pool. None: the budget,
            as published. Less caps what moves: what is wanted and not fetched is not attended in this step.
        query_block: tokens of a prompt that share their blocks.
    """

    window: int = 4096
    sinks: int = 128
    budget: int = 2048
    unit: int = 128
    representatives: int = 4
    cached: int | None = None
    fetched: int | None = None
    query_block: int = 512

    name = "infllm"
    source = "arXiv 2402.04617, section 3"
    budget_fields = ("budget", "cached", "fetched")

    @property
    def budget_unit(self) -> int:
        """Budgets are whole blocks."""
        return self.unit

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in the pool's size, and check."""
        check_range(self.name, "window", self.window, 1)
        check_range(self.name, "sinks", self.sinks, 0)
        check_range(self.name, "unit", self.unit, 1)
        check_range(self.name, "budget", self.budget, self.unit)
        check_range(self.name, "representatives", self.representatives, 1, self.unit)
        check_range(self.name, "query_block", self.query_block, 1)
        resolved = dataclasses.replace(
            self,
            cached=2 * self.budget if self.cached is None else self.cached,
            fetched=self.budget if self.fetched is None else self.fetched,
        )
        check_range(self.name, "cached", resolved.cached, self.budget)
        check_range(self.name, "fetched", resolved.fetched, self.unit, self.budget)
        return resolved

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """No block ever leaves the window."""
        if self.left(capacity - 1) >= 1:
            return None
        least = self.window + self.sinks + self.unit
        return f"capacity {capacity} is below infllm's window + sinks + unit = {least} tokens"

    def prefill_attention(self) -> PrefillAttention:
        """The same for the prompt."""
        return InfLLMPrefill(
            self.window, self.sinks, self.budget // self.unit, self.unit, self.representatives, self.query_block
        )

    # Sizes and places

    def left(self, position: int) -> int:
        """Blocks that the window of a query at that position has left as a whole."""
        return max(position - self.window + 1 - self.sinks, 0) // self.unit

    def ring_slots(self, spec: CacheSpec) -> int:
        """The window, and the block that it is leaving."""
        return min(self.window + self.unit, spec.capacity)

    def count(self, spec: CacheSpec) -> int:
        """Blocks that a query attends to at most."""
        return min(self.budget // self.unit, self.left(spec.capacity - 1))

    def pool_slots(self, spec: CacheSpec) -> int:
        """Blocks that fit the pool."""
        assert self.cached is not None
        return min(self.cached // self.unit, self.left(spec.capacity - 1))

    def moved(self, spec: CacheSpec) -> int:
        """Blocks that a step fetches."""
        assert self.fetched is not None
        return min(self.fetched // self.unit, self.count(spec))

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Blocks that may have to be written after the shortest prompt."""
        return self.left(capacity - 1) - self.left(shortest - 1)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Keys before RoPE and values of the prompt's blocks and of later ones; nothing where none leaves."""
        units = self.left(spec.capacity - 1)
        return HostLayout(spec.kv_heads, units, self.unit, 2, max(spec.window, 1)) if units else None

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Capacity and tail both end."""
        if self.host_layout(spec) is None:
            return spec.capacity - lengths
        blocks = state.frozen.units + max(spec.window, 1) + 1  # the one that does not fit
        return jnp.minimum(spec.capacity, self.sinks + blocks * self.unit + self.window - 1) - lengths

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Half of the slots for the window, a 16th for sinks, the rest for the pool, in blocks of at most 128.

        Large blocks come first, where eight of them fit.
        """
        cls = type(self)

        def make(slots: int, unit: int) -> Any:
            sinks, window = min(cls.sinks, slots // 16), max(slots // 2, 1)
            cached = max((slots - sinks - window) // unit, 2)
            return cls(
                window=window,
                sinks=sinks,
                budget=cached // 2 * unit,
                unit=unit,
                cached=cached * unit,
                representatives=min(cls.representatives, unit),
            )

        def group(unit: int) -> Sequence[Self]:
            least = 2 if unit == 4 else 20 * unit
            return Falling(lambda slots: make(slots, unit), least, max(num_tokens, least))

        return [group(unit) for unit in (128, 64, 32, 16, 8, 4)]
