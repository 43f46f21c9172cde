"""How well each chunk matches a query, by the landmarks of the chunk."""

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
    """Softmax of scale * q . landmark over the candidates for each query head, then the maximum over the group.

    If a chunk has s landmarks, m = n * s, the softmax is over the landmarks of all candidates, and the score of a chunk
    is the sum over its landmarks. With a spread, (scale * |q| * spread)**2 / 2 is added to each product: half the
    variance of the products with the keys that the landmark is the mean of, if these spread alike in all directions.
    Products and softmax are float32, never rounded to TF32: the choice of chunks must not depend on the machine.

    Args:
        q: [B, T, h_q, d], h_q a multiple of h_kv.
        landmarks: [B, h_kv, m, d], the landmarks of a chunk side by side; or, with landmark_scale, uint8
            [B, h_kv, m, d * bits / 8]: two's complement codes of 8 or 4 bits in the layout of `pallas_kernels.bits`.
        candidates: bool [B, h_kv, n].
        scale: factor on the products.
        landmark_scale: the step of each landmark's codes [B, h_kv, m, 1], floating.
        spread: root mean square difference of the keys from their landmark [B, h_kv, m, 1], floating.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        float32 [B, h_kv, T, n]; -1 where a chunk is no candidate.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
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
