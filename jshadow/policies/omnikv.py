"""OmniKV: a few filter layers choose tokens for the layers after them (Hao et al. 2025, ICLR, sections 3 and 4).

The important tokens are nearly the same in neighboring layers. A filter layer attends to all tokens, and chooses the
prompt tokens that its heads attend to most, one set for all heads. The layers after it, up to the next filter, are
sparse: they attend to these tokens and to all generated tokens. Their prompt keys and values are in the host tier. They
are fetched as soon as the set is known, two layers before the first layer that needs them.

The paper scores tokens by a softmax (equation 4), and its code by default uses raw products. Here the score is the
softmax, in which an attention sink of the model has its part. Each query of the observation window keeps its own
position.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jshadow.cache.prompt_walk import check_text, prompts_of
from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.errors import ConfigError, PromptError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import MASKED, Piece, attend, group_queries, softmax_with
from jshadow.ops.layout import to_chunks, top_k
from jshadow.policies.base import Bytes, HookInputs, LayerCache, fetched_bytes, full_layers
from jshadow.policies.capabilities import CouplesLayers, PlansAhead, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.eviction import KeepsLaterTokens, LaterTokens, PromptLengths
from jshadow.policies.full import Full
from jshadow.policies.registry import register


class FilterLive(struct.PyTreeNode):
    """The live part of a filter layer.

    Attributes:
        cache: keys after RoPE and values of all tokens [B, h_kv, capacity, d].
        queries: the last w queries after RoPE [B, w, h_q, d], or None with selector="last". The query at position p is
            in slot p % w.
    """

    cache: KeyValues
    queries: Array | None


# The paper's filter layers by number of layers (Llama-3-8B-262K, Yi-9B, Llama-3.1-70B; appendix). For other numbers of
# layers, those for 32 layers are scaled.
_PAPERS_FILTERS = {32: (2, 8, 18), 48: (6, 11, 30), 80: (4, 19, 41)}


@register(
    small={"budget": 9, "filter_layers": (0,)},
    lossless=lambda tokens, config: {"budget": tokens, "filter_layers": (0,)},
)
@dataclasses.dataclass(frozen=True)
class OmniKV(CouplesLayers, Sized):
    """Full attention before the first filter, in each filter and in the layer after it; sparse in all other layers.

    Attributes:
        budget: number of prompt tokens that a sparse layer attends to.
        filter_layers: the filter layers, rising. None: the paper's for 32, 48 and 80 layers, scaled for other models.
        selector: the score by which a filter chooses tokens. "last": the attention of the current query. "uniform": the
            sum over the last queries. "exp": a sum in which each query has half the weight of the next newer one.
        observation_window: number of queries that "uniform" and "exp" sum over.
    """

    budget: int = 2048
    filter_layers: tuple[int, ...] | None = None
    selector: str = "last"
    observation_window: int = 16

    name = "omnikv"
    source = "OmniKV (ICLR 2025), sections 3 and 4"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "budget", self.budget, 1)
        check_range(self.name, "observation_window", self.observation_window, 1)
        check_choice(self.name, "selector", self.selector, ("last", "uniform", "exp"))
        full = full_layers(config)
        if not full:
            return dataclasses.replace(self, filter_layers=())  # all layers keep the model's own window
        ranks = _PAPERS_FILTERS.get(len(full), tuple(rank * len(full) // 32 for rank in _PAPERS_FILTERS[32]))
        usual = sorted({full[rank] for rank in ranks})
        layers = usual if self.filter_layers is None else self.filter_layers
        numbers = isinstance(layers, list | tuple) and all(type(one) is int for one in layers)
        layers = tuple(layers) if numbers else ()
        if not layers or list(layers) != sorted(set(layers)) or not set(layers) <= set(full):
            raise ConfigError(
                f"omnikv.filter_layers must be rising layers among {full}, at least one, got {self.filter_layers!r}"
            )
        return dataclasses.replace(self, filter_layers=layers)

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """Return a filter, a sparse layer, or full attention. Layers with the model's own window are not counted."""
        assert self.filter_layers is not None
        full = full_layers(config)
        ranks, rank = [full.index(one) for one in self.filter_layers], full.index(layer)
        if rank in ranks:
            end = min((other for other in ranks if other > rank), default=len(full))
            return OmniKVFilter(self.budget, self.selector, self.observation_window, full[rank + 2 : end])
        if rank < ranks[0] or rank - 1 in ranks:
            return Full()
        return OmniKVSparse(self.budget)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return policies with fewer and fewer filters. All but the first have a filter in the first layer."""
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
    """A layer that attends to all tokens and chooses tokens for the sparse layers after it.

    Attributes:
        budget: as in OmniKV.
        selector: as in OmniKV.
        observation_window: as in OmniKV.
        serves: the sparse layers after it, up to the next filter.
    """

    budget: int = 2048
    selector: str = "last"
    observation_window: int = 16
    serves: tuple[int, ...] = ()

    @property
    def reads(self) -> HookInputs:
        """A selector that sums needs the last queries. A step processes one new token, as each query chooses."""
        return HookInputs(last_queries=self.summed_queries)

    @property
    def summed_queries(self) -> int:
        """Number of queries w whose attention is summed; 0 if only the current query chooses."""
        return 0 if self.selector == "last" else self.observation_window

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        live = super().init(spec, fitted).live
        window = (spec.batch, self.summed_queries, spec.q_heads, spec.head_dim)
        queries = jnp.zeros(window, spec.dtype) if self.summed_queries else None
        return LayerState(PromptLengths(jnp.zeros(spec.batch, jnp.int32)), FilterLive(live.cache, queries))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        cache, queries = super().compress(spec, state, prompt, fitted)[0].live.cache, None
        if self.summed_queries:
            assert prompt.q_tail is not None
            slots = (
                prompt.lengths[:, None] - self.summed_queries + jnp.arange(self.summed_queries)
            ) % self.summed_queries
            queries = jnp.zeros_like(prompt.q_tail).at[jnp.arange(spec.batch)[:, None], slots].set(prompt.q_tail)
        return state.replace(frozen=PromptLengths(prompt.lengths), live=FilterLive(cache, queries)), None

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        cache, queries = super().append(spec, state, step)[0].live.cache, state.live.queries
        if queries is not None:
            here = (jnp.arange(self.summed_queries) == step.positions % self.summed_queries) & step.valid
            queries = jnp.where(here[..., None, None], step.q_post.astype(queries.dtype), queries)
        return state.replace(live=FilterLive(cache, queries)), None

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        lengths: Array = state.frozen.lengths
        return None if self.summed_queries else lengths

    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        if not self.serves:
            return ()
        scores = self.prompt_scores(spec, state, step)
        candidate = jnp.arange(spec.capacity) < state.frozen.lengths[:, None]
        ids = top_k(jnp.where(candidate, scores, -jnp.inf), min(self.budget, spec.capacity))
        good = jnp.take_along_axis(candidate, ids, axis=1) & step.valid[:, :1]
        return tuple(Selection(ids[:, None], good[:, None], layer=layer) for layer in self.serves)

    def prompt_scores(self, spec: CacheSpec, state: LayerState, step: StepKV) -> Array:
        """Return the attention that each prompt token gets, the largest of all heads, float32 [B, capacity] (eq. 4)."""
        position, weight = step.positions, jnp.ones((1, 1))
        queries = step.q_post
        if state.live.queries is not None:
            queries, w = state.live.queries, self.summed_queries
            position = step.positions - (step.positions - jnp.arange(w)) % w  # of the query in each slot, int32 [B, w]
            age = step.positions - position
            weight = jnp.where(position >= 0, 0.5**age if self.selector == "exp" else 1.0, 0.0)
        tokens = jnp.arange(spec.capacity)
        seen = (tokens < state.frozen.lengths[:, None, None]) & (tokens <= position[..., None])
        queries = group_queries(queries, spec.kv_heads)
        logits = jnp.einsum("bhgtd,bhnd->bhgtn", queries, state.live.cache.k, preferred_element_type=jnp.float32)
        logits *= spec.scale
        probs = softmax_with(jnp.where(seen[:, None, None], logits, MASKED), step.sinks)
        return (probs.max(axis=(1, 2)) * weight[..., None]).sum(axis=1)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the scores for the output, and the scores of each query that chooses."""
        return (
            super().step_temporaries(spec)
            + 3 * 4 * spec.batch * max(1, self.summed_queries) * spec.q_heads * spec.capacity
        )


