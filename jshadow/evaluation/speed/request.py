"""The request that all systems answer, and the measurements of an answer."""

import dataclasses

import numpy as np

from jshadow.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Request:
    """The request that every system answers.

    Attributes:
        model: directory of a checkpoint, or a hub id.
        tokens: number of tokens of each prompt.
        batch: number of prompts.
        steps: number of decode steps.
        dtype: dtype of weights, keys and values.
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
        """Number of tokens that a row holds at the end."""
        return self.tokens + self.steps

    def prompts(self, vocab: int) -> np.ndarray:
        """Return random token ids, int32 [batch, tokens]. The measured time does not depend on the text."""
        return np.random.default_rng(0).integers(0, vocab, (self.batch, self.tokens), np.int32)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The measurements of one answer.

    Attributes:
        prefill_seconds: time of the prefill.
        decode_seconds: time of all decode steps.
        bytes_device: bytes of keys and values on the device after the last step.
        bytes_host: bytes of keys and values on the host after the last step.
        compile_seconds: time of compilation.
    """

    prefill_seconds: float
    decode_seconds: float
    bytes_device: int
    bytes_host: int
    compile_seconds: float = 0.0
