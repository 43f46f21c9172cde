"""The types of the public functions: prompts, tokens, learned arrays, logits, and the progress of a prefill."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypedDict, TypeVar

import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from jshadow.policies.prefill_attention import PrefillAttention


class PrefillProgress(NamedTuple):
    """How far a prefill is, or a turn: tokens that are appended to a state.

    Attributes:
        layers: number of finished layers.
        num_layers: number of all layers. 0 for a turn, whose pieces pass through all layers.
        units: number of finished units of the layer that is being read. A unit is one piece of the prompt that goes
            through a layer or a part of it, or one call of attention, or the compression of the layer. For a turn, it
            is a piece.
        num_units: number of units of this layer, or of the turn. 0 if all layers are finished.
        share: share of all operations that is done. The compression counts as the policy's estimate of it.
        tokens: number of real tokens of all rows.
        tokens_per_second: tokens a second through all layers, or None if it is not known yet.
        seconds_left: estimate of the seconds until the end, or None if it is not known yet.
    """

    layers: int
    num_layers: int
    units: int
    num_units: int
    share: float
    tokens: int
    tokens_per_second: float | None = None
    seconds_left: float | None = None

    def timed(self, begun: float, seconds: float) -> "PrefillProgress":
        """Return the progress with its rate, if the share grew from `begun` to `share` in `seconds` seconds."""
        if seconds <= 0 or self.share <= begun:
            return self
        rate = (self.share - begun) / seconds
        return self._replace(tokens_per_second=self.tokens * rate, seconds_left=(1 - self.share) / rate)


Chat = list[dict[str, str]]  # messages with "role" and "content"
OnePrompt = str | list[int] | tuple[int, ...] | np.ndarray | Chat
Batch = list[str] | list[list[int]] | list[Chat] | list[OnePrompt] | tuple[OnePrompt, ...]
Prompt = OnePrompt | Batch

Tokens = ArrayLike  # integers: token ids, or numbers of tokens
Fitted = Mapping[str, object]  # a nested dict of arrays [L, ...] that a policy learned

Joined = TypeVar("Joined")  # the results of a callable on logits, concatenated over the pieces of a prompt
WholeLogits = Literal["last", "all"]
Logits = str | Callable[[Array], Joined]

Progress = Callable[[PrefillProgress], None]  # called after each unit of a prefill, or each piece of a turn


class _Keywords(TypedDict, total=False):
    fitted: Fitted | None
    prefill_chunk: int
    attention: PrefillAttention | None
    room: int | None


class PrefillKeywords(_Keywords, total=False):
    """Keyword arguments of `prefill` that do not affect its return type."""

    fetch: str


class PrefillManyKeywords(_Keywords, total=False):
    """Keyword arguments of `prefill_many` that do not affect its return type."""

    fetch: str | list[str] | tuple[str, ...]
    shortest: int | None
    progress: Progress | None


class ExtendKeywords(TypedDict, total=False):
    """Keyword arguments of `extend` that do not affect its return type."""

    extend_chunk: int
    progress: Progress | None
