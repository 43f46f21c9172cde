"""RocketKV evicts a part of the prompt once, and then each query fetches some pages of what is left.

Source: Behnam et al. 2025, arXiv 2502.14051, section 3. First, SnapKV's scores choose the prompt tokens that each KV
head keeps. Then the kept tokens are grouped in pages, in the order of their positions, and each step fetches the pages
with the highest bounds, as Quest does. So the page bounds on the device and the tokens in host memory shrink alike.

The paper reads the bounds of only those columns in which the queries are largest. Here all columns are read, as in
Quest. The paper pools SnapKV's scores over a number of tokens that depends on the prompt. Here it is SnapKV's own. In
the paper, the two stages have about equal compression ratios. Here both numbers are settings. With another method of
scores, the eviction does not depend on a question at the end of the prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.policies.adakv import SCORES, scorer_of
from jshadow.policies.base import HookInputs
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.eviction import EvictingPolicy, best_positions, take_positions
from jshadow.policies.quest import Quest
from jshadow.policies.registry import register
from jshadow.policies.retrieval import UnitFrozen


class RocketFrozen(UnitFrozen):
    """The prompt's part of the state.

    Its units, and the positions that the pages know, count the kept tokens only: a kept token of the prompt has the
    number of the kept tokens before it, and a later token has its position minus `evicted`.

    Attributes:
        evicted: number of tokens of each row's prompt that are dropped, int32 [B].
    """

    evicted: Array


@register(
    small={"kept": 30, "budget": 12, "unit": 4},
    lossless=lambda tokens, config: {"kept": tokens, "budget": max(tokens, 4), "unit": 4},
)
@dataclasses.dataclass(frozen=True)
class RocketKV(Quest):
    """Keep a part of the prompt, and fetch the pages of it with the highest upper bound on a query's scores.

    Attributes:
        kept: number of prompt tokens that each KV head keeps.
        scores: the method that scores the prompt's tokens, with its default settings: "snapkv", "expected_attention",
            "keydiff" or "kvzip".
    """

    budget: int = 512
    unit: int = 8
    dense_layers: int = 0
    kept: int = 4096
    scores: str = "snapkv"

    name = "rocketkv"
    source = "arXiv 2502.14051, section 3"
    budget_fields = ("budget", "kept")
    size_free = ("recent", "top_p", "scores")

    @property
    def scorer(self) -> EvictingPolicy:
        """The method that scores the prompt's tokens."""
        return scorer_of(self.scores, self.kept)

    @property
    def reads(self) -> HookInputs:
        return dataclasses.replace(self.scorer.reads, piece=super().reads.piece)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_choice(self.name, "scores", self.scores, SCORES)
        check_range(self.name, "kept", self.kept, 1)
        self.scorer.resolve(config, capacity)
        return super().resolve(config, capacity)

    # Sizes

    def slots(self, spec: CacheSpec) -> int:
        """Return the maximum number of prompt tokens that a head keeps."""
        return min(self.kept, spec.capacity)

    def ring_slots(self, spec: CacheSpec) -> int:
        return self.recent + self.unit + self.reads.piece - 2

    def window_slots(self, capacity: int, shortest: int) -> int:
        return min(capacity - shortest + self.unit - 1, capacity)

    def host_layout(self, spec: CacheSpec) -> HostLayout:
        tail = max(1, -(-spec.window // self.unit))
        return HostLayout(spec.kv_heads, self.slots(spec) // self.unit, self.unit, planes=2, tail_units=tail)

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        return jnp.minimum(spec.capacity - lengths, super().room(spec, state, lengths - state.frozen.evicted))

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return Quest's length, and at least that of the prompt if tokens of it were dropped."""
        evicted = state.frozen.evicted
        first = super().earliest(spec, state, reached - evicted)
        assert first is not None
        # If tokens were dropped, the last kept tokens need not be the last ones of the prompt.
        return evicted + jnp.where(evicted > 0, jnp.maximum(first, self.slots(spec)), first)

    # A prompt

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        return _with_evicted(super().init(spec, fitted), jnp.zeros(spec.batch, jnp.int32))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        count = self.slots(spec)
        scores, reserved = self.scorer.score(spec, prompt)
        at = best_positions(scores, prompt.lengths, reserved, count)
        k, v = (take_positions(x, at).astype(spec.dtype).swapaxes(1, 2) for x in (prompt.k_post, prompt.v))
        where = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (spec.batch, count))
        kept = PromptKV(k, k, v, jnp.minimum(prompt.lengths, count), where)
        state, write = super().compress(dataclasses.replace(spec, capacity=count), state, kept, fitted)
        return _with_evicted(state, prompt.lengths - kept.lengths), write

    # One step

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        return super().append(spec, state, _after_eviction(state, step))

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        return super().select(spec, state, _after_eviction(state, step))

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        return super().attend(spec, state, _after_eviction(state, step), fetched)

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        return super().attended_parts(spec, state, lengths - state.frozen.evicted)

    # Costs

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        kept = 4 * spec.batch * self.slots(spec) * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return super().compress_bytes(spec, tokens) + self.scorer.compress_bytes(spec, tokens) + kept

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return policies with page sizes from small to large, which keep half of the tokens."""
        same = {name: getattr(self, name) for name in self.size_free} | {"kept": max(1, num_tokens // 2)}
        groups = super().candidates(same["kept"], config)
        return [[dataclasses.replace(one, **same) for one in group] for group in groups]


def _with_evicted(state: LayerState, evicted: Array) -> LayerState:
    """Return a state whose frozen record tells how many tokens were dropped."""
    frozen = state.frozen
    return state.replace(frozen=RocketFrozen(frozen.units, frozen.summaries, frozen.basis, None, evicted))


def _after_eviction(state: LayerState, step: StepKV) -> StepKV:
    """Return the step with the positions and lengths that it has among the kept tokens."""
    evicted = state.frozen.evicted
    return step.replace(positions=step.positions - evicted[:, None], lengths=step.lengths - evicted)
