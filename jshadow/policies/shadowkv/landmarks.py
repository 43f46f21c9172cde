"""Chunk landmarks: how a chunk of keys is summed up, and how a query scores chunks by them (ShadowKV, section 4)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jshadow.ops.attention import MASKED, group_queries
from jshadow.ops.packing import ROW_BITS, Scaled, quantise_rows
from jshadow.policies.shadowkv.key_codecs.factorise import BLOCK
from pallas_kernels import half_variance, whole_products

EXACT = lax.Precision.HIGHEST  # choices must not hang on a GPU rounding float32 products to TF32


def chunk_landmarks(
    keys: Float[Array, "B h n c d"], parts: int = 1
) -> tuple[Float[Array, "B h m d"], Float[Array, "B h n"]]:  # fmt: skip
    """Landmarks and how badly they represent their chunk.

    Args:
        keys: post-RoPE keys [B, h, n, c, d].
        parts: landmarks of a chunk, each of c / parts tokens in a row.

    Returns:
        float32 means [B, h, n * parts, d] and least cosine between a key of a chunk and its mean [B, h, n]: 1 where
        each key is its own.
    """
    batch, heads, count, size, dim = keys.shape
    keys = keys.astype(jnp.float32).reshape(batch, heads, count * parts, size // parts, dim)
    mean = keys.mean(axis=3)
    if size == parts:  # what rounding leaves of the ones must choose no outliers
        return mean, jnp.ones((batch, heads, count), jnp.float32)
    length = jnp.linalg.norm(keys, axis=-1) * jnp.linalg.norm(mean, axis=-1)[..., None]
    cosine = jnp.einsum("bhncd,bhnd->bhnc", keys, mean, precision=EXACT) / jnp.maximum(
        length, jnp.finfo(jnp.float32).tiny
    )
    return mean, cosine.reshape(batch, heads, count, size).min(axis=-1)


def chunk_spread(keys: Float[Array, "B h n c d"], parts: int = 1) -> Float[Array, "B h m"]:
    """Root mean square of the numbers by which keys differ from their landmark.

    Args:
        keys: post-RoPE keys [B, h, n, c, d].
        parts: landmarks of a chunk, each of c / parts tokens in a row.

    Returns:
        float32 [B, h, n * parts].
    """
    batch, heads, count, size, dim = keys.shape
    keys = keys.astype(jnp.float32).reshape(batch, heads, count * parts, size // parts, dim)
    return jnp.sqrt(((keys - keys.mean(axis=3, keepdims=True)) ** 2).mean(axis=(3, 4)))


def prompt_landmarks(
    keys: Float[Array, "B S h d"], chunks: int, size: int, block: int = BLOCK, parts: int = 1
) -> tuple[Float[Array, "B h m d"], Float[Array, "B h {chunks}"]]:
    """`chunk_landmarks` of a prompt's first chunks, a float32 copy of at most `block` tokens at once.

    Args:
        keys: post-RoPE keys [B, S, h, d].
        chunks: chunks to return; those past the prompt are zero.
        size: tokens of a chunk.
        block: tokens summed up at once, if a chunk is no larger.
        parts: landmarks of a chunk.

    Returns:
        means [B, h, chunks * parts, d] in the dtype of the keys, and float32 least cosines.
    """
    batch, _, heads, dim = keys.shape
    means = jnp.zeros((batch, heads, chunks * parts, dim), keys.dtype)
    worst = jnp.zeros((batch, heads, chunks), jnp.float32)
    return over_chunks(lambda rows: chunk_landmarks(rows, parts), keys, chunks, size, block, (means, worst))


def prompt_spread(
    keys: Float[Array, "B S h d"], chunks: int, size: int, block: int = BLOCK, parts: int = 1
) -> Float[Array, "B h m"]:
    """`chunk_spread` of a prompt's first chunks; arguments as `prompt_landmarks` has them. Float32."""
    none = jnp.zeros((keys.shape[0], keys.shape[2], chunks * parts), jnp.float32)
    return over_chunks(lambda rows: (chunk_spread(rows, parts),), keys, chunks, size, block, (none,))[0]


