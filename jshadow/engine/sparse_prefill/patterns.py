"""Patterns: the kind and the size of the sparse prefill of each query head. `jshadow prefill-patterns` finds them."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.engine.sparse_prefill.lines import HeadSizes
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, check_positive
from jshadow.weights.texts import read_text

FORMAT = "jshadow prefill pattern 1"
KINDS = {"vertical_slash": ("vertical", "slash"), "a_shape": ("initial", "local"), "block_sparse": ("blocks",)}


@dataclasses.dataclass(frozen=True)
class HeadPattern:
    """The sparse attention of one query head.

    Attributes:
        kind: "vertical_slash", "a_shape" or "block_sparse".
        sizes: the settings of the attention of that name: (vertical, slash), (initial, local) or (blocks,).
    """

    kind: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"pattern: kind must be one of {sorted(KINDS)}, got {self.kind!r}")
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in self.sizes)
        if not isinstance(self.sizes, tuple) or len(self.sizes) != len(KINDS[self.kind]) or not whole:
            wanted = ", ".join(KINDS[self.kind])
            raise ConfigError(f"pattern: sizes of {self.kind} must be ({wanted}), each at least 1, got {self.sizes!r}")

    @property
    def row(self) -> tuple[int, int, int, int]:
        """The values (columns, diagonals, by_position, blocks) of this head, as in HeadSizes."""
        if self.kind == "block_sparse":
            return 0, 0, 0, self.sizes[0]
        return self.sizes[0], self.sizes[1], int(self.kind == "a_shape"), 0


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The patterns of all heads. It is hashable, because it is part of settings that must be hashable.

    Attributes:
        heads: the pattern of each head, as heads[layer][query head].
        block: number of tokens in a block, for the sizes of block-sparse heads.
    """

    heads: tuple[tuple[HeadPattern, ...], ...]
    block: int = 64

    def __post_init__(self) -> None:
        check_positive("pattern", block=self.block)
        if not self.heads or not all(self.heads) or len({len(layer) for layer in self.heads}) != 1:
            raise ConfigError("pattern: heads must not be empty, and each layer must have the same number of them")

    def arrays(self) -> HeadSizes:
        """Return the sizes of all heads as arrays [L, h_q]."""
        rows = np.array([[head.row for head in layer] for layer in self.heads], np.int32)
        return HeadSizes(*(rows[..., index] for index in range(4)))  # type: ignore[arg-type]

    def check(self, config: ModelConfig, block: int) -> None:
        """Raise ConfigError if the model has other numbers of layers and heads, or `block` is not the pattern's own.

        The block size only matters if a head is block-sparse.
        """
        mine, its = (len(self.heads), len(self.heads[0])), (config.num_layers, config.q_heads)
        if mine != its:
            raise ConfigError(
                f"pattern must be of this model, {its[0]} layers of {its[1]} query heads, got {mine[0]} of {mine[1]}"
            )
        if block != self.block and any(head.kind == "block_sparse" for layer in self.heads for head in layer):
            raise ConfigError(f"block must be the pattern's own {self.block}, got {block}")

    def digest(self) -> str:
        """Return the first eight hexadecimal digits of a SHA-256 digest of the pattern."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    def __repr__(self) -> str:
        kinds = [[[head.kind, *head.sizes] for head in layer] for layer in self.heads]
        return f"Pattern({kinds}, block={self.block})"


def load_pattern(path: str | os.PathLike[str]) -> Pattern:
    """Read a pattern that `jshadow prefill-patterns` wrote. Raises ConfigError if the file cannot be read."""
    source = Path(path).expanduser()
    try:
        about = json.loads(read_text(source))
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ConfigError(f"pattern: {source} must be a file of {FORMAT!r}")
        layers = tuple(tuple(HeadPattern(kind, tuple(sizes)) for kind, *sizes in layer) for layer in about["heads"])
        return Pattern(layers, about["block"])
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"pattern: {source} must be a readable file of {FORMAT!r}: {error!r}") from error


def as_json(pattern: Pattern, about: Mapping[str, Any] | None = None) -> str:
    """Return the text of a pattern's file.

    Args:
        pattern: the pattern to write.
        about: other plain values to store in the file. `load_pattern` ignores them.
    """
    layers = [[[head.kind, *head.sizes] for head in layer] for layer in pattern.heads]
    return json.dumps({"format": FORMAT, "block": pattern.block, **(about or {}), "heads": layers}) + "\n"
