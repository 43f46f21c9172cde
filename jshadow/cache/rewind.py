"""States whose rows give back their newest tokens, as speculation needs: a token that was guessed wrong is undone.

Most methods store each token after the prompt in a slot of its own. Such a row only becomes shorter: its slots are
written again by the next tokens. A ring buffer has lost the oldest tokens for the newest ones, so it can go back a few
tokens only. `LayerCache.earliest` says how far. B is the number of rows.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.shared_rows import each_row
from jshadow.errors import ConfigError, StateMismatch

UNKNOWN = -1  # the last token of a row that gave tokens back, if the caller does not tell it


def reached_tokens(state: Any) -> Array:
    """Return the most tokens that each row of a KVState has ever held, int32 [B]."""
    return jnp.maximum(state.counters.reached, state.lengths)


def earliest(state: Any, reached: Array) -> Array:
    """Return the fewest tokens that each row can hold after a rewind, int32 [B]. It can be traced by jit.

    Args:
        state: a KVState.
        reached: the most tokens that each row has held by then, int32 [B].

    Raises:
        ConfigError: a layer's method cannot give tokens back.
    """
    if state.shares_prompt:
        shared: Array = each_row(lambda one, reached: earliest(one, reached), state, reached)
        return shared
    distinct = {spec.policy: (spec, layer) for spec, layer in zip(state.specs, state.layers, strict=True)}
    limits = [spec.policy.earliest(spec, layer, reached) for spec, layer in distinct.values()]
    if any(limit is None for limit in limits):
        raise ConfigError(f"policy must be one that can give tokens back (KVState.rewind), got {state.policy}")
    return jnp.max(jnp.stack(limits), axis=0)


def rewound(state: Any, lengths: Array, last: Array) -> Any:
    """Return the state after each row went back to `lengths` tokens. It can be traced by jit, and checks nothing.

    Args:
        state: a KVState.
        lengths: number of tokens of each row, int32 [B], from `earliest` to the number that it holds.
        last: the last token of each row then, int32 [B].
    """
    if state.shares_prompt:

        def one_row(one: Any, lengths: Array, last: Array) -> Any:
            return rewound(one, lengths, last).split()[1]

        return state.join(each_row(one_row, state, lengths, last))
    counters = state.counters.replace(reached=reached_tokens(state))
    layers = tuple(
        spec.policy.rewound(spec, layer, lengths) for spec, layer in zip(state.specs, state.layers, strict=True)
    )
    return state.replace(layers=layers, lengths=lengths, last=last, counters=counters)


def rewind(state: Any, lengths: Any, last: Any) -> Any:
    """Return the result of `KVState.rewind`. The state must not be consumed."""
    held, wanted = np.asarray(state.lengths), np.asarray(lengths)
    if wanted.shape != held.shape or wanted.dtype.kind not in "iu":
        raise StateMismatch(f"lengths must be integers of shape {held.shape}, got {wanted.dtype} {wanted.shape}")
    least = np.minimum(np.asarray(earliest(state, reached_tokens(state))), held)  # a row may always stay as it is
    if (bad := np.flatnonzero((wanted < least) | (wanted > held))).size:
        row = int(bad[0])
        raise StateMismatch(
            f"lengths of row {row} must lie in [{least[row]}, {held[row]}] for {state.policy.name}, got {wanted[row]}"
        )
    if last is None:
        tokens = jnp.where(wanted == held, state.last, UNKNOWN)
    else:
        tokens = jnp.asarray(last, jnp.int32)
        if tokens.shape != held.shape:
            raise StateMismatch(f"last must be integers of shape {held.shape}, got {tokens.shape}")
        tokens = jnp.where(wanted >= 0, tokens, state.last)
    # The new lengths are computed from an array of the state, so that they are placed like it. If they were placed
    # otherwise, JAX would compile the next step again.
    return rewound(state, jnp.minimum(state.lengths, wanted.astype(np.int32)), tokens)
