"""The public API in any order, against dense attention: what a state remembers is what its rows were fed, no more.

A machine holds states beside the plain list of token ids that each row has seen. Every call that answers logits must
answer those of exact attention over that list, by the NumPy oracle; every policy runs where it must lose nothing.
"""

import zlib

import pytest
from cases import mode_of
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from state_machine import LONG, PROMPT, SHORT, StateMachine


def run(name: str, fetch: str, examples: int, steps: int, **fields: object) -> None:
    """Let a machine run; each policy and mode has its own, reproducible examples."""
    machine = type(f"{name}_{fetch}", (StateMachine,), {"name": name, "fetch": fetch, **fields})
    run_state_machine_as_test(
        seed(zlib.crc32(machine.__name__.encode()))(machine),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, database=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "quest", "omnikv", "specache", "shadowkv_plus", "shadowkv_plus_transform"])
def test_any_order_of_calls_is_dense_attention(name):
    run(name, mode_of(name), examples=8, steps=8)


@pytest.mark.slow
def test_many_orders_of_calls():
    """Of states with one, two or three rows and windows of two sizes, whose prompts are read in pieces or at once."""
    sizes = {"batches": (1, 2, 3), "least": (SHORT, LONG), "pieces": (PROMPT, 5)}
    run("shadowkv", "zero_copy", examples=8, steps=12, **sizes)
