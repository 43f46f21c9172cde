"""Patterns: the kind and the size of the sparse prefill of each query head, as MInference publishes them for models."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.engine.sparse_prefill.lines import HeadSizes
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.weights.tokenizer import read_text

KINDS = {"vertical_slash": ("vertical", "slash"), "a_shape": ("initial", "local")}
PUBLISHED = {"vertical_and_slash": "vertical_slash", "stream_llm": "a_shape"}  # the names in MInference's files


@dataclasses.dataclass(frozen=True)
class HeadPattern:
    """The sparse attention of one query head.

    Attributes:
        kind: "vertical_slash" or "a_shape".
        sizes: the settings of the attention of that name: (vertical, slash) or (initial, local).
    """

    kind: str
    sizes: tuple[int, int]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"pattern: kind must be one of {sorted(KINDS)}, got {self.kind!r}")
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in self.sizes)
        if not isinstance(self.sizes, tuple) or len(self.sizes) != 2 or not whole:
            wanted = ", ".join(KINDS[self.kind])
            raise ConfigError(f"pattern: sizes of {self.kind} must be ({wanted}), each at least 1, got {self.sizes!r}")


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The patterns of all heads. It is hashable, because it is part of settings that must be hashable.

    Attributes:
        heads: the pattern of each head, as heads[layer][query head].
    """

    heads: tuple[tuple[HeadPattern, ...], ...]

    def __post_init__(self) -> None:
        if not self.heads or not all(self.heads) or len({len(layer) for layer in self.heads}) != 1:
            raise ConfigError("pattern: heads must not be empty, and each layer must have the same number of them")

    def arrays(self) -> HeadSizes:
        """Return the sizes of all heads as arrays [L, h_q]."""
        rows = [[(*head.sizes, int(head.kind == "a_shape")) for head in layer] for layer in self.heads]
        return HeadSizes(*np.moveaxis(np.array(rows, np.int32), 2, 0))

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if the model has other numbers of layers and heads."""
        mine, its = (len(self.heads), len(self.heads[0])), (config.num_layers, config.q_heads)
        if mine != its:
            raise ConfigError(
                f"pattern must be of this model, {its[0]} layers of {its[1]} query heads, got {mine[0]} of {mine[1]}"
            )

    def digest(self) -> str:
        """Return the first eight hexadecimal digits of a SHA-256 digest of the pattern."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"Pattern({[[[head.kind, *head.sizes] for head in layer] for layer in self.heads]})"


def load_pattern(path: str | os.PathLike[str]) -> Pattern:
    """Read a pattern as MInference publishes them: the JSON files of its folder `minference/configs`.

    A file has a list of layers. Each is an object that maps the number of a query head to a kind, two sizes and a
    score, as in `{"0": ["vertical_and_slash", 1000, 6096, 0.61], ...}`. The kinds are "vertical_and_slash" and
    "stream_llm", which is an A-shape.

    Raises:
        ConfigError: the file cannot be read, or has something else in it.
    """
    source = Path(path).expanduser()
    try:
        layers = json.loads(read_text(source))
        return Pattern(tuple(_layer(layer) for layer in layers))
    except ConfigError as error:
        raise ConfigError(f"{error} ({source})") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"pattern: {source} must be a readable file of MInference: {error!r}") from error


def _layer(heads: dict[str, Any]) -> tuple[HeadPattern, ...]:
    """Return the patterns of a layer's heads in their order, from its object in a file."""
    if set(heads) != {str(number) for number in range(len(heads))}:
        raise ConfigError(f"pattern: a layer must have the heads 0 to {len(heads) - 1}, got {sorted(heads)!r:.80}")
    found = (heads[str(number)][:3] for number in range(len(heads)))
    return tuple(HeadPattern(PUBLISHED.get(kind, kind), tuple(sizes)) for kind, *sizes in found)