@dataclasses.dataclass(frozen=True)
class OmniKVSparse(KeepsLaterTokens):
    """A layer that attends to the prompt tokens that its filter chose, and to all tokens after the prompt.

    Attributes:
        budget: number of prompt tokens that are chosen.
    """

    name = "omnikv"
    splits_heads = False
    takes_sinks = True

    budget: int = 2048

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        return HostLayout(spec.kv_heads, spec.capacity, 1, planes=2)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        zeros = jnp.zeros((spec.batch, spec.kv_heads, spec.window, spec.head_dim), spec.dtype)
        return LayerState(PromptLengths(jnp.zeros(spec.batch, jnp.int32)), LaterTokens(KeyValues(zeros, zeros)))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        planes = [to_chunks(x, spec.capacity, 1) for x in (prompt.k_post, prompt.v)]
        data = jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, spec.capacity, -1)
        return state.replace(frozen=PromptLengths(prompt.lengths)), HostWrite(data)

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        window, q_post = state.live.window.append(step, step.positions, spec.rope, state.frozen.lengths)
        return state.replace(live=LaterTokens(window), q_post=q_post), None

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        assert fetched is not None
        assert fetched.k is not None
        window = state.live.window
        seen = jnp.arange(spec.window) <= (step.positions - state.frozen.lengths[:, None])[..., None]
        chosen = Piece(fetched.k, fetched.v, fetched.valid[:, :, None])
        return attend(step.q_post, [chosen, Piece(window.k, window.v, seen[:, None])], spec.scale, step.sinks), state

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        chosen = jnp.minimum(state.frozen.lengths, min(self.budget, spec.capacity))
        parts = {"selected": chosen, "window": lengths - state.frozen.lengths}
        return {name: tokens.astype(jnp.float32) for name, tokens in parts.items()}

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        return fetched_bytes(spec, state, "selected", min(self.budget, spec.capacity))

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the fetched rows and the window twice, and once in float32; and their scores."""
        rows = min(self.budget, spec.capacity) + spec.window
        wide = spec.kv_heads * spec.head_dim * (4 * jnp.dtype(spec.dtype).itemsize + 2 * 4)
        return spec.batch * rows * (wide + 3 * 4 * spec.q_heads)


_QUERIES = 64  # number of evenly spaced queries that are measured in each row of a text


class FilterMasses(NamedTuple):
    """The result of the measurement.

    Attributes:
        layers: the n layers that attend to all tokens, in order.
        masses: float64 [n, n]. Entry [i, j] is the share of the attention of layers[j] that falls on the top tokens of
            layers[i]; NaN for j <= i.
        budget: number of top tokens.
    """

    layers: tuple[int, ...]
    masses: np.ndarray
    budget: int

    @property
    def scores(self) -> np.ndarray:
        """The mean of each layer's masses over all later layers, float64 [n]. It is NaN for the last layer."""
        count = np.arange(len(self.layers))[::-1]
        return np.nansum(self.masses, axis=1) / np.where(count > 0, count, np.nan)


