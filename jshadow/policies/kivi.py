"""KIVI stores keys and values in a few bits, and the newest tokens exactly (Liu et al. 2024, arXiv 2402.02750).

Keys are quantized by channel and values by token. R is the `residual`. When a layer holds n tokens, the keys of the
first n - n % R tokens are quantized, in blocks of R tokens. The values of the first n - R tokens are also quantized,
one token at a time. These counts are those of the published code. A block of keys is still exact for the query of the
token that completes it. In the published code, the value that is quantized in a step is also still exact for that
step's query; here it is not.

The prompt's attention is exact, and no token is evicted. With bits=1, numbers are quantized as in SpeCache (arXiv
2503.16163, equation 3).

Example: with R = 4 and n = 10, the keys of tokens 0 to 7 are quantized in two blocks, and those of tokens 8 and 9 are
exact. The values of tokens 0 to 5 are quantized, and those of tokens 6 to 9 are exact.
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
from jshadow.ops.packing import Packed, dequantize, quantize, scale_dtype, words_of
from jshadow.policies.base import UniformPolicy
from jshadow.policies.capabilities import Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.registry import register


class Quantized(struct.PyTreeNode):
    """Quantized keys and values. R is `KIVI.residual`, g is `KIVI.group`, and w is the number of words in a group.

    Example: B = 1, 2 heads of width 64, 3 blocks of R = 128 tokens, g = 32 and 2 bits. A group has 64 bits, so w = 2,
    and the words of the keys are uint32 [1, 2, 3, 4, 64, 2]. Entry [0, h, u, j, c] holds channel c of the keys of
    tokens 128u + 32j to 128u + 32j + 31.

    Attributes:
        keys: words uint32 [B, h_kv, blocks, R / g, d, w]; scale and zero [B, h_kv, blocks, R / g, d].
        values: words uint32 [B, h_kv, tokens, d / g, w]; scale and zero [B, h_kv, tokens, d / g].
    """

    keys: Packed
    values: Packed


class KiviFrozen(struct.PyTreeNode):
    """The quantized part of the prompt.

    Attributes:
        quantized: the keys of the prompt's whole blocks, and all values but the last R. Unused entries are zeros.
        lengths: tokens of the prompt, int32 [B].
    """

    quantized: Quantized
    lengths: Array


class KiviLive(struct.PyTreeNode):
    """The part that decoding changes.

    Attributes:
        later: blocks of keys and values that were quantized after the prompt. Entry 0 is the first one that was not
            quantized with the prompt.
        recent: a ring buffer of the newest tokens' exact keys after RoPE and values [B, h_kv, R, d]. The token at
            position p is in slot p % R.
    """

    later: Quantized
    recent: KeyValues


class Part(NamedTuple):
    """Some of the tokens that a layer holds, ready for attention.

    Attributes:
        k, v: keys and values [B, h_kv, n, d] in the model's dtype, dequantized where they were quantized.
        positions: positions of the tokens, int32 [B, n].
        seen: which entries are real tokens that no other part contains, bool [B, n].
        quantized: whether the keys, or the keys and the values, were quantized.
    """

    k: Array
    v: Array
    positions: Array
    seen: Array
    quantized: bool

    def piece(self, seen: Array) -> Piece:
        """Return the part as a Piece for attention. The mask `seen` is bool [B, n] or [B, h_kv, n]."""
        return Piece(self.k, self.v, seen[:, None, None] if seen.ndim == 2 else seen[:, :, None])


def put(old: Packed, new: Packed, place: Array, valid: Array) -> Packed:
    """Write one entry of each row into entries [B, h, n, ...] at the index `place`, int32 [B, 1], where `valid`, bool
    [B, 1].
    """

    def one(old: Array, new: Array) -> Array:
        batch, heads, count = old.shape[:3]
        if count == 0:
            return old
        rows = new.reshape(batch, heads, 1, -1).swapaxes(1, 2)
        return write_rows(old.reshape(batch, heads, count, -1), rows, place, valid).reshape(old.shape)

    return jax.tree.map(one, old, new)


def cut(packed: Packed, count: Array) -> Packed:
    """Replace the entries of [B, h, n, ...] by zeros, except the first `count` [B] of each row."""

    def one(x: Array) -> Array:
        there = jnp.arange(x.shape[2]) < count[:, None]
        return jnp.where(there.reshape(there.shape[0], 1, -1, *[1] * (x.ndim - 3)), x, 0).astype(x.dtype)

    return jax.tree.map(one, packed)


_BITS = (1, 2, 4, 8)


@register(
    small={"bits": 2, "group": 8, "residual": 8},
    lossless=lambda tokens, config: never_full(tokens, config, KIVI.group),
)
@dataclasses.dataclass(frozen=True)
class KIVI(UniformPolicy, Sized):
    """Keep all tokens in a few bits, and the newest tokens exactly.

    Attributes:
        bits: bits of a quantized number: 1, 2, 4 or 8.
        group: numbers that share a scale and a zero point. For keys, a group is `group` tokens of one channel. For
            values, it is `group` channels of one token. It must divide the residual and the head width.
        residual: number of newest tokens whose values are exact. Keys are quantized in blocks of this many tokens.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128

    name = "kivi"
    takes_sinks = True
    source = "arXiv 2402.02750, section 3"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_choice(self.name, "bits", self.bits, _BITS)
        check_range(self.name, "group", self.group, 1)
        check_range(self.name, "residual", self.residual, 1)
        for what, size in (("residual", self.residual), ("head_dim", config.head_dim)):
            if size % self.group:
                raise ConfigError(f"kivi.group must divide {what}={size}, got {self.group}")
        return self

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return the maximum number of tokens whose values can be quantized after the prompt.

        These include the tokens of the prompt that are exact at first.
        """
        return capacity - max(shortest - self.residual, 0)

    # Counts

    def blocks(self, tokens: int) -> int:
        """Return the number of whole blocks of keys in `tokens` tokens."""
        return tokens // self.residual

    def first_exact_value(self, held: Array) -> Array:
        """Return the first position whose value is exact when `held` tokens are held."""
        return jnp.maximum(held - self.residual, 0)

    # State

    def empty(self, spec: CacheSpec, blocks: int, tokens: int) -> Quantized:
        """Return codes of zeros for `blocks` blocks of keys and the values of `tokens` tokens."""
        heads, words = (spec.batch, spec.kv_heads), words_of(self.group, self.bits)
        per_block, per_head = self.residual // self.group, spec.head_dim // self.group

        def packed(*shape: int) -> Packed:
            scale = jnp.zeros((*heads, *shape), scale_dtype(spec.dtype))
            return Packed(jnp.zeros((*heads, *shape, words), jnp.uint32), scale, scale)

        return Quantized(packed(blocks, per_block, spec.head_dim), packed(tokens, per_head))

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        ring = jnp.zeros((spec.batch, spec.kv_heads, self.residual, spec.head_dim), spec.dtype)
        frozen = self.empty(spec, self.blocks(spec.capacity), max(spec.capacity - self.residual, 0))
        later = self.empty(spec, -(-spec.window // self.residual), spec.window)
        return LayerState(KiviFrozen(frozen, jnp.zeros(spec.batch, jnp.int32)), KiviLive(later, KeyValues(ring, ring)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Quantize the old keys and values of the prompt, and store the newest R tokens exactly in the ring."""
        blocks, tokens = self.blocks(spec.capacity), max(spec.capacity - self.residual, 0)
        keys = fit_tokens(prompt.k_post, blocks * self.residual).transpose(0, 2, 1, 3)
        keys = keys.reshape(spec.batch, spec.kv_heads, blocks, self.residual, spec.head_dim)
        values = fit_tokens(prompt.v, tokens).transpose(0, 2, 1, 3)
        codes = Quantized(self.quantize_keys(keys), self.quantize_values(values))
        k, v = (fill_ring(x, prompt.lengths, self.residual) for x in (prompt.k_post, prompt.v))
        # Entries after a row's old tokens were quantized from padding, or from tokens that are still exact. Zero them.
        old = prompt.lengths // self.residual, self.first_exact_value(prompt.lengths)
        codes = Quantized(cut(codes.keys, old[0]), cut(codes.values, old[1]))
        live = state.live.replace(recent=KeyValues(k, v))
        return state.replace(frozen=KiviFrozen(codes, prompt.lengths), live=live), None

    def quantize_keys(self, keys: Array) -> Packed:
        """Quantize blocks of keys [B, h_kv, n, R, d], in groups of tokens for each channel."""
        grouped = keys.reshape(*keys.shape[:3], self.residual // self.group, self.group, keys.shape[4])
        return quantize(grouped.swapaxes(4, 5), self.bits)

    def quantize_values(self, values: Array) -> Packed:
        """Quantize values [B, h_kv, n, d], in groups of channels for each token."""
        grouped = values.reshape(*values.shape[:3], values.shape[3] // self.group, self.group)
        return quantize(grouped, self.bits)

    def keys_of(self, spec: CacheSpec, packed: Packed) -> Array:
        """Dequantize blocks of keys to [B, h_kv, blocks * R, d] in the model's dtype."""
        wide = dequantize(packed, self.group, self.bits).swapaxes(4, 5)
        tokens = wide.shape[2] * self.residual
        return wide.reshape(spec.batch, spec.kv_heads, tokens, spec.head_dim).astype(spec.dtype)

    def values_of(self, spec: CacheSpec, packed: Packed) -> Array:
        """Dequantize values to [B, h_kv, tokens, d] in the model's dtype."""
        wide = dequantize(packed, self.group, self.bits)
        return wide.reshape(spec.batch, spec.kv_heads, wide.shape[2], spec.head_dim).astype(spec.dtype)

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Quantize the value that leaves the ring, and write the new token in its place.

        If the new token completes a block of keys, quantize that block.
        """
        ring, later, position = state.live.recent, state.live.later, step.positions[:, :1]
        start_value = self.first_exact_value(state.frozen.lengths)[:, None]
        slot, leaving = position % self.residual, position - self.residual
        old = jnp.take_along_axis(ring.v, slot[:, None, :, None], axis=2)
        gone = step.valid[:, :1] & (leaving >= 0)
        values = put(later.values, self.quantize_values(old), leaving - start_value, gone)
        recent = ring.written(step.k_post[:, :1], step.v[:, :1], slot, step.valid[:, :1])
        full = step.valid[:, :1] & (slot == self.residual - 1)
        place = position // self.residual - (state.frozen.lengths // self.residual)[:, None]
        keys = put(later.keys, self.quantize_keys(recent.k[:, :, None]), place, full)
        return state.replace(live=KiviLive(Quantized(keys, values), recent)), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        pieces = [part.piece(part.seen) for part in self.parts(spec, state, step.positions[:, :1] + 1)]
        return attend(step.q_post, pieces, spec.scale, step.sinks), state

    def parts(self, spec: CacheSpec, state: LayerState, held: Array) -> list["Part"]:
        """Return all tokens held, each in exactly one part.

        `held`, int32 [B, 1], is the number of tokens that each row holds, with the query's own token.
        """
        lengths, recent, size = state.frozen.lengths[:, None], state.live.recent, self.residual
        frozen, later = state.frozen.quantized, state.live.later
        keys, values = self.keys_of(spec, frozen.keys), self.values_of(spec, frozen.values)
        later_keys, later_values = self.keys_of(spec, later.keys), self.values_of(spec, later.values)
        # the ends of the quantized keys and values: those of the prompt's part, and those of all tokens held
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
        if keys.shape[2]:  # tokens whose keys were quantized with the prompt, and whose values later or not yet
            near, rows = at[:, :size], later_values[:, :, :size]
            found.append(Part(key_at(keys, near, 0), rows, near, (near < v_end) & (near < k_cut), True))
            found.append(Part(key_at(keys, slots, 0), recent.v, slots, (slots >= v_end) & (slots < k_cut), True))
        seen = (at >= k_cut) & (at < v_end)
        found.append(Part(key_at(later_keys, at, k_cut), later_values, at, seen, True))
        seen = (slots >= v_end) & (slots >= k_cut) & (slots < k_end)
        found.append(Part(key_at(later_keys, slots, k_cut), recent.v, slots, seen, True))
        found.append(Part(recent.k, recent.v, slots, slots >= k_end, False))
        # a slot of the ring that no token has reached yet has a negative position
        return [part._replace(seen=part.seen & (part.positions >= 0)) for part in found]

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        left = spec.window - (lengths - self.first_exact_value(state.frozen.lengths))
        return jnp.minimum(spec.capacity - lengths, left)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the length of the prompt if no value has been quantized. Else the row cannot go back."""
        return jnp.where(reached <= self.residual, state.frozen.lengths, reached)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Count all tokens: those with an exact key and value ("window"), and the others ("quantized")."""
        exact = (lengths - 1) % self.residual + 1
        parts = {"window": exact, "quantized": lengths - exact}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count all tokens of a layer dequantized, and their scores."""
        tokens = spec.capacity + 2 * spec.window + 4 * self.residual
        row = spec.kv_heads * spec.head_dim * (4 * jnp.dtype(spec.dtype).itemsize + 4 * 4)
        return spec.batch * tokens * (row + 3 * 4 * spec.q_heads)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        cls, largest = type(self), math.gcd(config.head_dim, 64)
        groups = [group for group in (16, 32, 64) if group <= largest] or [largest]
        return [
            [cls(bits=bits, group=group, residual=max(group, min(128, num_tokens // 16 // group * group)))]
            for bits in sorted(_BITS, reverse=True)
            for group in groups
        ]


def never_full(num_tokens: int, config: ModelConfig, usual_group: int) -> dict[str, int]:
    """Return settings with a residual larger than num_tokens, so that no token is quantized."""
    group = math.gcd(config.head_dim, usual_group)
    return {"group": group, "residual": -(-(num_tokens + 1) // group) * group}
