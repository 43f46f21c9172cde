"""Full attention: every key and value, exact. The measure of all other policies."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import fit_tokens, write_rows
from jshadow.policies.base import HookInputs, UniformPolicy
from jshadow.policies.capabilities import Sized
from jshadow.policies.costs import Costs
from jshadow.policies.registry import register


class FullLive(struct.PyTreeNode):
    """Attributes: cache: keys after RoPE and values by position, [B, h_kv, capacity, d]."""

    cache: KeyValues


@register(lossless=lambda tokens, config: {})
@dataclasses.dataclass(frozen=True)
class Full(UniformPolicy, Sized, Costs):
    """Keep and attend everything."""

    name = "full"
    source = "the dense baseline"

    @property
    def reads(self) -> HookInputs:
        """Pieces of 16 tokens."""
        return HookInputs(piece=16)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Zeros [B, h_kv, capacity, d]."""
        zeros = jnp.zeros((spec.batch, spec.kv_heads, spec.capacity, spec.head_dim), spec.dtype)
        return LayerState(live=FullLive(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Copy the prompt to the front of the cache."""
        k, v = (fit_tokens(x, spec.capacity).transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v))
        return state.replace(live=FullLive(KeyValues(k, v))), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write each new token at its position."""
        cache = state.live.cache
        k = write_rows(cache.k, step.k_post, step.positions, step.valid)
        v = write_rows(cache.v, step.v, step.positions, step.valid)
        return state.replace(live=FullLive(KeyValues(k, v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Exact attention over all positions up to the query's own."""
        cache, rows = state.live.cache, step.positions.shape[1]
        end = step.positions
        if rows > 1:
            end = jnp.minimum(end, step.lengths[:, None] + step.valid.sum(axis=1, keepdims=True) - 1)
        pieces = [Piece(cache.k, cache.v, jnp.arange(spec.capacity) <= end[:, None, :, None])]
        if rows > 1:  # a guess is not kept, yet it sees itself
            k, v = (x.swapaxes(1, 2) for x in (step.k_post, step.v))
            pieces.append(Piece(k, v, (jnp.eye(rows, dtype=bool) & ~step.valid[:, None])[:, None]))
        return attend(step.q_post, pieces, spec.scale), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """All of them."""
        return {"window": lengths.astype(jnp.float32)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores, and a copy of the values: where 128 does not divide the capacity, XLA pads them for the product of
        one query's weights and so many values on NVIDIA GPUs, which it splits along the tokens."""
        padded = spec.batch * spec.capacity * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return super().step_temporaries(spec) + padded

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """There is one size."""
        return [[self]]
