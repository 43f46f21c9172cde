"""The parts of a block as flax.linen modules. They hold weights only: no cache, no positions, no policy."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jshadow.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (Llama 2, section 2.2)."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D] in x's dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * (1 / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps))
        return scale.astype(x.dtype) * wide.astype(x.dtype)


class MLP(nn.Module):
    """Gated SiLU MLP."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., D] -> [..., D]."""
        bias, dtype = self.config.mlp_bias, x.dtype
        gate = nn.Dense(self.config.ffn_dim, use_bias=bias, dtype=dtype, name="gate")(x)
        up = nn.Dense(self.config.ffn_dim, use_bias=bias, dtype=dtype, name="up")(x)
        return nn.Dense(self.config.model_dim, use_bias=bias, dtype=dtype, name="down")(nn.silu(gate) * up)


class Attention(nn.Module):
    """The four projections of grouped-query attention; what happens between them is the caller's."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the projections."""
        c = self.config
        self.q = nn.Dense(c.q_heads * c.head_dim, use_bias=c.attention_bias)
        self.k = nn.Dense(c.kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.v = nn.Dense(c.kv_heads * c.head_dim, use_bias=c.attention_bias)
        self.o = nn.Dense(c.model_dim, use_bias=c.attention_bias)

    def query(self, x: Array) -> Array:
        """x [B, T, D] -> queries before RoPE [B, T, h_q, d]."""
        return self.q(x).reshape(*x.shape[:-1], self.config.q_heads, self.config.head_dim)

    def key_value(self, x: Array) -> tuple[Array, Array]:
        """x [B, T, D] -> keys before RoPE and values, both [B, T, h_kv, d]."""
        shape = (*x.shape[:-1], self.config.kv_heads, self.config.head_dim)
        return self.k(x).reshape(shape), self.v(x).reshape(shape)

    def output(self, heads: Array) -> Array:
        """heads [B, T, h_q, d] -> [B, T, D]."""
        return self.o(heads.reshape(*heads.shape[:-2], -1))
