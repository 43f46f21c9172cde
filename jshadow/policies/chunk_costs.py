"""What a decode step costs that fetches selected chunks and rebuilds their keys (ShadowKV and its kin)."""

import abc

import jax.numpy as jnp

from jshadow.policies.base import Policy
from jshadow.policies.places import BLOCK
from jshadow.state import CacheSpec, LayerState


class ChunkCosts(Policy):
    """The accounting of a step, apart from the step.

    Attributes:
        rank: columns of the factors; resolved before anything is counted.
        chunk_size: tokens in a chunk.
    """

    rank: int | None
    chunk_size: int

    @abc.abstractmethod
    def max_outliers(self, capacity: int) -> int:
        """Chunks kept exactly for the longest prompt that fits."""

    @abc.abstractmethod
    def max_selected(self, capacity: int) -> int:
        """Chunks selected in a step for the longest prompt that fits."""

    def selected_numbers(self, spec: CacheSpec, width: int) -> int:
        """Numbers of the selected tokens' rows of that width, each KV head its own; twice where there is a tail, for
        both of its halves are gathered from; from the host a row comes once."""
        layout = self.host_layout(spec)
        assert layout is not None
        tiers = bool(layout.units) + bool(layout.tail_units)
        return tiers * spec.batch * spec.kv_heads * self.max_selected(spec.capacity) * self.chunk_size * width

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Of left rows and values only what is selected, of all else everything."""
        assert self.rank is not None
        item = jnp.dtype(spec.dtype).itemsize
        parts = super().step_bytes(spec, state)
        values = self.selected_numbers(spec, spec.head_dim) * item
        once = spec.batch * spec.kv_heads * self.max_selected(spec.capacity) * self.chunk_size * spec.head_dim * item
        offloaded = any(tier is not None and tier.memory != "device" for tier in (state.host.prompt, state.host.tail))
        held = {part: size for part, size in parts.items() if part not in ("host rows", "host tail")}
        return held | {
            "left": (self.selected_numbers(spec, self.rank) * item, 0),
            "values": (0, once) if offloaded else (values, 0),
        }

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Also the rebuilding of the selected keys, and their scores."""
        assert self.rank is not None
        rebuilt = self.selected_numbers(spec, spec.head_dim)
        return super().step_flops(spec, state) + 2 * rebuilt * (self.rank + spec.group)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores and sorting of all chunks, places; selected left rows, keys and values; scores of what is attended.

        Keys are float32 until they are rotated; values lie there as they came and as they are attended.
        """
        assert self.rank is not None
        layout = self.host_layout(spec)
        assert layout is not None
        item, chunks = jnp.dtype(spec.dtype).itemsize, layout.units + layout.tail_units
        scores = spec.batch * chunks * 4 * (3 * spec.q_heads + 4 * spec.kv_heads)
        selected = self.selected_numbers(spec, 1) * (self.rank * item + spec.head_dim * (2 * 4 + 3 * item))
        count = self.max_selected(spec.capacity)
        # Each selected unit is compared with a block of those selected before, in four bytes.
        places = 5 * spec.batch * spec.kv_heads * count * min(count, BLOCK)
        exact = spec.window + (self.max_outliers(spec.capacity) + self.max_selected(spec.capacity)) * self.chunk_size
        return scores + selected + places + 3 * 4 * spec.batch * spec.q_heads * exact
