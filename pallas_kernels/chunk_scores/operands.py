"""The arrays that chunk_scores reads, and the checks of their shapes and dtypes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_groups, expect_shape


class Chunks(NamedTuple):
    """The landmarks of n chunks. Each chunk has s landmarks, so there are m = n * s.

    Attributes:
        landmarks: floating [B, h_kv, m, d]. The landmarks of a chunk are neighbors. With a scale they are packed
            instead: uint8 [B, h_kv, m, d * bits / 8], two's complement codes in the layout of `pallas_kernels.bits`.
        candidates: bool [B, h_kv, n], the chunks that are scored.
        scale: floating [B, h_kv, m, 1], the step of each landmark's codes, or None.
        spread: floating [B, h_kv, m, 1], the root mean square difference of the keys from their landmark, or None.
    """

    landmarks: jax.Array
    candidates: jax.Array
    scale: jax.Array | None = None
    spread: jax.Array | None = None

    @property
    def parts(self) -> int:
        """Number of landmarks of a chunk. There must be at least one chunk."""
        return self.landmarks.shape[2] // self.candidates.shape[2]

    def bits(self, dim: int) -> int | None:
        """Return the bits of a packed landmark number if heads are `dim` wide, or None if landmarks are not packed."""
        return None if self.scale is None else 8 * self.landmarks.shape[3] // dim


def check(q: jax.Array, chunks: Chunks) -> None:
    """Check the shapes and dtypes of all arrays.

    Raises:
        ValueError: a shape or a dtype is wrong.
    """
    expect_shape("q", q, ("B", "T", "h_q", "d"))
    expect_dtype("q", q, jnp.floating)
    check_landmarks(q, chunks)
    landmarks, candidates, _, spread = chunks
    expect_shape("candidates", candidates, (*landmarks.shape[:2], "n"))
    expect_groups(q.shape[2], landmarks.shape[1])
    expect_dtype("candidates", candidates, jnp.bool_)
    if spread is not None:
        expect_shape("spread", spread, (*landmarks.shape[:3], 1))
        expect_dtype("spread", spread, jnp.floating)
    rows, count = landmarks.shape[2], candidates.shape[2]
    if (rows > 0) != (count > 0) or (count and rows % count):
        raise ValueError(f"landmarks must be a multiple of the {count} candidates, got {rows} landmarks")


def check_landmarks(q: jax.Array, chunks: Chunks) -> None:
    """Check the landmarks and their scale. The queries must be checked before.

    Raises:
        ValueError: a shape or a dtype is wrong.
    """
    dim, landmarks, scale = q.shape[3], chunks.landmarks, chunks.scale
    if scale is None:
        expect_shape("landmarks", landmarks, (q.shape[0], "h_kv", "m", dim))
        expect_dtype("landmarks", landmarks, jnp.floating)
        return
    expect_shape("landmarks", landmarks, (q.shape[0], "h_kv", "m", "d * bits / 8"))
    expect_dtype("landmarks", landmarks, jnp.uint8)
    if landmarks.shape[3] not in (dim, dim / 2):
        raise ValueError(f"landmarks must have 8 or 4 bits for each of {dim} numbers, got {landmarks.shape[3]} bytes")
    expect_shape("landmark_scale", scale, (*landmarks.shape[:3], 1))
    expect_dtype("landmark_scale", scale, jnp.floating)
