"""The two feature maps (kernels) of LESS, phi of queries and psi of keys, and the sum of both kinds of attention.

phi(q) = |GELU(GELU(q A1) A2)|        psi(k) = |(s * GELU(GELU(k B1) B2)) (I + M)|
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class KernelSizes(NamedTuple):
    """The sizes of the kernels.

    Attributes:
        rank: number of features R, which is the number of rows of a KV head's state.
        hidden: width between the two layers of a kernel.
    """

    rank: int
    hidden: int

    def shapes(self, kv_heads: int, head_dim: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of one layer's arrays, by kernel and name.

        "phi" has A1 ("first") and A2 ("second"). "psi" has B1 ("first"), B2 ("second"), s ("scale") and M
        ("interaction").
        """
        phi: dict[str, tuple[int, ...]] = {
            "first": (kv_heads, head_dim, self.hidden),
            "second": (kv_heads, self.hidden, self.rank),
        }
        scale, interaction = (kv_heads, self.rank), (kv_heads, self.rank, self.rank)
        return {"phi": phi, "psi": phi | {"scale": scale, "interaction": interaction}}


def layers_of(kernel: dict[str, Array], x: Array) -> Array:
    """Apply both layers of a kernel to x [B, h_kv, n, d], and return float32 [B, h_kv, n, R]."""
    between = jax.nn.gelu(jnp.einsum("bhnd,hdm->bhnm", x.astype(jnp.float32), kernel["first"]), approximate=False)
    return jax.nn.gelu(jnp.einsum("bhnm,hmr->bhnr", between, kernel["second"]), approximate=False)


def query_features(kernels: dict[str, Any], q: Array) -> Array:
    """Return phi of queries, float32 [B, h_kv, n, R]. No number is negative.

    `q` [B, h_kv, n, d] is the n queries of each KV head's group.
    """
    return jnp.abs(layers_of(kernels["phi"], q))


def key_features(kernels: dict[str, Any], k: Array) -> Array:
    """Return psi of keys `k` [B, h_kv, n, d], float32 [B, h_kv, n, R]. No number is negative."""
    psi = kernels["psi"]
    scaled = layers_of(psi, k) * psi["scale"][:, None]
    return jnp.abs(scaled + jnp.einsum("bhnr,hre->bhne", scaled, psi["interaction"]))


def combine(out: Array, lse: Array, top: Array, bottom: Array) -> Array:
    """Combine exact attention over some tokens with kernel attention over others, under one normalizer, float32 [...,
    d].

    The result is (exp(lse) * out + top) / (exp(lse) + bottom). `out` and `lse` are the output of exact attention [...,
    d]
    and the log-sum-exp of its scores [...]. `top` is phi(q) H [..., d], and `bottom` is phi(q) z [...], never negative.
    Where bottom is 0, the result is `out`, bit for bit.
    """
    there = bottom > 0
    known = jnp.where(there, bottom, 1.0)  # so that neither the value nor the gradient divides by 0 or takes log(0)
    # bottom / (bottom + exp(lse)), written so that exp(lse) cannot overflow
    share = jax.nn.sigmoid(jnp.log(known) - lse)[..., None]
    return jnp.where(there[..., None], out + share * (top / known[..., None] - out), out)
