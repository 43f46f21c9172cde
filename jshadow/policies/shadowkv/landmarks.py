"""Landmarks: summaries of keys by which chunks are selected (ShadowKV, section 4), in one level or two.

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
from jax import Array, lax
from jaxtyping import Bool, Float, Int

import pallas_kernels
from jshadow.ops.attention import MASKED, group_queries
from jshadow.ops.layout import token_slice, write_rows
from jshadow.ops.packing import ROW_BITS, Scaled, quantize_rows, scale_dtype
from jshadow.policies.shadowkv.key_codecs.base import BLOCK, chosen_rows
from jshadow.policies.shadowkv.settings import Landmarks
from pallas_kernels import hadamard, half_variance

EXACT = lax.Precision.HIGHEST  # otherwise a GPU rounds float32 products to TF32, and may choose other chunks


def chunk_landmarks(
    keys: Float[Array, "B h n c d"], parts: int = 1
) -> tuple[Float[Array, "B h m d"], Float[Array, "B h n"]]:
    """Return the landmarks of chunks, float32, and how well they represent the chunks.

    Each of the `parts` landmarks of a chunk is the mean of c / parts consecutive keys after RoPE. The second result is
    the least cosine between a key of a chunk and its landmark. It is 1 if each key has its own landmark.
    """
    batch, heads, count, size, dim = keys.shape
    keys = keys.astype(jnp.float32).reshape(batch, heads, count * parts, size // parts, dim)
    mean = keys.mean(axis=3)
    if size == parts:  # computed cosines would differ from 1 by rounding, and rounding must not choose outliers
        return mean, jnp.ones((batch, heads, count), jnp.float32)
    length = jnp.linalg.norm(keys, axis=-1) * jnp.linalg.norm(mean, axis=-1)[..., None]
    cosine = jnp.einsum("bhncd,bhnd->bhnc", keys, mean, precision=EXACT) / jnp.maximum(
        length, jnp.finfo(jnp.float32).tiny
    )
    return mean, cosine.reshape(batch, heads, count, size).min(axis=-1)


def chunk_spread(keys: Float[Array, "B h n c d"], parts: int = 1) -> Float[Array, "B h m"]:
    """Return the root mean square of the differences between keys after RoPE and their landmark, float32.

    `parts` is as in `chunk_landmarks`.
    """
    batch, heads, count, size, dim = keys.shape
    keys = keys.astype(jnp.float32).reshape(batch, heads, count * parts, size // parts, dim)
    return jnp.sqrt(((keys - keys.mean(axis=3, keepdims=True)) ** 2).mean(axis=(3, 4)))


def prompt_landmarks(
    keys: Float[Array, "B S h d"], chunks: int, size: int, block: int = BLOCK, parts: int = 1
) -> tuple[Float[Array, "B h m d"], Float[Array, "B h {chunks}"]]:
    """Return the `chunk_landmarks` of a prompt's first `chunks` chunks of `size` tokens, the means in the keys' dtype.

    Chunks after the end of the prompt are zero. At most `block` tokens have a float32 copy at once, but at least one
    chunk.
    """
    batch, _, heads, dim = keys.shape
    means = jnp.zeros((batch, heads, chunks * parts, dim), keys.dtype)
    worst = jnp.zeros((batch, heads, chunks), jnp.float32)
    return _over_chunks(lambda rows: chunk_landmarks(rows, parts), keys, chunks, size, block, (means, worst))


def prompt_spread(
    keys: Float[Array, "B S h d"], chunks: int, size: int, block: int = BLOCK, parts: int = 1
) -> Float[Array, "B h m"]:
    """Return the `chunk_spread` of a prompt's first chunks, float32. The arguments are those of `prompt_landmarks`."""
    empty = jnp.zeros((keys.shape[0], keys.shape[2], chunks * parts), jnp.float32)
    return _over_chunks(lambda rows: (chunk_spread(rows, parts),), keys, chunks, size, block, (empty,))[0]


