"""Landmarks in two levels, and how landmarks of one or two levels are stored and read.

The finer landmarks are, the better they choose, and the more memory every step reads only to choose. With two levels a
step reads less. The landmarks of a chunk are stored as their Hadamard transform, which has as many numbers. Its first
row is the mean of the chunk, which is what one landmark of the whole chunk would be. A query scores all chunks by their
means. Then only the best candidates are scored by all their landmarks. An error of a mean is an error of all landmarks
of its chunk, so means have eight bits where the other rows have four. Two levels are not the paper's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jshadow.ops.attention import group_queries
from jshadow.ops.packing import Scaled, scale_dtype
from jshadow.policies.shadowkv.key_codecs.base import chosen_rows
from jshadow.policies.shadowkv.landmarks import landmark_logits, landmark_products, store_landmarks
from jshadow.policies.shadowkv.records import Landmarks
from pallas_kernels import half_variance
from pallas_kernels.bits import signed_at

GROUP = 4  # neighbouring chunks whose landmarks are read together; as many groups are read as chunks are chosen


class Levels(struct.PyTreeNode):
    """Landmarks of n chunks, s of each, as the rows of their transform over a chunk.

    Attributes:
        means: of chunks [B, h_kv, n, d], or `Scaled` rows of them.
        details: the s - 1 other rows of each chunk side by side [B, h_kv, n, (s - 1) * d], or `Scaled` rows of them
            with s - 1 scales.
    """

    means: Array | Scaled
    details: Array | Scaled

    @property
    def parts(self) -> int:
        """Landmarks of a chunk."""
        mean, details = (x.scale if isinstance(x, Scaled) else x for x in (self.means, self.details))
        return 1 + details.shape[3] // mean.shape[3]


StoredLandmarks = Array | Scaled | Levels


class Marks(NamedTuple):
    """Chunks that lie side by side: the prompt's, or those that joined later.

    Attributes:
        landmarks: as they are stored.
        spread: as it is stored, or None.
        open: which chunks each query may choose, bool [B, h_kv, 1 or T, n].
    """

    landmarks: StoredLandmarks
    spread: Any
    open: Array


# Storing


def stored_landmarks(landmarks: Float[Array, "B h m d"], kind: Landmarks, parts: int, dtype: Any) -> StoredLandmarks:
    """Landmarks [B, h, n * parts, d], those of a chunk side by side, as they are stored; `dtype` is the model's."""
    if kind.levels == 1:
        return store_landmarks(landmarks, kind.dtype, dtype)
    return store_levels(landmarks, parts, kind.dtype, dtype)


