"""OmniKV: a few filter layers choose the tokens for the layers behind them (Hao et al. 2025, ICLR, sections 3 and 4).

Tokens that matter differ little from layer to layer. So a filter layer attends to everything and says which prompt
tokens its heads looked at most, one set for all heads; the sparse layers behind it, up to the next filter, attend to
those and to what was generated. Their keys and values lie in the host tier and are fetched as soon as the set is known,
two layers ahead of the first that needs them. The paper's score is a softmax (equation 4), its default code takes raw
products; here it is the softmax, and every query of the window keeps the position that it had.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import MASKED, Piece, attend, group_queries
from jshadow.ops.layout import to_chunks, top_k, write_rows
from jshadow.policies.base import HookInputs, LayerCache, full_layers
from jshadow.policies.capabilities import CouplesLayers, PlansAhead, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.costs import Costs
from jshadow.policies.full import Full
from jshadow.policies.registry import register

# The paper's filter layers by number of layers (Llama-3-8B-262K, Yi-9B, Llama-3.1-70B; appendix); others scale these.
PAPERS_FILTERS = {32: (2, 8, 18), 48: (6, 11, 30), 80: (4, 19, 41)}


class FilterFrozen(struct.PyTreeNode):
    """Attributes: lengths: tokens of the prompt, int32 [B]: these may be chosen."""

    lengths: Array


class FilterLive(struct.PyTreeNode):
    """Attributes: cache: as in full attention; queries: the last w after RoPE, token p in slot p % w [B, w, h_q, d]."""

    cache: KeyValues
    queries: Array | None


class SparseLive(struct.PyTreeNode):
    """Attributes: window: keys after RoPE and values of the tokens after the prompt [B, h_kv, W, d], in turn."""

    window: KeyValues


@register(
    small={"budget": 9, "filter_layers": (0,)},
    lossless=lambda tokens, config: {"budget": tokens, "filter_layers": (0,)},
)
@dataclasses.dataclass(frozen=True)
class OmniKV(CouplesLayers, Sized):
    """Dense up to the first filter, at each filter and at the layer behind it; sparse elsewhere.

    Attributes:
        budget: prompt tokens that a sparse layer attends to.
        filter_layers: None: the paper's for models of 32, 48 and 80 layers, scaled for others.
        selector: "last": by the attention of the current query; "uniform": by the sum over the last ones; "exp": by a
            sum in which each older query counts half.
        observation_window: queries that "uniform" and "exp" sum over.
    """

    budget: int = 2048
    filter_layers: tuple[int, ...] | None = None
    selector: str = "last"
    observation_window: int = 16

    name = "omnikv"
    source = "OmniKV (ICLR 2025), sections 3 and 4"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in the filter layers, and check."""
        check_range(self.name, "budget", self.budget, 1)
        check_range(self.name, "observation_window", self.observation_window, 1)
        check_choice(self.name, "selector", self.selector, ("last", "uniform", "exp"))
        own = full_layers(config)
        if not own:
            return dataclasses.replace(self, filter_layers=())  # no layer is this policy's
        ranks = PAPERS_FILTERS.get(len(own), tuple(rank * len(own) // 32 for rank in PAPERS_FILTERS[32]))
        usual = sorted({own[rank] for rank in ranks})
        layers = usual if self.filter_layers is None else self.filter_layers
        numbers = isinstance(layers, list | tuple) and all(type(one) is int for one in layers)
        layers = tuple(layers) if numbers else ()
        if not layers or list(layers) != sorted(set(layers)) or not set(layers) <= set(own):
            raise ConfigError(
                f"omnikv.filter_layers must be rising layers among {own}, at least one, got {self.filter_layers!r}"
            )
        return dataclasses.replace(self, filter_layers=layers)

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """Filter, sparse or dense; layers of the model's own window do not count."""
        assert self.filter_layers is not None
        own = full_layers(config)
        ranks, rank = [own.index(one) for one in self.filter_layers], own.index(layer)
        if rank in ranks:
            end = min((other for other in ranks if other > rank), default=len(own))
            return OmniKVFilter(self.budget, self.selector, self.observation_window, own[rank + 2 : end])
        if rank < ranks[0] or rank - 1 in ranks:
            return Full()
        return OmniKVSparse(self.budget)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """As many filter layers as fit, with sparse layers offloaded; the first one moves to the front if need be."""
        cls, full = type(self), full_layers(config)
        if not full:
            return [[cls()]]
        usual = cls().resolve(config, num_tokens).filter_layers
        assert usual is not None
        first = full[:1]
        plans = (usual, (*first, *usual[1:]), (*first, usual[len(usual) // 2]), first)
        return [[dataclasses.replace(cls(), filter_layers=tuple(sorted(set(layers))))] for layers in plans]


@dataclasses.dataclass(frozen=True)
class OmniKVFilter(Full, PlansAhead):
    """A layer that attends to everything and chooses for those behind it.

    Attributes:
        budget, selector, observation_window: as OmniKV's.
        serves: sparse layers, up to the next filter.
    """

    budget: int = 2048
    selector: str = "last"
    observation_window: int = 16
    serves: tuple[int, ...] = ()

    @property
    def reads(self) -> HookInputs:
        """The prompt's last queries, where they count on; single steps, for each query chooses for itself."""
        return HookInputs(last_queries=self.summed_queries)

    @property
    def summed_queries(self) -> int:
        """Queries whose attention is summed over; 0: the current one chooses alone."""
        return 0 if self.selector == "last" else self.observation_window

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """An empty cache, no query yet."""
        live = super().init(spec, fitted).live
        window = (spec.batch, self.summed_queries, spec.q_heads, spec.head_dim)
        queries = jnp.zeros(window, spec.dtype) if self.summed_queries else None
        return LayerState(FilterFrozen(jnp.zeros(spec.batch, jnp.int32)), FilterLive(live.cache, queries))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep everything, and the last queries."""
        cache, queries = super().compress(spec, state, prompt, fitted)[0].live.cache, None
        if self.summed_queries:
            assert prompt.q_tail is not None
            slots = (
                prompt.lengths[:, None] - self.summed_queries + jnp.arange(self.summed_queries)
            ) % self.summed_queries
            queries = jnp.zeros_like(prompt.q_tail).at[jnp.arange(spec.batch)[:, None], slots].set(prompt.q_tail)
        return state.replace(frozen=FilterFrozen(prompt.lengths), live=FilterLive(cache, queries)), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the token's key and value, and its query over the oldest."""
        cache, queries = super().append(spec, state, step)[0].live.cache, state.live.queries
        if queries is not None:
            here = (jnp.arange(self.summed_queries) == step.positions % self.summed_queries) & step.valid
            queries = jnp.where(here[..., None, None], step.q_post.astype(queries.dtype), queries)
        return state.replace(live=FilterLive(cache, queries)), None

    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        """One set for all heads of all layers that it serves."""
        if not self.serves:
            return ()
        scores = self.prompt_scores(spec, state, step)
        candidate = jnp.arange(spec.capacity) < state.frozen.lengths[:, None]
        ids = top_k(jnp.where(candidate, scores, -jnp.inf), min(self.budget, spec.capacity))
        good = jnp.take_along_axis(candidate, ids, axis=1) & step.valid[:, :1]
        return tuple(Selection(ids[:, None], good[:, None], layer=layer) for layer in self.serves)

    def prompt_scores(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """How much each prompt token was attended to, the largest of all heads, float32 [B, capacity] (equation 4)."""
        position, weight = step.positions, jnp.ones((1, 1))
        queries = step.q_post
        if state.live.queries is not None:
            queries, w = state.live.queries, self.summed_queries
            position = step.positions - (step.positions - jnp.arange(w)) % w  # of the query in each slot [B, w]
            age = step.positions - position
            weight = jnp.where(position >= 0, 0.5**age if self.selector == "exp" else 1.0, 0.0)
        tokens = jnp.arange(spec.capacity)
        seen = (tokens < state.frozen.lengths[:, None, None]) & (tokens <= position[..., None])
        queries = group_queries(queries, spec.kv_heads)
        logits = jnp.einsum("bhgtd,bhnd->bhgtn", queries, state.live.cache.k, preferred_element_type=jnp.float32)
        logits *= spec.scale
        probs = jax.nn.softmax(jnp.where(seen[:, None, None], logits, MASKED), axis=-1)
        return (probs.max(axis=(1, 2)) * weight[..., None]).sum(axis=1)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Scores for the output, and of each query that chooses."""
        return (
            super().step_temporaries(spec)
            + 3 * 4 * spec.batch * max(1, self.summed_queries) * spec.q_heads * spec.capacity
        )


@dataclasses.dataclass(frozen=True)
class OmniKVSparse(LayerCache, Costs):
    """A layer that attends to what was chosen for it, and to everything after the prompt.

    Attributes:
        budget: prompt tokens that are chosen.
    """

    budget: int = 2048

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Room for everything after the shortest prompt."""
        return max(capacity - shortest, 1)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """The prompt, token by token."""
        return HostLayout(spec.kv_heads, spec.capacity, 1, planes=2)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """An empty window."""
        zeros = jnp.zeros((spec.batch, spec.kv_heads, spec.window, spec.head_dim), spec.dtype)
        return LayerState(FilterFrozen(jnp.zeros(spec.batch, jnp.int32)), SparseLive(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """All of the prompt to the host tier."""
        planes = [to_chunks(x, spec.capacity, 1) for x in (prompt.k_post, prompt.v)]
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, spec.capacity, -1)
        return state.replace(frozen=FilterFrozen(prompt.lengths)), HostWrite(data)

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Write the new token behind the prompt."""
        slots, window = step.positions - state.frozen.lengths[:, None], state.live.window
        k = write_rows(window.k, step.k_post, slots, step.valid)
        v = write_rows(window.v, step.v, slots, step.valid)
        return state.replace(live=SparseLive(KeyValues(k, v))), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Exact attention over what came, and over the window."""
        assert fetched is not None
        assert fetched.k is not None
        window = state.live.window
        seen = jnp.arange(spec.window) <= (step.positions - state.frozen.lengths[:, None])[..., None]
        chosen = Piece(fetched.k, fetched.v, fetched.valid[:, :, None])
        return attend(step.q_post, [chosen, Piece(window.k, window.v, seen[:, None])], spec.scale), state

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Capacity and window both end."""
        return jnp.minimum(spec.capacity - lengths, spec.window - (lengths - state.frozen.lengths))

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """What was chosen of the prompt, and all after it."""
        chosen = jnp.minimum(state.frozen.lengths, min(self.budget, spec.capacity))
        parts = {"selected": chosen, "window": lengths - state.frozen.lengths}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """The window is read, the chosen rows move."""
        parts = {name: (device, 0) for name, (device, _) in layer_nbytes(state).items() if not name.startswith("host")}
        numbers = 2 * spec.batch * spec.kv_heads * min(self.budget, spec.capacity) * spec.head_dim
        size = numbers * jnp.dtype(spec.dtype).itemsize
        return parts | {"selected": (size, 0 if spec.fetch == "resident" else size)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """The rows that came, twice, in float32 for their products too, and their scores."""
        rows = min(self.budget, spec.capacity) + spec.window
        wide = spec.kv_heads * spec.head_dim * (4 * jnp.dtype(spec.dtype).itemsize + 2 * 4)
        return spec.batch * rows * (wide + 3 * 4 * spec.q_heads)
