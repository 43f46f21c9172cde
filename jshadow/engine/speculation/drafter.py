"""The contract of a drafter: it proposes the tokens that may come next, and learns which ones came.

B is the number of rows, S the tokens of the longest text, and w the number of tokens that are proposed at once.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig

MOST_TOKENS = 64


class Progress(NamedTuple):
    """How far each row is.

    Attributes:
        token: the newest token, which the model has not read yet, int32 [B].
        number: how many tokens were drawn so far, `token` included, int32 [B].
        left: how many more tokens may be drawn, int32 [B]. 0: the row is not active.
    """

    token: Array
    number: Array
    left: Array


class Target(NamedTuple):
    """The model whose tokens are to be guessed, where a cycle begins.

    Attributes:
        weights, config: the model.
        state: its state, which has not read `progress.token`.
        progress: how far each row is.
        wanted: how many tokens are needed for each row, int32 [B], at most the width that is asked for.
        sampler, key: how the model draws. Token number i of a row is drawn with fold_in(key, i).
    """

    weights: dict
    config: ModelConfig
    state: KVState
    progress: Progress
    wanted: Array
    sampler: Sampler
    key: Array


class Text(NamedTuple):
    """The texts before the first new token.

    Attributes:
        tokens: token ids, int32 [B, S], right padded.
        lengths: number of real tokens of each row, int [B].
        config: the model.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    config: ModelConfig

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], config: ModelConfig) -> "Text":
        """Return the texts of rows of token ids, which may be empty."""
        lengths = np.array(list(map(len, rows)))
        tokens = np.zeros((len(rows), max(int(lengths.max()), 1)), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return cls(tokens, lengths, config)


class Memory(NamedTuple):
    """The arrays that a drafter keeps between cycles.

    Attributes:
        fixed: a pytree of arrays that stay as they are, such as weights. They are not copied.
        live: a pytree of arrays that each cycle replaces.
    """

    fixed: Any
    live: Any


class Proposal(NamedTuple):
    """The result of `Drafter.propose`.

    Attributes:
        tokens: int32 [B, w]. Those after the first `Target.wanted` of a row have no meaning.
        state: the target's state. Its arrays may differ from before only where tokens after `lengths` are stored.
        live: what the drafter then remembers.
    """

    tokens: Array
    state: KVState
    live: Any


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """A way to propose tokens: a frozen, hashable dataclass of settings. Its methods can be traced by jit.

    Attributes:
        tokens: the most tokens that are proposed at once. Fewer are proposed while few are accepted.

    Class attributes:
        name: the name on the command line.
        source: the paper, or the program.
        on_meshes: whether it can serve a model on several devices.
        cost: what a proposed token costs, its check included, in plain steps. It decides how many tokens pay.
    """

    tokens: int = dataclasses.field(default=8, kw_only=True)

    on_meshes: ClassVar[bool] = False
    cost: ClassVar[float] = 0.08

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.check_numbers(tokens=self.tokens)

    def check_numbers(self, **values: Any) -> None:
        """Raise ConfigError unless these settings are integers in [1, MOST_TOKENS]."""
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
                raise ConfigError(f"{self.name}.{name} must be an integer in [1, {MOST_TOKENS}], got {value!r}")

    @property
    def traced(self) -> "Drafter":
        """The drafter that programs are traced with: one without arrays, and equal to others that trace the same."""
        return self

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError if the drafter cannot serve a model with such a state, which may be abstract."""
        return

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ConfigError if the drafter's token ids are not those of the model's tokenizer, which may be None."""
        return

    @abc.abstractmethod
    def begin(self, text: Text, state: KVState) -> Memory:
        """Return the memory before the first new token, which `heard` gets. The state has read the text.

        The shapes of its arrays should depend on the state and not on the text, or each text compiles programs anew.
        """

    @abc.abstractmethod
    def ready(self, memory: Memory) -> Array:
        """Return how many tokens can be proposed for each row, int32 [B]: 0, or at least 1."""

    @abc.abstractmethod
    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Propose `width` tokens for each row."""

    @abc.abstractmethod
    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> Any:
        """Return `Memory.live` after new tokens.

        Args:
            memory: the memory before them.
            tokens: the tokens, int32 [B, n]. The first `counts` [B] of them are real.
            counts: number of new tokens of each row, int32 [B].
            state: the target's state, which has read all but the newest token.
        """
