"""The key code of a prompt, its weights and its limits. On a mesh, each device codes a part."""

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.policies.shadowkv.key_codecs import KeyCode
from jshadow.policies.shadowkv.key_codecs.base import Parts, encode_parts
from jshadow.policies.shadowkv.key_codecs.lowrank import query_weights
from jshadow.policies.shadowkv.selection import least_cosine
from jshadow.policies.shadowkv.state import ShadowFrozen

if TYPE_CHECKING:
    from jshadow.policies.shadowkv.settings import ShadowSettings


def encode(
    policy: "ShadowSettings", spec: CacheSpec, prompt: PromptKV, weights: Array | None, *, losses: bool
) -> tuple[KeyCode, Array | None]:
    """Code the keys of a prompt. Return also the coding error of each chunk, or None without `losses`."""
    count, size = policy.max_chunks(spec.capacity), policy.chunk_size
    if spec.shards is not None and policy.codec.joint:
        split = dataclasses.replace(spec, shards=dataclasses.replace(spec.shards, left="split"))
        parts = Parts(spec.shards, policy.max_chunks(spec.capacity), policy.left_chunks(split), size)
        code, lost = encode_parts(policy.codec, prompt.k_pre, prompt.lengths, weights, parts, losses)
        left = code.left[:, : policy.left_chunks(spec)]
        return code.replace(left=left), None if lost is None else lost[:, :, :count]
    code = policy.codec.encode(prompt.k_pre, prompt.lengths, count, size, weights)
    lost = policy.codec.losses(code, prompt.k_pre, size, weights) if losses else None
    return code, lost


def key_weights(policy: "ShadowSettings", spec: CacheSpec, prompt: PromptKV) -> Array | None:
    """Return the weights on errors of a key's numbers, float32 [B, h_kv, d], or None if all count equally."""
    if policy.keys.weights == "none":
        return None
    assert prompt.q_tail is not None
    rotary = spec.rope.rotary_dim(spec.head_dim)
    return query_weights(prompt.q_tail, prompt.lengths, spec.kv_heads, rotary, spec.heads_axis)


def landmark_cut(policy: "ShadowSettings", spec: CacheSpec, frozen: ShadowFrozen) -> Array:
    """Return the limit `PlusFrozen.cut`, float32 [B, h_kv]; see `least_cosine`."""
    slots = frozen.outliers.k.shape[2] // policy.chunk_size
    by_landmark = jnp.minimum(policy.landmark_outliers(spec.capacity), policy.row_outliers(frozen.chunks))
    used = jnp.arange(slots) < by_landmark[:, None, None]
    return least_cosine(frozen.outliers, used, policy.chunk_size, policy.landmark_parts)
