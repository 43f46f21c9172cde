"""What the sparse attentions of a prefill share: the choice of a layer's lines, and attention over them."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.estimate import KEY_TILE
from jshadow.engine.sparse_prefill.lines import HeadSizes, Lines
from jshadow.engine.sparse_prefill.lists import attend_chosen
from jshadow.engine.sparse_prefill.patterns import Pattern
from jshadow.engine.sparse_prefill.tiles import GATHERED, Chosen, Tiling
from jshadow.models.config import AttentionKind, ModelConfig, check_positive
from jshadow.ops.attention import causal_attention
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece


@dataclasses.dataclass(frozen=True)
class SparsePrefill(PrefillAttention):
    """The base of the attentions: each query head attends to chosen columns and diagonals.

    Attention is causal, its softmax is float32, and each key counts once. The work grows with the number of chosen
    keys, and not with S x S. `aux` is a `Chosen`, which counts the tiles. If the settings cover the whole prompt,
    attention is exact.

    Attributes:
        block: number M of queries and of keys in a tile. It does not affect the result.

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
    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> Lines:
        """Return the chosen columns and diagonals."""

    @property
    @abc.abstractmethod
    def most_columns(self) -> int:
        """Static upper bound of `HeadSizes.columns`."""

    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Chosen:
        """Choose the lines of a layer; see PrefillAttention. `learned` has the HeadSizes of this layer, or is None."""
        batch, tokens = prompt.k_post.shape[:2]
        none = jnp.zeros((batch, config.q_heads), jnp.int32)
        counted = Chosen(None, none, none)
        if learned is None and self.covers(tokens):
            return counted
        sizes = self.sizes(config.q_heads) if learned is None else jax.tree.map(jnp.asarray, learned)
        return counted.replace(lines=self.choose_lines(config, prompt, q_tail, sizes))

    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Chosen
    ) -> tuple[Array, Chosen]:
        """Compute attention of a piece over the chosen keys; see PrefillAttention."""
        scale = config.attention_scale
        if aux.lines is None:
            return causal_attention(piece.q_post, prompt.k_post, prompt.v, scale, piece.first)[0], aux
        return attend_chosen(piece, prompt, aux, Tiling(scale, self.block))

    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Return the bytes of the sums, the chosen lines, the lists of a piece, a tile and the queries of a piece."""
        heads, dim = config.q_heads, config.head_dim
        gathered = max(GATHERED, self.block)
        chosen = heads * tokens * 40  # sums, their order, masks; diagonals twice; the copies that a sort makes
        estimate = heads * self.tail * (4 * KEY_TILE + 2 * dim) * 4
        tile = heads * gathered * (4 * self.block + 4 * dim) * 4 + 3 * tokens * self.block  # and the masks of one head
        queries = 3 * heads * size * dim * 4
        # The kernel's lists, and the copy that a sort of the columns makes.
        lists = heads * -(-size // self.block) * (tokens // self.block + 2 * min(self.most_columns, tokens) + 2) * 4
        return batch * (chosen + estimate + tile + queries + lists)
