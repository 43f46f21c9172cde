"""The parts of a block as flax.linen modules. They hold only weights, and depend on no cache, position or policy."""

import functools
import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig

_CHOICES = (None, "int8")
_PROJECTIONS = re.compile(r"layer_\d+/(attention|mlp(/experts|/shared)?)/(q|k|v|o|gate|up|down)/kernel")
BLOCK = 2**22  # how many numbers are converted to float32 at once


def check_quantize(quantize: str | None) -> None:
    """Raise ConfigError unless `quantize` is None or "int8"."""
    if quantize not in _CHOICES:
        raise ConfigError(f"quantize must be one of {_CHOICES}, got {quantize!r}")


def quantized(path: str) -> bool:
    """Whether the weight at `path` is a projection of a layer's attention or MLP, which are stored in int8."""
    return _PROJECTIONS.fullmatch(path) is not None


def dtype_of(path: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which the weight at `path` is held in a model of `dtype`.

    The bias behind the choice of experts is float32, because the choice is sensitive to its rounding.
    """
    return np.dtype(np.float32) if path.endswith("/router/correction") else dtype


def quantize_int8(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a kernel [D, F] column by column, so that the largest magnitude of a column becomes 127.

    Returns:
        The kernel as int8 [D, F], and the factors of its columns, float32 [F]. For kernels [E, D, F], both have the
        first axis E.
    """
    if kernel.ndim == 3:
        both = [quantize_int8(one) for one in kernel]
        return np.stack([one for one, _ in both]), np.stack([factors for _, factors in both])
    factors = np.empty(kernel.shape[1], np.float32)
    out = np.empty(kernel.shape, np.int8, order="F" if kernel.flags.f_contiguous else "C")
    step = max(1, BLOCK // kernel.shape[0])
    for start in range(0, kernel.shape[1], step):
        columns = slice(start, start + step)
        wide = kernel[:, columns].astype(np.float32)
        top = np.abs(wide).max(axis=0)
        factors[columns] = np.where(top > 0, top / 127, 1)
        out[:, columns] = np.rint(wide / factors[columns])
    return out, factors


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


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (Llama 2, section 2.2).

    Attributes:
        eps: constant that is added to the mean square.
        unit: whether x is multiplied by 1 + scale in float32 (Gemma), instead of by scale.
    """

    eps: float
    unit: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalize x [..., D]. The result has the shape and dtype of x."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))

        def normalize(x: Array) -> Array:
            wide = x.astype(jnp.float32)
            wide = wide * (1 / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps))
            if self.unit:
                return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
            return scale.astype(x.dtype) * wide.astype(x.dtype)

        return rows_of(normalize, x)


class Linear(nn.Module):
    """A linear projection. Its weights are floating, or int8 with a float32 factor for each output.

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
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        int8 = self.has_variable("params", "kernel_scale")
        # Before it is multiplied by its factor, an output of int8 weights may exceed the range of float16.
        wide = jnp.float32 if int8 else None

        def product(x: Array) -> Array:
            sums = (((x.ndim - 1,), (0,)), ((), ()))
            return lax.dot_general(x, kernel.astype(x.dtype), sums, preferred_element_type=wide)

        out = rows_of(product, x) if self.shares_input else product(x)
        if int8:
            out = (out * self.get_variable("params", "kernel_scale")).astype(x.dtype)
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return out


def gated(config: ModelConfig, gate: Array, up: Array) -> Array:
    """Return the inner numbers of a gated MLP [..., F] from its products gate and up [..., F]."""
    if config.activation == "swiglu_clamped":  # gpt-oss: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", 2.2
        gate = jnp.minimum(gate, config.swiglu_limit)
        up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (up + 1)
    activate = functools.partial(jax.nn.gelu, approximate=True) if config.activation == "gelu_tanh" else jax.nn.silu
    return activate(gate) * up


class MLP(nn.Module):
    """The gated MLP: down(activation(gate(x)) * up(x))."""

    config: ModelConfig
    width: int | None = None  # None: that of the config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Apply the MLP to x [..., D]. The result has the same shape."""
        bias, width = self.config.mlp_bias, self.width or self.config.ffn_dim
        gate = Linear(width, bias, True, name="gate")(x)
        up = Linear(width, bias, True, name="up")(x)
        return Linear(self.config.model_dim, bias, name="down")(gated(self.config, gate, up))


class Attention(nn.Module):
    """The four projections of grouped-query attention, and its sinks. The caller computes the attention itself."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the projections."""
        c = self.config
        self.q = Linear(c.q_heads * c.head_dim, c.attention_bias, True)
        self.k = Linear(c.kv_heads * c.head_dim, c.attention_bias, True)
        self.v = Linear(c.kv_heads * c.head_dim, c.attention_bias, True)
        self.o = Linear(c.model_dim, c.attention_bias and c.output_bias)
        if c.sinks:
            self.sinks = self.param("sinks", nn.initializers.zeros, (c.q_heads,))
        if c.qk_norm or c.joint_qk_norm:
            self.q_norm = RMSNorm(c.norm_eps, c.unit_norms)
            self.k_norm = RMSNorm(c.norm_eps, c.unit_norms)

    def query(self, x: Array) -> Array:
        """Return the queries before RoPE [B, T, h_q, d] of x [B, T, D]."""
        c, q = self.config, self.q(x)
        q = (self.q_norm(q) if c.joint_qk_norm else q).reshape(*x.shape[:-1], c.q_heads, c.head_dim)
        return self.q_norm(q) if c.qk_norm else q

    def key_value(self, x: Array) -> tuple[Array, Array]:
        """Return the keys before RoPE and the values of x [B, T, D], both [B, T, h_kv, d]."""
        c, k = self.config, self.k(x)
        shape = (*x.shape[:-1], c.kv_heads, c.head_dim)
        k = (self.k_norm(k) if c.joint_qk_norm else k).reshape(shape)
        return self.k_norm(k) if c.qk_norm else k, self.v(x).reshape(shape)

    def output(self, heads: Array) -> Array:
        """Project the attention outputs of all heads [B, T, h_q, d] to [B, T, D]."""
        return self.o(heads.reshape(*heads.shape[:-2], -1))
