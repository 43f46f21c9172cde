"""The costs of ShadowKV, for the planner: temporaries, and what a decode step reads, moves, computes and exchanges.

If there is a tail (ShadowKV+), the device gathers each selected row from both parts of the host tier. A row is moved
from the host only once. On a mesh, the sizes are those of one device.
"""

import math

import jax
import jax.numpy as jnp

from jshadow.cache.accounting import layer_nbytes, leaf_bytes
from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.ops.packing import scale_dtype
from jshadow.policies.base import Bytes, Links, StepCosts, gathered, reduced
from jshadow.policies.shadowkv.key_codecs import Sizes
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, pass_launches
from jshadow.policies.shadowkv.landmarks import GROUP, first_level
from jshadow.policies.shadowkv.selection import has_kernel
from jshadow.policies.shadowkv.settings import ShadowSettings
from pallas_kernels.products import CACHED_ROWS

_REST_LAUNCHES = 60  # kernels of a compression outside its loops
SECTOR = 32  # bytes that a GPU reads at least at once, from its own memory and from host memory


class ShadowCosts(ShadowSettings):
    """The settings of ShadowKV, and the costs that follow from them."""

    def _coded(self, spec: CacheSpec, tokens: int) -> tuple[Sizes, int]:
        """Return the sizes of the keys that a device codes, and of how many of a prompt's tokens.

        On a mesh, a device codes all heads of its tokens if the code is joint.
        """
        sizes, shards = Sizes.of(spec), spec.shards
        if shards is None or not self.codec.joint:
            return sizes, tokens
        return sizes._replace(heads=sizes.heads * shards.tp), -(-tokens // shards.tp)

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count the temporaries of the codec, and landmarks and values before they are packed.

        The codec needs temporaries when it encodes, or when it measures errors to choose outliers.
        """
        (coded, own), columns, item = self._coded(spec, tokens), Sizes.of(spec).columns, _itemsize(spec)
        total = self.codec.encode_bytes(coded, own, min(own, BLOCK))
        if self.choice.outlier_rule != "landmark":
            total = max(total, self.codec.losses_bytes(coded, min(own, BLOCK)))
        if own < tokens:  # the exchanged keys: all tokens padded, and this device's part before and after
            total += (tokens * columns + 2 * own * coded.columns) * item
        if self.landmarks.dtype != "model" or self.landmark_parts > 1:
            total += 2 * self.max_chunks(spec.capacity) * self.landmark_parts * columns * (item + 4)
        if self.values.dtype != "model":
            total += max(tokens, spec.capacity) * columns * (item + 4)
        return spec.batch * total

    def compress_work(self, spec: CacheSpec, tokens: int) -> tuple[int, int]:
        """Count the matrix products of the code, and the keys that are rebuilt to choose outliers.

        The kernels are those of the code, of the passes over the prompt (landmarks, their spread, and the errors of
        rebuilt keys), and REST_LAUNCHES others.
        """
        sizes, own = self._coded(spec, tokens)
        rebuilt = self.landmark_outliers(spec.capacity) < self.max_outliers(spec.capacity)
        products = rebuilt * 2 * own * sizes.columns * self.codec.products(sizes)
        passes = pass_launches(1 + (self.landmarks.order == 2) + rebuilt, tokens)
        launches = self.codec.encode_launches(sizes, own) + passes + _REST_LAUNCHES
        return spec.batch * (self.codec.encode_flops(sizes, own) + products), launches

    # A decode step

    def _tiers(self, spec: CacheSpec) -> tuple[HostLayout, int]:
        """Return the layout of the host tier, and how many of its two parts (prompt and tail) are not empty."""
        layout = self.host_layout(spec)
        assert layout is not None
        return layout, bool(layout.units) + bool(layout.tail_units)

    def selected_numbers(self, spec: CacheSpec, width: int) -> int:
        """Return `width` times the number of gathered tokens, summed over rows and KV heads."""
        _, halves = self._tiers(spec)
        return halves * spec.batch * spec.kv_heads * self.selected(spec) * self.chunk_size * width

    def _near_chunks(self, spec: CacheSpec) -> int:
        """Return the maximum number of chunks whose second level of landmarks a step reads."""
        named = self.max_selected(spec.capacity) * self.choice.wider
        groups = -(-self.max_chunks(spec.capacity) // GROUP) - -self._tiers(spec)[0].tail_units // GROUP
        return GROUP * min(named, groups)

    def landmark_reads(self, spec: CacheSpec, state: LayerState) -> tuple[int, int]:
        """Return how many numbers and how many bytes of landmarks a step reads.

        With one level, it reads all landmarks. With two levels, it reads the means of all chunks, and both levels of a
        few chunks, which it gathers from each part of the tier.
        """
        (layout, halves), every = self._tiers(spec), layer_nbytes(state).get("landmarks", (0, 0))[0]
        chunks, row = layout.units + layout.tail_units, spec.batch * spec.kv_heads * spec.head_dim
        if self.landmarks.levels == 1:
            return chunks * self.landmark_parts * row, every
        near = halves * self._near_chunks(spec)
        parts = [part.landmarks for part in (state.frozen, state.live) if hasattr(part, "landmarks")]
        means = sum(map(leaf_bytes, jax.tree.leaves([first_level(part) for part in parts])))
        return (chunks + near * self.landmark_parts) * row, means + near * every // max(chunks, 1)

    def _left_reads(self, spec: CacheSpec) -> int:
        """Return the bytes of the left rows of the selected tokens, summed over rows and KV heads."""
        layout, _ = self._tiers(spec)
        each = bool(layout.units) * self.codec.read_bytes(Sizes.of(spec))
        each += bool(layout.tail_units) * self.later_codec.read_bytes(Sizes.of(spec))
        return spec.batch * spec.kv_heads * self.selected(spec) * self.chunk_size * each

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        layout, halves = self._tiers(spec)
        once = spec.batch * spec.kv_heads * self.selected(spec) * unit_bytes(spec, layout)
        offloaded = any(tier is not None and tier.memory != "device" for tier in (state.host.prompt, state.host.tail))
        # The rows that are kept on the device are read in the place of fetched rows; `passes` counts both.
        usual = super().step_bytes(spec, state).items()
        parts = {part: size for part, size in usual if part not in ("host rows", "host tail", "keys")}
        parts["landmarks"] = (self.landmark_reads(spec, state)[1], 0)
        if self.landmarks.levels == 2 and "spread" in parts:  # the same chunks as of the landmarks
            chunks = layout.units + layout.tail_units + halves * self._near_chunks(spec) * self.landmark_parts
            parts["spread"] = (spec.batch * spec.kv_heads * chunks * jnp.dtype(scale_dtype(spec.dtype)).itemsize, 0)
        left = self.choice.rebuilt * self._left_reads(spec)
        return parts | {"left": (left, 0), "values": (0, once) if offloaded else (halves * once, 0)}

    def step_costs(self, spec: CacheSpec, state: LayerState) -> StepCosts:
        """Count what the kernels move besides, the rebuilding of the selected keys, and the exchange of left rows.

        Parts of `passes`:

        - "scores": each query head's mass or logit of every chunk, and the score of every chunk, in float32. Each is
          written once and read once. The masks and the softmax statistics take less than 1 % of this.
        - "selected": the rebuilt keys and the values of the selected chunks. Each is written once and read once.
        - "padding": the rest of the sectors in which the rows of the selected chunks lie.
        - "left rows": on a mesh, the array in which the left rows of all heads' chunks reach their devices. It is
          written and read once, and so is the part of it that a device gets.
        """
        (layout, halves), item, rebuilt = self._tiers(spec), _itemsize(spec), self.choice.rebuilt
        unit, left = unit_bytes(spec, layout), self.chunk_size * self.codec.read_bytes(Sizes.of(spec))
        rows = spec.batch * spec.kv_heads * self.selected(spec)
        scores = 2 * 4 * spec.batch * (spec.q_heads + spec.kv_heads) * (layout.units + layout.tail_units)
        one = rows * self.chunk_size * spec.head_dim * item
        beside_left, beside_values = rows * beside(left), rows * beside(unit)
        resident, by_kernel = spec.fetch == "resident", spec.fetch != "device_put"  # the host gathers rows alone
        asked = self._asked_bytes(spec)
        passes = {
            "left rows": (2 * (asked + asked // spec.shards.tp) if spec.shards and asked else 0, 0),
            "scores": (scores if rows else 0, 0),
            "selected": (2 * (rebuilt + 1) * one, 0),
            "padding": (rebuilt * beside_left + resident * beside_values, (by_kernel and not resident) * beside_values),
        }
        kept: Bytes = {}
        if spec.keep and not layout.no_kernel:  # chunks that stay are neither read, written nor moved
            kept = {"left": (self._left_reads(spec), 0), "selected": (2 * one, 0)}
            kept["values"] = (halves * rows * unit, 0) if resident else (0, rows * unit)
            kept["padding"] = (beside_left + resident * beside_values, 0 if resident else beside_values)
        # Packed numbers are counted as if they were unpacked.
        numbers, size = self.landmark_reads(spec, state)
        packed = numbers - size // item
        if self.values.dtype != "model":
            packed += halves * rows * (self.chunk_size * spec.head_dim - unit // item)
        products = rebuilt * self.selected_numbers(spec, spec.head_dim)
        flops = 2 * products * (self.codec.products(Sizes.of(spec)) + spec.group) + 2 * spec.group * packed
        return StepCosts(flops, passes, kept, self._links(spec))

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the bytes of scoring and sorting all chunks, and of the rows and scores of the selected ones.

        Selected keys are float32 until they are rotated. Selected values exist twice: as fetched, and as attended to.
        """
        (layout, halves), parts = self._tiers(spec), self.read_parts
        item, chunks = _itemsize(spec), layout.units + layout.tail_units
        scores = spec.batch * chunks * 4 * (3 * spec.q_heads * parts + 4 * spec.kv_heads)
        if parts > 1:  # the sums of a chunk's landmarks
            scores += spec.batch * chunks * 4 * spec.q_heads
        if self.landmarks.dtype != "model":
            rows = spec.batch * chunks * parts * spec.kv_heads
            # On a GPU the kernel unpacks into registers. On a CPU `pallas_kernels` unpacks one block at a time.
            if has_kernel(self.scoring(spec), joined=layout.tail_units > 0):
                rows = min(rows, 2 * CACHED_ROWS)
            scores += rows * spec.head_dim * (4 + item)
        if self.landmarks.levels == 2:
            near = spec.batch * self._near_chunks(spec) * self.landmark_parts
            scores += near * (spec.kv_heads * spec.head_dim * (halves + 4 + item) + 4 * 4 * spec.q_heads)
        expanded = max(codec.expand_bytes(Sizes.of(spec)) for codec in (self.codec, self.later_codec))
        selected = expanded + spec.head_dim * (2 * 4 + 3 * item)
        if self.values.dtype != "model":
            selected += spec.head_dim * (1 + 4)
        # `pallas_kernels.select_chunks` sorts and searches the selected chunks, and the places of the cache.
        places = 8 * 4 * spec.batch * spec.kv_heads * (self.selected(spec) + self.places(spec))
        # Each device makes the rows that all heads ask for. A reduce-scatter may copy them.
        asked = 2 * self._asked_bytes(spec)
        attended = asked + self._exact_scores(spec) + self.selected_numbers(spec, 3 * 4 * spec.group) // halves
        return scores + self.choice.rebuilt * self.selected_numbers(spec, selected) + places + attended

    def _exact_scores(self, spec: CacheSpec) -> int:
        """Return the bytes of the scores, masked scores and weights of the window and the outliers in a step."""
        exact = spec.window + self.max_outliers(spec.capacity) * self.chunk_size
        return 3 * 4 * spec.batch * spec.q_heads * exact

    def query_temporaries(self, spec: CacheSpec) -> int:
        """Count what `step_temporaries` counts, without the scores of exact tokens."""
        return self.step_temporaries(spec) - self._exact_scores(spec)

    # What the devices of a mesh exchange

    def _asked_rows(self, spec: CacheSpec) -> int:
        """Return for how many chunks all heads of `tp` ask for left rows, which another device may have.

        Every device makes an array with a place for each of them, and one reduce-scatter brings every head its rows.
        """
        if spec.shards is None or not self.splits_left(spec):
            return 0
        # The coding error of a later chunk is measured when it joins.
        joined = self._tiers(spec)[0].tail_units > 0 and self.choice.outlier_rule != "landmark"
        joined = joined and self.later_codec.joint
        return spec.batch * spec.kv_heads * spec.shards.tp * (self.selected(spec) * self.choice.rebuilt + joined)

    def _asked_bytes(self, spec: CacheSpec) -> int:
        """Return the bytes of the array of `_asked_rows` on each device."""
        return self._asked_rows(spec) * self.chunk_size * self.codec.read_bytes(Sizes.of(spec))

    def _links(self, spec: CacheSpec) -> Links:
        """Return the bytes that a device sends in a step.

        - "left rows": the ids int32 [B, h_kv, k] of the chunks that each head selects, and their left rows.
        - "later rows": the sums from which the left rows of new tokens are made, float32 [B, rank] (ShadowKV+ with
          later_keys="projected").
        """
        shards, links = spec.shards, Links()
        if shards is None:
            return links
        if rows := self._asked_rows(spec):
            links["left rows"] = gathered(4 * rows, shards.tp) + gathered(self._asked_bytes(spec), shards.tp)
        if self._tiers(spec)[0].tail_units and shards.tp > 1 and self.later_codec.joint:
            links["later rows"] = reduced(4 * spec.batch * self.codec.products(Sizes.of(spec)), shards.tp)
        return links


def _itemsize(spec: CacheSpec) -> int:
    return jnp.dtype(spec.dtype).itemsize


def beside(row: int) -> int:
    """Return the mean bytes that are read beside a row of `row` bytes because whole sectors are read.

    Rows lie one after the other, so a row begins at any multiple of the greatest common divisor of both sizes.
    """
    return SECTOR - math.gcd(row, SECTOR) if row else 0