def over_chunks(
    summary: Callable[[Array], tuple[Array, ...]], keys: Array, chunks: int, size: int, block: int,
    none: tuple[Array, ...],
) -> Any:  # fmt: skip
    """What `summary` makes of a prompt's chunks [B, h, some, size, d], a block after the other, in arrays like none."""
    batch, length, heads, dim = keys.shape
    there = min(chunks, length // size)
    if there == 0:
        return none
    count = min(there, max(1, block // size))

    def sum_up(index: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        first = jnp.minimum(index * count, there - count)  # an overlap is written twice, with the same numbers
        rows = lax.dynamic_slice_in_dim(keys, first * size, count * size, axis=1)
        rows = rows.reshape(batch, count, size, heads, dim).transpose(0, 3, 1, 2, 4)
        return tuple(
            lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), first * (new.shape[2] // count), axis=2)
            for old, new in zip(done, summary(rows), strict=True)
        )

    return lax.fori_loop(0, -(-there // count), sum_up, none)


def keep_landmarks(means: Float[Array, "B h n d"], kind: str, dtype: Any) -> Array | Scaled:
    """Landmarks as they are kept: "model" in dtype, "int8" or "int4" with a scale for each."""
    return means.astype(dtype) if kind == "model" else quantise_rows(means, ROW_BITS[kind], dtype)


def landmark_logits(
    q: Float[Array, "B T h_q d"], landmarks: Float[Array, "B h_kv n d"] | Scaled,
    candidates: Bool[Array, "B h_kv #T n"], scale: float, spread: Float[Array, "B h_kv n 1"] | None = None,
) -> Float[Array, "B h_kv group T n"]:  # fmt: skip
    """Float32 products of queries [B, T, h_q, d] and landmarks [B, h_kv, n, d], and half the variance of those with the
    keys behind where there is a spread; MASKED where no candidate.
    """
    grouped = group_queries(q, candidates.shape[1])
    # One axis of rows: over two, XLA's CPU backend takes five times as long.
    rows = grouped.reshape(*grouped.shape[:2], -1, q.shape[3])
    logits = scale * landmark_products(rows, landmarks)
    if spread is not None:
        logits += half_variance(rows, spread, scale)
    return jnp.where(candidates[:, :, None], logits.reshape(*grouped.shape[:4], candidates.shape[3]), MASKED)


def landmark_products(
    rows: Float[Array, "B h R d"], landmarks: Float[Array, "B h n d"] | Scaled
) -> Float[Array, "B h R n"]:  # fmt: skip
    """Float32 products of rows and landmarks as they are kept, each head its own."""
    if isinstance(landmarks, Scaled):
        bits = 8 * landmarks.codes.shape[3] // max(rows.shape[3], 1)
        products = whole_products(rows, landmarks.codes, bits)
        return products * landmarks.scale.astype(jnp.float32)[:, :, None, :, 0]
    return jnp.einsum("bhrd,bhnd->bhrn", rows, landmarks, precision=EXACT, preferred_element_type=jnp.float32)


def chunk_scores(
    logits: Float[Array, "B h_kv group T m"], valid: Bool[Array, "B T"], shared: bool, dtype: str = "float32",
    parts: int = 1,
) -> Float[Array, "B h_kv Q n"]:  # fmt: skip
    """Score of each chunk: softmax over the candidates per query head, then the maximum over the group.

    Args:
        logits: from `landmark_logits`.
        valid: bool [B, T], queries that count.
        shared: sum over the queries before the maximum: one set of scores (Q = 1) for all of them.
        dtype: to which the softmax is rounded, as the published code rounds to bfloat16.
        parts: landmarks of a chunk, whose mass is added up; m = n * parts.

    Returns:
        float32 [B, h_kv, Q, n], Q = T unless shared; -1 where not a candidate.
    """
    there = logits > MASKED
    mass = jnp.where(there & valid[:, None, None, :, None], jax.nn.softmax(logits, axis=-1), 0.0)
    mass = lax.reduce_precision(mass, *MANTISSA[dtype])
    if parts > 1:
        mass = mass.reshape(*mass.shape[:4], mass.shape[4] // parts, parts).sum(axis=-1)
        there = there[..., ::parts]
    if shared:
        mass, there = mass.sum(axis=3, keepdims=True), there.any(axis=3, keepdims=True)
    return jnp.where(there[:, :, 0], mass.max(axis=2), -1.0)


MANTISSA = {"float32": (8, 23), "bfloat16": (8, 7)}  # exponent and mantissa bits
