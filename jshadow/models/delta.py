"""The weights around the recurrent state of a gated DeltaNet layer (arXiv 2412.06464, section 3; Qwen3-Next).

Queries, keys and values pass a short convolution, and then the state (`jshadow/ops/delta_rule.py`). The caller computes
both, as it computes attention. The output is normed, and multiplied by a gate.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.models.layers import Linear, Norm


class DeltaMixer(nn.Module):
    """The projections, the kernels of the convolution, and the gates of a gated DeltaNet layer.

    n_k, n_v heads of keys and of values, d_k, d_v their widths.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declare the parts."""
        r = recurrent_of(self.config)
        keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
        self.q, self.k = Linear(keys, shares_input=True), Linear(keys, shares_input=True)
        self.v, self.gate = Linear(values, shares_input=True), Linear(values, shares_input=True)
        self.beta, self.decay = (Linear(r.value_heads, shares_input=True) for _ in range(2))
        self.o = Linear(self.config.model_dim)
        widths = {"q_taps": keys, "k_taps": keys, "v_taps": values}
        self.kernels = [
            self.param(name, nn.initializers.lecun_normal(), (r.taps, width)) for name, width in widths.items()
        ]
        self.a_log, self.dt_bias = (
            self.param(name, nn.initializers.zeros, (r.value_heads,)) for name in ("a_log", "dt_bias")
        )
        self.norm = Norm("rms", self.config.norm_eps)

    def heads(self, x: Array) -> tuple[Array, Array, Array]:
        """Return the inputs of the convolution for x [B, T, D]: [B, T, n_k, d_k] twice, and [B, T, n_v, d_v]."""
        r = recurrent_of(self.config)
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k = (one.reshape(*x.shape[:-1], r.key_heads, r.key_dim) for one in (q, k))
        return q, k, v.reshape(*x.shape[:-1], r.value_heads, r.value_dim)

    def gates(self, x: Array) -> tuple[Array, Array]:
        """Return the logarithm of the decay and the strength of the update for x [B, T, D], float32 [B, T, n_v]."""
        a_log, dt_bias = self.a_log.astype(jnp.float32), self.dt_bias.astype(jnp.float32)
        log_decay = -jnp.exp(a_log) * jax.nn.softplus(self.decay(x).astype(jnp.float32) + dt_bias)
        return log_decay, jax.nn.sigmoid(self.beta(x).astype(jnp.float32))

    def taps(self) -> tuple[Array, Array, Array]:
        """Return the kernels of the convolution over `heads`: [taps, n_k, d_k] twice, and [taps, n_v, d_v]."""
        r = recurrent_of(self.config)
        q, k, v = self.kernels
        shapes = [(r.taps, r.key_heads, r.key_dim)] * 2 + [(r.taps, r.value_heads, r.value_dim)]
        q, k, v = (one.reshape(shape) for one, shape in zip((q, k, v), shapes, strict=True))
        return q, k, v

    def output(self, heads: Array, x: Array) -> Array:
        """Norm and gate what the state gave [B, T, n_v, d_v], and project it to [B, T, D]. x [B, T, D] is the input."""
        gate = jax.nn.silu(self.gate(x).astype(jnp.float32)).reshape(heads.shape)
        return self.o((self.norm(heads) * gate).astype(x.dtype).reshape(*x.shape[:-1], -1))
