"""How much a query wants each chunk, by the chunk's landmark."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape
from pallas_kernels.choose import run
from pallas_kernels.chunk_scores import pallas, reference


def chunk_scores(
    q: jax.Array, landmarks: jax.Array, candidates: jax.Array, *, scale: float, implementation: str = "auto"
) -> jax.Array:
    """Softmax of scale * q . landmark over the candidates for each query head, then the maximum over the group.

    Products and softmax are float32, not rounded to TF32: which chunks win must not hang on the machine.

    Args:
        q: [B, T, h_q, d], h_q a multiple of h_kv.
        landmarks: [B, h_kv, n, d].
        candidates: bool [B, h_kv, n].
        scale: factor on the products.
        implementation: "auto", "xla", "pallas" or "interpret".

    Returns:
        float32 [B, h_kv, T, n]; -1 where not a candidate.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: the kernel was asked for by name and cannot do this.
    """
    expect_shape("q", q, ("B", "T", "h_q", "d"))
    expect_shape("landmarks", landmarks, (q.shape[0], "h_kv", "n", q.shape[3]))
    expect_shape("candidates", candidates, landmarks.shape[:3])
    expect_groups(q.shape[2], landmarks.shape[1])
    expect_dtype("q", q, jnp.floating)
    expect_dtype("landmarks", landmarks, jnp.floating)
    expect_dtype("candidates", candidates, jnp.bool_)
    if landmarks.shape[2] == 0:
        return jnp.zeros((q.shape[0], landmarks.shape[1], q.shape[1], 0), jnp.float32)
    return run(
        implementation,
        functools.partial(pallas.chunk_scores, scale=float(scale)),
        functools.partial(reference.chunk_scores, scale=float(scale)),
        q, landmarks, candidates,
    )  # fmt: skip
