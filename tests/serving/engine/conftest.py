"""Rows of an engine that are filled with NaN, and with numbers that are no index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshadow.serving.groups import Group


def poison(group, slot):
    """Fill a row of a group."""

    def fill(leaf):
        array = np.array(leaf)
        if array.dtype == bool:
            array[slot] = True
        else:
            array[slot] = np.nan if jnp.issubdtype(array.dtype, jnp.floating) else np.iinfo(array.dtype).max // 2
        return jax.device_put(array, leaf.sharding)

    if group.pool is not None:
        state, rows = group.pool
        if state.shares_prompt:  # the prompt half has no rows
            state = state.join(jax.tree.map(fill, state.split()[1]))
        else:
            state = state.with_row_trees(jax.tree.map(fill, state.row_trees()))
        group.pool = group.pool._replace(state=state, rows=jax.tree.map(fill, rows))


@pytest.fixture
def poison_row_of(monkeypatch):
    """A function that fills the row of an answer. All free rows of a group are filled whenever one of them is freed."""
    release = Group.release

    def release_and_poison(group, slot):
        release(group, slot)
        for free in np.flatnonzero([job is None for job in group.jobs]):
            poison(group, free)

    def poison_row_of(engine, answer):
        for group in engine._loop.groups:
            for slot, job in enumerate(group.jobs):
                if job and job.answer is answer:
                    return poison(group, slot)
        raise AssertionError("the answer must have a row")

    monkeypatch.setattr(Group, "release", release_and_poison)
    return poison_row_of
