"""The sparse attentions of a prefill: vertical-slash, A-shape and block-sparse (MInference)."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.estimate import KEY_TILE, line_sums
from jshadow.engine.sparse_prefill.lines import HeadSizes, Lines, choose, make_lines
from jshadow.engine.sparse_prefill.lists import attend_chosen
from jshadow.engine.sparse_prefill.patterns import Pattern, load_pattern
from jshadow.engine.sparse_prefill.tiles import GATHERED, Chosen, Tiling
from jshadow.errors import ConfigError
from jshadow.models.config import AttentionKind, ModelConfig, check_positive
from jshadow.ops.attention import causal_attention
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece


@dataclasses.dataclass(frozen=True)
class SparsePrefill(PrefillAttention):
    """The base of the three attentions: each query head attends to chosen columns and diagonals, or key blocks.

    Attention is causal, its softmax is float32, and each key counts once. The work grows with the number of chosen
    keys, and not with S x S. `aux` is a `Chosen`, which counts the tiles. If the settings cover the whole prompt,
    attention is exact.

    Attributes:
        block: number M of queries and of keys in a tile. It does not affect the result of columns and diagonals.

    Class attributes:
        name: the name for `--prefill`.
    """

    name = ""

    block: int = 64

    def __post_init__(self) -> None:
        check_positive(self.name, block=self.block)

    @property
    def multiple(self) -> int:  # type: ignore[override]
        """The number of tokens in a piece is a multiple of the block size."""
        return self.block

    def label(self, tokens: int | None = None) -> str:
        """Return the text for `--prefill`, with the settings that are not the defaults. A pattern is named by digest.

        If `tokens` is given and the settings cover that many tokens, a note says that the prefill is exact.
        """
        changed = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        shown = {key: value.digest() if isinstance(value, Pattern) else value for key, value in changed.items()}
        text = ":".join([self.name, *(f"{key}={value}" for key, value in shown.items())])
        whole = tokens is not None and "pattern" not in changed and self.covers(tokens)
        return f"{text} (exact: it covers {tokens:,} tokens)" if whole else text

    @abc.abstractmethod
    def covers(self, tokens: int) -> bool:
        """Whether every query of a prompt of `tokens` tokens attends to all keys before it."""

    @abc.abstractmethod
    def sizes(self, heads: int) -> HeadSizes:
        """Return the sizes of `heads` query heads. This is called only if there is no pattern."""

    @abc.abstractmethod
    def choose_lines(
        self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes
    ) -> Lines | None:
        """Return the chosen columns and diagonals, or None if all heads are block-sparse."""

    @property
    def most_blocks(self) -> int:
        """Static upper bound of `HeadSizes.blocks`. It is 0 if no head is block-sparse."""
        return 0

    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Chosen:
        """Choose the lines of a layer; see PrefillAttention. `learned` has the HeadSizes of this layer, or is None."""
        batch, tokens = prompt.k_post.shape[:2]
        none = jnp.zeros((batch, config.q_heads), jnp.int32)
        counted = Chosen(None, None, none, none)
        if learned is None and self.covers(tokens):
            return counted
        sizes = self.sizes(config.q_heads) if learned is None else jax.tree.map(jnp.asarray, learned)
        lines = self.choose_lines(config, prompt, q_tail, sizes)
        return counted.replace(lines=lines, sizes=sizes if self.most_blocks else None)

    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Chosen
    ) -> tuple[Array, Chosen]:
        """Compute attention of a piece over the chosen keys; see PrefillAttention."""
        scale = config.attention_scale
        if aux.lines is None and aux.sizes is None:
            return causal_attention(piece.q_post, prompt.k_post, prompt.v, scale, piece.first)[0], aux
        most_blocks = min(self.most_blocks, prompt.k_post.shape[1] // self.block)
        return attend_chosen(piece, prompt, aux, Tiling(scale, self.block, most_blocks))

    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Return the bytes of the sums, the chosen lines, a tile and a piece's queries; see PrefillAttention."""
        heads, dim = config.q_heads, config.head_dim
        gathered = max(GATHERED, self.block)
        chosen = heads * tokens * 40  # sums, their order, masks; diagonals twice; the copies that a sort makes
        estimate = heads * self.tail * (4 * KEY_TILE + 2 * dim) * 4
        tile = heads * gathered * (4 * self.block + 4 * dim) * 4
        queries = 3 * heads * size * dim * 4
        means = (heads * size + config.kv_heads * tokens) * dim * 8 if self.most_blocks else 0
        return batch * (chosen + estimate + tile + queries + means)


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
        pattern: the kind and sizes of each head, which replace vertical and slash: a Pattern, the path of its file, or
            None.
        key_blocks: maximum number of key blocks of a block-sparse head. A pattern with such heads sets it.

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
    key_blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("vertical", "slash", "last_queries", "local_diagonals")
        check_positive(self.name, **{name: getattr(self, name) for name in names})
        for name in ("first_columns", "key_blocks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.name}.{name} must be an integer of at least 0, got {value!r}")
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", load_pattern(self.pattern))
        if self.pattern is not None and not isinstance(self.pattern, Pattern):
            raise ConfigError(f"{self.name}.pattern must be a Pattern or the path of a file, got {self.pattern!r}")

    @property
    def tail(self) -> int:  # type: ignore[override]
        """Number of last queries by which the columns and diagonals are chosen."""
        return self.last_queries

    @property
    def most_blocks(self) -> int:
        """Maximum number of key blocks of the pattern's block-sparse heads."""
        return self.key_blocks

    def prepared(self, config: ModelConfig) -> tuple[PrefillAttention, HeadSizes | None]:
        """Return the sizes of a pattern as arrays, and this attention with their maxima; see PrefillAttention."""
        if not isinstance(self.pattern, Pattern):
            return self, None
        self.pattern.check(config, self.block)
        sizes = self.pattern.arrays()
        largest = {"vertical": sizes.columns, "slash": sizes.diagonals, "key_blocks": sizes.blocks}
        most: dict[str, Any] = {name: int(values.max()) for name, values in largest.items()}
        most |= {name: max(1, most[name]) for name in ("vertical", "slash")}
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


@dataclasses.dataclass(frozen=True)
class BlockSparse(SparsePrefill):
    """Attention of each block of queries to a few blocks of keys (MInference, arXiv 2407.02490, section 3.2).

    The key blocks are those whose mean key has the largest product with the mean query of the block. A block of queries
    always sees its own block of keys.

    Attributes:
        blocks: number of key blocks that a block of queries sees.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "block_sparse"

    blocks: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, blocks=self.blocks)

    @property
    def most_blocks(self) -> int:
        """Number of key blocks, which is the same for all heads."""
        return self.blocks

    def covers(self, tokens: int) -> bool:
        """Whether all blocks are chosen."""
        return self.blocks * self.block >= tokens

    def sizes(self, heads: int) -> HeadSizes:
        """Return the same sizes for all heads."""
        return HeadSizes.equal(heads, blocks=self.blocks)

    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> None:
        """Return None. `attend` chooses key blocks for each block of queries."""
        return None
