"""Runs Pallas kernels program by program on NumPy arrays, and watches every element they touch.

Pallas' interpreter forgives what a GPU does not: it clips or drops an index that is out of bounds. Here that fails,
and so does an element that is written twice or never. What was read is kept, to show what was not.

The threads of a program also exchange numbers in memory. Here every load must be separated by a barrier from the store
before it, and every store from the loads and the store before it.
"""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from random_arrays import array

from pallas_kernels.select_chunks import kernel as select_kernel

NEVER = -1  # the time of what has not happened
clock = [0]  # barriers that the program has passed


class Watched:
    """A kernel's ref: an array, how often each element was read and written, and when last. `given`: it is an input."""

    def __init__(self, array: Any, *, given: bool = True) -> None:
        self.array, self.shape, self.dtype, self.given = np.array(array), tuple(array.shape), array.dtype, given
        self.reads, self.writes = np.zeros(self.shape, int), np.zeros(self.shape, int)
        self.read_at, self.written_at = np.full(self.shape, NEVER), np.full(self.shape, NEVER)

    @property
    def at(self) -> "Watched":
        return self

    def __getitem__(self, index: Any) -> tuple["Watched", tuple[np.ndarray, ...]]:
        whole = index if isinstance(index, tuple) else (index,)
        assert len(whole) == len(self.shape)
        return self, tuple(np.broadcast_arrays(*map(np.asarray, whole)))

    def touch(self, index: tuple[np.ndarray, ...], mask: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """The lanes that count, and their indices, all of which must exist."""
        lanes = np.broadcast_to(True if mask is None else np.asarray(mask), index[0].shape)
        places = tuple(axis[lanes] for axis in index)
        for axis, (place, size) in enumerate(zip(places, self.shape, strict=True)):
            assert ((place >= 0) & (place < size)).all(), f"axis {axis} of size {size}: {place}"
        return lanes, places


def load(view: Any, *, mask: Any = None, other: Any = None, eviction_policy: str | None = None) -> jax.Array:
    """pltriton.load. The hint for the cache changes no value."""
    ref, index = view
    lanes, places = ref.touch(index, mask)
    if not ref.given:
        assert (ref.writes[places] > 0).all(), "an element is read before it is written"
        assert (ref.written_at[places] < clock[0]).all(), "no barrier between a store and a load"
        ref.read_at[places] = clock[0]
    np.add.at(ref.reads, places, 1)
    out = np.full(lanes.shape, 0 if other is None else other, ref.dtype)
    out[lanes] = ref.array[places]
    return array(out)


def store(view: Any, value: jax.Array, *, mask: Any = None) -> None:
    """pltriton.store."""
    ref, index = view
    lanes, places = ref.touch(index, mask)
    np.add.at(ref.writes, places, 1)
    assert value.dtype == ref.dtype
    if not ref.given:
        last = np.maximum(ref.read_at[places], ref.written_at[places])
        assert (last < clock[0]).all(), "no barrier between a store and what came before it"
        ref.written_at[places] = clock[0]
    ref.array[places] = np.broadcast_to(np.asarray(value), lanes.shape)[lanes]


def without_rule(function: Any) -> Any:
    """Stands in for `custom_vmap`: a function that ignores its rule."""
    call = functools.partial(function)
    call.def_vmap = lambda rule: None  # type: ignore[attr-defined]
    return call


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes kernels run watched, and collects the operands of each call: pytrees of Watched."""
    calls: list[Any] = []
    program = [0]

    def pallas_call(kernel, *, grid, out_shape, input_output_aliases=None, **_):
        def run(*operands: Any) -> Any:
            inputs = jax.tree.map(Watched, operands)
            shapes, tree = jax.tree.flatten(out_shape)
            refs = [Watched(np.zeros(x.shape, x.dtype), given=False) for x in shapes]
            aliases = {out: jax.tree.leaves(inputs)[index] for index, out in (input_output_aliases or {}).items()}
            for out, ref in aliases.items():
                refs[out] = ref  # one buffer
            outputs = jax.tree.unflatten(tree, refs)
            calls.append(inputs)
            for program[:] in itertools.product(*map(range, grid)):
                clock[0] = 0
                kernel(*inputs, *(outputs if isinstance(outputs, list) else [outputs]))
            scratch = select_kernel.Scratch  # memory that nothing reads after the kernel
            for index, ref in enumerate(jax.tree.leaves(outputs, is_leaf=lambda part: isinstance(part, scratch))):
                if not isinstance(ref, scratch):
                    assert ref.writes.min() >= (index not in aliases), "an element is not written"
                    assert ref.writes.max() <= 1, "an element is written twice"
            return jax.tree.map(lambda ref: array(ref.array), outputs)

        return run

    # A function with a rule for vmap is traced when it is called. The watched kernels cannot be traced.
    monkeypatch.setattr(jax.custom_batching, "custom_vmap", without_rule)
    monkeypatch.setattr(pl, "pallas_call", pallas_call)
    monkeypatch.setattr(pl, "program_id", lambda axis: jnp.int32(program[axis]))
    monkeypatch.setattr(select_kernel, "barrier", lambda interpret: operator.setitem(clock, 0, clock[0] + 1))
    monkeypatch.setattr(pltriton, "load", load)
    monkeypatch.setattr(pltriton, "store", store)
    with jax.disable_jit():
        yield calls
