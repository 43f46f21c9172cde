"""The weights around the recurrent state of a layer: gated DeltaNet (arXiv 2412.06464, section 3) and Mamba-2 (arXiv
2405.21060, section 7).

Queries, keys and values pass a short convolution, and then the state (`jshadow/ops/delta_rule.py`). In Mamba-2, they
are called C, B and x. The caller computes both, as it computes attention. The output is normed and gated.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.models.layers import Linear, Norm


class RecurrentMixer(nn.Module):
    """The projections, the kernels of the convolution, and the gates of a recurrent layer.

    n_k, n_v heads of keys and of values, d_k, d_v their widths.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declare the parts."""
        r = recurrent_of(self.config)
        keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
        self.q, self.k = Linear(keys, shares_input=True), Linear(keys, shares_input=True)
        self.v, self.gate = Linear(values, shares_input=True), Linear(values, shares_input=True)
        self.decay = Linear(r.value_heads, shares_input=True)
        if r.corrects:
            self.beta = Linear(r.value_heads, shares_input=True)
        else:
            self.skip = self.param("skip", nn.initializers.ones, (r.value_heads,))
        self.o = Linear(self.config.model_dim)
        widths = {"q": keys, "k": keys, "v": values}
        self.kernels = [
            self.param(f"{name}_taps", nn.initializers.lecun_normal(), (r.taps, width))
            for name, width in widths.items()
        ]
        if r.tap_biases:
            self.biases = [
                self.param(f"{name}_biases", nn.initializers.zeros, (width,)) for name, width in widths.items()
            ]
        self.a_log, self.dt_bias = (
            self.param(name, nn.initializers.zeros, (r.value_heads,)) for name in ("a_log", "dt_bias")
        )
        if r.corrects:
            self.norm = Norm("rms", self.config.norm_eps)
        else:
            self.norm_scale = self.param("norm_scale", nn.initializers.ones, (values,))

    def heads(self, x: Array) -> tuple[Array, Array, Array]:
        """Return the inputs of the convolution for x [B, T, D]: [B, T, n_k, d_k] twice, and [B, T, n_v, d_v]."""
        r = recurrent_of(self.config)
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k = (one.reshape(*x.shape[:-1], r.key_heads, r.key_dim) for one in (q, k))
        return q, k, v.reshape(*x.shape[:-1], r.value_heads, r.value_dim)

    def gates(self, x: Array) -> tuple[Array, Array]:
        """Return the logarithm of the decay and the strength of the update for x [B, T, D], float32 [B, T, n_v].

        In Mamba-2, the strength is the time step.
        """
        a_log, dt_bias = self.a_log.astype(jnp.float32), self.dt_bias.astype(jnp.float32)
        time_step = jax.nn.softplus(self.decay(x).astype(jnp.float32) + dt_bias)
        if not recurrent_of(self.config).corrects:
            return -jnp.exp(a_log) * time_step, time_step
        return -jnp.exp(a_log) * time_step, jax.nn.sigmoid(self.beta(x).astype(jnp.float32))

    def taps(self) -> tuple[Array, Array, Array]:
        """Return the kernels of the convolution over `heads`: [taps, n_k, d_k] twice, and [taps, n_v, d_v].

        If the convolution has biases, they are one more row.
        """
        r, kernels = recurrent_of(self.config), self.kernels
        if r.tap_biases:
            kernels = [jnp.concatenate([kernel, bias[None]]) for kernel, bias in zip(kernels, self.biases, strict=True)]
        q, k, v = kernels
        q, k = (one.reshape(len(one), r.key_heads, r.key_dim) for one in (q, k))
        return q, k, v.reshape(len(v), r.value_heads, r.value_dim)

    def skipped(self) -> Array | None:
        """Return the factor with which each head's value is added to what its state gives, [n_v], or None."""
        skip: Array | None = None if recurrent_of(self.config).corrects else self.skip
        return skip

    def output(self, heads: Array, x: Array) -> Array:
        """Norm and gate what the state gave [B, T, n_v, d_v], and project it to [B, T, D]. x [B, T, D] is the input.

        Gated DeltaNet norms each head, and then multiplies by the gate. Mamba-2 multiplies first, and norms the heads
        of a group together, with a scale for each column.
        """
        gate = jax.nn.silu(self.gate(x).astype(jnp.float32))
        if not recurrent_of(self.config).corrects:
            return self.o(self._grouped_norm(heads.reshape(gate.shape).astype(jnp.float32) * gate, x.dtype))
        return self.o((self.norm(heads) * gate.reshape(heads.shape)).astype(x.dtype).reshape(*x.shape[:-1], -1))

    def _grouped_norm(self, rows: Array, dtype: jnp.dtype) -> Array:
        groups = rows.reshape(*rows.shape[:-1], recurrent_of(self.config).key_heads, -1)
        square = jnp.mean(groups * groups, axis=-1, keepdims=True)
        normed = (groups / jnp.sqrt(square + self.config.norm_eps)).reshape(rows.shape).astype(dtype)
        return self.norm_scale.astype(dtype) * normed
