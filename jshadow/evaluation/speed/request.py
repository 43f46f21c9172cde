"""A request that systems are compared on, and an answer to it."""

import dataclasses

import numpy as np

from jshadow.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Request:
    """What every system is given.

    Attributes:
        model: a checkpoint's folder, or a hub id.
        tokens: of each prompt.
        batch: prompts.
        steps: tokens to feed after the prompt.
        dtype: of weights, keys and values.
    """

    model: str
    tokens: int = 4096
    batch: int = 1
    steps: int = 24
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Tokens that a row holds in the end."""
        return self.tokens + self.steps

    def prompts(self, vocab: int) -> np.ndarray:
        """Random ids [batch, tokens]: exact attention, and a selection of fixed size, take as long for any text."""
        return np.random.default_rng(0).integers(0, vocab, (self.batch, self.tokens), np.int32)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to a request: seconds of the prefill and of all decode steps, bytes of keys and values after them."""

    prefill_seconds: float
    decode_seconds: float
    bytes_device: int
    bytes_host: int
    compile_seconds: float = 0.0
