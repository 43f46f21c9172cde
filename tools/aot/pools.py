"""The programs that move rows between states: insert a row into a pool in place, and take a row out of it."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from aot.compiler import place
from aot.models import ONE_LAYER
from aot.programs import Task, size
from jshadow.cache.rows import insert_into, taken_from
from jshadow.planner.bytes import abstract_of, on_backend
from jshadow.planner.machine import abstract_state
from jshadow.policies import Policy, ShadowKV

ROWS, CAPACITY = 8, 131_072


def rows_of(policy: Policy, batch: int, room: int) -> Any:
    """Return the abstract arrays of the rows of a state that is offloaded."""
    sizes: dict[str, Any] = {"batch": batch, "capacity": CAPACITY, "prompt": 1024, "dtype": "bfloat16"}
    state = abstract_state(ONE_LAYER, policy, **sizes, fetch="device_put", room=room)
    return abstract_of(on_backend(state.specs, "gpu"), state.policy).row_trees()


def pool_tasks(gpu: str) -> Iterator[Task]:
    """Yield the programs for a pool of eight rows. The window of the row that is inserted is smaller."""
    for told, policy in (("paper", ShadowKV()), ("packed", ShadowKV.packed(small=True))):
        pool, alone = rows_of(policy, ROWS, 1024), rows_of(policy, 1, 64)
        number = place(Shape((), jnp.int32))
        yield Task(
            f"insert a row, {told}",
            gpu,
            insert_into.__wrapped__,
            (jax.tree.leaves(place(pool)), jax.tree.leaves(place(alone)), number),
            (0,),
            reused=size(pool),
        )
        yield Task(
            f"take a row, {told}", gpu, taken_from.__wrapped__, (place(pool), place(Shape((1,), jnp.int32))), reused=0
        )
