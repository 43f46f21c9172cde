"""The arrays of a state by name, as a saved state stores them."""

from typing import Any

import jax

from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.errors import CheckpointError


def is_place(node: Any) -> bool:
    """Return whether a node of the pytree is a HostArray. A HostArray counts as one leaf."""
    return isinstance(node, HostArray)


def places(state: KVState) -> dict[str, Any]:
    """Return every array or HostArray of a state by its name. Raises CheckpointError if two have the same name."""
    flat = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_place)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise CheckpointError(f"leaves of the state must have distinct names, got {len(flat)} with {len(named)} names")
    return named


def cache_fills(state: KVState) -> dict[str, int]:
    """Return the names of the leaves that are only a cache, and what fills each of them in an empty cache."""
    return {
        f"layers.{index}.live.{field}": fill
        for index, spec in enumerate(state.specs)
        for field, fill in spec.policy.emptied.items()
    }


def bare(leaf: Any) -> Any:
    """Return the array of a leaf, which may be a HostArray."""
    return leaf.array if isinstance(leaf, HostArray) else leaf


def token_names(batch: int) -> list[str]:
    """Return the tensor names of the token ids, one for each row."""
    return [f"tokens.{row}" for row in range(batch)]