def filter_masses(
    params: Any,
    tokens: Any,
    *,
    budget: int,
    queries: int = _QUERIES,
    progress: Callable[[int, int], None] | None = None,
) -> FilterMasses:
    """Measure how well each layer chooses tokens for the layers after it (section 3 and appendix).

    A layer is a good filter if later layers attend to the tokens that its own attention ranks highest. A layer scores a
    token by the largest attention that any head gives it, as OmniKV's filters do. It chooses among all tokens up to the
    query's own. Layers with the model's own window are left out. Most heads attend strongly to the first token (a
    sink),
    and nearly every layer ranks it high. So all shares are large and differ little. Only their order matters.

    Args:
        tokens: int32 [S] or [B, S], without padding.
        budget: number of tokens that a layer chooses. It must be less than S.
        queries: maximum number of queries that are measured in each row. They are evenly spaced among those that can
            attend to more tokens than the budget.
        progress: called with (layers done, number of layers).

    Raises:
        PromptError: tokens have a wrong shape, are out of range, or are not more than the budget.
        ConfigError: budget or queries is below 1.
    """
    check_range("filter_masses", "budget", budget, 1)
    check_range("filter_masses", "queries", queries, 1)
    text, config = check_text(params.config, tokens), params.config
    count = text.shape[1]
    if count <= budget:
        raise PromptError(f"tokens must be more than budget={budget}, got {count}: nothing would be left out")
    at = np.unique(np.linspace(budget, count - 1, min(queries, count - budget)).round().astype(np.int32))
    layers = full_layers(config)
    chosen: list[Array] = []
    masses = np.full((len(layers), len(layers)), np.nan)
    for layer, prompt in enumerate(prompts_of(params, text, progress)):
        if prompt is None or layer not in layers:
            continue
        best, given = layer_attention(
            prompt.q_post, prompt.k_post, jnp.asarray(at), prompt.sinks, scale=config.attention_scale, budget=budget
        )
        for rank, one in enumerate(chosen):
            masses[rank, len(chosen)] = float(jnp.take_along_axis(given, one, axis=2).sum(axis=2).mean())
        chosen.append(best)
    return FilterMasses(layers, masses, budget)


