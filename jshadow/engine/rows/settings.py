"""Sampling settings of one request in a batch, and the arrays that a batch has for them, with their checks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.engine.checks import as_array, check_sampling
from jshadow.engine.sampling import Sampler
from jshadow.engine.types import Tokens
from jshadow.errors import ConfigError, PromptError
from jshadow.models.config import check_positive

# The value that turns a penalty off, the lowest value and the highest.
PENALTIES = {
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 0.01, 100.0),
}
MOST_BIAS = 100.0


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """How the tokens of one request are drawn. The default is greedy.

    The logits are changed in the order repetition penalty, presence and frequency penalty, bias, grammar mask. Then the
    sampler applies.

    Attributes:
        sampler: temperature and filters.
        seed: integer of 64 bits.
        presence_penalty: subtracted from the logits of the tokens that the request has drawn, in [-2, 2].
        frequency_penalty: subtracted once for each time that the token was drawn, in [-2, 2].
        repetition_penalty: divisor of a logit above 0, and factor of any other, for tokens of the prompt and drawn
            tokens, in [0.01, 100]. 1 is off. (Keskar et al., CTRL, 2019, section 4.1)
        logit_bias: token ids, and what is added to their logits, in [-100, 100].

    Raises:
        ConfigError: a value is out of range.
    """

    sampler: Sampler = dataclasses.field(default_factory=Sampler)
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sampling(self.sampler, self.seed)
        if self.sampler is None:
            raise ConfigError("sampler must be a Sampler, got None")
        for name, (_, low, high) in PENALTIES.items():
            _check_number(f"row.{name}", getattr(self, name), low, high)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"row.logit_bias must be a mapping from token id to number, got {self.logit_bias!r}")
        for token, value in self.logit_bias.items():
            _check_number(f"row.logit_bias[{token!r}]", value, -MOST_BIAS, MOST_BIAS)


@dataclasses.dataclass(frozen=True)
class RowParts:
    """Which arrays the rows of a batch have. Rows with other parts make other programs, so an engine chooses once.

    Attributes:
        vocab_size: V, the number of logits.
        penalties: whether rows may have penalties. This takes V numbers and W words a row.
        bias_limit: K, the largest number of tokens with a bias in a row. 0 means that rows have no bias.
        grammar: whether rows have a mask of allowed tokens. This takes W words a row.

    Raises:
        ConfigError: a value is out of range.
    """

    vocab_size: int
    penalties: bool = False
    bias_limit: int = 0
    grammar: bool = False

    def __post_init__(self) -> None:
        check_positive("parts", vocab_size=self.vocab_size)
        if isinstance(self.bias_limit, bool) or not isinstance(self.bias_limit, int) or self.bias_limit < 0:
            raise ConfigError(f"parts.bias_limit must be an integer of at least 0, got {self.bias_limit!r}")


def check_row(settings: RowSettings, parts: RowParts) -> None:
    """Check that a batch has the parts that the settings of a row need.

    Raises:
        ConfigError: it has no penalties, or its rows have fewer biased tokens.
        PromptError: a biased token is out of range.
    """
    for name, (off, _, _) in PENALTIES.items():
        if (value := getattr(settings, name)) != off and not parts.penalties:
            raise ConfigError(f"row.{name} must be {off} in a batch without penalties, got {value}")
    if (count := len(settings.logit_bias)) > parts.bias_limit:
        raise ConfigError(f"row.logit_bias must have at most bias_limit={parts.bias_limit} tokens, got {count}")
    check_row_ids("logit_bias", list(settings.logit_bias), parts.vocab_size)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not (isinstance(value, int | float) and low <= value <= high):
        raise ConfigError(f"{name} must lie in [{low}, {high}], got {value!r}")


def check_row_ids(name: str, tokens: Tokens, size: int) -> np.ndarray:
    """Return token ids of one request as int32 [n]. Raises PromptError if an id is not in [0, size)."""
    array = as_array(tokens, name)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise PromptError(f"{name} must be integers with 1 axis, got {array.dtype} {array.shape}")
    if (bad := array[(array < 0) | (array >= size)]).size:
        raise PromptError(f"{name} must lie in [0, vocab_size={size}), got {int(bad[0])}")
    return array.astype(np.int32)
