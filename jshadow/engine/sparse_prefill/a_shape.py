"""A-shape attention to the first and the nearest tokens (MInference)."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.base import SparsePrefill
from jshadow.engine.sparse_prefill.lines import HeadSizes, Lines, make_lines
from jshadow.models.config import ModelConfig, check_positive


@dataclasses.dataclass(frozen=True)
class AShape(SparsePrefill):
    """Attention to the first and the nearest tokens (the A-shape of MInference, arXiv 2407.02490, section 3.2).

    Attributes:
        initial: number of tokens at the start of the prompt that every query sees.
        local: number of nearest tokens that a query sees, including its own.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "a_shape"

    initial: int = 1024
    local: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, initial=self.initial, local=self.local)

    @property
    def most_columns(self) -> int:
        """Number of first columns."""
        return self.initial

    def covers(self, tokens: int) -> bool:
        """Whether all tokens are among the first tokens, or among the nearest tokens."""
        return max(self.initial, self.local) >= tokens

    def sizes(self, heads: int) -> HeadSizes:
        """Return the same sizes for all heads."""
        return HeadSizes.equal(heads, self.initial, self.local, by_position=True)

    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> Lines:
        """Return the same lines for every row. Padding comes after a row's queries, so the causal mask hides it."""
        batch, tokens = prompt.k_post.shape[:2]
        shape = (batch, config.q_heads, tokens)
        columns = jnp.broadcast_to(jnp.arange(min(self.initial, tokens), dtype=jnp.int32), (*shape[:2], self.initial))
        index = jnp.broadcast_to(jnp.arange(tokens), shape)
        return make_lines(columns, index < self.initial, index < self.local, self.block)
