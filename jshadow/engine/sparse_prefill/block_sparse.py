"""Block-sparse attention of query blocks to chosen key blocks (MInference)."""

import dataclasses

from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.base import SparsePrefill
from jshadow.engine.sparse_prefill.lines import HeadSizes
from jshadow.models.config import ModelConfig, check_positive


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
