"""KIVI: keys by channel and values by token in a few bits, the newest exactly (Liu et al. 2024, arXiv 2402.02750).

As the published code counts: of n tokens, keys of the first n - n % R are quantised, in blocks of R, and values of the
first n - R; a block is still exact for the query that completes it (there the oldest value is too, which here is not).
A prompt's own attention is exact, nothing is evicted. One bit uses the quantiser of SpeCache (arXiv 2503.16163,
equation 3).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import fill_ring, fit_tokens, ring_positions, write_rows
from jshadow.ops.packing import Packed, dequantise, quantise, scale_dtype, words_of
from jshadow.policies.base import UniformPolicy
from jshadow.policies.capabilities import Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.costs import Costs
from jshadow.policies.registry import register

BITS = (1, 2, 4, 8)


class Quantised(struct.PyTreeNode):
    """Attributes: keys: words [B, h_kv, blocks, R / g, d, w]; values: words [B, h_kv, tokens, d / g, w]; and scales."""

    keys: Packed
    values: Packed


class KiviFrozen(struct.PyTreeNode):
    """The prompt.

    Attributes:
        quantised: its keys in whole blocks, and its values but the last R.
        lengths: its tokens, int32 [B].
    """

    quantised: Quantised
    lengths: Array


class KiviLive(struct.PyTreeNode):
    """What decoding changes.

    Attributes:
        later: blocks of keys, and values, that were quantised after the prompt, the first of them in place 0.
        recent: the newest tokens exactly, token p in slot p % R, [B, h_kv, R, d]: keys after RoPE, and values.
    """

    later: Quantised
    recent: KeyValues


class Part(NamedTuple):
    """Some of the tokens that a layer holds.

    Attributes:
        k, v: [B, h_kv, n, d], multiplied out where they are quantised.
        positions: of the tokens, int32 [B, n].
        seen: bool [B, n]: those that are real, and stand in no other part.
        quantised: keys, or keys and values, are not exact.
    """

    k: Array
    v: Array
    positions: Array
    seen: Array
    quantised: bool

    def piece(self, seen: Array) -> Piece:
        """For attention; seen, bool [B, n] or [B, h_kv, n]."""
        return Piece(self.k, self.v, seen[:, None, None] if seen.ndim == 2 else seen[:, :, None])


@register(
    small={"bits": 2, "group": 8, "residual": 8},
    lossless=lambda tokens, config: never_full(tokens, config, KIVI.group),
)
@dataclasses.dataclass(frozen=True)
class KIVI(UniformPolicy, Sized, Costs):
    """Keep everything in a few bits, the newest tokens exactly.

    Attributes:
        bits: of a number: 1, 2, 4 or 8.
        group: numbers that share a scale and a zero: tokens of a channel of keys, channels of a token of values.
        residual: newest tokens that are exact; keys are quantised in blocks of as many.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128

    name = "kivi"
    source = "arXiv 2402.02750, section 3"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check that groups divide heads and blocks."""
        check_choice(self.name, "bits", self.bits, BITS)
        check_range(self.name, "group", self.group, 1)
        check_range(self.name, "residual", self.residual, 1)
        for what, size in (("residual", self.residual), ("head_dim", config.head_dim)):
            if size % self.group:
                raise ConfigError(f"kivi.group must divide {what}={size}, got {self.group}")
        return self

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Tokens that may be quantised after the prompt: those of its last, open block too."""
        return capacity - max(shortest - self.residual, 0)

    # Counts

    def blocks(self, tokens: int) -> int:
        """Blocks of keys of so many tokens."""
        return tokens // self.residual

    def first_exact_value(self, held: Array) -> Array:
        """First position of which the value is exact."""
        return jnp.maximum(held - self.residual, 0)

    # State

    def empty(self, spec: CacheSpec, blocks: int, tokens: int) -> Quantised:
        """Zeros for so many blocks of keys and tokens of values."""
        heads, words = (spec.batch, spec.kv_heads), words_of(self.group, self.bits)
        per_block, per_head = self.residual // self.group, spec.head_dim // self.group

        def packed(*shape: int) -> Packed:
            scale = jnp.zeros((*heads, *shape), scale_dtype(spec.dtype))
            return Packed(jnp.zeros((*heads, *shape, words), jnp.uint32), scale, scale)

        return Quantised(packed(blocks, per_block, spec.head_dim), packed(tokens, per_head))

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Nothing held."""
        ring = jnp.zeros((spec.batch, spec.kv_heads, self.residual, spec.head_dim), spec.dtype)
        frozen = self.empty(spec, self.blocks(spec.capacity), max(spec.capacity - self.residual, 0))
        later = self.empty(spec, -(-spec.window // self.residual), spec.window)
        return LayerState(KiviFrozen(frozen, jnp.zeros(spec.batch, jnp.int32)), KiviLive(later, KeyValues(ring, ring)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Quantise what is old, keep the rest in the ring."""
        blocks, tokens = self.blocks(spec.capacity), max(spec.capacity - self.residual, 0)
        keys = fit_tokens(prompt.k_post, blocks * self.residual).transpose(0, 2, 1, 3)
        keys = keys.reshape(spec.batch, spec.kv_heads, blocks, self.residual, spec.head_dim)
        values = fit_tokens(prompt.v, tokens).transpose(0, 2, 1, 3)
        codes = Quantised(self.quantise_keys(keys), self.quantise_values(values))
        k, v = (fill_ring(x, prompt.lengths, self.residual) for x in (prompt.k_post, prompt.v))
        # what lies behind a row's end was quantised from zeros or from tokens that are not old yet: make it nothing
        old = prompt.lengths // self.residual, self.first_exact_value(prompt.lengths)
        codes = Quantised(cut(codes.keys, old[0]), cut(codes.values, old[1]))
        live = state.live.replace(recent=KeyValues(k, v))
        return state.replace(frozen=KiviFrozen(codes, prompt.lengths), live=live), None

    def quantise_keys(self, keys: Array) -> Packed:
        """Blocks [B, h_kv, n, R, d]: groups of tokens of each channel."""
        grouped = keys.reshape(*keys.shape[:3], self.residual // self.group, self.group, keys.shape[4])
        return quantise(grouped.swapaxes(4, 5), self.bits)

    def quantise_values(self, values: Array) -> Packed:
        """Tokens [B, h_kv, n, d]: groups of channels of each token."""
        grouped = values.reshape(*values.shape[:3], values.shape[3] // self.group, self.group)
        return quantise(grouped, self.bits)

    def keys_of(self, spec: CacheSpec, packed: Packed) -> Array:
        """Keys [B, h_kv, blocks * R, d]."""
        wide = dequantise(packed, self.group, self.bits).swapaxes(4, 5)
        tokens = wide.shape[2] * self.residual
        return wide.reshape(spec.batch, spec.kv_heads, tokens, spec.head_dim).astype(spec.dtype)

    def values_of(self, spec: CacheSpec, packed: Packed) -> Array:
        """Values [B, h_kv, tokens, d]."""
        wide = dequantise(packed, self.group, self.bits)
        return wide.reshape(spec.batch, spec.kv_heads, wide.shape[2], spec.head_dim).astype(spec.dtype)

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Quantise the value that leaves the ring, then write the token; then the block of keys that it completes."""
        ring, later, position = state.live.recent, state.live.later, step.positions[:, :1]
        start_value = self.first_exact_value(state.frozen.lengths)[:, None]
        slot, leaving = position % self.residual, position - self.residual
        old = jnp.take_along_axis(ring.v, slot[:, None, :, None], axis=2)
        gone = step.valid[:, :1] & (leaving >= 0)
        values = put(later.values, self.quantise_values(old), leaving - start_value, gone)
        k = write_rows(ring.k, step.k_post[:, :1], slot, step.valid[:, :1])
        v = write_rows(ring.v, step.v[:, :1], slot, step.valid[:, :1])
        full = step.valid[:, :1] & (slot == self.residual - 1)
        place = position // self.residual - (state.frozen.lengths // self.residual)[:, None]
        keys = put(later.keys, self.quantise_keys(k[:, :, None]), place, full)
        return state.replace(live=KiviLive(Quantised(keys, values), KeyValues(k, v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Attention over quantised keys and values, quantised keys with exact values, and what is exact."""
        pieces = [part.piece(part.seen) for part in self.parts(spec, state, step.positions[:, :1] + 1)]
        return attend(step.q_post, pieces, spec.scale), state

    def parts(self, spec: CacheSpec, state: LayerState, held: Array) -> list["Part"]:
        """Everything that rows hold, each token once; held, int32 [B, 1]: tokens, the query's own included."""
        lengths, recent, size = state.frozen.lengths[:, None], state.live.recent, self.residual
        frozen, later = state.frozen.quantised, state.live.later
        keys, values = self.keys_of(spec, frozen.keys), self.values_of(spec, frozen.values)
        later_keys, later_values = self.keys_of(spec, later.keys), self.values_of(spec, later.values)
        # of keys and values, what the prompt's part ends with, and what is quantised by now
        k_cut, v_cut = lengths // size * size, self.first_exact_value(lengths)
        k_end, v_end = (held - 1) // size * size, self.first_exact_value(held)
        slots = ring_positions(held[:, 0], size)

        def key_at(rows: Array, positions: Array, start: Array | int) -> Array:
            index = jnp.clip(positions - start, 0, rows.shape[2] - 1)
            return jnp.take_along_axis(rows, index[:, None, :, None], axis=2)

        found = []
        if values.shape[2]:
            at = jnp.broadcast_to(jnp.arange(values.shape[2]), (spec.batch, values.shape[2]))
            found.append(Part(keys[:, :, : values.shape[2]], values, at, at < v_cut, True))
        at = v_cut + jnp.arange(spec.window)
        if keys.shape[2]:  # values that were quantised after the prompt, of keys that the prompt's blocks have
            near, rows = at[:, :size], later_values[:, :, :size]
            found.append(Part(key_at(keys, near, 0), rows, near, (near < v_end) & (near < k_cut), True))
            found.append(Part(key_at(keys, slots, 0), recent.v, slots, (slots >= v_end) & (slots < k_cut), True))
        seen = (at >= k_cut) & (at < v_end)
        found.append(Part(key_at(later_keys, at, k_cut), later_values, at, seen, True))
        seen = (slots >= v_end) & (slots >= k_cut) & (slots < k_end)
        found.append(Part(key_at(later_keys, slots, k_cut), recent.v, slots, seen, True))
        found.append(Part(recent.k, recent.v, slots, slots >= k_end, False))
        # a slot of the ring that no token has reached yet stands for a negative position
        return [part._replace(seen=part.seen & (part.positions >= 0)) for part in found]

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Capacity, and the segment behind the prompt."""
        left = spec.window - (lengths - self.first_exact_value(state.frozen.lengths))
        return jnp.minimum(spec.capacity - lengths, left)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Everything; what is exact in both, and the rest."""
        exact = (lengths - 1) % self.residual + 1
        parts = {"window": exact, "quantised": lengths - exact}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Everything multiplied out for a layer, and scores."""
        tokens = spec.capacity + 2 * spec.window + 4 * self.residual
        row = spec.kv_heads * spec.head_dim * (4 * jnp.dtype(spec.dtype).itemsize + 4 * 4)
        return spec.batch * tokens * (row + 3 * 4 * spec.q_heads)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """The most bits first, and of each the smallest groups."""
        cls, largest = type(self), math.gcd(config.head_dim, 64)
        groups = [group for group in (16, 32, 64) if group <= largest] or [largest]
        return [
            [cls(bits=bits, group=group, residual=max(group, min(128, num_tokens // 16 // group * group)))]
            for bits in sorted(BITS, reverse=True)
            for group in groups
        ]


def never_full(num_tokens: int, config: ModelConfig, usual_group: int) -> dict[str, int]:
    """Settings with a residual that is never full."""
    group = math.gcd(config.head_dim, usual_group)
    return {"group": group, "residual": -(-(num_tokens + 1) // group) * group}


def put(old: Packed, new: Packed, place: Array, valid: Array) -> Packed:
    """old [B, h, n, ...] with new [B, h, 1, ...] at places [B, 1], where valid."""

    def one(old: Array, new: Array) -> Array:
        batch, heads, count = old.shape[:3]
        if count == 0:
            return old
        rows = new.reshape(batch, heads, 1, -1).swapaxes(1, 2)
        return write_rows(old.reshape(batch, heads, count, -1), rows, place, valid).reshape(old.shape)

    return jax.tree.map(one, old, new)


def cut(packed: Packed, count: Array) -> Packed:
    """The first count [B] of [B, h, n, ...], zeros behind."""

    def one(x: Array) -> Array:
        there = jnp.arange(x.shape[2]) < count[:, None]
        return jnp.where(there.reshape(there.shape[0], 1, -1, *[1] * (x.ndim - 3)), x, 0).astype(x.dtype)

    return jax.tree.map(one, packed)
