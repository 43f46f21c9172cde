"""The contract of a drafter: it proposes the tokens that may come next, and learns which ones came.

B is the number of rows, and w the number of tokens that are proposed at once.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np
from jax import Array

from jshadow.errors import ConfigError

MOST_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """A way to propose tokens: a frozen, hashable dataclass of settings. Its methods can be traced by jit.

    What a drafter remembers is a pytree of arrays, which its methods take and return.

    Attributes:
        tokens: the most tokens that are proposed at once. Fewer are proposed while few are accepted.
    """

    tokens: int = 8

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
                raise ConfigError(f"{self.name}.{name} must be an integer in [1, {MOST_TOKENS}], got {value!r}")

    @abc.abstractmethod
    def begin(self, prompt: np.ndarray, lengths: np.ndarray, new: int) -> Any:
        """Return the memory before the first new token, which `heard` gets.

        Args:
            prompt: token ids, int32 [B, S], right padded.
            lengths: number of real tokens of each row, int [B].
            new: the most tokens that a row can get.
        """

    @abc.abstractmethod
    def ready(self, memory: Any) -> Array:
        """Return how many tokens can be proposed for each row, int32 [B]: 0, or at least 1."""

    @abc.abstractmethod
    def propose(self, memory: Any, width: int) -> Array:
        """Return proposed tokens, int32 [B, width]. Those of a row that is not ready have no meaning."""

    @abc.abstractmethod
    def heard(self, memory: Any, tokens: Array, counts: Array) -> Any:
        """Return the memory after new tokens. The first `counts` [B] of `tokens` [B, n] are real."""
