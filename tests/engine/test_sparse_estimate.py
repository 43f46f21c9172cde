"""The estimate of what a prompt's queries attend to costs little beside exact attention, counted in the jaxpr."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from cases import TINY

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill import VerticalSlash

TOKENS = 8192


def operations(jaxpr, times=1):
    """Multiplications and additions of all matrix products. A loop counts as often as it runs."""
    total = 0
    for one in jaxpr.eqns:
        runs = times
        if one.primitive.name == "dot_general":
            (contracted, _), _ = one.params["dimension_numbers"]
            left = one.invars[0].aval.shape
            total += times * 2 * one.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        elif one.primitive.name == "scan":
            runs = times * one.params["length"]
        for inner in jax.tree.leaves(one.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            found = operations(getattr(inner, "jaxpr", inner), runs) if hasattr(inner, "jaxpr") else 0
            assert not (found and one.primitive.name == "while"), "how often this loop runs is not known"
            total += found
    return total


def test_the_estimate_is_below_three_hundredths_of_exact_attention():
    """The last 64 queries by 8,192 keys, twice. Exact attention has half as many pairs as the square, and two products.

    The share halves with each doubling of the prompt.
    """
    config, attention = dataclasses.replace(TINY, q_heads=4, kv_heads=2, head_dim=64), VerticalSlash()
    rows = jax.ShapeDtypeStruct((1, TOKENS, 2, 64), jnp.float32)
    whole = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (1, TOKENS)))
    tail = jax.ShapeDtypeStruct((1, attention.tail, 4, 64), jnp.float32)

    def begin(prompt, tail):
        return attention.begin(config, config.attention_kind(0), prompt, tail, None)

    counted = operations(jax.make_jaxpr(begin)(PromptKV(rows, rows, rows, *whole), tail).jaxpr)
    assert counted == 2 * 4 * 2 * 64 * TOKENS * 64
    assert counted < 0.03 * 4 * 4 * 64 * TOKENS * (TOKENS + 1) / 2
