"""Loki scores tokens by the principal components of their keys (Singhania et al. 2024, arXiv 2406.02542, section 4).

Keys are stored in the basis of their principal components, and their leading columns are used for scoring. If keys and
values are offloaded, only the leading columns are on the device. The basis is computed from the prompt
(`calibration="online"`, which the ShadowKV authors found more accurate) or learned from a text (`fit`). It is the basis
of keys after RoPE. The mean of the keys is subtracted to compute the basis. It is not subtracted to score, because it
changes all scores of a query by the same amount.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.prompt_walk import directions
from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.models.config import ModelConfig
from jshadow.policies.capabilities import LearnsBasis, Sized
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.registry import register
from jshadow.policies.retrieval import RetrievalPolicy
from jshadow.policies.sizing import Falling

_SHARE = 4  # 1 / SHARE of the tokens and of the columns are used by default: the paper's k_f = d_f = 0.25


class Components(struct.PyTreeNode):
    """The basis in which keys are stored.

    Attributes:
        turn: the basis as orthonormal columns, by falling variance, float32 [B, h_kv, d, d].
        known: whether the prompt's keys vary along a column at all, bool [B, h_kv, d]. The last columns of a short
            prompt are arbitrary, and they are not used to score.
    """

    turn: Array
    known: Array


@register(small={"budget": 9, "columns": 3, "recent": 4}, lossless=lambda tokens, config: {"budget": tokens})
@dataclasses.dataclass(frozen=True)
class Loki(RetrievalPolicy, LearnsBasis, Sized):
    """Fetch the tokens with the highest scores, computed in the leading columns of a basis.

    Attributes:
        budget: number of tokens fetched for a query. None: a quarter of the capacity.
        columns: number of leading columns that are used to score. None: a quarter of the head width.
        recent: number of newest tokens that are always attended to. The paper has only the current token.
        calibration: "online": the basis is computed from each prompt. "offline": it is learned from a text.
        unit: tokens in a unit; it must be 1.
        top_p: fetch only the best tokens of the budget that together have this share of the softmax over their scores.
            1: all tokens of the budget.
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
        budget = max(1, capacity // _SHARE) if self.budget is None else self.budget
        columns = max(1, config.head_dim // _SHARE) if self.columns is None else self.columns
        resolved = dataclasses.replace(self, budget=budget, columns=columns)
        check_range(self.name, "columns", columns, 1, config.head_dim)
        check_range(self.name, "unit", self.unit, 1, 1)
        check_choice(self.name, "calibration", self.calibration, ("online", "offline"))
        return super(Loki, resolved).resolve(config, capacity)

    def no_basis(self, spec: CacheSpec) -> Components:
        shape = (spec.batch, spec.kv_heads, spec.head_dim)
        return Components(jnp.zeros((*shape, spec.head_dim), jnp.float32), jnp.zeros(shape, bool))

    def learn(self, spec: CacheSpec, prompt: PromptKV, fitted: Any) -> Components:
        if self.calibration == "online":
            return Components(*self.basis_of(prompt))
        turn = self.fitted_basis(spec, fitted)
        return Components(turn, jnp.ones(turn.shape[:3], bool))

    def basis_of(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Return the principal components of each head's keys after RoPE, by falling variance."""
        keys = prompt.k_post.astype(jnp.float32)
        real = (jnp.arange(keys.shape[1]) < prompt.lengths[:, None])[..., None, None]
        mean = jnp.where(real, keys, 0).sum(axis=1, keepdims=True) / prompt.lengths[:, None, None, None]
        away = jnp.where(real, keys - mean, 0)
        spread = jnp.einsum("bshd,bshe->bhde", away, away, precision="highest")
        return directions(spread)

    def stored(self, keys: Array, basis: Any) -> Array:
        """Convert keys or queries to the basis. Products are the same in every orthonormal basis (section 4.2)."""
        batch, tokens, _, dim = keys.shape
        grouped = keys.astype(jnp.float32).reshape(batch, tokens, basis.turn.shape[1], -1, dim)
        turned = jnp.einsum("bshgd,bhde->bshge", grouped, basis.turn, precision="highest")
        return turned.reshape(keys.shape).astype(keys.dtype)

    def summarize(self, spec: CacheSpec, keys: Array, there: Array, basis: Any) -> Array:
        return keys[:, :, :, 0, : self.columns]

    def resident_summaries(self, rows: Array) -> Array:
        return rows[..., : self.columns]  # the leading columns of the keys are at the front of each row

    def score(self, spec: CacheSpec, summaries: Any, q: Array, basis: Any) -> Array:
        known = basis.known | (self.columns == spec.head_dim)  # with all columns, every basis gives the same products
        short = jnp.where(known[:, :, None, None], q, 0)[..., : self.columns].astype(spec.dtype)
        return jnp.einsum("bhgtr,bhnr->bhgtn", short, summaries, preferred_element_type=jnp.float32).max(axis=2)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        cls = type(self)
        return [Falling(lambda columns: cls(columns=columns), 1, config.head_dim)]
