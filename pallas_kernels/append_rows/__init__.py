"""The op that applies RoPE to the queries and keys of new tokens, and writes keys and values into a buffer."""

import functools

import jax

from pallas_kernels.append_rows import kernel, reference
from pallas_kernels.append_rows.operands import NewTokens as NewTokens
from pallas_kernels.append_rows.operands import check
from pallas_kernels.choose import run


def append_rows(
    k: jax.Array, v: jax.Array, new: NewTokens, *, factor: float = 1.0, unit: int = 1, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply RoPE to the queries and keys of new tokens, and write keys and values into the slots of a buffer.

    A token whose slot is past the end of the buffer is not written. Donated buffers are changed in place.

    Args:
        k: keys after RoPE, floating [B, h_kv, W, d].
        v: values, in the shape and dtype of k.
        new: the new tokens. The rotation is computed in float32 and rounded to their dtype. Keys and values are then
            rounded to the dtype of k.
        factor: the rotated columns of the queries are multiplied by it.
        unit: number of slots that new.first counts as one.

    Returns:
        The queries after RoPE, in the shape and dtype of new.q, and the new k and v.

    Raises:
        ValueError: a shape, a dtype or the implementation is wrong.
        NotImplementedError: `implementation` names the kernel, and the kernel does not support the arguments.
    """
    check(k, v, new)
    rotated, write = (functools.partial(op.append_rows, factor=factor, unit=unit) for op in (kernel, reference))
    queries, keys, values = run(implementation, rotated, write, k, v, new)
    return queries, keys, values
