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
    """The settings of `InfLLM`, and the sizes that follow from them.

    Attributes:
        window: number of newest tokens, which are attended to at their true distance.
        sinks: number of first tokens, which are always attended to.
        budget: number of tokens in the blocks that a query attends to.
        unit: tokens in a block.
        representatives: number of tokens of a block whose mean key is used to score the block.
        cached: number of tokens in the blocks that the device keeps. None: twice the budget.
        fetched: maximum number of tokens that a step fetches, in blocks. None: the budget, as published. A smaller
            number limits the transfer: a selected block that is neither in the pool nor fetched is not attended to in
            this step.
        query_block: number of consecutive prompt tokens that share their blocks.
    """

    splits_heads = False

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
        """The number of tokens in a block."""
        return self.unit

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Replace None in `cached` and `fetched`, and check the settings."""
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
        """Return a reason if no block can leave the window at this capacity, or else None."""
        if self.left(capacity - 1) >= 1:
            return None
        least = self.window + self.sinks + self.unit
        return f"capacity {capacity} is below infllm's window + sinks + unit = {least} tokens"

    def prefill_attention(self) -> PrefillAttention:
        """Return the attention in which the prompt's queries also attend to selected blocks."""
        return InfLLMPrefill(
            self.window, self.sinks, self.budget // self.unit, self.unit, self.representatives, self.query_block
        )

    # Sizes

    def left(self, position: int) -> int:
        """Return the number of blocks that lie completely before the window of a query at `position`."""
        return max(position - self.window + 1 - self.sinks, 0) // self.unit

    def ring_slots(self, spec: CacheSpec) -> int:
        """Return the number of slots R of the ring: the window, and the block that is leaving it."""
        return min(self.window + self.unit, spec.capacity)

    def count(self, spec: CacheSpec) -> int:
        """Return the maximum number of blocks that a query attends to."""
        return min(self.budget // self.unit, self.left(spec.capacity - 1))

    def pool_slots(self, spec: CacheSpec) -> int:
        """Return the number of blocks C in the pool."""
        assert self.cached is not None
        return min(self.cached // self.unit, self.left(spec.capacity - 1))

    def moved(self, spec: CacheSpec) -> int:
        """Return the maximum number of blocks that a step fetches."""
        assert self.fetched is not None
        return min(self.fetched // self.unit, self.count(spec))

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return the maximum number of blocks that are written after the shortest prompt."""
        return self.left(capacity - 1) - self.left(shortest - 1)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Return the layout of the keys before RoPE and values of all blocks, or None if no block leaves the window."""
        units = self.left(spec.capacity - 1)
        return HostLayout(spec.kv_heads, units, self.unit, 2, max(spec.window, 1)) if units else None

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Return how many more tokens fit into both the capacity and the tail."""
        if self.host_layout(spec) is None:
            return spec.capacity - lengths
        blocks = state.frozen.units + max(spec.window, 1) + 1  # the last of these does not fit, and may not be complete
        return jnp.minimum(spec.capacity, self.sinks + blocks * self.unit + self.window - 1) - lengths

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return policies that use half of the slots for the window, at most 1/16 for sinks, and the rest for the pool.

        There is one group for each size of blocks, from 128 tokens to 4. A group with larger blocks needs more slots.
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
