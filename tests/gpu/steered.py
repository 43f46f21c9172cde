"""ShadowKV with a set repeat share: the real scores are computed, then a moving window of chunks wins."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.policies import ShadowKV

BONUS = 4.0  # scores are probabilities
PHASE = 32  # tokens after the prompt that share nothing with each other; those that follow share SHARE
SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Steered(ShadowKV):
    """Chunks have a rank (their number times a stride, modulo the chunks), so that neighbours lie far apart; a step
    selects the next k ranks on a wheel of those that may be selected.

    Attributes:
        prompt: tokens of every row's prompt.
    """

    prompt: int = 0

    @property
    def chunks(self) -> int:
        """Of the prompt."""
        return max(0, self.prompt // self.chunk_size - self.local_chunks)

    def wheel(self, capacity: int) -> int:
        """Ranks that may be selected; those behind belong to outliers.

        Raises:
            ValueError: two selections that share nothing do not fit.
        """
        size = self.chunks - self.max_outliers(capacity)
        if size < 2 * self.max_selected(capacity):
            raise ValueError(f"{size} chunks are too few to select {self.max_selected(capacity)} others in each step")
        return size

    def ranks(self, count: int) -> Array:
        """Rank of each of `count` chunks, int32 [count]; those past the prompt share ranks with others."""
        stride = next(n for n in range(round(0.618 * self.chunks), 2 * self.chunks) if math.gcd(n, self.chunks) == 1)
        return jnp.arange(count, dtype=jnp.int32) * stride % self.chunks

    def eligible(self, capacity: int) -> Array:
        """Chunks that are no outliers, bool [n]: what `candidates` must say."""
        count = self.max_chunks(capacity)
        return (self.ranks(count) < self.wheel(capacity)) & (jnp.arange(count) < self.chunks)

    def moved(self, capacity: int) -> int:
        """Ranks by which the window moves in the second phase."""
        selected = self.max_selected(capacity)
        return selected - round(SHARE * selected)

    def scores(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """The real scores, and a bonus for the window; float32 [B, h_kv, T, n]."""
        real = super().scores(spec, state, step)
        wheel, selected = self.wheel(spec.capacity), self.max_selected(spec.capacity)
        token = (step.positions - self.prompt)[:, None, :, None]
        start = selected * jnp.minimum(token, PHASE) + self.moved(spec.capacity) * jnp.maximum(token - PHASE, 0)
        # Heads look at different chunks, or they would find each other's left rows in the cache.
        start += jnp.arange(spec.kv_heads)[:, None, None] * (wheel // spec.kv_heads)
        ranks = self.ranks(real.shape[3])
        inside = ((ranks - start) % wheel < selected) & (ranks < wheel)
        return jnp.where(inside & (real >= 0), real + BONUS, real)