@functools.partial(jax.jit, static_argnames=("scale", "budget"))
def layer_attention(
    q: Array, k: Array, at: Array, sinks: Array | None = None, *, scale: float, budget: int
) -> tuple[Array, Array]:
    """Return the `budget` top tokens of the queries at positions `at`, int32 [B, n, budget], and their attention.

    The attention is a mean over heads, float32 [B, n, S]. q [B, S, h_q, d] and k [B, S, h_kv, d] are after RoPE.
    `sinks` has the sink of each query head, or is None.
    """

    def one(position: Array) -> tuple[Array, Array]:
        query = group_queries(jnp.take(q, position[None], axis=1), k.shape[2]).astype(jnp.float32)
        logits = jnp.einsum("bhgtd,bshd->bhgs", query, k.astype(jnp.float32)) * scale
        seen = jnp.arange(k.shape[1]) <= position
        probs = softmax_with(jnp.where(seen, logits, -jnp.inf), sinks)
        ranked = jnp.where(seen, probs.max(axis=(1, 2)), -1.0)
        return jax.lax.top_k(ranked, budget)[1], probs.mean(axis=(1, 2))

    best, given = jax.lax.map(one, at)
    return best.swapaxes(0, 1), given.swapaxes(0, 1)


def choose_filters(found: FilterMasses, count: int) -> tuple[int, ...]:
    """Choose filter layers: the best layer in each of `count` equal stretches of the model, in rising order.

    The stretches keep the filters apart and the first filter early, since all layers before it are dense. A filter must
    have a sparse layer to serve. Therefore the last two layers are not chosen, and there are at least two layers
    between two filters. A model that is too shallow for `count` filters gets fewer, at least one.

    Raises:
        ConfigError: count is below 1, or no layer attends to all tokens.
    """
    check_range("choose_filters", "count", count, 1)
    if not found.layers:
        raise ConfigError("filter layers must see all tokens, got a model whose layers all see a window only")
    usable = max(len(found.layers) - 2, 1)
    scores = np.nan_to_num(found.scores, nan=-1.0)
    ranks: list[int] = []
    for part in np.array_split(np.arange(usable), min(count, -(-usable // 3))):
        free = [int(rank) for rank in part if not ranks or rank >= ranks[-1] + 3]
        if free:
            ranks.append(max(free, key=lambda rank: (scores[rank], -rank)))
    return tuple(found.layers[rank] for rank in ranks)


def dense_share(filters: tuple[int, ...], config: ModelConfig) -> float:
    """Return the share of layers with full attention, among those that do not have the model's own window.

    These are the layers before the first filter, the filters, and the layer after each filter.
    """
    full = full_layers(config)
    ranks = [full.index(layer) for layer in filters]
    dense = set(range(ranks[0])) | set(ranks) | {rank + 1 for rank in ranks}
    return len([rank for rank in dense if rank < len(full)]) / len(full)
