"""What a policy may ask of a prefill: an attention of its own (`PrefillAttention`), and a second pass over the prompt.

Sparse prefill implements the first, and so do policies that inherit `OwnPrefill`. The prompt's keys and values are
computed and cached as usual. They differ from those of exact prefill only because the hidden states differ.

A second pass tells which tokens are needed to repeat the prompt. Source: KVzip (Kim et al. 2025, arXiv 2505.23416,
section 3). The model is asked to repeat the prompt, chunk by chunk, and is then given the chunk. The queries of the
given tokens attend to the prompt. The largest attention that a token receives while its own chunk is repeated is its
score. A policy asks for a second pass with `HookInputs.second_pass`, and reads the scores in `PromptKV.second_pass`.
The prefill computes them (`engine/prefill/second_pass.py`).
"""

import abc
import dataclasses
from typing import Any

from flax import struct
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.models.transformer import Heads

# NVIDIA's kvpress asks in these words. The last word of BETWEEN is the template's end of a user's message, which is a
# line break for a model without a chat template.
REPEAT_ALL = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with"
AFTER_REQUEST = "\n"


@dataclasses.dataclass(frozen=True)
class SecondPass:
    """The settings of a second pass.

    Attributes:
        chunk: number of prompt tokens that are repeated at once.
        sinks: number of first tokens of the prompt that share the attention, beside the chunk and the tokens of the
            second pass. They are not scored there, except in the first chunk, which contains them.
        normalized: divide the attention by the norm of the query token's hidden state, and multiply it by the norm of
            the key token's value after the output projection (KVzip+ of kvpress).
        overlap: number of tokens before a chunk that are repeated in the request for the chunk.
    """

    chunk: int = 2048
    sinks: int = 4
    normalized: bool = False
    overlap: int = 8

    def most_tokens(self, tokens: int) -> int:
        """Return an upper bound on the tokens that are processed at once for a prompt of `tokens` tokens.

        A token has at least one byte of text.
        """
        return max(len(REPEAT_ALL), len(REPEAT_FROM)) + len(AFTER_REQUEST) + self.overlap + min(self.chunk, tokens)


class PrefillPiece(struct.PyTreeNode):
    """The queries of P consecutive tokens of a prompt.

    Attributes:
        q_pre, q_post: queries before and after RoPE [B, P, h_q, d]. q_pre is None if the attention is `ahead`.
        first: position of the first query, int32 [].
        inverse: angle per position of each rotated pair of dimensions, float32 [rotary_dim / 2].
        sinks: the logit of each query head's attention sink [h_q], or None.
        heads: in a recurrent layer, all projections of the tokens. Then q_post is q_pre.
    """

    q_pre: Array | None
    q_post: Array
    first: Array
    inverse: Array
    sinks: Array | None = None
    heads: Heads | None = None


@dataclasses.dataclass(frozen=True)
class PrefillAttention(abc.ABC):
    """The attention of the queries of a prompt. It is frozen and hashable, so it is static under jit, like a policy.

    A prompt is processed in pieces of consecutive tokens. Layers with the model's own window keep that window.

    Class attributes:
        ahead: whether all keys, values and last queries of a layer are computed before its first piece.
        tail: number of the last real queries of each row that `begin` gets if `ahead`.
        multiple: the number of tokens in a piece is a multiple of this.
        takes_sinks: whether `attend` gives the sinks of a piece their part of the softmax. If not, models with
            attention sinks are refused.
    """

    ahead = False
    tail = 0
    multiple = 1
    takes_sinks = False

    def label(self, tokens: int | None = None) -> str:
        """Return the name for reports. It may describe the effect on a prompt of `tokens` tokens."""
        return type(self).__name__

    def prepared(self, config: ModelConfig) -> tuple["PrefillAttention", Any]:
        """Return the attention to run for a model, and arrays [L, ...] or None.

        `begin` gets each layer's slice of the arrays. Settings that differ from layer to layer become arrays, so that
        one compiled program serves all layers.

        Raises:
            ConfigError: the settings were found by a search on another model.
        """
        return self, None

    @abc.abstractmethod
    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> Any:
        """Return the initial value of the pytree that each piece passes on to the next.

        `prompt` is the whole prompt if `ahead`, else zeros of the same shapes. `q_tail` has the queries after RoPE of
        each
        row's last `tail` real tokens [B, tail, h_q, d], or None. `learned` is this layer's slice of the arrays of
        `prepared`, or None.
        """

    @abc.abstractmethod
    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: Any
    ) -> tuple[Array, Any]:
        """Compute the attention of one piece [B, P, h_q, d]. Keys and values after its last token may be arbitrary.

        `aux` is the pytree from `begin` or from the previous piece. Return also the pytree to pass on to the next
        piece.
        That of the last piece becomes `PromptKV.extra`.
        """

    @abc.abstractmethod
    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Return an upper bound on the temporary device bytes for a piece of `size` tokens of `batch` prompts of
        `tokens`.
        """
