"""Laws about the state: its counted bytes, the cost and independence of forks, and host arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from jshadow.cache import offload
from jshadow.cache.accounting import leaf_bytes, state_nbytes
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.step import step_writes
from jshadow.errors import StateMismatch
from jshadow.evaluation.laws.answers import has_host_rows
from jshadow.evaluation.laws.inputs import BATCH, STEPS, TINY, abstract, model, run_steps, state_of
from jshadow.evaluation.laws.law import Case, both_settings, equal, holds, in_each_mode, in_one_mode, law

MEMORIES = ("device", "pinned_host")


def halves(state: KVState) -> tuple[list[Any], list[Any]]:
    """Return the frozen leaves, which forks share, and the live leaves, which forks copy."""
    reads, writes = state.split()
    return jax.tree.leaves(reads), jax.tree.leaves(writes)


def pointers(leaves: list[Any]) -> list[int]:
    """Return the addresses of all leaves that have elements."""
    return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]


@law("The bytes that a state reports for each memory are the bytes of its leaves there.", cases=both_settings)
def bytes_are_the_leaves_bytes(case: Case) -> None:
    """Count the leaves of layers, shared arrays and learned arrays. Also compare the host's bytes with the specs."""
    state = state_of(case)
    leaves = jax.tree.leaves((state.layers, state.shared, state.fitted))
    by_memory = [sum(leaf_bytes(leaf) for leaf in leaves if leaf.sharding.memory_kind == memory) for memory in MEMORIES]
    equal(np.sum(list(state_nbytes(state).values()), axis=0), by_memory, f"bytes in {MEMORIES}")
    equal(sum(by_memory), sum(leaf_bytes(leaf) for leaf in leaves), "bytes in all")
    equal(by_memory[1], offload.host_bytes(state.specs), "bytes in host memory, and those of the specs,")


@law("The state that bytes are planned from has the tree, shapes and dtypes of the real state.", cases=in_each_mode)
def abstract_state_is_the_real_one(case: Case) -> None:
    """Compare trees, static fields, shapes and dtypes, and check that the abstract leaves allocate no memory."""
    state, planned = state_of(case), abstract(case, case.fetch)
    holds(state_nbytes(planned) == state_nbytes(state), f"bytes by part: {state_nbytes(planned)} are planned")
    trees: list[Any] = [jax.tree.structure(tree) for tree in (planned, state)]
    holds(trees[0] == trees[1], "trees and static fields differ")
    for shape, real in zip(jax.tree.leaves(planned), jax.tree.leaves(state), strict=True):
        holds(isinstance(shape, jax.ShapeDtypeStruct), f"an abstract leaf is a {type(shape).__name__}")
        holds((shape.shape, shape.dtype) == (real.shape, real.dtype), f"{shape} is planned, {real.aval} is there")


@law("Forks share the frozen half of a state and copy only its live half. Steps keep the frozen half shared.")
def ten_forks_cost_ten_lives(case: Case) -> None:
    """Compare the addresses of the leaves of ten forks."""
    state = state_of(case)
    frozen, live = halves(state)
    forks = [state.fork() for _ in range(10)]
    addresses = set(pointers(live))
    for fork in forks:
        shared, copied = halves(fork)
        holds(all(one is other for one, other in zip(shared, frozen, strict=True)), "a fork copies a frozen leaf")
        holds(addresses.isdisjoint(pointers(copied)), "two forks share a live leaf")
        addresses |= set(pointers(copied))
        kinds = [[leaf.sharding.memory_kind for leaf in leaves] for leaves in (copied, live)]
        holds(kinds[0] == kinds[1], "a fork's live leaf lies in another memory")
    _, stepped = decode.decode_step(model(), STEPS[:, 0], forks[0])
    same = [one is other for one, other in zip(halves(stepped)[0], frozen, strict=True)]
    holds(all(same), "a step copies a frozen leaf")


