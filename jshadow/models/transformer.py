"""A decoder-only transformer. Its caller passes the attention in.

A block computes projections and calls `cache(heads) -> (out, aux)`. The engine provides this closure: exact attention
over a prompt, or a policy over its state. There is only the `params` collection and nothing is mutable. Each layer has
its own subtree `layer_<i>`, so that one compiled layer serves all of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jshadow.models.config import ModelConfig
from jshadow.models.layers import MLP, Attention, RMSNorm


class Heads(NamedTuple):
    """The inputs of a block's cache: q_pre [B, T, h_q, d], k_pre and v [B, T, h_kv, d], x_in [B, T, D].

    Queries and keys come before RoPE (after bias and norm); x_in is the normed input of the attention.
    """

    q_pre: Array
    k_pre: Array
    v: Array
    x_in: Array


Cache = Callable[[Heads], tuple[Array, Any]]


class Block(nn.Module):
    """Attention and MLP, normed before (and after, where the config says so), each with a residual connection."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        self.attention_norm = RMSNorm(c.norm_eps, c.unit_norms)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.norm_eps, c.unit_norms)
        self.mlp = MLP(c)
        if c.post_norms:
            self.attention_post_norm = RMSNorm(c.norm_eps, c.unit_norms)
            self.mlp_post_norm = RMSNorm(c.norm_eps, c.unit_norms)

    def __call__(self, x: Array, cache: Cache) -> tuple[Array, Any]:
        """x [B, T, D] -> (x [B, T, D], whatever else the cache returned)."""
        x_in = self.attention_norm(x)
        with jax.named_scope("attention"):
            out, aux = cache(Heads(self.attention.query(x_in), *self.attention.key_value(x_in), x_in))
            out = self.attention.output(out.astype(x.dtype))
            x = x + (self.attention_post_norm(out) if self.config.post_norms else out)
        with jax.named_scope("mlp"):
            out = self.mlp(self.mlp_norm(x))
            return x + (self.mlp_post_norm(out) if self.config.post_norms else out), aux

    def query(self, x_in: Array) -> Array:
        """This block's queries before RoPE [B, T, h_q, d] for the x_in of another block (speculation, InfiniGen)."""
        return self.attention.query(x_in)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        self.embed = nn.Embed(c.vocab_size, c.model_dim)
        self.blocks = [Block(c, name=f"layer_{i}") for i in range(c.num_layers)]
        self.norm = RMSNorm(c.norm_eps, c.unit_norms)
        if not c.tie_embeddings:
            self.head = nn.Dense(c.vocab_size, use_bias=False)

    def __call__(self, tokens: Array, cache: Cache) -> Array:
        """Token ids [B, T] -> float32 logits [B, T, V], every block with the same cache closure."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x, cache)
        return self.logits(x)

    def embedding(self, tokens: Array) -> Array:
        """Token ids [B, T] -> [B, T, D]."""
        x = self.embed(tokens)
        # rounded to x's dtype first, as the models were trained
        return x * jnp.asarray(self.config.model_dim**0.5, x.dtype) if self.config.scale_embedding else x

    def logits(self, x: Array) -> Array:
        """x [..., D] -> float32 logits [..., V]."""
        x = self.norm(x)
        if self.config.tie_embeddings:
            return jnp.einsum("...d,vd->...v", x, self.embed.embedding, preferred_element_type=jnp.float32)
        kernel = self.head.variables["params"]["kernel"] if not self.is_initializing() else None
        if kernel is None:
            return self.head(x).astype(jnp.float32)
        return jnp.einsum("...d,dv->...v", x, kernel, preferred_element_type=jnp.float32)


def embed(weights: dict, config: ModelConfig, tokens: Array) -> Array:
    """Token ids [B, T] -> hidden states [B, T, D]."""
    return cast(Array, Transformer(config).apply({"params": weights}, tokens, method="embedding"))


def apply_block(weights: dict, config: ModelConfig, layer: int, x: Array, cache: Cache) -> tuple[Array, Any]:
    """Block `layer` of the model on x [B, T, D]; returns x and what the cache returned beside its output."""
    return Block(config).apply({"params": weights[f"layer_{layer}"]}, x, cache)


def block_query(weights: dict, config: ModelConfig, layer: int, x_in: Array) -> Array:
    """Queries before RoPE [B, T, h_q, d] that block `layer` would make of x_in [B, T, D]."""
    # parent=None: this runs inside another block's apply, whose submodule it must not become
    block = Block(config, parent=None)
    return cast(Array, block.apply({"params": weights[f"layer_{layer}"]}, x_in, method="query"))


def logits(weights: dict, config: ModelConfig, x: Array) -> Array:
    """Hidden states [..., D] -> float32 logits [..., V]."""
    return cast(Array, Transformer(config).apply({"params": weights}, x, method="logits"))


@functools.cache
def abstract_weights(config: ModelConfig) -> dict:
    """The weight tree as float32 ShapeDtypeStructs: no memory is taken."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def init(tokens: Array) -> dict:
        return dict(Transformer(config).init(jax.random.key(0), tokens, lambda heads: (heads.q_pre, None)))

    return dict(jax.eval_shape(init, tokens)["params"])
