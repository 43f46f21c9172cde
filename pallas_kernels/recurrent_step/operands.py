"""The arrays that recurrent_step reads and changes, and the checks of their shapes and dtypes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import expect_dtype, expect_shape


class HeldRows(NamedTuple):
    """What a layer holds of each of B rows. All arrays are changed.

    Position p of a row is in slot p % R of `k`, `u` and `log_decay`, and in slot p % I of the inputs.

    Attributes:
        state: S of each value head after a row's first tokens, float32 [B, n_v, d_k, d_v].
        k: keys of the pending tokens, float32 [B, R, n_k, d_k].
        u: what each of them adds to S along its key, float32 [B, R, n_v, d_v].
        log_decay: logarithms of their decays, float32 [B, R, n_v].
        q_inputs, k_inputs: the newest inputs of the convolution, floating [B, I, n_k, d_k].
        v_inputs: the same for values, in their dtype, [B, I, n_v, d_v].
    """

    state: jax.Array
    k: jax.Array
    u: jax.Array
    log_decay: jax.Array
    q_inputs: jax.Array
    k_inputs: jax.Array
    v_inputs: jax.Array


class NextToken(NamedTuple):
    """One new token in each row.

    Attributes:
        q, k: inputs of the convolution, [B, 1, n_k, d_k], in the dtype of the held inputs.
        v: the same for values, [B, 1, n_v, d_v].
        log_decay: logarithm of its decay, at most 0, float32 [B, 1, n_v].
        beta: strength of its update, float32 [B, 1, n_v].
        q_taps, k_taps: kernels of the convolution, floating [K, n_k, d_k]. If it has biases, they are one more row.
        v_taps: the same for values, [K, n_v, d_v].
        skip: floating [n_v], the factor of the value that is added to the output, or None.
        lengths: number of tokens of each row before this one, int32 [B].
        folded: number of tokens that S holds after the step, int32 [B], at most `lengths`.
        folds: how many of these are pending before the step, and are folded into S, int32 [B]. It is 0 in a row whose
            token is not valid. folded - folds, which S holds before the step, is more than lengths - R.
        valid: bool [B, 1]. A row whose token is not valid keeps all its arrays with the same bits.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    q_taps: jax.Array
    k_taps: jax.Array
    v_taps: jax.Array
    skip: jax.Array | None
    lengths: jax.Array
    folded: jax.Array
    folds: jax.Array
    valid: jax.Array


def check(held: HeldRows, new: NextToken) -> None:
    """Check the shapes and dtypes of all arrays.

    Raises:
        ValueError: one of them is wrong.
    """
    expect_shape("held.state", held.state, ("B", "n_v", "d_k", "d_v"))
    expect_shape("held.k", held.k, ("B", "R", "n_k", "d_k"))
    expect_shape("held.q_inputs", held.q_inputs, ("B", "I", "n_k", "d_k"))
    (batch, value_heads, key_dim, value_dim), (slots, key_heads) = held.state.shape, held.k.shape[1:3]
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"held.state's heads must be a multiple of the {key_heads} heads of held.k, got {value_heads}")
    keys, values, taps = (key_heads, key_dim), (value_heads, value_dim), len(new.q_taps)
    ring, inputs, row, numbers = (batch, slots), held.q_inputs.shape[:2], (batch,), jnp.float32
    if inputs[1] < taps:
        raise ValueError(f"held.q_inputs must have a slot for each of the {taps} taps, got {inputs[1]}")
    table: dict[str, tuple[Any, list[Any]]] = {
        "held": (
            held,
            [
                ((batch, *held.state.shape[1:]), numbers),
                ((*ring, *keys), numbers),
                ((*ring, *values), numbers),
                ((*ring, value_heads), numbers),
                *[((batch, inputs[1], *one), new.q.dtype) for one in (keys, keys, values)],
            ],
        ),
        "new": (
            new,
            [
                *[((*row, 1, *one), jnp.floating) for one in (keys, keys, values)],
                *[((*row, 1, value_heads), numbers)] * 2,
                *[((taps, *one), jnp.floating) for one in (keys, keys, values)],
                ((value_heads,), jnp.floating),
                *[(row, jnp.int32)] * 3,
                ((*row, 1), jnp.bool_),
            ],
        ),
    }
    for start, (fields, expected) in table.items():
        for name, x, (shape, dtype) in zip(fields._fields, fields, expected, strict=True):
            if x is not None:
                expect_shape(f"{start}.{name}", x, shape)
                expect_dtype(f"{start}.{name}", x, dtype)
