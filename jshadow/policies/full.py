"""Full attention over exact keys and values: the baseline of all other policies."""

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
from jshadow.ops.layout import fit_tokens
from jshadow.policies.base import HookInputs, Policy, UniformPolicy, why_dense
from jshadow.policies.capabilities import HasAll, Sized
from jshadow.policies.registry import register


class OneCache(struct.PyTreeNode):
    """The live part of a layer that has one buffer.

    Attributes:
        cache: keys and values [B, h_kv, slots, d]. The keys are after RoPE unless the policy states otherwise.
    """

    cache: KeyValues


@register(lossless=lambda tokens, config: {})
@dataclasses.dataclass(frozen=True)
class Full(UniformPolicy, HasAll, Sized):
    """Keep all keys and values exactly, and attend to all of them. The token at position p is in slot p."""

    name = "full"
    takes_sinks = True
    source = "the dense baseline"

    @property
    def reads(self) -> HookInputs:
        return HookInputs(piece=16, whole_turns=True)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        zeros = jnp.zeros((spec.batch, spec.kv_heads, spec.capacity, spec.head_dim), spec.dtype)
        return LayerState(live=OneCache(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        k, v = (fit_tokens(x, spec.capacity).transpose(0, 2, 1, 3) for x in (prompt.k_post, prompt.v))
        return state.replace(live=OneCache(KeyValues(k, v))), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        cache, q_post = state.live.cache.append(step, step.positions, spec.rope)
        return state.replace(live=OneCache(cache), q_post=q_post), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        return attend_all(spec, step, state.live.cache.k, state.live.cache.v), state

    def all_tokens(self, spec: CacheSpec, state: LayerState) -> KeyValues:
        cache: KeyValues = state.live.cache
        return cache

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return 1: every token has a slot of its own."""
        return jnp.ones_like(reached)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        return {"window": lengths.astype(jnp.float32)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the scores, and a padded copy of the values.

        On NVIDIA GPUs, XLA splits the product of one query's weights and the values along the tokens. If the capacity
        is not a multiple of 128, it pads the values first.
        """
        slots = spec.batch * spec.capacity
        padded = slots * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return super().step_temporaries(spec) + padded

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        return [[self]]


def attend_all(spec: CacheSpec, step: StepKV, k: Array, v: Array) -> Array:
    """Compute the attention of a step's queries over all positions up to their own, [B, T, h_q, d].

    k (after RoPE) and v [B, h_kv, capacity, d] include the tokens of the step. A guess is not stored, but its query
    attends
    to its own key.
    """
    rows, end = step.positions.shape[1], step.positions
    if rows > 1:
        end = jnp.minimum(end, step.lengths[:, None] + step.valid.sum(axis=1, keepdims=True) - 1)
    pieces = [Piece(k, v, end[:, None, :, None] + 1)]
    if rows == 2:
        own_k, own_v = (x.swapaxes(1, 2) for x in (step.k_post, step.v))
        guess = jnp.eye(rows, dtype=bool) & ~step.valid[:, None]
        pieces.append(Piece(own_k, own_v, guess[:, None]))
    return attend(step.q_post, pieces, spec.scale, step.sinks)


def or_full(policy: Policy, config: ModelConfig, capacity: int) -> tuple[Policy, str | None]:
    """Return the policy that runs at a capacity, and why Full takes the place of `policy`, or None if it does not.

    `policy` is resolved. Full takes its place if it has no effect.
    """
    reason = why_dense(policy, config, capacity)
    return (policy if reason is None else Full()), reason
