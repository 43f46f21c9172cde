"""Keys that follow from the fetched values, in models whose values are the keys before their norm (Gemma 4).

There, the key before RoPE is the value times a weight for each column of a head. So no code of the keys is stored: the
keys of the chosen chunks are made from their values. They differ from the real keys by one rounding of a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jshadow.cache.records import Rebuild
from jshadow.policies.shadowkv.key_codecs.base import KeyCode, KeyCodec, Sizes, Spread


@dataclasses.dataclass(frozen=True)
class ValueCodec(KeyCodec):
    """Store the weights of the columns alone. right is float32 [B, h_kv, d]; left has no numbers, [B, h_kv, n, 0].

    The rows that `expand` takes are the values.
    """

    name = "from_values"
    joint = False
    from_values = True

    def shapes(self, batch: int, units: int, chunk: int, sizes: Sizes) -> KeyCode:
        left: Any = jax.ShapeDtypeStruct((batch, sizes.heads, units, 0), jnp.dtype(sizes.dtype))
        return KeyCode(left, jax.ShapeDtypeStruct((batch, sizes.heads, sizes.dim), jnp.float32))

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
        values: Array | None = None,
    ) -> KeyCode:
        """Find the weights by least squares over the tokens. Their error is at most that of a rounded key.

        `values` [B, S, h_kv, d] are the prompt's. The other arguments are as in `KeyCodec`.
        """
        assert values is not None
        batch, tokens, heads, dim = k_pre.shape
        real = jnp.arange(tokens) < lengths[:, None]
        wide = jnp.where(real[..., None, None], values, 0).astype(jnp.float32)
        squares = (wide * wide).sum(axis=1)
        right = jnp.where(squares > 0, (k_pre.astype(jnp.float32) * wide).sum(axis=1) / squares, 0)
        code = self.empty(batch, units, chunk, Sizes(heads, dim, k_pre.dtype.name))
        return code.replace(right=right)

    def project(self, k_pre: Array, right: Any, weights: Array | None = None, axis: str | None = None) -> Array:
        return k_pre[..., :0]

    def expand(self, rows: Array, right: Any) -> Array:
        return rows.astype(jnp.float32) * right[:, :, None]

    def keys_of(
        self, rebuild: Rebuild, ids: Int[Array, "B h_kv k"], values: Float[Array, "B h_kv tokens d"]
    ) -> Float[Array, "B h_kv tokens d"]:
        """Return the keys after RoPE of units whose values are `values`, float32."""
        return self.rotated(rebuild, ids, self.expand(values, rebuild.right))

    def products(self, sizes: Sizes) -> int:
        return 1

    def expand_bytes(self, sizes: Sizes) -> int:
        return 0

    def encode_bytes(self, sizes: Sizes, tokens: int, block: int) -> int:
        """Count the products of keys and values, if they are not added at once."""
        return 4 * tokens * sizes.columns
