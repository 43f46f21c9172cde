"""Records of the units that the layers of a step fetched, and the counters that add them up.

B rows, T tokens of a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache import accounting
from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import Fetched, LayerState, Selection
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters


@dataclasses.dataclass
class LayerWork:
    """The units that one layer fetched in a step.

    Attributes:
        moved: bytes that every row moved from the host, the same for all rows.
        missed: (bytes of a unit, number of units in each head, int32 [B, heads]) of each fetch that skips units on the
            device. These units were moved in addition, and rows differ.
        fetches: the fetched units, in the order of the fetches.
        followed: the selections whose hits are counted.
        later: (target layer, selection, fetched units) of each fetch that is for the next step.
        counted: the layer's own counters of these tokens if it took them in several blocks, else None.
    """

    moved: int = 0
    missed: list[tuple[int, Array]] = dataclasses.field(default_factory=list)
    fetches: list[Fetched] = dataclasses.field(default_factory=list)
    followed: list[Selection] = dataclasses.field(default_factory=list)
    later: list[tuple[int, Selection, Fetched]] = dataclasses.field(default_factory=list)
    counted: Counters | None = None

    def add(self, spec: CacheSpec, selection: Selection, layout: Any, fetched: Fetched) -> None:
        """Record the fetch of the units `selection` from the layer with this spec and host layout."""
        self.fetches.append(fetched)
        self.moved += accounting.fetched_bytes(spec, selection, layout)
        if selection.kept is not None and spec.fetch != "resident":
            self.missed.append((unit_bytes(spec, layout), selection.kept.count))
        if selection.hit is not None or selection.counts is not None:
            self.followed.append(selection)


def attended(spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
    """Return the number of tokens that a query attends to, including its own, as a mean over heads, float32 [B].

    `lengths` is the number of tokens that each row holds at this query, int32 [B].
    """
    return functools.reduce(jnp.add, spec.policy.attended_parts(spec, state, lengths).values())


def count_step(
    counters: Counters,
    specs: tuple[CacheSpec, ...],
    layers: list[LayerState],
    works: list[LayerWork],
    visible: Array,
    valid: Array,
) -> Counters:
    """Return the counters after a step.

    Args:
        counters: the counters before the step.
        specs: the spec of each layer.
        layers: the state of each layer after the step.
        works: the units that each layer fetched.
        visible: number of tokens up to and including each query's own, int32 [B, T].
        valid: which queries are real, bool [B, T].
    """
    queries = valid.sum(axis=1, dtype=jnp.uint32)
    one = (queries > 0).astype(jnp.uint32)
    seen = [
        jax.vmap(functools.partial(attended, spec, layer), in_axes=1, out_axes=1)(visible)
        for spec, layer in zip(specs, layers, strict=True)
    ]
    units = [unit_counts(selection) for work in works for selection in work.followed]
    # The layers are added first. So a GPU needs no kernel in each layer to add up the heads.
    selected, hits = (one * summed((pair[which] for pair in units), len(one)) for which in (0, 1))
    missed = jnp.zeros_like(one)
    for unit, count in in_one(pair for work in works for pair in work.missed):
        missed += accounting.missed_quanta(count.sum(axis=1), unit)
    return Counters(
        steps=counters.steps + queries,
        attended=counters.attended + jnp.where(valid, functools.reduce(jnp.add, seen), 0.0).sum(axis=1),
        selected=counters.selected + selected,
        hits=counters.hits + hits,
        fetched=counters.fetched
        + one * (jnp.uint32(sum(work.moved for work in works) // accounting.FETCH_QUANTUM) + missed),
        reached=counters.reached,
    )


def add_counted(
    counters: Counters, works: list[LayerWork], join: Callable[[Counters], Counters] | None = None
) -> Counters:
    """Return the counters after a step whose layers have counted their work themselves (`LayerWork.counted`).

    `join` adds up the counts of several devices. The layers are added first, so a step has one such sum.
    """
    counts = [work.counted for work in works if work.counted is not None]
    total: Counters = jax.tree.map(lambda *parts: functools.reduce(jnp.add, parts), *counts)
    total = total.replace(steps=counts[0].steps)  # every layer has counted the same queries
    both: Counters = jax.tree.map(jnp.add, counters, total if join is None else join(total))
    return both


def unit_counts(selection: Selection) -> tuple[Array, Array]:
    """Return the number of valid units of a selection, and that of its hits, int32 [B, heads] each."""
    if selection.counts is not None:
        return selection.counts
    assert selection.hit is not None
    valid, hits = (mask.sum(axis=2, dtype=jnp.int32) for mask in (selection.valid, selection.valid & selection.hit))
    return valid, hits


def summed(counts: Iterable[Array], rows: int) -> Array:
    """Add up counts of heads, int32 [B, heads] each, for `rows` rows: uint32 [B]."""
    total: Array = jnp.zeros(rows, jnp.uint32)
    for _, count in in_one((0, count) for count in counts):
        total = total + count.astype(jnp.uint32).sum(axis=1)
    return total


def in_one(pairs: Iterable[tuple[int, Array]]) -> list[tuple[int, Array]]:
    """Add up the arrays of those pairs whose number and shape are equal."""
    sums: dict[tuple[int, tuple[int, ...]], Array] = {}
    for number, array in pairs:
        key = number, array.shape
        sums[key] = sums[key] + array if key in sums else array
    return [(number, array) for (number, _), array in sums.items()]
