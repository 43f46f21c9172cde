"""How the arrays of a whole state are split over a mesh: a PartitionSpec for each of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jshadow.cache.counters import Counters
from jshadow.cache.offload import tier_shapes
from jshadow.cache.records import LayerState
from jshadow.cache.shards import Shards, splits
from jshadow.cache.spec import CacheSpec

EVERYWHERE = PartitionSpec()
Specs = tuple[PartitionSpec, ...]


class Moves(NamedTuple):
    """How arrays are split on a mesh before and after rows move between them.

    Attributes:
        shards: the mesh.
        before, after: the PartitionSpec of each array.
    """

    shards: Shards
    before: Specs
    after: Specs


def moves_of(
    tree: Any, specs: tuple[CacheSpec, ...], after: tuple[CacheSpec, ...] | None, splits_of: Callable[..., Any]
) -> Moves | None:
    """Return how the arrays of a tree are split, or None on one device.

    Args:
        tree: the arrays.
        specs: the specs of the state.
        after: the specs of the state that results. None: the same.
        splits_of: `row_splits` or `write_splits`.
    """
    shards = specs[0].shards
    if shards is None:
        return None
    count = len(jax.tree.leaves(tree))

    def flat(specs: tuple[CacheSpec, ...]) -> Specs:
        leaves = jax.tree.leaves(splits_of(specs), is_leaf=lambda split: isinstance(split, PartitionSpec))
        assert len(leaves) == count, (len(leaves), count)
        return tuple(leaves)

    return Moves(shards, flat(specs), flat(after or specs))


def layer_shapes(spec: CacheSpec) -> LayerState:
    """Return the state of a layer on one device, with ShapeDtypeStructs in place of arrays."""
    state = jax.eval_shape(functools.partial(spec.policy.init, spec))
    return state.replace(host=tier_shapes(spec.policy.host_layout(spec), spec))


def layer_splits(spec: CacheSpec) -> LayerState:
    """Return the PartitionSpec of every array of a layer's state, in a LayerState."""
    where: LayerState = splits(dataclasses.replace(spec, layer=None), layer_shapes)
    return where


def row_splits(specs: tuple[CacheSpec, ...]) -> tuple[Any, ...]:
    """Return the PartitionSpecs of the arrays of `KVState.row_trees`."""
    return tuple(map(layer_splits, specs)), None, EVERYWHERE, EVERYWHERE, counter_splits()


def write_splits(specs: tuple[CacheSpec, ...]) -> tuple[Any, ...]:
    """Return the PartitionSpecs of the arrays of `Writes`, in the order of its fields."""
    layers = tuple((where.live, where.host.tail) for where in map(layer_splits, specs))
    return layers, None, EVERYWHERE, EVERYWHERE, counter_splits()


def counter_splits() -> Counters:
    """Return the PartitionSpecs of the counters, which lie on every device."""
    names = [field.name for field in dataclasses.fields(Counters)]
    where: dict[str, Any] = dict.fromkeys(names, EVERYWHERE)
    return Counters(**where)