@law("Using a fork does not change the results of its parent.")
def fork_leaves_its_parent_usable(case: Case) -> None:
    """Compare the logits of a state after a fork of it was used with those of an unforked state, bit by bit."""
    parent = state_of(case)
    run_steps(model(), parent.fork(), STEPS[:, 3:9])
    untouched, _ = run_steps(model(), state_of(case), STEPS[:, :3])
    after, _ = run_steps(model(), parent, STEPS[:, :3])
    equal(after, untouched, "logits")


@law("Every use of a state that a step has consumed raises an error.", cases=in_one_mode)
def consumed_state_says_so(case: Case) -> None:
    """Check that every use raises StateMismatch with the word "consumed"."""
    state = state_of(case)
    decode.decode_step(model(), STEPS[:, 0], state)
    uses: dict[str, Callable[[], object]] = {
        "decode_step": lambda: decode.decode_step(model(), STEPS[:, 0], state),
        "decode_steps": lambda: decode.decode_steps(model(), STEPS[:, 0], state, 2),
        "extend": lambda: decode.extend(model(), STEPS[:, :2], [1, 1, 1], state),
        "fork": state.fork,
        "take": lambda: state.take([0]),
        "insert": lambda: state.insert(0, state_of(case)),
        "insert into another": lambda: state_of(case).insert(0, state),
    }
    for name, use in uses.items():
        try:
            use()
        except StateMismatch as error:
            holds("consumed" in str(error), f"{name} says {error}")
        else:
            holds(False, f"{name} takes a consumed state")


@law(
    "A step neither scatters to a host array nor moves a whole host array.",
    cases=lambda subject, fetches: [Case(subject, "device_put")],
    unclaimed=has_host_rows,
)
def steps_leave_the_host_alone(case: Case) -> None:
    """Inspect the operations of a step. It must move rows from host memory, but no whole array."""
    offenses, fetches = step_host_moves(case)
    holds(not offenses, f"a step does this to a host array: {offenses[:1]}")
    holds(fetches, "a step fetches nothing from host memory")


def step_host_moves(case: Case) -> tuple[list[str], int]:
    """Return the forbidden operations of a step on host arrays, and how many fetches it has."""
    state = state_of(case)
    reads, writes = state.split()
    args = (model().weights, np.zeros(BATCH, np.int32), reads, writes, np.ones(BATCH, bool))

    def run(weights: Any, token: Any, reads: Any, writes: Any, active: Any) -> Any:
        return step_writes(weights, TINY, token[:, None], active.astype(jnp.int32), reads, writes)

    return host_offenses(run, *args, stored={part.array.shape for part in host_tiers(state)})


def host_tiers(state: KVState) -> list[Any]:
    """Return the host arrays of every layer: the prompt's rows, and the rows of later tokens if there are any."""
    tiers = [layer.host for layer in state.layers if layer.host is not None]
    return [part for tier in tiers for part in (tier.prompt, tier.tail) if part is not None]


def host_offenses(function: Callable[..., Any], *args: Any, stored: set[tuple[int, ...]]) -> tuple[list[str], int]:
    """Return the forbidden operations of a function on host arrays, and how many fetches it has.

    Two kinds of operations are forbidden: a scatter to a host array, and a copy of a whole host array.

    Args:
        function: the function, which is traced but not run.
        *args: its arguments.
        stored: the shapes of the host arrays.
    """
    offenses, fetches = [], 0
    for equation in equations(jax.make_jaxpr(function)(*args).jaxpr):
        operands = [v for v in equation.invars if hasattr(v.aval, "shape") and in_host(v)]
        if equation.primitive.name.startswith("scatter") and operands:
            offenses.append(str(equation))
        if equation.primitive.name == "device_put":
            fetches += bool(operands)
            if any(v.aval.shape in stored for v in operands):
                offenses.append(str(equation))
    return offenses, fetches


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def in_host(variable: Any) -> bool:
    """Return whether a variable of a jaxpr lies in host memory."""
    return getattr(variable.aval, "memory_space", None) == jax.memory.Space.Host
