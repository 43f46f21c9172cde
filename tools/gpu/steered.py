"""ShadowKV with a given share of chunks that stay selected. In each step, only a moving window of chunks is open.

All kernels do the work of a real step: they read the landmarks of every chunk, and select by real scores. A chunk that
is not open has no score, so each step selects exactly the chunks of its window. This holds for one and for two levels
of landmarks. The mask of open chunks takes the place of the candidates of the state, which a real step reads. Three
small kernels of a step compute the mask for all layers. A real step does not have them.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv.landmarks import Marks

PHASE = 32  # the first steps select no chunk of the previous step; steps after these repeat SHARE of the chunks
SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Steered(ShadowKV):
    """ShadowKV whose selection is a moving window.

    The rank of a chunk is its index times a stride, modulo the number of chunks. So neighboring chunks have very
    different ranks. A step selects the next k ranks, on a wheel of the ranks that may be selected.

    Attributes:
        prompt: number of tokens of every row's prompt.
        capacity: maximum tokens of a row.
    """

    prompt: int = 0
    capacity: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks of the prompt, without the local ones."""
        return max(0, self.prompt // self.chunk_size - self.local_chunks)

    @property
    def taken(self) -> int:
        """Number of chunks that a step selects."""
        return self.max_selected(self.capacity)

    @property
    def wheel(self) -> int:
        """Number of ranks that may be selected. Higher ranks belong to outliers.

        Raises:
            ValueError: there are too few chunks for two selections without common chunks.
        """
        size = self.chunks - self.max_outliers(self.capacity)
        if size < 2 * self.taken:
            raise ValueError(f"{size} chunks are too few to select {self.taken} others in each step")
        return size

    @property
    def moved(self) -> int:
        """Number of ranks that the window moves in a step of the second phase."""
        return self.taken - round(SHARE * self.taken)

    def ranks(self) -> Array:
        """Return the ranks of all chunks, int32 [n]. Chunks past the prompt have the same ranks as others."""
        stride = next(n for n in range(round(0.618 * self.chunks), 2 * self.chunks) if math.gcd(n, self.chunks) == 1)
        return jnp.arange(self.max_chunks(self.capacity), dtype=jnp.int32) * stride % self.chunks

    def eligible(self) -> Array:
        """Return which chunks are not outliers, bool [n]. The `candidates` of a state must equal this."""
        return (self.ranks() < self.wheel) & (jnp.arange(self.max_chunks(self.capacity)) < self.chunks)

    def window(self, positions: Array, heads: int) -> Array:
        """Return which chunks the tokens at `positions`, int32 [B, T], select; bool [B, heads, T, n]."""
        token = (positions - self.prompt)[:, None, :, None]
        start = self.taken * jnp.minimum(token, PHASE) + self.moved * jnp.maximum(token - PHASE, 0)
        # Heads select different chunks. Otherwise they would find each other's left rows in the GPU's cache.
        start += jnp.arange(heads)[:, None, None] * (self.wheel // heads)
        return ((self.ranks() - start) % self.wheel < self.taken) & self.eligible()

    def marks(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Marks, ...]:
        """Return the landmarks of all chunks, of which only those of the window are open."""
        [marks] = super().marks(spec, state, step)
        return (marks._replace(open=self.window(step.positions, marks.open.shape[1])),)
