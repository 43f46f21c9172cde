"""The op that scores chunks of keys by their landmarks, so that the best chunks can be selected.

A chunk is a run of neighboring tokens. A landmark is the mean key of a chunk, or of a part of a chunk.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.choose import run
from pallas_kernels.chunk_scores import kernel, reference
from pallas_kernels.chunk_scores.operands import Chunks, check


def chunk_scores(
    q: jax.Array,
    landmarks: jax.Array,
    candidates: jax.Array,
    *,
    scale: float,
    landmark_scale: jax.Array | None = None,
    spread: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Score each chunk of keys for each query position and KV head.

    For each query head, a softmax of scale * q . landmark runs over the landmarks of all candidate chunks. Each of the
    n chunks has s landmarks, so there are m = n * s landmarks. The probabilities of a chunk's landmarks are added. The
    score is the maximum of these sums over the query heads of the KV head.

    With a spread, (scale * |q| * spread)**2 / 2 is added to each scaled product. This is half the variance of the
    scaled products of q with the keys that the landmark stands for, if these keys vary equally in all directions.

    Products and softmax are float32 and are never rounded to TF32, so that every machine selects the same chunks.
    For packed landmarks, the GPU kernel computes the products with whole numbers, which is more exact than float32.

    Args:
        q: floating [B, T, h_q, d], where h_q is a multiple of h_kv.
        landmarks: floating [B, h_kv, m, d]. The s landmarks of a chunk are neighbors. With landmark_scale they are
            packed instead: uint8 [B, h_kv, m, d * bits / 8], two's complement codes of 8 or 4 bits in the layout of
            `pallas_kernels.bits`.
        candidates: bool [B, h_kv, n], the chunks that are scored.
        landmark_scale: floating [B, h_kv, m, 1], the step of each landmark's codes.
        spread: floating [B, h_kv, m, 1], the root mean square difference of the keys from their landmark.

    Returns:
        float32 [B, h_kv, T, n]. Chunks that are not candidates have -1.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    chunks = Chunks(landmarks, candidates, landmark_scale, spread)
    check(q, chunks)
    if candidates.shape[2] == 0:
        return jnp.zeros((q.shape[0], landmarks.shape[1], q.shape[1], 0), jnp.float32)
    return run(
        implementation,
        functools.partial(kernel.chunk_scores, scale=float(scale)),
        functools.partial(reference.chunk_scores, scale=float(scale)),
        q,
        chunks,
    )
