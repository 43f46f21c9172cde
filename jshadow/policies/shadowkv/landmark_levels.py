"""Landmarks in two levels, and how landmarks of one or two levels are stored and read.

Finer landmarks choose better, but each step must read more memory to choose. With two levels, a step reads less. The
landmarks of a chunk are stored as their Hadamard transform, which has the same size. Its first row is the mean of the
chunk, that is, the landmark of the whole chunk. A query scores all chunks by their means. Then only the best candidates
are scored by all their landmarks. An error in a mean affects all landmarks of the chunk. Therefore means have 8 bits
when the other rows have 4. Two levels are not part of the paper.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

import pallas_kernels
from jshadow.ops.attention import group_queries
from jshadow.ops.layout import write_rows
from jshadow.ops.packing import Scaled, scale_dtype
from jshadow.policies.shadowkv.key_codecs.left_rows import chosen_rows
from jshadow.policies.shadowkv.landmarks import landmark_logits, store_landmarks
from jshadow.policies.shadowkv.records import Landmarks
from pallas_kernels import hadamard

GROUP = 4  # number of neighboring chunks whose landmarks are read together; a query reads a group for each chosen chunk


class Levels(struct.PyTreeNode):
    """The s landmarks of each of n chunks, as the s rows of their Hadamard transform.

    Example: B = 1, 2 KV heads of width 64, 3 chunks of 8 tokens, and a landmark for every 2 tokens, so s = 4. means is
    [1, 2, 3, 64] and details is [1, 2, 3, 192]. With dtype "int4", means are `Scaled` with uint8 codes [1, 2, 3, 64]
    (8 bits) and scales [1, 2, 3, 1]; details are `Scaled` with codes [1, 2, 3, 96] and scales [1, 2, 3, 3].

    Attributes:
        means: the means of the chunks [B, h_kv, n, d], as an array or as `Scaled` rows.
        details: the other s - 1 rows of each chunk, side by side [B, h_kv, n, (s - 1) * d], as an array or as `Scaled`
            rows with s - 1 scales for each chunk.
    """

    means: Array | Scaled
    details: Array | Scaled

    @property
    def parts(self) -> int:
        """Number of landmarks s of a chunk."""
        mean, details = (x.scale if isinstance(x, Scaled) else x for x in (self.means, self.details))
        return 1 + details.shape[3] // mean.shape[3]


StoredLandmarks = Array | Scaled | Levels


class Marks(NamedTuple):
    """Consecutive chunks from which queries choose: those of the prompt, or those that joined later.

    Attributes:
        landmarks: the landmarks, as they are stored.
        spread: the spreads, as they are stored, or None.
        open: which chunks each query may choose, bool [B, h_kv, T, n], or [B, h_kv, 1, n] for all queries.
    """

    landmarks: StoredLandmarks
    spread: Any
    open: Array


# Storing


def stored_landmarks(landmarks: Float[Array, "B h m d"], kind: Landmarks, parts: int, dtype: Any) -> StoredLandmarks:
    """Convert landmarks [B, h, n * parts, d] to the stored form. `dtype` is the model's dtype."""
    if kind.levels == 1:
        return store_landmarks(landmarks, kind.dtype, dtype)
    return store_levels(landmarks, parts, kind.dtype, dtype)


