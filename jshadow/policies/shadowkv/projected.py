"""The layers of `ShadowKVPlus(plus_mode="project_only")`: every key that came after the prompt is attended through its
projection on the prompt's basis, and its value stays on the device (Sun et al. 2024, arXiv 2410.21465, section 7.1).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jshadow.cache.accounting import leaf_bytes
from jshadow.cache.records import HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.attention import Piece
from jshadow.ops.layout import write_rows
from jshadow.ops.rope import cos_sin, rotate
from jshadow.policies.shadowkv.costs import sizes_of
from jshadow.policies.shadowkv.key_codecs import LowRank, by_head
from jshadow.policies.shadowkv.policy import ShadowKV
from jshadow.policies.shadowkv.state import ShadowFrozen, ShadowLive, fields_of


class ProjectedFrozen(ShadowFrozen, kw_only=True):
    """Also `lengths`: tokens of the prompt, int32 [B]; `key_weights` as ShadowKV+ has them."""

    lengths: Array
    key_weights: Array | None = None


class ProjectedLive(ShadowLive, kw_only=True):
    """What decoding changes.

    Attributes:
        window: exact keys of the prompt's end [B, h_kv, e, d]; values of all tokens from chunks * c on
            [B, h_kv, window, d].
        left: left rows of the same tokens [B, window, rank], or [B, h_kv, window, w] where heads have their own.
    """

    left: Array


@dataclasses.dataclass(frozen=True)
class ShadowKVProjected(ShadowKV):
    """One layer's policy; not to be chosen by itself."""

    name = "shadowkv_plus"

    @property
    def exact_slots(self) -> int:
        """Tokens of a prompt that follow its chunks, at most."""
        return (self.local_chunks + self.chunk_multiple) * self.chunk_size

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Zeros."""
        state = super().init(spec, fitted)
        left = self.codec.empty(spec.batch, spec.window, 1, sizes_of(spec)).left
        window = state.live.window
        live = ProjectedLive(**fields_of(state.live) | {"window": KeyValues(self.exact(window.k), window.v)}, left=left)
        frozen = ProjectedFrozen(
            **fields_of(state.frozen), lengths=state.frozen.chunks, key_weights=self.no_weights(spec)
        )  # fmt: skip
        return LayerState(frozen, live)

    def exact(self, rows: Array) -> Array:
        """The slots of the prompt's end out of the window's [B, h_kv, window, d]."""
        return rows[:, :, : self.exact_slots]

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """As ShadowKV."""
        done, write = super().compress(spec, state, prompt, fitted)
        window = done.live.window
        live = done.live.replace(window=KeyValues(self.exact(window.k), window.v))
        frozen = ProjectedFrozen(
            **fields_of(done.frozen), lengths=prompt.lengths, key_weights=self.weights_of(spec, prompt)
        )  # fmt: skip
        return LayerState(frozen, live), write

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Values to the window, projected keys beside them."""
        live: ProjectedLive = state.live
        slots = step.positions - state.frozen.chunks[:, None] * self.chunk_size
        v = write_rows(live.window.v, step.v, slots, step.valid)
        rows = self.codec.project(step.k_pre, state.frozen.right, state.frozen.key_weights)
        left = write_rows(by_head(live.left), rows, slots, step.valid).reshape(live.left.shape)
        return state.replace(live=live.replace(window=KeyValues(live.window.k, v), left=left)), None

    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """The prompt's end, all later tokens by their projection, and outliers."""
        live, frozen = state.live, state.frozen
        first = frozen.chunks * self.chunk_size
        slot, rest = jnp.arange(spec.window), (frozen.lengths - first)[:, None, None]
        keys = self.codec.expand(by_head(live.left), frozen.right)
        positions = jnp.broadcast_to((first[:, None] + slot)[:, None], keys.shape[:3])
        keys = rotate(keys, *cos_sin(positions, step.inverse)).astype(spec.dtype)
        seen = (slot >= rest) & (slot <= step.positions[..., None] - first[:, None, None])
        exact = live.window.k
        ending = jnp.arange(exact.shape[2]) < rest
        pieces = [Piece(exact, self.exact(live.window.v), ending[:, None]), Piece(keys, live.window.v, seen[:, None])]
        return pieces + super().exact_pieces(spec, state, step)[1:]

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """All left rows of the window too: every key in it is rebuilt."""
        parts = super().step_bytes(spec, state)
        return parts | {"left": (parts["left"][0] + leaf_bytes(state.live.left), 0)}

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Also the rebuilding of the window's keys, and their scores."""
        window = spec.batch * spec.window * spec.kv_heads * spec.head_dim
        return super().step_flops(spec, state) + 2 * window * (self.codec.products(sizes_of(spec)) + spec.group)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Also the window's keys, in float32 until they are rotated."""
        window = spec.batch * spec.window * spec.kv_heads * spec.head_dim
        codes = spec.batch * spec.window * spec.kv_heads * self.codec.expand_bytes(sizes_of(spec))
        if isinstance(self.codec, LowRank):
            codes = 0  # left rows as they lie there
        return super().step_temporaries(spec) + codes + window * (2 * 4 + jnp.dtype(spec.dtype).itemsize)
