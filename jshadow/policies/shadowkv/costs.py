"""What it costs to keep a prompt's chunks, and a decode step that fetches some and rebuilds their keys (ShadowKV and
its kin).
"""

import abc

import jax.numpy as jnp

from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.packing import ROW_BITS, row_bytes, scale_dtype
from jshadow.policies.base import UniformPolicy
from jshadow.policies.capabilities import Budgeted, Sized
from jshadow.policies.costs import Costs
from jshadow.policies.shadowkv.key_codecs import KeyCodec, Sizes
from jshadow.policies.shadowkv.key_codecs.factorise import BLOCK as TOKENS
from jshadow.policies.shadowkv.landmark_levels import mean_kind
from jshadow.policies.shadowkv.places import BLOCK
from pallas_kernels import CACHED_ROWS


class ChunkCosts(UniformPolicy, Budgeted, Sized, Costs):
    """The accounting, apart from the steps.

    Attributes:
        budget: tokens selected in a step.
        chunk_size: tokens in a chunk.
        landmark_dtype, landmark_levels, landmark_order, value_dtype: how landmarks and host values are kept.
        outlier_rule: by what the chunks that are kept exactly are chosen.
    """

    budget: int | None
    chunk_size: int
    landmark_dtype: str
    landmark_levels: int
    landmark_order: int
    value_dtype: str
    outlier_rule: str

    @property
    @abc.abstractmethod
    def codec(self) -> KeyCodec:
        """How keys are kept."""

    @property
    @abc.abstractmethod
    def landmark_parts(self) -> int:
        """Landmarks of a chunk."""

    @property
    @abc.abstractmethod
    def read_parts(self) -> int:
        """Rows of a chunk's landmarks that every step reads; of the others only those of `max_near` chunks."""

    @property
    @abc.abstractmethod
    def rebuilt_rounds(self) -> int:
        """How often as many keys are rebuilt in a step as are attended to."""

    @property
    @abc.abstractmethod
    def scored_by_kernel(self) -> bool:
        """Whether `pallas_kernels.chunk_scores` scores the landmarks."""

    @abc.abstractmethod
    def max_chunks(self, capacity: int) -> int:
        """Chunks of the longest prompt that fits."""

    @abc.abstractmethod
    def max_outliers(self, capacity: int) -> int:
        """Chunks kept exactly for the longest prompt that fits."""

    @abc.abstractmethod
    def max_selected(self, capacity: int) -> int:
        """Chunks selected in a step for the longest prompt that fits."""

    @abc.abstractmethod
    def max_near(self, capacity: int, later: int) -> int:
        """Chunks of which a step reads all landmarks, where it does not of every chunk; `later` follow the prompt's."""

    # What is kept

    def landmark_bytes(self, chunks: int, sizes: Sizes) -> int:
        """Landmarks of so many chunks, scales included."""
        rows, kind = chunks * sizes.heads, self.landmark_dtype
        if self.landmark_levels == 1:
            return landmark_row_bytes(rows * self.landmark_parts, kind, sizes)
        details = landmark_row_bytes(rows * (self.landmark_parts - 1), kind, sizes)
        return landmark_row_bytes(rows, mean_kind(kind), sizes) + details

    def spread_bytes(self, chunks: int, sizes: Sizes) -> int:
        """How far keys lie from the landmarks of so many chunks."""
        if self.landmark_order == 1:
            return 0
        each = self.landmark_parts + (self.landmark_levels == 2)
        return chunks * sizes.heads * each * jnp.dtype(scale_dtype(sizes.dtype)).itemsize

    def device_numbers(self, num_tokens: int, config: ModelConfig) -> float:
        """Numbers of 16 bits that one layer keeps on the device for a prompt that fills the capacity.

        Raises:
            ConfigError: the settings are not resolved yet.
        """
        if self.budget is None or None in vars(self.codec).values():
            raise ConfigError(f"{self.name}.rank and budget must be resolved before bytes are counted, got None")
        sizes = Sizes(config.kv_heads, config.head_dim, "bfloat16")
        chunks, columns, size = self.max_chunks(num_tokens), config.key_columns, self.chunk_size
        exact = self.max_outliers(num_tokens) * size + self.window_slots(num_tokens, num_tokens)
        kept = self.codec.nbytes(chunks, size, sizes) + self.landmark_bytes(chunks, sizes)
        kept += self.spread_bytes(chunks, sizes)
        # A 16-bit number holds two masks; an id takes two numbers. Wider numbers make both cheaper.
        small = config.kv_heads * (chunks / 2 + 2 * self.max_selected(num_tokens)) + 2
        return kept / 2 + 2 * exact * columns + small

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """What the codec takes for a while, to encode or, where outliers are chosen by that, to see what it lost; where
        rows are packed, landmarks and values as they were before.
        """
        sizes, item = sizes_of(spec), itemsize(spec)
        total = self.codec.encode_bytes(sizes, tokens, min(tokens, TOKENS))
        if self.outlier_rule != "landmark":
            total = max(total, self.codec.losses_bytes(sizes, min(tokens, TOKENS)))
        if self.landmark_dtype != "model" or self.landmark_parts > 1:
            total += 2 * self.max_chunks(spec.capacity) * self.landmark_parts * sizes.columns * (item + 4)
        if self.value_dtype != "model":
            total += max(tokens, spec.capacity) * sizes.columns * (item + 4)
        return spec.batch * total

    # What a step reads

    def tiers(self, spec: CacheSpec) -> tuple[HostLayout, int]:
        """The host tier's layout, and how many of its two halves there are."""
        layout = self.host_layout(spec)
        assert layout is not None
        return layout, bool(layout.units) + bool(layout.tail_units)

    def selected_numbers(self, spec: CacheSpec, width: int) -> int:
        """Numbers of the selected tokens' rows of that width, each KV head its own; twice where there is a tail, for
        both of its halves are gathered from; from the host a row comes once."""
        _, tiers = self.tiers(spec)
        return tiers * spec.batch * spec.kv_heads * self.max_selected(spec.capacity) * self.chunk_size * width

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Of left rows and values only what is selected, of all else everything."""
        parts, (layout, tiers) = super().step_bytes(spec, state), self.tiers(spec)
        once = spec.batch * spec.kv_heads * self.max_selected(spec.capacity) * unit_bytes(spec, layout)
        offloaded = any(tier is not None and tier.memory != "device" for tier in (state.host.prompt, state.host.tail))
        held = {part: size for part, size in parts.items() if part not in ("host rows", "host tail")}
        held["landmarks"] = (self.landmark_reads(spec)[1], 0)
        if self.landmark_order == 2:
            held["spread"] = (self.spread_reads(spec), 0)
        return held | {
            "left": (self.rebuilt_rounds * self.selected_numbers(spec, self.codec.read_bytes(sizes_of(spec))), 0),
            "values": (0, once) if offloaded else (tiers * once, 0),
        }

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Also the rebuilding of the selected keys, and their scores; packed numbers as if they were wide."""
        rebuilt = self.rebuilt_rounds * self.selected_numbers(spec, spec.head_dim)
        packed = self.packed_landmarks(spec)
        if self.value_dtype != "model":
            layout, tiers = self.tiers(spec)
            rows = tiers * spec.batch * spec.kv_heads * self.max_selected(spec.capacity)
            packed += rows * (self.chunk_size * spec.head_dim - unit_bytes(spec, layout) // itemsize(spec))
        rebuilding = 2 * rebuilt * (self.codec.products(sizes_of(spec)) + spec.group)
        return super().step_flops(spec, state) + rebuilding + 2 * spec.group * packed

    def packed_landmarks(self, spec: CacheSpec) -> int:
        """Numbers of landmarks that a step reads beyond those that would fill as many bytes in the model's dtype."""
        if self.landmark_dtype == "model":
            return 0
        numbers, size = self.landmark_reads(spec)
        return numbers - size // itemsize(spec)

    def landmark_reads(self, spec: CacheSpec) -> tuple[int, int]:
        """Numbers and bytes of landmarks that a step reads: of all chunks all; or their means, and once more with all
        details those of few of them, from both halves where there is a tail."""
        (layout, tiers), sizes = self.tiers(spec), sizes_of(spec)
        chunks, row = layout.units + layout.tail_units, spec.kv_heads * spec.head_dim
        if self.landmark_levels == 1:
            return spec.batch * chunks * self.landmark_parts * row, spec.batch * self.landmark_bytes(chunks, sizes)
        near = tiers * self.max_near(spec.capacity, layout.tail_units)
        means = landmark_row_bytes(chunks * spec.kv_heads, mean_kind(self.landmark_dtype), sizes)
        numbers = (chunks + near * self.landmark_parts) * row
        return spec.batch * numbers, spec.batch * (means + self.landmark_bytes(near, sizes))

    def spread_reads(self, spec: CacheSpec) -> int:
        """Bytes of spreads that a step reads, of chunks as of their landmarks."""
        (layout, tiers), sizes = self.tiers(spec), sizes_of(spec)
        chunks = layout.units + layout.tail_units
        if self.landmark_levels == 1:
            return spec.batch * self.spread_bytes(chunks, sizes)
        near = tiers * self.max_near(spec.capacity, layout.tail_units) * self.landmark_parts
        return spec.batch * spec.kv_heads * (chunks + near) * jnp.dtype(scale_dtype(spec.dtype)).itemsize

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores and sorting of all chunks, places; selected left rows, keys and values; scores of what is attended.

        Keys are float32 until they are rotated; values lie there as they came and as they are attended.
        """
        (layout, tiers), parts = self.tiers(spec), self.read_parts
        item, chunks = itemsize(spec), layout.units + layout.tail_units
        scores = spec.batch * chunks * 4 * (3 * spec.q_heads * parts + 4 * spec.kv_heads)
        if parts > 1:  # added up, too
            scores += spec.batch * chunks * 4 * spec.q_heads
        if self.landmark_dtype != "model":
            rows = spec.batch * chunks * parts * spec.kv_heads
            # A GPU's kernel has them in registers; `pallas_kernels` brings a block at a time into a CPU's cache.
            rows = min(rows, 2 * CACHED_ROWS) if self.scored_by_kernel else rows
            scores += rows * spec.head_dim * (4 + item)
        if self.landmark_levels == 2:
            near = spec.batch * self.max_near(spec.capacity, layout.tail_units) * self.landmark_parts
            scores += near * (spec.kv_heads * spec.head_dim * (tiers + 4 + item) + 4 * 4 * spec.q_heads)
        selected = self.codec.expand_bytes(sizes_of(spec)) + spec.head_dim * (2 * 4 + 3 * item)
        if self.value_dtype != "model":
            selected += spec.head_dim * (1 + 4)
        count = self.max_selected(spec.capacity)
        # Each selected unit is compared with a block of those selected before, in four bytes.
        places = 5 * spec.batch * spec.kv_heads * count * min(count, BLOCK)
        exact = spec.window + (self.max_outliers(spec.capacity) + count) * self.chunk_size
        attended = 3 * 4 * spec.batch * spec.q_heads * exact
        return scores + self.rebuilt_rounds * self.selected_numbers(spec, selected) + places + attended


def landmark_row_bytes(rows: int, kind: str, sizes: Sizes) -> int:
    """So many rows of landmarks, kept as that kind."""
    if kind == "model":
        return rows * sizes.dim * jnp.dtype(sizes.dtype).itemsize
    return row_bytes(rows, sizes.dim, ROW_BITS[kind], sizes.dtype)


def sizes_of(spec: CacheSpec) -> Sizes:
    """What a codec must know of a layer."""
    return Sizes(spec.kv_heads, spec.head_dim, spec.dtype)


def itemsize(spec: CacheSpec) -> int:
    """Bytes of a number of the model's dtype."""
    return jnp.dtype(spec.dtype).itemsize
