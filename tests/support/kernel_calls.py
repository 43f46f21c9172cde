"""The GPU ops called with flat keyword arguments, as `kernel_cases` and `kernel_truth` have them.

Each call is one program of XLA: without `jax.jit`, every operation of a reference would be one.
"""

import functools

import jax

import pallas_kernels
from jshadow.cache.recurrence import step_tokens
from pallas_kernels import ChosenKeys, HostRows, KeptRows, NewTokens, TwoLevels

STATIC = ("profile", "value_bits", "value_dtype", "scale", "count", "size", "factor", "unit", "implementation")
jitted = functools.partial(jax.jit, static_argnames=STATIC)
select_chunks = jax.jit(pallas_kernels.select_chunks, static_argnames=("count", "implementation"))
chunk_scores = jax.jit(pallas_kernels.chunk_scores, static_argnames=("scale", "implementation"))
sparse_attention = jax.jit(pallas_kernels.sparse_attention, static_argnames=("scale", "implementation"))
recurrent_step = jax.jit(step_tokens, static_argnames="implementation")
sparse_prefill = jax.jit(pallas_kernels.sparse_prefill, static_argnames=("scale", "implementation"))


def operands(values, **fields):
    """The values, the keys, and what is kept, or None."""
    rows = HostRows(values, *(fields.pop(key, None) for key in ("values_tail", "value_bits", "value_dtype")))
    kept = [fields.pop(key, None) for key in ("kept_values", "kept_keys", "places", "missed")]
    return rows, ChosenKeys(**fields), None if kept[3] is None else KeptRows(*kept)


@jitted
def reconstruct_keys(implementation="auto", **fields):
    return pallas_kernels.reconstruct_keys(ChosenKeys(**fields), implementation=implementation)


@jitted
def fetch_reconstruct(values, implementation="auto", **fields):
    return pallas_kernels.fetch_reconstruct(*operands(values, **fields), implementation=implementation)


@jitted
def attend_chunks(q, values, scale, implementation="auto", **fields):
    rows, keys, _ = operands(values, **fields)
    return pallas_kernels.attend_chunks(q, rows, keys, scale=scale, implementation=implementation)


@jitted
def level_scores(q, scores, implementation="auto", **fields):
    options = {name: fields.pop(name) for name in ("count", "size", "scale")}
    return pallas_kernels.level_scores(q, scores, TwoLevels(**fields), **options, implementation=implementation)


@jitted
def append_rows(k, v, q_new, k_new, v_new, implementation="auto", **rest):
    options = {name: rest.pop(name) for name in ("factor", "unit") if name in rest}
    new = NewTokens(q_new, k_new, v_new, **rest)
    return pallas_kernels.append_rows(k, v, new, **options, implementation=implementation)
