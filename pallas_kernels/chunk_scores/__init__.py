"""How much a query wants each chunk, by the chunk's landmarks."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape
from pallas_kernels.choose import run
from pallas_kernels.chunk_scores import pallas, parts, reference


def chunk_scores(
    q: jax.Array, landmarks: jax.Array, candidates: jax.Array, *, scale: float,
    landmark_scale: jax.Array | None = None, spread: jax.Array | None = None, implementation: str = "auto",
) -> jax.Array:  # fmt: skip
    """Softmax of scale * q . landmark over the candidates for each query head, then the maximum over the group.

    Of s landmarks a chunk, m = n * s, the softmax is over those of all candidates, and a chunk's score is their sum.
    With a spread, (scale * |q| * spread)**2 / 2 is added to the products: half the variance of those with the keys that
    a landmark is the mean of, were they spread alike in all directions.
    Products and softmax are float32, not rounded to TF32: which chunks win must not hang on the machine.

    Args:
        q: [B, T, h_q, d], h_q a multiple of h_kv.
        landmarks: [B, h_kv, m, d], a chunk's side by side; or, with landmark_scale, uint8 [B, h_kv, m, d * bits / 8]:
            two's complement codes of 8 or 4 bits as `pallas_kernels.codes` packs them.
        candidates: bool [B, h_kv, n].
        scale: factor on the products.
        landmark_scale: the step of each landmark [B, h_kv, m, 1], floating.
        spread: root mean square of the numbers by which keys differ from their landmark [B, h_kv, m, 1], floating.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        float32 [B, h_kv, T, n]; -1 where not a candidate.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    expect_shape("q", q, ("B", "T", "h_q", "d"))
    expect_dtype("q", q, jnp.floating)
    check_landmarks(q, landmarks, landmark_scale)
    expect_shape("candidates", candidates, (*landmarks.shape[:2], "n"))
    expect_groups(q.shape[2], landmarks.shape[1])
    expect_dtype("candidates", candidates, jnp.bool_)
    if spread is not None:
        expect_shape("spread", spread, (*landmarks.shape[:3], 1))
        expect_dtype("spread", spread, jnp.floating)
    rows, chunks = landmarks.shape[2], candidates.shape[2]
    if (rows > 0) != (chunks > 0) or (chunks and rows % chunks):
        raise ValueError(f"landmarks must have s for each of the {chunks} candidates, got {rows} landmarks")
    if chunks == 0:
        return jnp.zeros((q.shape[0], landmarks.shape[1], q.shape[1], 0), jnp.float32)
    if landmark_scale is None and spread is None and rows == chunks:
        return run(
            implementation,
            functools.partial(pallas.chunk_scores, scale=float(scale)),
            functools.partial(reference.chunk_scores, scale=float(scale)),
            q, landmarks, candidates,
        )  # fmt: skip
    return run(
        implementation,
        functools.partial(parts.chunk_scores, scale=float(scale)),
        functools.partial(reference.chunk_scores, scale=float(scale)),
        q, landmarks, candidates, landmark_scale, spread,
    )  # fmt: skip


def check_landmarks(q: jax.Array, landmarks: jax.Array, landmark_scale: jax.Array | None) -> None:
    """Check the landmarks of queries that are right.

    Raises:
        ValueError: a shape or a dtype is wrong.
    """
    dim = q.shape[3]
    if landmark_scale is None:
        expect_shape("landmarks", landmarks, (q.shape[0], "h_kv", "m", dim))
        expect_dtype("landmarks", landmarks, jnp.floating)
        return
    expect_shape("landmarks", landmarks, (q.shape[0], "h_kv", "m", "d * bits / 8"))
    expect_dtype("landmarks", landmarks, jnp.uint8)
    if landmarks.shape[3] not in (dim, dim / 2):
        raise ValueError(f"landmarks must have 8 or 4 bits for each of {dim} numbers, got {landmarks.shape[3]} bytes")
    expect_shape("landmark_scale", landmark_scale, (*landmarks.shape[:3], 1))
    expect_dtype("landmark_scale", landmark_scale, jnp.floating)
