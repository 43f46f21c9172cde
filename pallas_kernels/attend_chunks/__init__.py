"""The op that rebuilds the keys of selected chunks and attends to them in one kernel, which writes no key or value."""

import jax

from pallas_kernels.arguments import expect_groups, expect_shape
from pallas_kernels.attend_chunks import kernel, reference
from pallas_kernels.choose import run
from pallas_kernels.fetch_reconstruct import operands
from pallas_kernels.fetch_reconstruct.operands import HostRows
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.reconstruct_keys.operands import check as check_keys


def attend_chunks(
    q: jax.Array, values: HostRows, keys: ChosenKeys, *, scale: float, implementation: str = "auto"
) -> jax.Array:
    """Compute softmax attention of one query over the tokens of k selected chunks, whose keys are rebuilt.

    The keys are those of `reconstruct_keys`, and the values those of `fetch_reconstruct`. Scores and softmax
    statistics are float32.

    Args:
        q: floating [B, 1, h_q, d], where h_q is a multiple of h_kv, and at most 16 times h_kv for the kernel.
        values: value rows of all chunks.
        keys: the arrays that keys are rebuilt from, and the ids of at least one selected chunk.

    Returns:
        [B, 1, h_q, d] in q's dtype.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check_keys(keys)
    operands.check(values, keys, None)
    batch, heads, count = keys.ids.shape
    expect_shape("q", q, (batch, 1, "h_q", keys.dim))
    expect_groups(q.shape[2], heads)
    if count < 1:
        raise ValueError("ids must have at least one chunk, got none")

    def compiled(q: jax.Array, values: HostRows, keys: ChosenKeys, interpret: bool) -> jax.Array:
        return kernel.attend_chunks(q, values, keys, scale, interpret)

    def plain(q: jax.Array, values: HostRows, keys: ChosenKeys) -> jax.Array:
        return reference.attend_chunks(q, values, keys, scale)

    attended: jax.Array = run(implementation, compiled, plain, q, values, keys)
    return attended
