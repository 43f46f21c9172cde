"""ShadowKV with a given share of repeated chunks. It computes the real scores, but a moving window of chunks wins."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.policies import ShadowKV

BONUS = 4.0  # added to the scores of the window; scores are probabilities, so the window always wins
PHASE = 32  # the first steps select no chunk of the previous step; steps after these repeat SHARE of the chunks
SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Steered(ShadowKV):
    """ShadowKV whose selection is a moving window.

    The rank of a chunk is its index times a stride, modulo the number of chunks. So neighboring chunks have very
    different ranks. A step selects the next k ranks, on a wheel of the ranks that may be selected.

    Attributes:
        prompt: number of tokens of every row's prompt.
    """

    prompt: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks of the prompt, without the local ones."""
        return max(0, self.prompt // self.chunk_size - self.local_chunks)

    def wheel(self, capacity: int) -> int:
        """Return the number of ranks that may be selected. Higher ranks belong to outliers.

        Raises:
            ValueError: there are too few chunks for two selections without common chunks.
        """
        size = self.chunks - self.max_outliers(capacity)
        if size < 2 * self.max_selected(capacity):
            raise ValueError(f"{size} chunks are too few to select {self.max_selected(capacity)} others in each step")
        return size

    def ranks(self, count: int) -> Array:
        """Return the ranks of `count` chunks, int32 [count]. Chunks past the prompt have the same ranks as others."""
        stride = next(n for n in range(round(0.618 * self.chunks), 2 * self.chunks) if math.gcd(n, self.chunks) == 1)
        return jnp.arange(count, dtype=jnp.int32) * stride % self.chunks

    def eligible(self, capacity: int) -> Array:
        """Return which chunks are not outliers, bool [n]. The `candidates` of a state must equal this."""
        count = self.max_chunks(capacity)
        return (self.ranks(count) < self.wheel(capacity)) & (jnp.arange(count) < self.chunks)

    def moved(self, capacity: int) -> int:
        """Return how many ranks the window moves in a step of the second phase."""
        selected = self.max_selected(capacity)
        return selected - round(SHARE * selected)

    def scores(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Return the real scores with a bonus for the chunks of the window, float32 [B, h_kv, T, n]."""
        real = super().scores(spec, state, step)
        wheel, selected = self.wheel(spec.capacity), self.max_selected(spec.capacity)
        token = (step.positions - self.prompt)[:, None, :, None]
        start = selected * jnp.minimum(token, PHASE) + self.moved(spec.capacity) * jnp.maximum(token - PHASE, 0)
        # Heads select different chunks. Otherwise they would find each other's left rows in the GPU's cache.
        start += jnp.arange(spec.kv_heads)[:, None, None] * (wheel // spec.kv_heads)
        ranks = self.ranks(real.shape[3])
        inside = ((ranks - start) % wheel < selected) & (ranks < wheel)
        return jnp.where(inside & (real >= 0), real + BONUS, real)
