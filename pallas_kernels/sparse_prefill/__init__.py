"""The op that computes attention of a prompt's queries over lists of key blocks and single keys."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.choose import run
from pallas_kernels.sparse_prefill import kernel, reference
from pallas_kernels.sparse_prefill.operands import KeyLists as KeyLists
from pallas_kernels.sparse_prefill.operands import Keys as Keys
from pallas_kernels.sparse_prefill.operands import check


def sparse_prefill(
    q: jax.Array,
    keys: Keys,
    lists: KeyLists,
    first: jax.Array,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Compute causal softmax attention of each block of queries over the keys in its lists.

    Scores and softmax statistics are float32. The result is 0 for a query that sees no key, and for padding. This is
    the sparse kernel of MInference (arXiv 2407.02490, appendix C), with an optional mask for exact diagonals.

    Args:
        q: consecutive queries, floating [B, P, h_q, d], where h_q is a multiple of h_kv.
        keys: the prompt's keys and values, at least up to the last query.
        lists: the keys of each of n query blocks. A query block has M = P / n queries.
        first: position of the first query, int32 []. It is a multiple of M.
        sinks: None, or floating [h_q], a logit of each query head. It takes part in the head's softmax as the score of
            one more key, whose value is 0.
        implementation: "auto", "xla", "pallas" or "interpret". "xla" holds a float32 matrix [B, h_q, P, S].

    Returns:
        [B, P, h_q, d] in q's dtype.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check(q, keys, lists, first)
    if sinks is not None:
        expect_shape("sinks", sinks, (q.shape[2],))
        expect_dtype("sinks", sinks, jnp.floating)
    return run(
        implementation,
        functools.partial(kernel.sparse_prefill, scale=float(scale)),
        functools.partial(reference.sparse_prefill, scale=float(scale)),
        q,
        keys,
        lists,
        first,
        sinks,
    )
