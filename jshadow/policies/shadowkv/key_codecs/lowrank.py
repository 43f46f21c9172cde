"""ShadowKV's own code (arXiv 2410.21465, section 4.1): the leading directions of the keys in the model's dtype."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.ops.layout import fit_tokens
from jshadow.policies.shadowkv.key_codecs import factorise as lowrank
from jshadow.policies.shadowkv.key_codecs.base import KeyCode, KeyCodec, Sizes


def usual_rank(columns: int) -> int:
    """The paper's share of the key columns: 160 of every 1024, in multiples of 8."""
    return min(columns, max(8, round(columns * 160 / 1024 / 8) * 8))


@dataclasses.dataclass(frozen=True)
class LowRank(KeyCodec):
    """left [B, n, c * rank] times right [B, h_kv, rank, d], both in the model's dtype.

    Attributes:
        rank: columns of the factors.
    """

    rank: int

    name = "lowrank"
    compiled = True
    weighed = True

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        """The two factors."""
        dtype = jnp.dtype(sizes.dtype)
        left: Any = jax.ShapeDtypeStruct((batch, units, chunk * self.rank), dtype)
        return KeyCode(left, jax.ShapeDtypeStruct((batch, sizes.heads, self.rank, sizes.dim), dtype))

    def encode(
        self, k_pre: Array, lengths: Array, units: int, chunk: int, weights: Array | None = None
    ) -> KeyCode:  # fmt: skip
        """By the Gram matrix."""
        left, right = lowrank.key_factors(k_pre, lengths, self.rank, weights)
        left = fit_tokens(left, units * chunk).reshape(left.shape[0], units, chunk * self.rank)
        return KeyCode(left, right.astype(k_pre.dtype))

    def project(self, k_pre: Array, right: Any, weights: Array | None = None) -> Array:
        """On the prompt's basis."""
        return lowrank.project_keys(k_pre, right, weights)[:, :, None]

    def expand(self, rows: Array, right: Any) -> Array:
        """The product."""
        if rows.shape[1] == 1:
            return jnp.einsum("bsr,bhrd->bhsd", rows[:, 0], right, preferred_element_type=jnp.float32)
        return jnp.einsum("bhtr,bhrd->bhtd", rows, right, precision=lowrank.EXACT, preferred_element_type=jnp.float32)

    def operands(self, right: Any) -> dict[str, Any]:
        """The other factor."""
        return {"right": right}

    def products(self, sizes: Sizes) -> int:
        """One for each column of the factors."""
        return self.rank

    def expand_bytes(self, sizes: Sizes) -> int:
        """The left row."""
        return self.rank * jnp.dtype(sizes.dtype).itemsize

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Left rows in the order of the prompt, the Gram matrix and its eigenvectors, float32 copies of a block."""
        columns, item = sizes.columns, jnp.dtype(sizes.dtype).itemsize
        return 2 * tokens * self.rank * item + 4 * (6 * columns * columns + 4 * block * columns)
