"""The public API in any order, against dense attention: what a state remembers is what its rows were fed, no more.

A machine holds states beside the plain list of token ids that each row has seen. Every call that answers logits must
answer those of exact attention over that list, by the NumPy oracle; every policy runs where it must lose nothing.
"""

import zlib

import pytest
from cases import DEVICE_ONLY, policies_of
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)
from state_machine import StateMachine


def run(name: str, fetch: str, examples: int, steps: int, **fields: object) -> None:
    """Let a machine run; each policy and mode has its own, reproducible examples."""
    machine = type(f"{name}_{fetch}", (StateMachine,), {"name": name, "fetch": fetch, **fields})
    run_state_machine_as_test(
        seed(zlib.crc32(machine.__name__.encode()))(machine),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, database=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("name", policies_of("h2o", "specache", "shadowkv_plus_transform"))
def test_any_order_of_calls_is_dense_attention(name):
    """Each size of batch and window is compiled anew: the fast suite tries few."""
    run(name, "device_put", examples=8, steps=8, batches=(2,))


@pytest.mark.parametrize(
    "name", [name for name in policies_of("quest", "omnikv", "shadowkv", "shadowkv_plus") if name not in DEVICE_ONLY]
)
def test_many_orders_of_calls(name):
    """In the other mode; of two others, the one that a CPU can only stand in for."""
    fetch = "zero_copy" if name.startswith("shadowkv") else "resident"
    run(name, fetch, examples=8, steps=12, batches=(1, 2, 3))
