"""The choice of keys for each query head in a sparse prefill.

A head attends to columns and diagonals. A column is a key to which all later queries attend. A diagonal is a distance:
each query attends to the key at that distance before it.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int

from jshadow.errors import ConfigError, check_one_of
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import top_k
from jshadow.weights.tokenizer import read_text


class HeadSizes(struct.PyTreeNode):
    """How many keys each query head attends to. All fields are int32 [h_q].

    They are arrays, so that all layers can share one compiled program.

    Attributes:
        by_position: 1: the head takes the first columns and the nearest diagonals (A-shape). 0: it takes those with the
            largest attention sums.
    """

    columns: Array
    diagonals: Array
    by_position: Array

    @classmethod
    def equal(cls, heads: int, columns: int, diagonals: int, by_position: bool = False) -> "HeadSizes":
        """Return the same sizes for all heads."""
        return cls(*(jnp.full(heads, value, jnp.int32) for value in (columns, diagonals, int(by_position))))


class Lines(struct.PyTreeNode):
    """The chosen columns and diagonals of each head. The S tokens form n blocks of M tokens.

    The block at distance D from a query block is D blocks before it.

    Attributes:
        columns: the chosen keys in rising order, padded with S, int32 [B, h_q, most].
        in_column: the same as a mask of all keys, bool [B, h_q, n, M].
        near: a mask of the chosen diagonals, bool [B, h_q, n, 2M]. Entry D has the 2M distances from (D - 1) * M on.
            They include all distances between a query block and the key block at distance D.
        strips: the block distances D at which a diagonal is chosen, in rising order, padded with n, int32 [B, h_q, n].
        touched: the same as a mask of all D, bool [B, h_q, n].
    """

    columns: Int[Array, "B h_q most"]
    in_column: Bool[Array, "B h_q n M"]
    near: Bool[Array, "B h_q n M2"]
    strips: Int[Array, "B h_q n"]
    touched: Bool[Array, "B h_q n"]


def choose(
    sums: Float[Array, "B h_q S"],
    counts: Int[Array, " h_q"],
    by_position: Int[Array, " h_q"],
    lengths: Int[Array, " B"],
    *,
    forced: int,
    most: int,
) -> tuple[Int[Array, "B h_q {most}"], Bool[Array, "B h_q S"]]:
    """Choose the columns or the diagonals of each head: the indices of its `counts` largest sums.

    Args:
        counts: how many indices a head chooses, at most `most`.
    """
    batch, heads, tokens = sums.shape
    index = jnp.arange(tokens)
    score = jnp.where(by_position[:, None] > 0, -index.astype(jnp.float32), sums)
    score = jnp.where(index < forced, jnp.inf, score)
    score = jnp.where(index < lengths[:, None, None], score, -jnp.inf)
    best = top_k(score, most)
    valid = (jnp.arange(most) < counts[:, None]) & (best < lengths[:, None, None])
    chosen = jnp.sort(jnp.where(valid, best, tokens), axis=-1)
    row, head = jnp.ogrid[:batch, :heads]
    mask = jnp.zeros(sums.shape, bool).at[row[..., None], head[..., None], chosen].set(True, mode="drop")
    return chosen, mask


def make_lines(
    columns: Int[Array, "B h_q most"], in_column: Bool[Array, "B h_q S"], diagonals: Bool[Array, "B h_q S"], block: int
) -> Lines:
    """Return Lines from the results of `choose` for columns, and the mask of `choose` for diagonals.

    `block` is M. It must divide S.
    """
    batch, heads, tokens = diagonals.shape
    count = tokens // block
    assert count * block == tokens, f"{tokens} tokens are no blocks of {block}"
    cut = diagonals.reshape(batch, heads, count, block)
    before = jnp.pad(cut, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    near = jnp.concatenate([before, cut], axis=3)
    touched = near[..., 1:].any(-1)  # distances of at least (D - 1) * M + 1: the farthest pair of two neighbors
    strips = jnp.sort(jnp.where(touched, jnp.arange(count), count), axis=-1)
    return Lines(columns, in_column.reshape(batch, heads, count, block), near, strips, touched)


def strip_blocks(lines: Lines, index: Int[Array, ""]) -> tuple[Int[Array, "B h_q n"], Int[Array, "B h_q"]]:
    """Return the key blocks that have keys on a chosen diagonal of query block `index`, and their number.

    The nearest block is first. Only the first blocks of each list count, as many as the number says.
    """
    blocks = index - lines.strips
    return jnp.maximum(blocks, 0), (blocks >= 0).sum(-1).astype(jnp.int32)


_KINDS = {"vertical_slash": ("vertical", "slash"), "a_shape": ("initial", "local")}
_PUBLISHED = {"vertical_and_slash": "vertical_slash", "stream_llm": "a_shape"}  # the names in MInference's files


@dataclasses.dataclass(frozen=True)
class HeadPattern:
    """The sparse attention of one query head.

    Attributes:
        sizes: the settings of the attention of that name: (vertical, slash) or (initial, local).
    """

    kind: str
    sizes: tuple[int, int]

    def __post_init__(self) -> None:
        check_one_of("pattern: kind", self.kind, sorted(_KINDS))
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in self.sizes)
        if not isinstance(self.sizes, tuple) or len(self.sizes) != 2 or not whole:
            wanted = ", ".join(_KINDS[self.kind])
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
    return tuple(HeadPattern(_PUBLISHED.get(kind, kind), tuple(sizes)) for kind, *sizes in found)
