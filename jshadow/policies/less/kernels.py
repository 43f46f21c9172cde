"""The two kernels of LESS, phi of queries and psi of keys, and how their attention joins the exact one.

phi(q) = |GELU(GELU(q A1) A2)|        psi(k) = |(s * GELU(GELU(k B1) B2)) (I + M)|
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class KernelSizes(NamedTuple):
    """Attributes: rank: rows R of the state of a KV head; hidden: width between the two layers of a kernel."""

    rank: int
    hidden: int

    def shapes(self, kv_heads: int, head_dim: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of one layer's arrays: A1, A2 of phi; B1, B2, s, M of psi."""
        phi: dict[str, tuple[int, ...]] = {
            "first": (kv_heads, head_dim, self.hidden),
            "second": (kv_heads, self.hidden, self.rank),
        }
        scale, interaction = (kv_heads, self.rank), (kv_heads, self.rank, self.rank)
        return {"phi": phi, "psi": phi | {"scale": scale, "interaction": interaction}}


def layers_of(kernel: dict[str, Array], x: Array) -> Array:
    """Both layers of a kernel: x [B, h_kv, n, d] -> float32 [B, h_kv, n, R]."""
    between = jax.nn.gelu(jnp.einsum("bhnd,hdm->bhnm", x.astype(jnp.float32), kernel["first"]), approximate=False)
    return jax.nn.gelu(jnp.einsum("bhnm,hmr->bhnr", between, kernel["second"]), approximate=False)


def query_features(kernels: dict[str, Any], q: Array) -> Array:
    """phi of queries [B, h_kv, n, d] of each KV head's group, float32 [B, h_kv, n, R], none negative."""
    return jnp.abs(layers_of(kernels["phi"], q))


def key_features(kernels: dict[str, Any], k: Array) -> Array:
    """psi of keys [B, h_kv, n, d], float32 [B, h_kv, n, R], none negative."""
    psi = kernels["psi"]
    scaled = layers_of(psi, k) * psi["scale"][:, None]
    return jnp.abs(scaled + jnp.einsum("bhnr,hre->bhne", scaled, psi["interaction"]))


def combine(out: Array, lse: Array, top: Array, bottom: Array) -> Array:
    """Exact attention over some tokens and a kernel's over others, under one normaliser.

    Args:
        out: float32 [..., d], of the tokens that are held.
        lse: log-sum-exp of their scores [...].
        top: phi(q) H [..., d].
        bottom: phi(q) z [...], not negative.

    Returns:
        Float32 [..., d]; `out` to the bit where bottom is 0.
    """
    there = bottom > 0
    known = jnp.where(there, bottom, 1.0)  # no division and no logarithm of 0, in a gradient neither
    # exp(log bottom) / (exp(log bottom) + exp(lse)), which overflows for no lse
    share = jax.nn.sigmoid(jnp.log(known) - lse)[..., None]
    return jnp.where(there[..., None], out + share * (top / known[..., None] - out), out)
