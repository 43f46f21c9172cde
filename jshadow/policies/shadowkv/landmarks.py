"""Landmarks: summaries of chunks of keys, and the logits that a query gives them (ShadowKV, section 4)."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

import pallas_kernels
from jshadow.ops.attention import MASKED, group_queries
from jshadow.ops.layout import token_slice
from jshadow.ops.packing import ROW_BITS, Scaled, quantize_rows
from jshadow.policies.shadowkv.key_codecs.base import BLOCK
from pallas_kernels import half_variance

EXACT = lax.Precision.HIGHEST  # otherwise a GPU rounds float32 products to TF32, and may choose other chunks


def chunk_landmarks(
    keys: Float[Array, "B h n c d"], parts: int = 1
) -> tuple[Float[Array, "B h m d"], Float[Array, "B h n"]]:
    """Compute the landmarks of chunks, and how well they represent the chunks.

    Args:
        keys: keys after RoPE [B, h, n, c, d].
        parts: number of landmarks of a chunk. Each is the mean of c / parts consecutive keys.

    Returns:
        The means, float32 [B, h, n * parts, d], and the least cosine between a key of a chunk and its landmark, float32
        [B, h, n]. The cosine is 1 if each key has its own landmark.
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
    """Compute the root mean square of the differences between keys and their landmark.

    Args:
        keys: keys after RoPE [B, h, n, c, d].
        parts: number of landmarks of a chunk. Each is the mean of c / parts consecutive keys.

    Returns:
        float32 [B, h, n * parts].
    """
    batch, heads, count, size, dim = keys.shape
    keys = keys.astype(jnp.float32).reshape(batch, heads, count * parts, size // parts, dim)
    return jnp.sqrt(((keys - keys.mean(axis=3, keepdims=True)) ** 2).mean(axis=(3, 4)))


def prompt_landmarks(
    keys: Float[Array, "B S h d"], chunks: int, size: int, block: int = BLOCK, parts: int = 1
) -> tuple[Float[Array, "B h m d"], Float[Array, "B h {chunks}"]]:
    """Compute the `chunk_landmarks` of a prompt's first chunks. At most `block` tokens have a float32 copy at once.

    Args:
        keys: keys after RoPE [B, S, h, d].
        chunks: number of chunks in the result. Those after the end of the prompt are zero.
        size: tokens in a chunk.
        block: number of tokens that are summarized at once, but at least one chunk.
        parts: number of landmarks of a chunk.

    Returns:
        The means [B, h, chunks * parts, d] in the dtype of the keys, and the least cosines, float32 [B, h, chunks].
    """
    batch, _, heads, dim = keys.shape
    means = jnp.zeros((batch, heads, chunks * parts, dim), keys.dtype)
    worst = jnp.zeros((batch, heads, chunks), jnp.float32)
    return over_chunks(lambda rows: chunk_landmarks(rows, parts), keys, chunks, size, block, (means, worst))


def prompt_spread(
    keys: Float[Array, "B S h d"], chunks: int, size: int, block: int = BLOCK, parts: int = 1
) -> Float[Array, "B h m"]:
    """Compute the `chunk_spread` of a prompt's first chunks, float32. The arguments are those of `prompt_landmarks`."""
    empty = jnp.zeros((keys.shape[0], keys.shape[2], chunks * parts), jnp.float32)
    return over_chunks(lambda rows: (chunk_spread(rows, parts),), keys, chunks, size, block, (empty,))[0]


def over_chunks(
    summary: Callable[[Array], tuple[Array, ...]],
    keys: Array,
    chunks: int,
    size: int,
    block: int,
    empty: tuple[Array, ...],
) -> Any:
    """Summarize a prompt's chunks block by block.

    Args:
        summary: maps chunks [B, h, m, size, d] to arrays in which axis 2 is m or a multiple of it.
        keys: the prompt's keys [B, S, h, d].
        chunks: maximum number of chunks to summarize.
        size: tokens in a chunk.
        block: tokens in a block, but at least one chunk.
        empty: arrays into which the results are written. They keep their values for chunks after the end of the prompt.

    Returns:
        The arrays `empty` with the results.
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

    Args:
        means: the landmarks, float32 [B, h, n, d].
        kind: "model" stores them in `dtype`. "int8" and "int4" store them with a scale for each landmark.
        dtype: the model's dtype.
    """
    return means.astype(dtype) if kind == "model" else quantize_rows(means, ROW_BITS[kind], dtype)


def landmark_logits(
    q: Float[Array, "B T h_q d"],
    landmarks: Float[Array, "B h_kv n d"] | Scaled,
    candidates: Bool[Array, "B h_kv #T n"],
    scale: float,
    spread: Float[Array, "B h_kv n 1"] | None = None,
) -> Float[Array, "B h_kv group T n"]:
    """Compute the logits of landmarks, float32. They are MASKED where a landmark is not a candidate.

    Args:
        q: queries after RoPE [B, T, h_q, d].
        landmarks: the landmarks in the stored form.
        candidates: which landmarks each query may choose, bool [B, h_kv, T, n], or [B, h_kv, 1, n] for all queries.
        scale: factor on the products of queries and landmarks.
        spread: the spreads of the landmarks, or None. If given, half the variance of the products of their keys with
            the query is added.
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
