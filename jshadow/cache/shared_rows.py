"""States whose rows have one prompt half in common.

The arrays of the prompt half have one row. Those of the changing half have a row for each of B sequences. A function of
a state of one row runs on every row of the changing half by `jax.vmap`, so nothing of the prompt half is repeated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from jshadow.cache.rows import insert_row, take_rows
from jshadow.cache.shards import with_rows
from jshadow.cache.state_splits import moves_of, write_splits
from jshadow.errors import StateMismatch


def each_row(function: Callable[..., Any], state: Any, *rows: Array) -> Any:
    """Run a function on each row of a KVState whose rows have their prompt half in common.

    Args:
        function: called with a state of one row and the arrays [1, ...] of that row. It returns a pytree of arrays
            [1, ...].
        state: the state.
        rows: arrays [B, ...].

    Returns:
        The result of the function, with arrays [B, ...].
    """
    reads, writes = state.split()

    def one(writes: Any, *rows: Array) -> Any:
        alone, *others = jax.tree.map(lambda leaf: leaf[None], (writes, *rows))
        return jax.tree.map(lambda leaf: leaf[0], function(state.of(reads, alone), *others))

    return jax.vmap(one)(writes, *rows)


def share(state: Any, rows: Any) -> Any:
    """Return the result of `KVState.share`. The state must not be consumed."""
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
        raise StateMismatch(f"rows must be an integer of at least 1, got {rows!r}")
    if state.batch != 1:
        raise StateMismatch(f"state must have one row, got {state.batch}; use take([i]) first")
    # `insert` may consume the prompt half of a state with as many rows as its prompt half.
    return take_shared(state, [0] * int(rows)) if rows > 1 else state.take([0])


def take_shared(state: Any, rows: list[int]) -> Any:
    """Return a KVState with the prompt half of `state`, and rows of its changing half."""
    reads, writes = state.split()
    return state.of(reads, take_rows(writes, rows, moves_of(writes, state.specs, None, write_splits)))


def check_inserted(state: Any, row: Any, other: Any) -> None:
    """Check the arguments of `KVState.insert`. Both states must not be consumed.

    Raises:
        StateMismatch: as in `KVState.insert`.
    """
    if isinstance(row, bool) or not isinstance(row, int | np.integer) or not 0 <= row < state.batch:
        raise StateMismatch(f"row must be a whole number in [0, {state.batch}), got {row!r:.80}")
    row_specs = tuple(with_rows(dataclasses.replace(spec, window=0), 1) for spec in state.specs)
    other_specs = tuple(dataclasses.replace(spec, window=0) for spec in other.specs)
    if row_specs != other_specs or other.batch != 1:
        raise StateMismatch(f"other must be one row of {state.specs[0]}, got {other.batch} of {other.specs[0]}")
    if not same_arrays(state.fitted, other.fitted):
        raise StateMismatch("other must have the learned arrays (fitted) of this state, got others")
    if state.shares_prompt:
        own, others = jax.tree.leaves(state.reads()), jax.tree.leaves(other.reads())
        if len(own) != len(others) or not all(one is its for one, its in zip(own, others, strict=True)):
            raise StateMismatch("other must have the prompt half of this state, the same arrays, got others")
    specs = tuple(with_rows(spec, 1) for spec in state.specs)
    if other.replace(specs=specs).room()[0] < 0:
        raise StateMismatch(
            f"other holds {int(other.lengths[0])} tokens, more than fit this state's window={state.specs[0].window}"
        )


def same_arrays(tree: Any, other: Any) -> bool:
    """Return whether two pytrees have the same structure and equal arrays."""
    if tree is other:
        return True
    leaves, other_leaves = jax.tree.leaves(tree), jax.tree.leaves(other)
    alike = str(jax.tree.structure(tree)) == str(jax.tree.structure(other))
    return alike and all(a is b or np.array_equal(a, b) for a, b in zip(leaves, other_leaves, strict=True))


def insert_shared(state: Any, row: int, other: Any, consume: bool) -> Any:
    """Return the result of `KVState.insert` for a state whose rows have their prompt half in common.

    The arguments must be checked.
    """
    reads, writes = state.split()
    if not consume:
        writes = state.fork().split()[1]
    moves = moves_of(writes, state.specs, None, write_splits)
    return state.of(reads, insert_row(writes, row, other.split()[1], moves))
