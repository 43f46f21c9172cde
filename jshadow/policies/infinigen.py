"""InfiniGen chooses a layer's tokens while the previous layer computes (Lee et al. 2024, arXiv 2406.19707, section 4).

The inputs of two neighboring layers are similar. Therefore a layer's queries can be predicted from the input of the
previous layer. Tokens are scored by the predicted queries in a few columns of a basis, and those whose score is within
`alpha` of the best one are fetched. The basis concentrates the variance of the queries in few columns (skewing).

In the paper, skewing is folded into the weights. With RoPE that is not possible, so it is applied to queries and keys
after RoPE. Columns are chosen by the sum of the queries' and the keys' magnitudes, as in the paper; its code has two
other rules. The number of fetched tokens follows from the scores and is the same for all heads. It has a fixed maximum,
because shapes are static. The first layers have full attention.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.prompt_walk import directions
from jshadow.cache.records import LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import group_queries
from jshadow.policies.base import HookInputs, LayerCache, full_layers
from jshadow.policies.capabilities import Foresees, LearnsBasis, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.full import Full
from jshadow.policies.registry import register
from jshadow.policies.retrieval import RetrievalPolicy
from jshadow.policies.sizing import Falling

_SHARE = 0.2  # default share of the tokens and of the columns, as in the published scripts


@register(
    small={"budget": 9, "columns": 4, "alpha": 0.5, "dense_layers": 1},
    lossless=lambda tokens, config: {"budget": tokens, "alpha": 1e9},
)
@dataclasses.dataclass(frozen=True)
class InfiniGen(RetrievalPolicy, Foresees, LearnsBasis, Sized):
    """Fetch the tokens with the highest scores for the predicted query.

    Attributes:
        budget: maximum number of tokens that are fetched for a query. None: a fifth of the capacity.
        columns: number of columns of the basis that are used to score. None: a fifth of the head width.
        alpha: a token is near if its score (an attention logit) is less than this much below the best one. The number
            of tokens fetched is the number of near tokens, as a mean over heads.
        dense_layers: number of first layers with full attention. At least 1, because the first layer's queries cannot
            be predicted.
        recent: number of newest tokens that are always attended to.
        calibration: "online": the basis is computed from each prompt's queries. "offline": it is learned from a text.
        unit: tokens in a unit; it must be 1.
        top_p: in addition to alpha, fetch only the best tokens of the budget that together have this share of the
            softmax over their scores. 1: no limit.
    """

    splits_heads = False

    budget: int | None = None  # type: ignore[assignment]
    columns: int | None = None
    alpha: float = 5.0
    dense_layers: int = 2
    recent: int = 1
    calibration: str = "online"
    unit: int = 1
    top_p: float = 1.0

    name = "infinigen"
    basis_name = "skew"
    source = "arXiv 2406.19707, section 4"

    @property
    def reads(self) -> HookInputs:
        """The hooks need all queries of the prompt.

        A step processes one new token at a time, because it records the fetched tokens of only one query.
        """
        return HookInputs(all_queries=True)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        budget = max(1, int(_SHARE * capacity)) if self.budget is None else self.budget
        columns = max(1, round(_SHARE * config.head_dim)) if self.columns is None else self.columns
        resolved = dataclasses.replace(self, budget=budget, columns=columns)
        check_range(self.name, "columns", columns, 1, config.head_dim)
        check_range(self.name, "dense_layers", self.dense_layers, 1)
        check_range(self.name, "unit", self.unit, 1, 1)
        check_choice(self.name, "calibration", self.calibration, ("online", "offline"))
        check_range(self.name, "recent", self.recent, 1)
        number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not number or not self.alpha > 0:
            raise ConfigError(f"infinigen.alpha must be above 0, got {self.alpha!r}")
        return super(InfiniGen, resolved).resolve(config, capacity)

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        return Full() if layer < self.dense_layers else self

    def no_basis(self, spec: CacheSpec) -> Array:
        assert self.columns is not None
        return jnp.zeros((spec.batch, spec.kv_heads, spec.head_dim, self.columns), jnp.float32)

    def learn(self, spec: CacheSpec, prompt: PromptKV, fitted: Any) -> Array:
        assert self.columns is not None
        assert prompt.q_post is not None
        if self.calibration == "online":
            skew, known = self.basis_of(prompt)
            skew = jnp.where(known[:, :, None], skew, 0)
        else:
            skew = self.fitted_basis(spec, fitted)
        real = (jnp.arange(prompt.k_post.shape[1]) < prompt.lengths[:, None])[:, None, :, None]
        queries = group_queries(prompt.q_post, spec.kv_heads).astype(jnp.float32)
        skewed_q = jnp.where(real[:, :, None], jnp.abs(jnp.einsum("bhgsd,bhde->bhgse", queries, skew)), 0)
        keys = prompt.k_post.astype(jnp.float32)
        skewed_k = jnp.where(real, jnp.abs(jnp.einsum("bshd,bhde->bhse", keys, skew)), 0)
        weight = skewed_q.sum(axis=(2, 3)) + skewed_k.sum(axis=2)
        # a stable sort, so that of equal columns the lower one is chosen
        order = jnp.argsort(-weight, axis=-1, stable=True)[..., : self.columns]
        return jnp.take_along_axis(skew, order[:, :, None, :], axis=3)

    def basis_of(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Return the principal directions of each KV head's queries after RoPE, the strongest first."""
        assert prompt.q_post is not None
        queries = group_queries(prompt.q_post, prompt.k_post.shape[2]).astype(jnp.float32)
        real = (jnp.arange(queries.shape[3]) < prompt.lengths[:, None])[:, None, None, :, None]
        queries = jnp.where(real, queries, 0)
        return directions(jnp.einsum("bhgsd,bhgse->bhde", queries, queries, precision="highest"))

    def summarize(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> Array:
        return jnp.einsum("bhnud,bhdr->bhnr", keys.astype(jnp.float32), basis).astype(spec.dtype)

    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        short = jnp.einsum("bhgtd,bhdr->bhgtr", q.astype(jnp.float32), basis).astype(spec.dtype)
        scores = jnp.einsum("bhgtr,bhnr->bhgtn", short, summaries, preferred_element_type=jnp.float32)
        return scores.max(axis=2) * spec.scale

    def score_scale(self, spec: CacheSpec) -> float:
        """Return 1, because `score` already returns attention logits."""
        return 1.0

    def query(self, step: StepKV) -> Array:
        assert step.q_foreseen is not None
        return step.q_foreseen

    def enough(self, spec: CacheSpec, scores: Array, good: Array) -> Array:
        """Return which of the best units are fetched.

        A unit is near if its score is less than alpha below the best one. All heads fetch the same number of units: the
        mean over heads of the number of near units.
        """
        good = super().enough(spec, scores, good)
        near = (scores > scores[..., :1] - self.alpha) & good
        count = jnp.round(near.sum(axis=3).astype(jnp.float32).mean(axis=1))
        return good & (jnp.arange(scores.shape[3]) < count[:, None, :, None])

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        first = self.first_recent(lengths - 1)
        chosen = (state.live.selected >= 0).sum(axis=2).astype(jnp.float32).mean(axis=1)
        return {"window": (lengths - first).astype(jnp.float32), "selected": chosen}

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Return policies with every number of columns, from all to 1.

        The first group has the usual number of dense layers. The second group has one dense layer.
        """
        cls = type(self)
        dense = cls.dense_layers if len(full_layers(config)) > cls.dense_layers else 1

        def group(dense: int) -> Sequence[Self]:
            return Falling(lambda columns: cls(columns=columns, dense_layers=dense), 1, config.head_dim)

        return [group(layers) for layers in dict.fromkeys((dense, 1))]
