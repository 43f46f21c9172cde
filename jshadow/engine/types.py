"""The types of the public functions: prompts, tokens, learned arrays, and the choice of logits."""

from collections.abc import Callable, Mapping
from typing import Literal, TypedDict, TypeVar

import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from jshadow.engine.prefill.progress import PrefillProgress
from jshadow.policies.prefill_attention import PrefillAttention

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


class PrefillKeywords(TypedDict, total=False):
    """Keyword arguments of `prefill` that do not affect its return type."""

    fetch: str
    fitted: Fitted | None
    prefill_chunk: int
    attention: PrefillAttention | None
    room: int | None


class PrefillManyKeywords(TypedDict, total=False):
    """Keyword arguments of `prefill_many` that do not affect its return type."""

    fetch: str | list[str] | tuple[str, ...]
    fitted: Fitted | None
    prefill_chunk: int
    shortest: int | None
    progress: Progress | None
    attention: PrefillAttention | None
    room: int | None


class ExtendKeywords(TypedDict, total=False):
    """Keyword arguments of `extend` that do not affect its return type."""

    extend_chunk: int
    progress: Progress | None
