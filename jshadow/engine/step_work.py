"""What the layers of a step moved and selected, and the counters that add it up.

B rows, T tokens of a step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache import offload
from jshadow.cache.records import Fetched, LayerState, Selection
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters


@dataclasses.dataclass
class LayerWork:
    """The units that one layer fetched in a step.

    Attributes:
        moved: bytes that each row moved.
        missed: what a row moved in addition, uint32 [B], in units of offload.FETCH_QUANTUM bytes. Rows differ if units
            that the device still has from the previous step are not fetched again.
        fetches: the fetched units, in the order of the fetches.
        followed: the selections whose hits are counted.
        later: (target layer, selection, fetched units) of each fetch that is for the next step.
    """

    moved: int = 0
    missed: int | Array = 0
    fetches: list[Fetched] = dataclasses.field(default_factory=list)
    followed: list[Selection] = dataclasses.field(default_factory=list)
    later: list[tuple[int, Selection, Fetched]] = dataclasses.field(default_factory=list)

    def add(self, spec: CacheSpec, selection: Selection, layout: Any, fetched: Fetched) -> None:
        """Count one fetch, of the units `selection` of the layer `spec`."""
        self.fetches.append(fetched)
        self.moved += offload.fetched_bytes(spec, selection, layout)
        self.missed = self.missed + offload.missed_quanta(spec, selection, layout)
        if selection.hit is not None:
            self.followed.append(selection)


def attended(spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
    """Tokens that a query attends to when rows hold `lengths` tokens, with its own; mean over heads, float32 [B]."""
    return functools.reduce(jnp.add, spec.policy.attended_parts(spec, state, lengths).values())


def count_step(
    counters: Counters,
    specs: tuple[CacheSpec, ...],
    layers: list[LayerState],
    works: list[LayerWork],
    visible: Array,
    valid: Array,
) -> Counters:
    """Add one step to the counters.

    Args:
        counters: the counters before the step.
        specs: one for each layer.
        layers: the layers after the step.
        works: the units that each layer fetched.
        visible: how many tokens are at or before each query, int32 [B, T].
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
        + one * (jnp.uint32(sum(work.moved for work in works) // offload.FETCH_QUANTUM) + missed),
    )
