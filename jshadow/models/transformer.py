"""A decoder-only transformer. The caller passes the attention in as a closure.

A block computes its projections and calls `cache(heads) -> (out, aux)`. The engine provides this closure. It computes
exact attention over a prompt, or a policy's attention over its state. There is only the `params` collection, and no
variable is mutable. Each layer has its own subtree `layer_<i>`, so that one compiled program can run every layer.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.models.experts import ExpertMLP
from jshadow.models.layers import MLP, Attention, Norm
from jshadow.models.recurrent import ConvolutionMixer, RecurrentMixer


class Heads(NamedTuple):
    """The argument of a block's cache closure: the projections of the block's input.

    Attributes:
        q_pre: queries before RoPE and after bias and norm, [B, T, h_q, d].
        k_pre: keys before RoPE and after bias and norm, [B, T, h_kv, d].
        v: values [B, T, h_kv, d].
        x_in: the normalized input of the attention, [B, T, D].
        sinks: the logit of each query head's attention sink [h_q], or None.
        gates: in a recurrent layer, the logarithm of the decay and the strength of the update of each value head,
            float32 [B, T, n_v] each. Then q_pre, k_pre and v are the inputs of the convolution, [B, T, n_k, d_k] twice
            and [B, T, n_v, d_v]. A short convolution has no gates here: its input is k_pre * v, and q_pre is a factor
            of its output.
        taps: in a recurrent layer, the kernels of the convolution over q_pre, k_pre and v, [taps, heads, width] each,
            or that of a short convolution alone. If it has biases, they are one more row.
        skip: in Mamba-2, the factor of each head with which its value, after the convolution, is added to what the
            state gives, [n_v].
    """

    q_pre: Array
    k_pre: Array
    v: Array
    x_in: Array
    sinks: Array | None = None
    gates: tuple[Array, Array] | None = None
    taps: tuple[Array, ...] | None = None
    skip: Array | None = None


_Cache = Callable[[Heads], tuple[Array, Any]]


class Block(nn.Module):
    """Attention or a recurrent layer, and in most layers an MLP.

    Each has a norm before it or after it, or both, and a residual connection.
    """

    config: ModelConfig
    has_experts: bool = False

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        if c.mixer == "recurrent":
            self.recurrent = (RecurrentMixer if recurrent_of(c).has_state else ConvolutionMixer)(c)
        else:
            self.attention = Attention(c)
        if c.has_mlp:
            self.mlp = ExpertMLP(c) if self.has_experts else MLP(c)
        if c.pre_norms:
            self.attention_norm = Norm(c.norm, c.norm_eps)
        if c.pre_norms and c.has_mlp and not c.parallel:
            self.mlp_norm = Norm(c.norm, c.norm_eps)
        if c.post_norms:
            self.attention_post_norm = Norm(c.norm, c.norm_eps)
        if c.post_norms and c.has_mlp:
            self.mlp_post_norm = Norm(c.norm, c.norm_eps)
        if c.layer_scale:
            self.scale = self.param("scale", nn.initializers.ones, (1,))

    def __call__(self, x: Array, cache: _Cache, valid: Array | None = None) -> tuple[Array, Any]:
        """Apply the block to x [B, T, D]. Return the new x, and the second result of `cache`.

        `valid` says which tokens are real, bool [B, T]. No expert runs for the others. None: all of them.
        """
        c = self.config
        x_in = self.attention_norm(x) if c.pre_norms else x
        with jax.named_scope("attention"):
            if c.mixer == "recurrent":
                mixer = self.recurrent
                q, k, v = mixer.heads(x_in)
                heads = Heads(q, k, v, x_in, gates=mixer.gates(x_in), taps=mixer.taps(), skip=mixer.skipped())
            else:
                q, (k, v) = self.attention.query(x_in), self.attention.key_value(x_in)
                heads = Heads(q, k, v, x_in, self.attention.sinks if c.sinks else None)
            out, aux = cache(heads)
            out = (self.recurrent if c.mixer == "recurrent" else self.attention).output(out.astype(x.dtype), x_in)
            x = x + self._scaled(self.attention_post_norm(out) if c.post_norms else out)
        if c.has_mlp:
            with jax.named_scope("mlp"):
                x = self._add_mlp(x, x_in, valid)
        return x * self.scale.astype(x.dtype) if c.layer_scale else x, aux

    def _add_mlp(self, x: Array, x_in: Array, valid: Array | None) -> Array:
        """Add the MLP of x to it. x_in is the input of attention, which a parallel block shares."""
        c = self.config
        if not c.parallel:
            x_in = self.mlp_norm(x) if c.pre_norms else x
        out = self.mlp(x_in, x, valid) if isinstance(self.mlp, ExpertMLP) else self.mlp(x_in)
        return x + self._scaled(self.mlp_post_norm(out) if c.post_norms else out)

    def _scaled(self, out: Array) -> Array:
        return out if self.config.residual_scale == 1 else out * jnp.asarray(self.config.residual_scale, out.dtype)

    def query(self, x_in: Array) -> Array:
        """Return this block's queries before RoPE [B, T, h_q, d] for the x_in of another block.

        InfiniGen uses this to predict the queries of the next layer.
        """
        return self.attention.query(x_in)


class Transformer(nn.Module):
    """The whole model: embedding, blocks, final norm and output head."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.model_dim)
        with_experts = () if c.experts is None else c.experts.layers
        self.blocks = [Block(c.at(i), i in with_experts, name=f"layer_{i}") for i in range(c.num_layers)]
        self.norm = Norm(c.norm, c.norm_eps)
        if not c.tie_embeddings:
            self.head = nn.Dense(c.vocab_size, use_bias=False)

    def __call__(self, tokens: Array, cache: _Cache) -> Array:
        """Turn token ids [B, T] into float32 logits [B, T, V]. All blocks get the same cache closure."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x, cache)
        return self.logits(x)

    def embedding(self, tokens: Array) -> Array:
        """Turn token ids [B, T] into hidden states [B, T, D]."""
        x = self.embed(tokens)
        # The factor is rounded to x's dtype first, as in the training of the models.
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def logits(self, x: Array) -> Array:
        """Apply the final norm and the output head to x [..., D]. Return float32 logits [..., V]."""
        out = self._products(self.norm(x))
        out = out if self.config.logit_scale == 1 else out * self.config.logit_scale
        cap = self.config.logit_cap
        return out if cap is None else cap * jnp.tanh(out / cap)

    def _products(self, x: Array) -> Array:
        if self.config.tie_embeddings:
            return jnp.einsum("...d,vd->...v", x, self.embed.embedding, preferred_element_type=jnp.float32)
        kernel = self.head.variables["params"]["kernel"] if not self.is_initializing() else None
        if kernel is None:
            return self.head(x).astype(jnp.float32)
        return jnp.einsum("...d,dv->...v", x, kernel, preferred_element_type=jnp.float32)


def embed(weights: dict, config: ModelConfig, tokens: Array) -> Array:
    """Turn token ids [B, T] into hidden states [B, T, D]."""
    return cast(Array, Transformer(config).apply({"params": weights}, tokens, method="embedding"))


def apply_block(
    weights: dict, config: ModelConfig, layer: int, x: Array, cache: _Cache, valid: Array | None = None
) -> tuple[Array, Any]:
    """Apply block `layer` to x [B, T, D]. The other arguments and the results are those of `Block`."""
    own = weights[f"layer_{layer}"]
    return Block(config.at(layer), "experts" in own.get("mlp", {})).apply({"params": own}, x, cache, valid)


def sinks_of(layer: dict) -> Array | None:
    """Return the attention sinks [h_q] of a layer with these weights, or None."""
    sinks: Array | None = layer.get("attention", {}).get("sinks")
    return sinks


def block_query(weights: dict, config: ModelConfig, layer: int, x_in: Array) -> Array:
    """Return the queries before RoPE [B, T, h_q, d] of block `layer` for x_in [B, T, D]."""
    # This runs inside the apply of another block. parent=None keeps it from becoming a submodule of that block.
    block = Block(config.at(layer), parent=None)
    return cast(Array, block.apply({"params": weights[f"layer_{layer}"]}, x_in, method="query"))


def logits(weights: dict, config: ModelConfig, x: Array) -> Array:
    """Turn hidden states [..., D] into float32 logits [..., V]."""
    return cast(Array, Transformer(config).apply({"params": weights}, x, method="logits"))


@functools.cache
def abstract_weights(config: ModelConfig) -> dict:
    """Return the weight tree as float32 ShapeDtypeStructs, which take no memory. Each sort of block is traced once."""
    tokens, x = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 1, config.model_dim), jnp.float32)

    def cache(heads: Heads) -> tuple[Array, None]:
        return heads.q_pre if heads.gates is None else heads.v, None  # of the shape of the layer's output

    def ends(model: Transformer, tokens: Array) -> Array:
        return model.logits(model.embedding(tokens))

    @functools.cache
    def block(of: ModelConfig, has_experts: bool) -> dict:
        made = Block(of, has_experts)
        return dict(jax.eval_shape(lambda x: made.init(jax.random.key(0), x, cache)["params"], x))

    model = Transformer(config)
    weights = dict(jax.eval_shape(lambda tokens: model.init(jax.random.key(0), tokens, method=ends)["params"], tokens))
    with_experts = () if config.experts is None else config.experts.layers
    layers = range(config.num_layers)
    return weights | {f"layer_{layer}": block(config.at(layer), layer in with_experts) for layer in layers}