def store_levels(landmarks: Float[Array, "B h m d"], parts: int, kind: str, dtype: Any) -> Levels:
    """Convert landmarks to their two levels.

    Args:
        landmarks: means of keys [B, h, n * parts, d], with those of a chunk side by side.
        parts: number of landmarks of a chunk, a power of two.
        kind: how the details are stored: "model", "int8" or "int4".
        dtype: the model's dtype.
    """
    batch, heads, count, dim = landmarks.shape
    chunked = landmarks.astype(jnp.float32).reshape(batch, heads, count // parts, parts, dim)
    rows = hadamard(chunked.swapaxes(3, 4) / parts).swapaxes(3, 4)
    means = store_landmarks(rows[:, :, :, 0], mean_kind(kind), dtype)
    details = store_landmarks(rows[:, :, :, 1:], kind, dtype)
    return Levels(means, jax.tree.map(lambda x: x.reshape(*x.shape[:3], x.shape[3] * x.shape[4]), details))


def stored_spread(find: Callable[[int], Float[Array, "B h _"]], kind: Landmarks, parts: int, dtype: Any) -> Any:
    """Convert spreads to the stored form of `ShadowFrozen.spread`. Return None if no score uses them.

    Args:
        find: maps a number m of landmarks in a chunk to their spreads, float32 [B, h, n * m].
        kind: the settings of the landmarks.
        parts: number of landmarks of a chunk.
        dtype: the model's dtype.
    """
    if kind.order == 1:
        return None
    narrow = scale_dtype(dtype)

    def stored(parts: int, width: int) -> Array:
        spread = jnp.minimum(find(parts), float(jnp.finfo(narrow).max)).astype(narrow)
        return spread.reshape(*spread.shape[:2], spread.shape[2] // width, width)

    return stored(parts, 1) if kind.levels == 1 else (stored(1, 1), stored(parts, parts))


def mean_kind(kind: str) -> str:
    """Return how means are stored if details are stored as `kind` ("model", "int8" or "int4")."""
    return "int8" if kind == "int4" else kind


# Reading


def first_level(landmarks: StoredLandmarks) -> Array | Scaled:
    """Return the part of landmarks that every query reads."""
    return landmarks.means if isinstance(landmarks, Levels) else landmarks


def first_spread(spread: Any) -> Array | None:
    """Return the part of spreads that every query reads."""
    return spread[0] if isinstance(spread, tuple) else spread


def first_logits(
    q: Float[Array, "B T h_q d"], marks: Marks, scale: float
) -> tuple[Float[Array, "B h_kv group T m"], int]:
    """Return the `landmark_logits` of the first level, and how many of them a chunk has."""
    landmarks = first_level(marks.landmarks)
    parts = first_rows(landmarks).shape[2] // max(marks.open.shape[3], 1)
    is_open = jnp.repeat(marks.open, parts, axis=3)
    return landmark_logits(q, landmarks, is_open, scale, first_spread(marks.spread)), parts


def marks_at(marks: Sequence[Marks], ids: Int[Array, "B h_kv k"]) -> tuple[Levels, Array | None]:
    """Gather both levels of the chunks `ids`, and the spreads of their landmarks.

    If marks[0] has n chunks, an id of n + j is chunk j of marks[1].
    """
    trees = [(part.landmarks, part.spread) for part in marks]
    tails = trees[1:]
    if tails:
        levels, spread = jax.tree.map(lambda rows, tail: chosen_rows(rows, tail, ids), trees[0], tails[0])
    else:
        levels, spread = jax.tree.map(lambda rows: chosen_rows(rows, None, ids), trees[0])
    return levels, None if spread is None else spread[1]


def level_logits(
    q: Float[Array, "B T h_q d"], near: Levels, spread: Float[Array, "B h_kv m s"] | None, sets: int, scale: float
) -> Float[Array, "B h_kv group T m_s"]:
    """Compute the logits of all landmarks of the candidates.

    Args:
        q: queries after RoPE [B, T, h_q, d].
        near: the levels of Q sets of m chunks [B, h_kv, Q * m, ...].
        spread: the spreads of their landmarks [B, h_kv, Q * m, s], or None. If given, half the variance of the products
            is added.
        sets: the number Q of sets. Each set is scored by its own query, or by all queries if there is one set.
        scale: factor on the products.

    Returns:
        float32 [B, h_kv, group, T, m * s].
    """
    batch, heads, rows, _ = first_rows(near.means).shape
    grouped = group_queries(q, heads)
    group, length = grouped.shape[2:4]
    asking = grouped.reshape(batch, heads, 1, group * length, -1) if sets == 1 else grouped.transpose(0, 1, 3, 2, 4)
    asking = asking.reshape(batch, heads * sets, -1, q.shape[3])
    levels = two_levels(near, spread)
    levels = jax.tree.map(lambda x: x.reshape(batch, heads * sets, rows // sets, x.shape[3]), levels)
    logits = pallas_kernels.level_logits(asking, levels, scale)
    logits = logits.reshape(batch, heads, sets, group * length // sets, logits.shape[3])
    if sets == 1:
        return logits.reshape(batch, heads, group, length, -1)
    return logits.transpose(0, 1, 3, 2, 4)


def two_levels(levels: Levels, spread: Float[Array, "B h_kv n s"] | None) -> pallas_kernels.TwoLevels:
    """Return landmarks in two levels, and the spreads of all landmarks or None, as `pallas_kernels` takes them."""
    parts = [(x.codes, x.scale) if isinstance(x, Scaled) else (x, None) for x in (levels.means, levels.details)]
    (means, mean_scale), (details, detail_scale) = parts
    return pallas_kernels.TwoLevels(means, details, mean_scale, detail_scale, spread)


def first_rows(landmarks: Array | Scaled) -> Array:
    """Return an array with one row a landmark: its code if landmarks are quantized, else the landmark itself."""
    return landmarks.codes if isinstance(landmarks, Scaled) else landmarks


def write_marks(marks: Any, new: Any, parts: int, number: Array, leaves: Array) -> Any:
    """Write landmarks or spreads of ShadowKV+'s later chunks where a chunk leaves the window.

    Args:
        marks: those of all later chunks, a pytree of arrays with `parts` rows of a chunk in axis 2.
        new: those of the chunks `number`.
        parts: number of rows of a chunk.
        number: which later chunks they are, int32 [B, m].
        leaves: which of them leave the window, bool [B, m].
    """
    places = (number[..., None] * parts + jnp.arange(parts)).reshape(number.shape[0], -1)
    valid = jnp.repeat(leaves, parts, axis=1)

    def write(old: Array, new: Array) -> Array:
        return write_rows(old, new.transpose(0, 2, 1, 3), places, valid)

    return jax.tree.map(write, marks, new)
