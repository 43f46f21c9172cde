"""The types of the public functions: prompts, tokens, learned arrays, logits, and the progress of a prefill."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from jax import Array
from numpy.typing import ArrayLike
from typing_extensions import TypeVar

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

Joined = TypeVar("Joined", default=Array)  # logits, or the results of a callable on them, of all pieces of a prompt
WholeLogits = Literal["last", "all"]
Logits = WholeLogits | Callable[[Array], Joined]

Progress = Callable[[PrefillProgress], None]  # called after each unit of a prefill, or each piece of a turn


class PrefillKeywords(TypedDict, total=False):
    """Keyword arguments of `begin_prefill`."""

    fetch: str
    fitted: Fitted | None
    prefill_chunk: int
    attention: PrefillAttention | None
    room: int | None