def _over_chunks(
    summary: Callable[[Array], tuple[Array, ...]],
    keys: Array,
    chunks: int,
    size: int,
    block: int,
    empty: tuple[Array, ...],
) -> Any:
    """Summarize a prompt's chunks block by block, and return the arrays `empty` with the results.

    `summary` maps chunks [B, h, m, size, d] to arrays in which axis 2 is m or a multiple of it. `empty` keeps its
    values
    for chunks after the end of the prompt. The other arguments are those of `prompt_landmarks`.
    """
    batch, length, heads, dim = keys.shape
    there = min(chunks, length // size)
    if there == 0:
        return empty
    count = min(there, max(1, block // size))

    def sum_up(index: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        first = jnp.minimum(index * count, there - count)  # overlapping chunks are written twice with equal results
        rows = token_slice(keys, first * size, count * size)
        rows = rows.reshape(batch, count, size, heads, dim).transpose(0, 3, 1, 2, 4)
        return tuple(
            lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), first * (new.shape[2] // count), axis=2)
            for old, new in zip(done, summary(rows), strict=True)
        )

    return lax.fori_loop(0, -(-there // count), sum_up, empty)


def store_landmarks(means: Float[Array, "B h n d"], kind: str, dtype: Any) -> Array | Scaled:
    """Convert landmarks to the stored form.

    The kind "model" stores them in `dtype`. "int8" and "int4" store them with a scale for each landmark.
    """
    return means.astype(dtype) if kind == "model" else quantize_rows(means, ROW_BITS[kind], dtype)


def landmark_logits(
    q: Float[Array, "B T h_q d"],
    landmarks: Float[Array, "B h_kv n d"] | Scaled,
    candidates: Bool[Array, "B h_kv #T n"],
    scale: float,
    spread: Float[Array, "B h_kv n 1"] | None = None,
) -> Float[Array, "B h_kv group T n"]:
    """Compute the logits of stored landmarks, float32. They are MASKED where a landmark is not a candidate.

    `scale` is the factor on the products of queries after RoPE and landmarks. With `spread`, half the variance of the
    products of a landmark's keys with the query is added.
    """
    grouped = group_queries(q, candidates.shape[1])
    # All queries are in one axis, because with two axes XLA's CPU backend takes five times as long.
    rows = grouped.reshape(*grouped.shape[:2], -1, q.shape[3])
    logits = scale * landmark_products(rows, landmarks)
    if spread is not None:
        logits += half_variance(rows, spread, scale)
    return jnp.where(candidates[:, :, None], logits.reshape(*grouped.shape[:4], candidates.shape[3]), MASKED)


def landmark_products(
    rows: Float[Array, "B h R d"], landmarks: Float[Array, "B h n d"] | Scaled
) -> Float[Array, "B h R n"]:
    """Return the products of rows with the landmarks of their head, float32. Landmarks are in the stored form."""
    numbers, step = (landmarks.codes, landmarks.scale) if isinstance(landmarks, Scaled) else (landmarks, None)
    return pallas_kernels.landmark_products(rows, numbers, step)


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
    """Convert landmarks, of which the `parts` (a power of two) of a chunk lie side by side, to their two levels.

    `kind` tells how the details are stored: "model", "int8" or "int4".
    """
    batch, heads, count, dim = landmarks.shape
    chunked = landmarks.astype(jnp.float32).reshape(batch, heads, count // parts, parts, dim)
    rows = hadamard(chunked.swapaxes(3, 4) / parts).swapaxes(3, 4)
    means = store_landmarks(rows[:, :, :, 0], mean_kind(kind), dtype)
    details = store_landmarks(rows[:, :, :, 1:], kind, dtype)
    return Levels(means, jax.tree.map(lambda x: x.reshape(*x.shape[:3], x.shape[3] * x.shape[4]), details))


def stored_spread(find: Callable[[int], Float[Array, "B h _"]], kind: Landmarks, parts: int, dtype: Any) -> Any:
    """Convert spreads to the stored form of `ShadowFrozen.spread`. Return None if no score uses them.

    `find` maps a number m of landmarks in a chunk to their spreads, float32 [B, h, n * m].
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
    """Return the landmarks that every query reads: the means of the chunks if there are two levels, else all."""
    return landmarks.means if isinstance(landmarks, Levels) else landmarks


def first_spread(spread: Any) -> Array | None:
    """Return the spreads of the landmarks that every query reads, which are those of the first level."""
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
    """Compute the logits of all landmarks of the candidates, float32 [B, h_kv, group, T, m * s].

    `near` has the levels of `sets` sets of m chunks [B, h_kv, sets * m, ...], and `spread` the spreads of their
    landmarks,
    or None. Each set is scored by its own query, or by all queries if there is one set.
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

    `marks` are those of all later chunks, with `parts` rows of a chunk in axis 2, and `new` those of the chunks
    `number`,
    int32 [B, m]. `leaves` tells which of these leave the window, bool [B, m].
    """
    places = (number[..., None] * parts + jnp.arange(parts)).reshape(number.shape[0], -1)
    valid = jnp.repeat(leaves, parts, axis=1)

    def write(old: Array, new: Array) -> Array:
        return write_rows(old, new.transpose(0, 2, 1, 3), places, valid)

    return jax.tree.map(write, marks, new)
