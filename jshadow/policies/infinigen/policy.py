"""InfiniGen: tokens are chosen while the layer before computes (Lee et al. 2024, arXiv 2406.19707, section 4).

The input of two neighbouring layers differs little, so a layer's queries can be foreseen from the input of the one
before. Foreseen queries meet a few columns of the keys, in a basis that gathers the queries' variance in few columns
(skewing); tokens within `alpha` of the best score are fetched. Skewing cannot be folded into weights where keys are
rotated, so it is applied to queries and keys after RoPE. Columns are chosen by the paper's sum of queries' and keys'
magnitudes (its code has two other ways). The number of tokens follows from the scores, the same for all heads, up to a
fixed maximum: shapes are static. The first layers are dense.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.prompt_walk import directions, prompts_of
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

SHARE = 0.2  # of the tokens, and of the columns: the published scripts' settings


@register(
    small={"budget": 9, "columns": 4, "alpha": 0.5, "dense_layers": 1},
    lossless=lambda tokens, config: {"budget": tokens, "alpha": 1e9},
)
@dataclasses.dataclass(frozen=True)
class InfiniGen(RetrievalPolicy, Foresees, LearnsBasis, Sized):
    """Fetch what the foreseen query wants.

    Attributes:
        budget: tokens fetched at most. None: a fifth of the capacity.
        columns: of keys and queries that score. None: a fifth of the head.
        alpha: scores that much below the best one are not fetched.
        dense_layers: first layers that attend to everything; at least one, for the first cannot be foreseen.
        recent: newest tokens that are always attended.
        calibration: "online": the basis comes from each prompt's queries; "offline": from a text (`fit`).
        unit: tokens of a unit; only 1 is possible.
        top_p: share of the softmax over the budget that is enough, beside alpha.
    """

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
        """All queries of the prompt; single steps, for each query's count is read off its own step."""
        return HookInputs(all_queries=True)

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in a fifth each, and check."""
        budget = max(1, int(SHARE * capacity)) if self.budget is None else self.budget
        columns = max(1, round(SHARE * config.head_dim)) if self.columns is None else self.columns
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
        """The first layers see everything."""
        return Full() if layer < self.dense_layers else self

    def no_basis(self, spec: CacheSpec) -> Array:
        """Zeros [B, h_kv, d, columns]."""
        assert self.columns is not None
        return jnp.zeros((spec.batch, spec.kv_heads, spec.head_dim, self.columns), jnp.float32)

    def learn(self, spec: CacheSpec, prompt: PromptKV, fitted: Any) -> Array:
        """The chosen columns of the skewing basis, float32 [B, h_kv, d, columns]."""
        assert self.columns is not None
        assert prompt.q_post is not None
        if self.calibration == "online":
            skew, known = query_basis(prompt)
            skew = jnp.where(known[:, :, None], skew, 0)
        else:
            skew = self.fitted_basis(spec, fitted)
        real = (jnp.arange(prompt.k_post.shape[1]) < prompt.lengths[:, None])[:, None, :, None]
        queries = group_queries(prompt.q_post, spec.kv_heads).astype(jnp.float32)
        skewed_q = jnp.where(real[:, :, None], jnp.abs(jnp.einsum("bhgsd,bhde->bhgse", queries, skew)), 0)
        keys = prompt.k_post.astype(jnp.float32)
        skewed_k = jnp.where(real, jnp.abs(jnp.einsum("bshd,bhde->bhse", keys, skew)), 0)
        weight = skewed_q.sum(axis=(2, 3)) + skewed_k.sum(axis=2)
        # a stable choice: ties go to the lower column
        order = jnp.argsort(-weight, axis=-1, stable=True)[..., : self.columns]
        return jnp.take_along_axis(skew, order[:, :, None, :], axis=3)

    def fit(
        self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Array]:
        """The skewing bases of a text: {"skew": float32 [L, h_kv, d, d]}."""
        return {
            self.basis_name: jnp.stack([query_basis(prompt)[0][0] for prompt in prompts_of(params, tokens, progress)])
        }

    def summarise(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> Array:
        """Partial keys [B, h_kv, n, columns]."""
        return jnp.einsum("bhnud,bhdr->bhnr", keys.astype(jnp.float32), basis).astype(spec.dtype)

    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        """Foreseen scores, the largest of the group."""
        short = jnp.einsum("bhgtd,bhdr->bhgtr", q.astype(jnp.float32), basis).astype(spec.dtype)
        scores = jnp.einsum("bhgtr,bhnr->bhgtn", short, summaries, preferred_element_type=jnp.float32)
        return scores.max(axis=2) * spec.scale

    def score_scale(self, spec: CacheSpec) -> float:
        """Scores are logits."""
        return 1.0

    def query(self, step: StepKV) -> Array:
        """Those that the layer before predicted."""
        assert step.q_foreseen is not None
        return step.q_foreseen

    def enough(self, spec: CacheSpec, scores: Array, good: Array) -> Array:
        """As many as are within alpha of the best, mean over heads; each head its own best ones."""
        good = super().enough(spec, scores, good)
        near = (scores > scores[..., :1] - self.alpha) & good
        count = jnp.round(near.sum(axis=3).astype(jnp.float32).mean(axis=1))
        return good & (jnp.arange(scores.shape[3]) < count[:, None, :, None])

    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Recent tokens, and as many as were near enough."""
        first = self.first_recent(lengths - 1)
        chosen = (state.live.selected >= 0).sum(axis=2).astype(jnp.float32).mean(axis=1)
        return {"window": (lengths - first).astype(jnp.float32), "selected": chosen}

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Keys and values offloaded, by the columns that stay; with the usual dense layers if these fit, or one."""
        cls = type(self)
        dense = cls.dense_layers if len(full_layers(config)) > cls.dense_layers else 1

        def group(dense: int) -> Sequence[Self]:
            return Falling(lambda columns: cls(columns=columns, dense_layers=dense), 1, config.head_dim)

        return [group(layers) for layers in dict.fromkeys((dense, 1))]


def query_basis(prompt: PromptKV) -> tuple[Array, Array]:
    """Orthonormal directions of each KV head's queries after RoPE, the strongest first.

    Returns:
        Float32 [B, h_kv, d, d], and bool [B, h_kv, d]: the queries are spread along them at all. The directions of a
        short prompt that has nothing along them are arbitrary.
    """
    assert prompt.q_post is not None
    queries = group_queries(prompt.q_post, prompt.k_post.shape[2]).astype(jnp.float32)
    real = (jnp.arange(queries.shape[3]) < prompt.lengths[:, None])[:, None, None, :, None]
    queries = jnp.where(real, queries, 0)
    return directions(jnp.einsum("bhgsd,bhgse->bhde", queries, queries, precision="highest"))
