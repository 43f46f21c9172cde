"""The key code of ShadowKV+'s later tokens, those after the chunks of the prompt.

There are two codes (`PlusSettings.later_keys`):

- "int6" and "int4": each token is coded without the others (`TokenCodec`).
- "projected": keys are projected on the code of the prompt (ShadowKV, section 7.1). What lies outside the prompt's
  basis is lost.

Sizes: B rows of the batch, T tokens, m later chunks of c tokens, h_kv KV heads of width d, w numbers in a left row.
"""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import PromptKV, Rebuild, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.ops.layout import take_span, write_rows
from jshadow.policies.shadowkv.costs import sizes_of
from jshadow.policies.shadowkv.key_codecs import by_token
from jshadow.policies.shadowkv.state import PlusFrozen

if TYPE_CHECKING:
    from jshadow.policies.shadowkv.plus_settings import PlusSettings


def empty_rows(policy: "PlusSettings", spec: CacheSpec) -> tuple[Array, Any]:
    """Return left rows of zeros for all later chunks, and the part of their code that all chunks share.

    The latter is None if the later keys have the prompt's code.
    """
    chunks = policy.later_chunks(spec)
    code = policy.later_codec.empty(spec.batch, chunks, policy.chunk_size, sizes_of(spec))
    return code.left, code.right if policy.later_keys != "projected" else None


def shared_part(policy: "PlusSettings", prompt: PromptKV) -> Any:
    """Return what `PlusFrozen.later` holds for a prompt."""
    if policy.later_keys == "projected":
        return None
    return policy.later_codec.encode(prompt.k_pre, prompt.lengths, 0, policy.chunk_size).right


def left_rows(policy: "PlusSettings", spec: CacheSpec, frozen: PlusFrozen, k_pre: Array) -> Array:
    """Return the left rows [B, T, 1 or h_kv, w] of keys before RoPE [B, T, h_kv, d]."""
    right = frozen.right if frozen.later is None else frozen.later
    return policy.later_codec.project(k_pre, right, frozen.key_weights, spec.heads_axis)


def window_rows(policy: "PlusSettings", spec: CacheSpec, frozen: PlusFrozen, prompt: PromptKV, left: Array) -> Array:
    """Return `left` with the rows of the prompt's tokens that are in no chunk of the prompt."""
    size = policy.chunk_size
    span = min(policy.window_chunks, policy.later_chunks(spec)) * size
    rest = take_span(prompt.k_pre, frozen.chunks * size, span).transpose(0, 2, 1, 3)
    real = frozen.chunks[:, None] * size + jnp.arange(span) < prompt.lengths[:, None]
    rows = jnp.where(real[..., None, None], left_rows(policy, spec, frozen, rest), 0).swapaxes(1, 2)
    return by_token(left, size).at[:, :, :span].set(rows).reshape(left.shape)


def with_new_rows(policy: "PlusSettings", spec: CacheSpec, frozen: PlusFrozen, step: StepKV, left: Array) -> Array:
    """Return `left` with the rows of the new tokens of a step."""
    places = step.positions - frozen.chunks[:, None] * policy.chunk_size
    rows = left_rows(policy, spec, frozen, step.k_pre)
    return write_rows(by_token(left, policy.chunk_size), rows, places, step.valid).reshape(left.shape)


def with_later(policy: "PlusSettings", spec: CacheSpec, prompt: Rebuild, frozen: PlusFrozen, left: Array) -> Rebuild:
    """Return the code of the prompt's chunks, extended by the left rows of later chunks."""
    if frozen.later is None:
        return prompt.replace(tail=left, tail_unit=frozen.chunks)
    codec, size = policy.later_codec, policy.chunk_size
    none = codec.empty(spec.batch, 0, size, sizes_of(spec)).left
    later = Rebuild(none, frozen.later, prompt.inverse, left, frozen.chunks, codec=codec, unit=size)
    return prompt.replace(later=later)
