"""A policy that tells what ShadowKV loses if a part of the prompt is dropped before its keys are encoded.

RocketKV (arXiv 2502.14051) drops tokens first, and then retrieves. `EvictedChunks` is ShadowKV that selects only from
the chunks that an evicting method keeps. It stores all chunks, so its bytes are not those of a real eviction. It runs
with `PYTHONPATH=benchmarks jshadow eval MODEL --policies evicted_chunks:EvictedChunks:share=0.5 ...`.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import HostWrite, LayerState, PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import top_k
from jshadow.policies import ShadowKV, register
from jshadow.policies.adakv import SCORES, scorer_of
from jshadow.policies.base import HookInputs
from jshadow.policies.checks import check_choice, check_number
from jshadow.policies.eviction import EvictingPolicy, with_reserved
from jshadow.policies.shadowkv.selection import leave_out


@register(small={"rank": 12, "budget": 16, "chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2}, lossless=None)
@dataclasses.dataclass(frozen=True)
class EvictedChunks(ShadowKV):
    """Select only from a share of the prompt's chunks. The outliers and the window are kept in any case.

    The score of a chunk is the highest score of its tokens. Each KV head has other scores, so it keeps other chunks.

    Attributes:
        share: share of the prompt's chunks that each KV head keeps, at least 0. From 1 on, it keeps all.
        evictor: the method that scores the prompt's tokens: "snapkv", "expected_attention", "keydiff" or "kvzip".
    """

    share: float = 0.5
    evictor: str = "kvzip"

    name = "evicted_chunks"

    @property
    def scorer(self) -> EvictingPolicy:
        """The method that scores the prompt's tokens. With 64 kept tokens, SnapKV observes the last 32 queries."""
        return scorer_of(self.evictor, 64)

    @property
    def reads(self) -> HookInputs:
        """The hooks of a prompt need what both methods need. Those of a step are ShadowKV's."""
        own, scoring = super().reads, self.scorer.reads
        last = max(own.last_queries, scoring.last_queries)
        return dataclasses.replace(scoring, last_queries=last, piece=own.piece)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings."""
        check_number(self.name, "share", self.share, 0)
        check_choice(self.name, "evictor", self.evictor, SCORES)
        return super().resolve(config, capacity)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Do what ShadowKV does, and then exclude the chunks with the lowest scores."""
        state, write = super().compress(spec, state, prompt, fitted)
        frozen, last = state.frozen, self.scorer.reads.last_queries
        read = prompt.replace(q_tail=prompt.q_tail[:, -last:]) if last and prompt.q_tail is not None else prompt
        scores, reserved = self.scorer.score(spec, read)
        scores = with_reserved(scores, prompt.lengths, reserved, scores.shape[2])
        order = best_first(scores, frozen.chunks, (frozen.candidates.shape[2], self.chunk_size))
        dropped = jnp.arange(order.shape[2]) >= jnp.ceil(self.share * frozen.chunks)[:, None, None]
        return state.replace(frozen=frozen.replace(candidates=leave_out(frozen.candidates, order, dropped))), write


def best_first(scores: Array, chunks: Array, shape: tuple[int, int]) -> Array:
    """Return the n chunks of each head in the order of their scores, int32 [B, h, n]. Those that a row lacks come last.

    Args:
        scores: the scores of tokens, float32 [B, h, S].
        chunks: number of chunks of each row, int32 [B].
        shape: n, and the number of tokens in a chunk.
    """
    count, size = shape
    tokens = scores[:, :, : count * size]
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, count * size - tokens.shape[2])), constant_values=-jnp.inf)
    best = tokens.reshape(*tokens.shape[:2], count, size).max(axis=3)
    return top_k(jnp.where(jnp.arange(count) < chunks[:, None, None], best, -jnp.inf), count)
