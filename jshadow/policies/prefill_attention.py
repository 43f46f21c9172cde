"""What may take the place of exact attention while a prompt is taken in: sparse prefill, and policies with their own.

Nothing here touches what is cached: keys and values of the prompt are computed all the same, from hidden states that
then differ.
"""

import abc
import dataclasses
from typing import Any

from flax import struct
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.models.config import AttentionKind, ModelConfig


class PrefillPiece(struct.PyTreeNode):
    """The queries of one piece of a prompt.

    Attributes:
        q_pre, q_post: before and after RoPE [B, P, h_q, d].
        first: position of the first of them, int32 [].
        inverse: angle per position of each rotated pair, float32 [rotary_dim / 2].
    """

    q_pre: Array
    q_post: Array
    first: Array
    inverse: Array


@dataclasses.dataclass(frozen=True)
class PrefillAttention(abc.ABC):
    """How the queries of a prompt attend. Frozen and hashable: static under jit, like a policy.

    Layers in which the model itself sees a window only keep that window.

    Class attributes:
        ahead: a pass before the first piece computes all keys, values and trailing queries of the layer.
        tail: trailing real queries of each row that `begin` is given, where `ahead`.
        multiple: every piece is a whole multiple of so many tokens.
    """

    ahead = False
    tail = 0
    multiple = 1

    def label(self, tokens: int | None = None) -> str:
        """What a report calls it, and what it is to a prompt of so many tokens."""
        return type(self).__name__

    def prepared(self, config: ModelConfig) -> tuple["PrefillAttention", Any]:
        """What runs in place of this one, static in all layers, and arrays [L, ...] of which `begin` gets a layer's.

        Sizes that differ from layer to layer go there, so that one compiled program serves all layers.

        Raises:
            ConfigError: they were searched for in another model.
        """
        return self, None

    @abc.abstractmethod
    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Any:
        """What the pieces hand to each other, before the first one.

        Args:
            config, kind: the model and its layer.
            prompt: the whole prompt where `ahead`, else zeros of its shape.
            q_tail: queries after RoPE of each row's last `tail` real tokens [B, tail, h_q, d], or None.
            learned: this layer's slice of the arrays of `prepared`, or None.
        """

    @abc.abstractmethod
    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Any
    ) -> tuple[Array, Any]:
        """The output [B, P, h_q, d] of a piece, and what to hand on.

        Args:
            config, kind: the model and its layer.
            piece: its queries.
            prompt: keys and values up to the piece's last token at least; what lies behind may hold anything.
            aux: from `begin`, or from the piece before. The last one's becomes `PromptKV.extra`.
        """

    @abc.abstractmethod
    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Device bytes that a piece of `size` tokens of a prompt of `tokens` takes for a while, at most."""
