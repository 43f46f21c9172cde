"""The parts of a block as flax.linen modules. They hold only weights, and depend on no cache, position or policy."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.models.config import ModelConfig
from jshadow.ops.projections import Weights, scaled, sums, weights_of

_FLOAT32 = ("/router/correction", "/recurrent/a_log", "/recurrent/dt_bias")


def dtype_of(path: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which the weight at `path` is held in a model of `dtype`.

    The bias behind the choice of experts is float32, because the choice is sensitive to its rounding. The rates at
    which a recurrent state decays are float32 too.
    """
    return np.dtype(np.float32) if path.endswith(_FLOAT32) else dtype


def rows_of(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function to x [..., D] that treats each row of D numbers alone. On a GPU, one row is computed as two.

    XLA's GPU compiler handles a single row badly. It splits a norm into two kernels. It computes the product with a
    small matrix in three kernels: the first multiplies number by number and writes its result to memory, and the others
    add. Such a product also does not become one product with others of the same input. With two rows, a norm is one
    kernel, and a product stays a product.

    Args:
        function: maps [..., D] to [..., N].
        x: its input.

    Returns:
        function(x), [..., N].
    """
    if x.size > x.shape[-1]:
        return function(x)
    return lax.platform_dependent(x, cuda=lambda x: as_two_rows(function, x), default=function)


def as_two_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """Return `rows_of` for one row x [..., D], computed with a second row of zeros.

    The zeros come from a selection. XLA's GPU compiler makes the selection part of a norm's kernel. It would remove a
    copy of x as the second row, and it would need a kernel for a padding.
    """
    first = lax.broadcasted_iota(jnp.int32, (2, x.shape[-1]), 0) == 0
    return function(jnp.where(first, x.reshape(1, -1), 0))[:1].reshape(*x.shape[:-1], -1)


class Norm(nn.Module):
    """Root-mean-square norm (Llama 2, section 2.2) or another of `config.NORMS`, computed in float32.

    Attributes:
        kind: the kind of norm. "bare": a root-mean-square norm without a scale.
        eps: constant that is added to the mean square.
    """

    kind: str
    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalize x [..., D]. The result has the shape and dtype of x."""
        scale = None if self.kind == "bare" else self.param("scale", nn.initializers.ones, (x.shape[-1],))

        def normalize(x: Array) -> Array:
            wide = x.astype(jnp.float32)
            if self.kind == "layer":
                wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
            wide = wide * (1 / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps))
            if scale is None:
                return wide.astype(x.dtype)
            if self.kind == "rms":
                return scale.astype(x.dtype) * wide.astype(x.dtype)
            factor = scale.astype(jnp.float32)
            return (wide * (1 + factor if self.kind == "unit" else factor)).astype(x.dtype)

        return rows_of(normalize, x)


def projection(module: nn.Module, shape: tuple[int, ...], init: Callable[..., Array]) -> Weights:
    """Return the weights of a module that holds a kernel of this shape, plain or quantized.

    Raises:
        ConfigError: see `weights_of`.
    """
    if module.is_initializing():
        return Weights(module.param("kernel", init, shape))
    named = module.variables["params"]
    if jnp.issubdtype(named["kernel"].dtype, jnp.floating) and "kernel_scale" not in named:
        return Weights(module.param("kernel", init, shape))
    return weights_of(named, shape, "/".join(module.path))


class Linear(nn.Module):
    """A linear projection. Its weights are floating or quantized; see `jshadow.ops.projections`.

    Attributes:
        features: number of outputs.
        use_bias: whether a bias is added.
        shares_input: whether other projections have the same input, so that one product may compute them all.
    """

    features: int
    use_bias: bool = False
    shares_input: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Project x [..., D] to [..., features] in x's dtype."""
        weights = projection(self, (x.shape[-1], self.features), nn.initializers.lecun_normal())
        merges = self.shares_input and weights.kind in (None, "int8")  # the others have a kernel of their own
        out = rows_of(lambda x: sums(x, weights), x) if merges else sums(x, weights)
        out = scaled(out, weights, x.dtype)
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return out


def activated(config: ModelConfig, gate: Array | None, up: Array) -> Array:
    """Return the inner numbers of an MLP [..., F] from its products gate and up [..., F]. gate may be None."""
    if gate is None:  # Primer (arXiv 2109.08668, section 3)
        return jnp.square(jax.nn.relu(up))
    if config.activation == "swiglu_clamped":  # gpt-oss: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", 2.2
        gate = jnp.minimum(gate, config.swiglu_limit)
        up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (up + 1)
    activate = functools.partial(jax.nn.gelu, approximate=True) if config.activation == "gelu_tanh" else jax.nn.silu
    return activate(gate) * up


class MLP(nn.Module):
    """The MLP: down(activation(gate(x)) * up(x)), or down(max(0, up(x))^2) without a gate."""

    config: ModelConfig
    width: int | None = None  # None: that of the config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Apply the MLP to x [..., D]. The result has the same shape."""
        bias, width = self.config.mlp_bias, self.width or self.config.ffn_dim
        gate = Linear(width, bias, True, name="gate")(x) if self.config.gated else None
        up = Linear(width, bias, True, name="up")(x)
        return Linear(self.config.model_dim, bias, name="down")(activated(self.config, gate, up))


class Attention(nn.Module):
    """The projections of grouped-query attention, and its sinks. The caller computes the attention itself."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the projections."""
        c = self.config
        self.q = Linear(c.q_heads * c.head_dim, c.attention_bias, True)
        self.k = Linear(c.kv_heads * c.head_dim, c.attention_bias, True)
        if not c.values_from_keys:
            self.v = Linear(c.kv_heads * c.head_dim, c.attention_bias, True)
        self.o = Linear(c.model_dim, c.attention_bias and c.output_bias)
        if c.output_gate:
            self.gate = Linear(c.q_heads * c.head_dim, c.attention_bias, True)
        if c.sinks:
            self.sinks = self.param("sinks", nn.initializers.zeros, (c.q_heads,))
        if c.qk_norm or c.joint_qk_norm:
            self.q_norm = Norm(c.norm, c.norm_eps)
            self.k_norm = Norm(c.norm, c.norm_eps)
        if c.value_norm:
            self.v_norm = Norm("bare", c.norm_eps)

    def query(self, x: Array) -> Array:
        """Return the queries before RoPE [B, T, h_q, d] of x [B, T, D]."""
        c, q = self.config, self.q(x)
        q = (self.q_norm(q) if c.joint_qk_norm else q).reshape(*x.shape[:-1], c.q_heads, c.head_dim)
        return self.q_norm(q) if c.qk_norm else q

    def key_value(self, x: Array) -> tuple[Array, Array]:
        """Return the keys before RoPE and the values of x [B, T, D], both [B, T, h_kv, d]."""
        c, k = self.config, self.k(x)
        shape = (*x.shape[:-1], c.kv_heads, c.head_dim)
        v = (k if c.values_from_keys else self.v(x)).reshape(shape)
        k = (self.k_norm(k) if c.joint_qk_norm else k).reshape(shape)
        return self.k_norm(k) if c.qk_norm else k, self.v_norm(v) if c.value_norm else v

    def output(self, heads: Array, x: Array) -> Array:
        """Project the attention outputs of all heads [B, T, h_q, d] to [B, T, D]. x [B, T, D] is the input."""
        rows = heads.reshape(*heads.shape[:-2], -1)
        return self.o(rows * jax.nn.sigmoid(self.gate(x)) if self.config.output_gate else rows)
