"""Vertical-slash attention, whose columns and diagonals are chosen by the last queries (MInference)."""

import dataclasses

from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.base import SparsePrefill
from jshadow.engine.sparse_prefill.estimate import line_sums
from jshadow.engine.sparse_prefill.lines import HeadSizes, Lines, choose, make_lines
from jshadow.engine.sparse_prefill.patterns import Pattern, load_pattern
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, check_positive
from jshadow.policies.prefill_attention import PrefillAttention


@dataclasses.dataclass(frozen=True)
class VerticalSlash(SparsePrefill):
    """Attention to the columns and diagonals with the largest sums (MInference, arXiv 2407.02490, section 3.2).

    The last `last_queries` real queries of each row attend to the whole prompt. Their probabilities are summed by
    column and by diagonal. All queries of the head attend to the columns and diagonals with the largest sums. (The
    published kernel rounds a diagonal up to blocks of 64 keys, and so attends to somewhat more keys.)

    Attributes:
        vertical: number of columns of each head.
        slash: number of diagonals of each head.
        last_queries: number of queries by which the columns and diagonals are chosen.
        first_columns: number of columns at the start of the prompt that are always chosen.
        local_diagonals: number of diagonals next to a query's own token that are always chosen.
        pattern: the kind and sizes of each head, which replace vertical and slash: a Pattern, the path of a file of
            MInference (see `load_pattern`), or None.

    Raises:
        ConfigError: a setting is out of range, or a pattern file cannot be read.
    """

    name = "vertical_slash"
    ahead = True

    vertical: int = 1000
    slash: int = 6096
    last_queries: int = 64
    first_columns: int = 30
    local_diagonals: int = 100
    pattern: Pattern | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("vertical", "slash", "last_queries", "local_diagonals")
        check_positive(self.name, **{name: getattr(self, name) for name in names})
        first = self.first_columns
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigError(f"{self.name}.first_columns must be an integer of at least 0, got {first!r}")
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", load_pattern(self.pattern))
        if self.pattern is not None and not isinstance(self.pattern, Pattern):
            raise ConfigError(f"{self.name}.pattern must be a Pattern or the path of a file, got {self.pattern!r}")

    @property
    def tail(self) -> int:  # type: ignore[override]
        """Number of last queries by which the columns and diagonals are chosen."""
        return self.last_queries

    @property
    def most_columns(self) -> int:
        """Maximum number of columns of a head."""
        return self.vertical

    def prepared(self, config: ModelConfig) -> tuple[PrefillAttention, HeadSizes | None]:
        """Return the sizes of a pattern as arrays, and this attention with their maxima; see PrefillAttention."""
        if not isinstance(self.pattern, Pattern):
            return self, None
        self.pattern.check(config)
        sizes = self.pattern.arrays()
        most = {"vertical": int(sizes.columns.max()), "slash": int(sizes.diagonals.max())}
        return dataclasses.replace(self, pattern=None, **most), sizes

    def covers(self, tokens: int) -> bool:
        """Whether all columns or all diagonals are chosen."""
        return max(self.vertical, self.slash) >= tokens

    def sizes(self, heads: int) -> HeadSizes:
        """Return the same sizes for all heads."""
        return HeadSizes.equal(heads, self.vertical, self.slash)

    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> Lines:
        """Choose the lines by `line_sums`. An A-shaped head gets its first columns and nearest diagonals."""
        assert q_tail is not None
        tokens = prompt.k_post.shape[1]
        by_column, by_diagonal = line_sums(q_tail, prompt.k_post, prompt.lengths, config.attention_scale)
        columns, in_column = choose(
            by_column,
            sizes.columns,
            sizes.by_position,
            prompt.lengths,
            forced=self.first_columns,
            most=min(self.vertical, tokens),
        )
        _, diagonals = choose(
            by_diagonal,
            sizes.diagonals,
            sizes.by_position,
            prompt.lengths,
            forced=self.local_diagonals,
            most=min(self.slash, tokens),
        )
        return make_lines(columns, in_column, diagonals, self.block)
