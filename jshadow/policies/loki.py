"""Loki: tokens by the leading principal components of their keys (Singhania et al. 2024, arXiv 2406.02542, section 4).

Keys are kept rotated into the basis, so that their leading columns serve for scoring. Where keys and values are
offloaded, the leading columns are all that stays on the device. A basis comes from the prompt itself
(`calibration="online"`, which the ShadowKV authors found more accurate) or from a text (`fit`). The basis is that of
keys after RoPE; their mean is subtracted to find it and not to score, for it moves all scores of a query alike.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.prompt_walk import directions, prompts_of
from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.policies.capabilities import LearnsBasis, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.registry import register
from jshadow.policies.retrieval import RetrievalPolicy
from jshadow.policies.sizing import Falling

SHARE = 4  # of the tokens and of the columns, one in so many: the paper's k_f = d_f = 0.25


class Components(struct.PyTreeNode):
    """What keys are kept in.

    Attributes:
        turn: orthonormal columns, float32 [B, h_kv, d, d].
        known: the prompt's keys are spread along them, bool [B, h_kv, d]; a short prompt leaves the last ones
            arbitrary, and those do not score.
    """

    turn: Array
    known: Array


@register(small={"budget": 9, "columns": 3, "recent": 4}, lossless=lambda tokens, config: {"budget": tokens})
@dataclasses.dataclass(frozen=True)
class Loki(RetrievalPolicy, LearnsBasis, Sized):
    """Fetch the tokens whose keys agree most with a query in a few columns of a basis.

    Attributes:
        budget: tokens fetched for a query. None: a quarter of the capacity.
        columns: leading columns of the basis that score. None: a quarter of the head.
        recent: newest tokens that are always attended (the paper has none but the token itself).
        calibration: "online": a basis of each prompt; "offline": the `fitted` one.
        unit: tokens of a unit; only 1 is possible.
        top_p: share of the softmax over the budget that is enough.
    """

    budget: int | None = None  # type: ignore[assignment]
    columns: int | None = None
    recent: int = 1
    calibration: str = "online"
    unit: int = 1
    top_p: float = 1.0

    name = "loki"
    basis_name = "components"
    source = "arXiv 2406.02542, section 4"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Fill in a quarter each, and check."""
        budget = max(1, capacity // SHARE) if self.budget is None else self.budget
        columns = max(1, config.head_dim // SHARE) if self.columns is None else self.columns
        resolved = dataclasses.replace(self, budget=budget, columns=columns)
        check_range(self.name, "columns", columns, 1, config.head_dim)
        check_range(self.name, "unit", self.unit, 1, 1)
        check_choice(self.name, "calibration", self.calibration, ("online", "offline"))
        return super(Loki, resolved).resolve(config, capacity)

    def no_basis(self, spec: CacheSpec) -> Components:
        """Zeros."""
        shape = (spec.batch, spec.kv_heads, spec.head_dim)
        return Components(jnp.zeros((*shape, spec.head_dim), jnp.float32), jnp.zeros(shape, bool))

    def learn(self, spec: CacheSpec, prompt: PromptKV, fitted: Any) -> Components:
        """The principal components of each head's keys."""
        if self.calibration == "online":
            return principal(prompt)
        turn = self.fitted_basis(spec, fitted)
        return Components(turn, jnp.ones(turn.shape[:3], bool))

    def fit(
        self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Array]:
        """The components of a text's keys: {"components": float32 [L, h_kv, d, d]}."""
        return {
            self.basis_name: jnp.stack([principal(prompt).turn[0] for prompt in prompts_of(params, tokens, progress)])
        }

    def stored(self, keys: Array, basis: Any) -> Array:
        """In the components: products of queries and keys are the same in any orthogonal basis (section 4.2)."""
        batch, tokens, _, dim = keys.shape
        grouped = keys.astype(jnp.float32).reshape(batch, tokens, basis.turn.shape[1], -1, dim)
        turned = jnp.einsum("bshgd,bhde->bshge", grouped, basis.turn, precision="highest")
        return turned.reshape(keys.shape).astype(keys.dtype)

    def summarise(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> Array:
        """Leading columns [B, h_kv, n, r]."""
        return keys[:, :, :, 0, : self.columns]

    def kept_summaries(self, spec: CacheSpec) -> bool:
        """On the device the leading columns are those of the keys themselves."""
        return spec.fetch != "resident"

    def resident_summaries(self, spec: CacheSpec, rows: Array) -> Array:
        """The front of each row."""
        return rows[..., : self.columns]

    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        """Products of the leading columns, the largest of the group."""
        known = basis.known | (self.columns == spec.head_dim)  # with all of them any basis gives the same products
        short = jnp.where(known[:, :, None, None], q, 0)[..., : self.columns].astype(spec.dtype)
        return jnp.einsum("bhgtr,bhnr->bhgtn", short, summaries, preferred_element_type=jnp.float32).max(axis=2)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Keys and values offloaded, by the columns that stay."""
        cls = type(self)
        return [Falling(lambda columns: cls(columns=columns), 1, config.head_dim)]


def principal(prompt: PromptKV) -> Components:
    """Orthonormal components of each head's keys after RoPE, the greatest variance first."""
    keys = prompt.k_post.astype(jnp.float32)
    real = (jnp.arange(keys.shape[1]) < prompt.lengths[:, None])[..., None, None]
    mean = jnp.where(real, keys, 0).sum(axis=1, keepdims=True) / prompt.lengths[:, None, None, None]
    away = jnp.where(real, keys - mean, 0)
    spread = jnp.einsum("bshd,bshe->bhde", away, away, precision="highest")
    return Components(*directions(spread))
