"""Records of the units that the layers of a step fetched, and the counters that add them up.

B rows, T tokens of a step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache import accounting
from jshadow.cache.records import Fetched, LayerState, Selection
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters


@dataclasses.dataclass
class LayerWork:
    """The units that one layer fetched in a step.

    Attributes:
        moved: bytes that every row moved from the host, the same for all rows.
        missed: data that each row moved in addition, uint32 [B], in units of accounting.FETCH_QUANTUM bytes. It counts
            fetches that skip units which are still on the device, so rows differ.
        fetches: the fetched units, in the order of the fetches.
        followed: the selections that have a `hit` mask, which is counted.
        later: (target layer, selection, fetched units) of each fetch that is for the next step.
    """

    moved: int = 0
    missed: int | Array = 0
    fetches: list[Fetched] = dataclasses.field(default_factory=list)
    followed: list[Selection] = dataclasses.field(default_factory=list)
    later: list[tuple[int, Selection, Fetched]] = dataclasses.field(default_factory=list)

    def add(self, spec: CacheSpec, selection: Selection, layout: Any, fetched: Fetched) -> None:
        """Record the fetch of the units `selection` from the layer with this spec and host layout."""
        self.fetches.append(fetched)
        self.moved += accounting.fetched_bytes(spec, selection, layout)
        self.missed = self.missed + accounting.missed_quanta(spec, selection, layout)
        if selection.hit is not None:
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
    followed = [selection for work in works for selection in work.followed]

    def total(masks: list[Array]) -> Array:
        counts = [mask.sum(axis=(1, 2), dtype=jnp.uint32) for mask in masks]
        return functools.reduce(jnp.add, counts, jnp.zeros_like(one)) * one

    missed = jnp.asarray(sum(work.missed for work in works), jnp.uint32)
    return Counters(
        steps=counters.steps + queries,
        attended=counters.attended + jnp.where(valid, functools.reduce(jnp.add, seen), 0.0).sum(axis=1),
        selected=counters.selected + total([selection.valid for selection in followed]),
        hits=counters.hits
        + total([selection.valid & hit for selection in followed if (hit := selection.hit) is not None]),
        fetched=counters.fetched
        + one * (jnp.uint32(sum(work.moved for work in works) // accounting.FETCH_QUANTUM) + missed),
    )