def store_levels(landmarks: Float[Array, "B h m d"], parts: int, kind: str, dtype: Any) -> Levels:
    """Landmarks [B, h, n * parts, d], those of a chunk side by side, as their levels.

    Args:
        landmarks: means of keys.
        parts: landmarks of a chunk, a power of two.
        kind: how the details are stored: "model", "int8" or "int4".
        dtype: the model's.
    """
    batch, heads, count, dim = landmarks.shape
    chunked = landmarks.astype(jnp.float32).reshape(batch, heads, count // parts, parts, dim)
    rows = hadamard(chunked.swapaxes(3, 4) / parts).swapaxes(3, 4)
    means = store_landmarks(rows[:, :, :, 0], mean_kind(kind), dtype)
    details = store_landmarks(rows[:, :, :, 1:], kind, dtype)
    return Levels(means, jax.tree.map(lambda x: x.reshape(*x.shape[:3], x.shape[3] * x.shape[4]), details))


def stored_spread(find: Callable[[int], Float[Array, "B h _"]], kind: Landmarks, parts: int, dtype: Any) -> Any:
    """Spreads as they are stored: of landmarks, or of the chunks and of their landmarks; None if no score uses them.

    Args:
        find: gives the float32 spreads [B, h, n * m] of m landmarks a chunk.
        kind: how landmarks are stored.
        parts: landmarks of a chunk.
        dtype: the model's.
    """
    if kind.order == 1:
        return None
    narrow = scale_dtype(dtype)

    def stored(parts: int, width: int) -> Array:
        spread = jnp.minimum(find(parts), float(jnp.finfo(narrow).max)).astype(narrow)
        return spread.reshape(*spread.shape[:2], spread.shape[2] // width, width)

    return stored(parts, 1) if kind.levels == 1 else (stored(1, 1), stored(parts, parts))


def mean_kind(kind: str) -> str:
    """How means are stored where details are stored as `kind`."""
    return "int8" if kind == "int4" else kind


def hadamard(x: Float[Array, "*rows s"]) -> Float[Array, "*rows s"]:
    """Hadamard transform over the last axis, whose size s is a power of two; s times its own inverse.

    The first number is the sum. The transform is done by additions: a GPU would round a product of matrices to TF32,
    and a CPU takes ten times as long for sums of products.
    """
    half = x.shape[-1] // 2
    if half == 0:
        return x
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([hadamard(first + second), hadamard(first - second)], axis=-1)


# Reading


def first_level(landmarks: StoredLandmarks) -> Array | Scaled:
    """The part of landmarks that every query reads."""
    return landmarks.means if isinstance(landmarks, Levels) else landmarks


def first_spread(spread: Any) -> Array | None:
    """The part of spreads that every query reads."""
    return spread[0] if isinstance(spread, tuple) else spread


def first_logits(
    q: Float[Array, "B T h_q d"], marks: Marks, scale: float
) -> tuple[Float[Array, "B h_kv group T m"], int]:
    """`landmark_logits` of the first level, and how many of them a chunk has."""
    landmarks = first_level(marks.landmarks)
    parts = first_rows(landmarks).shape[2] // max(marks.open.shape[3], 1)
    is_open = jnp.repeat(marks.open, parts, axis=3)
    return landmark_logits(q, landmarks, is_open, scale, first_spread(marks.spread)), parts


def marks_at(marks: Sequence[Marks], ids: Int[Array, "B h_kv k"]) -> tuple[Levels, Array | None]:
    """Both levels of chunks ids, and the spread of their landmarks; ids past the first chunks mean later ones."""
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
    """Scores of all landmarks of chosen chunks before the softmax.

    Args:
        q: queries after RoPE [B, T, h_q, d].
        near: levels of Q sets of m chunks [B, h_kv, Q * m, ...].
        spread: of their landmarks [B, h_kv, Q * m, s]; if given, half the variance of the products is added.
        sets: Q; each set is scored by its own query, or by all queries if there is one set.
        scale: factor on the products.

    Returns:
        float32 [B, h_kv, group, T, m * s].
    """
    batch, heads, rows, _ = first_rows(near.means).shape
    count, parts = rows // sets, near.parts
    grouped = group_queries(q, heads)
    group, length = grouped.shape[2:4]
    asking = grouped.reshape(batch, heads, 1, group * length, -1) if sets == 1 else grouped.transpose(0, 1, 3, 2, 4)
    asking = asking.reshape(batch, heads * sets, -1, q.shape[3])

    def products(level: Array | Scaled, rows: int) -> Array:
        """With each of the rows of a chunk, [B, h_kv * Q, R, m, rows]."""
        shape = (batch, heads * sets, count * rows)
        level = jax.tree.map(lambda x: x.reshape(*shape, x.shape[3] // rows), level)
        logits = jax.lax.platform_dependent(asking, level, cpu=landmark_products, default=gathered_products)
        return logits.reshape(*asking.shape[:3], count, rows)

    transformed = scale * jnp.concatenate([products(near.means, 1), products(near.details, parts - 1)], axis=4)
    logits = hadamard(transformed)
    if spread is not None:
        spread = spread.reshape(batch, heads * sets, count * parts, 1)
        logits += half_variance(asking, spread, scale).reshape(logits.shape)
    logits = logits.reshape(batch, heads, sets, -1, count * parts)
    if sets == 1:
        return logits.reshape(batch, heads, group, length, count * parts)
    return logits.transpose(0, 1, 3, 2, 4)


def first_rows(landmarks: Array | Scaled) -> Array:
    """An array with a row for each landmark."""
    return landmarks.codes if isinstance(landmarks, Scaled) else landmarks


def gathered_products(rows: Float[Array, "B h R d"], landmarks: Array | Scaled) -> Float[Array, "B h R n"]:
    """`landmark_products` of few rows with gathered landmarks, for a GPU.

    The products are sums: XLA reads the landmarks where they lie. For a product of matrices it would copy them first.
    """

    def summed(rows: Array, numbers: Array) -> Array:
        return (rows[:, :, :, None].astype(jnp.float32) * numbers[:, :, None].astype(jnp.float32)).sum(axis=4)

    if not isinstance(landmarks, Scaled):
        return summed(rows, landmarks)
    width = landmarks.codes.shape[3]
    bits = 8 * width // max(rows.shape[3], 1)
    total = jnp.zeros((), jnp.float32)
    for place in range(8 // bits):
        numbers = signed_at(landmarks.codes, place, bits)
        total += summed(rows[..., place * width : (place + 1) * width], numbers)
    return total * landmarks.scale.astype(jnp.float32)[:, :, None, :, 0]
