"""The laws: about logits, about rows and other parts of the state, and about turns and prompts in pieces."""

import functools
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
from jshadow.errors import CapacityError, ConfigError, StateMismatch
from jshadow.evaluation.laws.law import (
    BATCH,
    CAPACITY,
    FETCH_MODES,
    LENGTHS,
    NEIGHBOR,
    PROMPT,
    STEPS,
    TINY,
    Case,
    Difference,
    Subject,
    abstract,
    as_seen,
    both_settings,
    changing,
    close,
    equal,
    holds,
    in_each_mode,
    in_one_mode,
    later_rows,
    law,
    lossless_only,
    meaningful,
    model,
    offloads,
    prefilled,
    random_tokens,
    remembered,
    run_steps,
    same_codes,
    same_settings,
    state_of,
    teacher_forced,
)
from jshadow.policies.base import Policy
from jshadow.policies.full import Full

# The largest difference of logits that bfloat16 with its 8 significant bits may cause. Logits have a standard deviation
# of about 1.
_BF16_TOLERANCE = 0.12
# The smallest difference of logits from full attention that counts as an effect of the small settings.
_VISIBLE = 0.05


def _lossless_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return the cases with lossless settings in every fetch mode."""
    return [Case(subject, fetch, "lossless") for fetch in fetches]


@law(
    "With lossless settings, the logits and the greedy tokens equal those of full attention.",
    cases=_lossless_cases,
    unclaimed=lossless_only,
)
def lossless_is_full(case: Case) -> None:
    """Compare the logits of the prompt and of six given tokens, and eight greedily generated tokens."""
    logits, state = prefilled(case.policy, case.fetch)
    full_logits, full_state = prefilled(Full())
    close(logits, full_logits, 1e-4, "the prompt's logits")
    close(teacher_forced(case.policy, case.fetch), teacher_forced(Full(), "resident"), 1e-4, "the steps' logits")
    first = np.asarray(full_logits).argmax(-1).astype(np.int32)
    equal(_greedy(state, first), _greedy(full_state, first), "greedy tokens")


def _greedy(state: KVState, token: np.ndarray) -> np.ndarray:
    """Generate eight tokens greedily after `token` [B]: int32 [8, B]."""
    tokens = []
    for _ in range(8):
        logits, state = decode.decode_step(model(), token, state)
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        tokens.append(token)
    return np.stack(tokens)


@law(
    "With lossless settings in bfloat16, the logits equal those of full attention up to rounding to bfloat16.",
    cases=lambda subject, fetches: _lossless_cases(subject, fetches[:1]),
    unclaimed=lossless_only,
)
def lossless_is_full_in_bfloat16(case: Case) -> None:
    """Compare the logits of six steps."""
    lossless = teacher_forced(case.policy, case.fetch, "bfloat16")
    close(lossless, teacher_forced(Full(), "resident", "bfloat16"), _BF16_TOLERANCE, "the steps' logits")


def _drops_something(subject: Subject) -> str | None:
    """Return why the small settings need not differ from full attention, or None if they must."""
    return "its small settings are its lossless ones" if same_settings(subject) else None


@law(
    "With small settings, the logits differ from those of full attention, so the settings have an effect.",
    cases=in_one_mode,
    unclaimed=_drops_something,
)
def small_is_not_full(case: Case) -> None:
    """Compare the logits of the longest prompt. Without this law, a policy that ignores its settings would pass."""
    apart = np.abs(teacher_forced(case.policy, case.fetch) - teacher_forced(Full(), "resident"))[0].max()
    holds(
        apart > _VISIBLE,
        f"logits of the longest prompt differ from full attention's by {apart:.3g} only, not {_VISIBLE}",
    )


def _has_host_rows(subject: Subject) -> str | None:
    """Return why a law about host memory does not apply to a policy, or None if it applies."""
    return None if offloads(subject.small) else "it keeps nothing in host memory"


def _has_no_host_rows(subject: Subject) -> str | None:
    """Return why a law about policies without host memory does not apply to a policy, or None if it applies."""
    return "it keeps rows in host memory" if offloads(subject.small) else None


@law(
    "A policy that keeps nothing in host memory has the same program in all fetch modes.",
    cases=lambda subject, fetches: [Case(subject)],
    unclaimed=_has_no_host_rows,
)
def one_program_without_host_rows(case: Case) -> None:
    """Compare the lowered programs of a step as text."""
    token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    texts = [
        jax.jit(decode.step, static_argnums=1).lower(model().weights, TINY, token, abstract(case, fetch)).as_text()
        for fetch in FETCH_MODES
    ]
    holds(len(set(texts)) == 1, f"the step's programs differ in the fetch modes {FETCH_MODES}")


def _agreeing_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return the cases of both settings in the given fetch modes, except "resident"."""
    return [case for case in both_settings(subject, fetches) if case.fetch != "resident"]


@law(
    "The logits and the selected units are the same in all fetch modes.",
    cases=lambda subject, fetches: _agreeing_cases(subject, (*dict.fromkeys((*fetches, *FETCH_MODES[1:])),)),
    unclaimed=_has_host_rows,
)
def fetch_modes_agree(case: Case) -> None:
    """Compare the case's mode with "resident": the logits of six steps, and then the selected units."""
    close(teacher_forced(case.policy, "resident"), teacher_forced(case.policy, case.fetch), 1e-4, "the steps' logits")
    resident, offloaded = (_selected_units(case.policy, fetch) for fetch in ("resident", case.fetch))
    holds(resident.keys() == offloaded.keys(), f"states have the leaves {sorted(resident)} and {sorted(offloaded)}")
    for path, units in resident.items():
        equal(np.sort(units), np.sort(offloaded[path]), path)


@functools.cache
def _selected_units(policy: Policy, fetch: str) -> dict[str, np.ndarray]:
    """Return the state's leaves named `resident` after six steps. They hold the units that the last query selected."""
    state = run_steps(model(), prefilled(policy, fetch)[1], STEPS[:, :6])[1]
    return {path: leaf for path, leaf in changing(state).items() if path.endswith(".resident")}


@law(
    "A step under jit gives the same logits and the same state as the step without jit.",
    cases=in_one_mode,
)
def jit_is_no_jit(case: Case) -> None:
    """Compare one step under jit with the same step without jit, where each operation is a separate program."""
    state, token = state_of(case), jnp.asarray(STEPS[:, 0])
    plain, plain_state = decode.step(model().weights, TINY, token, state)
    jitted, jitted_state = decode.decode_step(model(), token, state.fork())
    close(plain, jitted, 1e-4)
    plain_leaves = changing(plain_state)
    for path, leaf in changing(jitted_state).items():
        close(plain_leaves[path], leaf, 1e-4, path)


@law("A step or a turn does not change any shape, dtype, memory kind or static field of the state.", cases=in_each_mode)
def steps_change_no_shape(case: Case) -> None:
    """Compare descriptions of the state before and after. Trees are equal only if their static fields are equal."""

    def describe(state: KVState) -> object:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding.memory_kind), state)

    state = state_of(case)
    before = describe(state)
    once = decode.decode_step(model(), STEPS[:, 0], state)[1]
    holds(describe(once) == before, "a step changes the description of the state")
    turned = decode.extend(model(), STEPS[:, :7], [3, 0, 2], once, logits="all")[1]
    holds(describe(turned) == before, "a turn changes the description of the state")


_ROOM = 6  # tokens that a row may take after its prompt


def _row_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return one case for each row, with small settings in the first fetch mode."""
    return [Case(subject, fetches[0], row=row) for row in range(BATCH)]


@functools.cache
def _alone(policy: Policy, fetch: str, row: int) -> tuple[np.ndarray, KVState]:
    length = LENGTHS[row]
    prompt = PROMPT[row : row + 1, :length]
    logits, state = decode.prefill(model(), prompt, [length], policy, capacity=CAPACITY, fetch=fetch)
    return np.asarray(logits)[0], state


def _row_alone(case: Case, row: int) -> tuple[KVState, float]:
    """Prefill a row alone, without padding, and compare its logits with those of the batch."""
    logits, state = _alone(case.policy, case.fetch, row)
    batch_logits, batch = prefilled(case.policy, case.fetch)
    close(logits, np.asarray(batch_logits)[row], 1e-4, "the prompt's logits")
    same = same_codes(as_seen(state, [LENGTHS[row]]), as_seen(batch, LENGTHS), row).all()
    return state, 1e-4 if same else NEIGHBOR


@law("A row gives the same logits alone as in a batch, and goes on alike if it joins a batch later.", cases=_row_cases)
def row_alone_is_row_in_batch(case: Case) -> None:
    """Feed six steps to the row alone. After three of them, its state also replaces a row of the batch."""
    assert case.row is not None
    row = case.row
    alone, tolerance = _row_alone(case, row)
    begin, alone = run_steps(model(), alone.fork(), STEPS[row : row + 1, :3])
    joined = state_of(case).insert(1, alone)
    end, _ = run_steps(model(), alone, STEPS[row : row + 1, 3:6])
    steps = np.concatenate([begin, end], axis=1)[0]
    close(steps, teacher_forced(case.policy, case.fetch)[row], tolerance, "the steps' logits")
    after, _ = run_steps(model(), joined, STEPS[[0, row, 2], 3:6])
    close(after[1], end[0], 1e-4, "the joined row's logits")


@law("Rows that are taken from a batch, one of them twice, continue as they would in that batch.", cases=in_each_mode)
def taken_rows_go_on(case: Case) -> None:
    """Take three rows from a batch of three, so that no other batch size is compiled. Compare the next logits."""
    _, state = run_steps(model(), state_of(case), STEPS[:, :2])
    rows = [2, 0, 2]
    taken = state.take(rows)
    equal(taken.lengths, [LENGTHS[row] + 2 for row in rows], "lengths")
    whole, _ = run_steps(model(), state, STEPS[:, 2:5])
    part, _ = run_steps(model(), taken, STEPS[rows, 2:5])
    close(part, whole[rows], 1e-5)


@law("A row that joins a batch continues as in its own batch, and the other rows continue as before.")
def joining_rows_go_on(case: Case) -> None:
    """Insert a row that was prefilled alone, so that its window has another size, and one that has taken steps."""
    alone, tolerance = _row_alone(case, 1)
    joined = state_of(case).insert(0, alone)
    equal(joined.lengths, [27, 27, 5], "lengths")
    rows, want = [1, 1, 2], teacher_forced(case.policy, case.fetch)
    begin, joined = run_steps(model(), joined, STEPS[rows, :2])
    joined = joined.insert(2, joined.take([0]))
    equal(joined.lengths, [29, 29, 29], "lengths after two steps")
    end, _ = run_steps(model(), joined, STEPS[[1, 1, 1], 2:6])
    close(begin[0], want[1, :2], tolerance, "the joined row's logits")
    close(begin[1:], want[1:, :2], 1e-5, "the other rows' logits")
    close(end[0], want[1, 2:6], tolerance, "the joined row's later logits")
    close(end[1], want[1, 2:6], 1e-5, "the other row's later logits")
    close(end[2], end[0], 1e-5, "the later logits of the row that joined again")


@law("A row that takes no part in a step stays equal bit by bit.", cases=in_each_mode)
def inactive_rows_do_not_change(case: Case) -> None:
    """Compare every leaf of the inactive row. Skipped writes to host memory must not change its rows either."""
    # The inactive row holds 28 tokens, so that its next token would begin a new unit of four.
    _, state = run_steps(model(), state_of(case), STEPS[:, :1])
    before = {path: leaf.copy() for path, leaf in meaningful(state).items()}
    _, state = decode.decode_step(model(), STEPS[:, 1], state, active=[True, False, True])
    for path, leaf in meaningful(state).items():
        equal(leaf[1], before[path][1], f"row 1 of {path}")


@functools.cache
def _prefilled_with_room(policy: Policy, fetch: str, room: int) -> KVState:
    return decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY, fetch=fetch, room=room)[1]


def _with_room(case: Case, room: int) -> KVState:
    """Return a new fork of the state of the batch, which was prefilled with a room."""
    return _prefilled_with_room(case.policy, case.fetch, room).fork()


@law("A room changes no logits and takes the planned bytes, and a step past it is refused.", cases=in_one_mode)
def a_room_changes_no_logits(case: Case) -> None:
    """Prefill with space for six tokens after each prompt, and feed six. Then ask for one more than there is space."""
    state = _with_room(case, _ROOM)
    planned = abstract(case, case.fetch, room=_ROOM)
    holds(state_nbytes(planned) == state_nbytes(state), f"bytes by part: {state_nbytes(planned)} are planned")
    holds(min(state.room()) >= _ROOM, f"room {state.room()} is less than {_ROOM}")
    logits, state = run_steps(model(), state, STEPS[:, :_ROOM])
    close(logits, teacher_forced(case.policy, case.fetch), 1e-5)
    more = int(state.room()[0]) + 1
    try:
        decode.extend(model(), random_tokens(BATCH, more), [more, 0, 0], state)
    except CapacityError as error:
        holds(f"room for {more - 1} more, got {more}" in str(error), f"the error names no room: {error}")
    else:
        holds(False, f"row 0 took {more} tokens")


@law("A state that gets a room continues as one that was prefilled with this room.", cases=in_each_mode)
def a_state_gets_room(case: Case) -> None:
    """Widen a state without room, feed as many tokens, and narrow the result. The source must stay usable."""
    least = _with_room(case, 0)
    wide = least.with_room(_ROOM)
    holds(min(wide.room()) >= _ROOM, f"room {wide.room()} is less than {_ROOM}")
    asked = _with_room(case, _ROOM)
    holds(wide.specs == asked.specs, "the windows are not those of a prefill with the same room")
    want, _ = run_steps(model(), asked, STEPS[:, :_ROOM])
    got, wide = run_steps(model(), wide, STEPS[:, :_ROOM])
    equal(got, want, "logits")
    again, _ = run_steps(model(), least.with_room(_ROOM), STEPS[:, :_ROOM])
    equal(again, want, "logits of a second state with room")
    more = CAPACITY - max(LENGTHS) - _ROOM + 1
    try:
        wide.with_room(more)
    except CapacityError as error:
        holds(f"at most {more - 1}" in str(error), f"the error names no limit: {error}")
    else:
        holds(False, f"a row got room for {more} tokens")


@law("Rows that share a prompt half continue as separate forks do, and keep one copy of it.", cases=in_each_mode)
def shared_rows_go_on_alone(case: Case) -> None:
    """Share one row three times, with different tokens and pauses. Poison one row, and replace it by a fork.

    The separate forks are rows of one batch, so that no step of a single row is compiled.
    """
    one = state_of(case).take([0])
    state = one.share(BATCH)
    holds(state.batch == BATCH and state.shares_prompt, "the rows do not share their prompt half")
    active = np.array([[True] * 4, [True, False, True, True], [False, True, True, False]])
    logits, state = run_steps(model(), state, STEPS[:, :4], active)
    kept = zip(jax.tree.leaves(state.reads()), jax.tree.leaves(one.reads()), strict=True)
    holds(all(leaf is source for leaf, source in kept), "a step copies an array of the prompt half")
    want, forks = run_steps(model(), state_of(case).take([0] * BATCH), STEPS[:, :4], active)
    for row in range(BATCH):
        close(logits[row][active[row]], want[row][active[row]], 1e-5, f"row {row}'s logits")
    equal(state.lengths, forks.lengths, "lengths")
    taken = state.take([1])
    equal(taken.lengths, state.lengths[1:2], "the length of a row that was taken")
    state = state.insert(1, taken.join(jax.tree.map(_spoiled, taken.split()[1])))
    later, _ = run_steps(model(), forks, STEPS[:, 4:5])
    after, state = run_steps(model(), state, STEPS[:, 4:5])
    for row in (0, 2):
        close(after[row], later[row], 1e-5, f"row {row}'s logits beside a poisoned row")
    state = state.insert(1, one.fork(), consume=True)
    after, _ = run_steps(model(), state, STEPS[[0, 0, 0], :1])
    close(after[1, 0], want[0, 0], 1e-5, "logits of a row that replaced a poisoned one")


def _spoiled(leaf: jax.Array) -> jax.Array:
    """Return NaNs in place of a leaf that holds numbers of the model in device memory, or else the leaf."""
    if leaf.dtype.kind in "biu" or leaf.ndim < 2 or leaf.sharding.memory_kind != "device":
        return leaf
    return jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding)


_MEMORIES = ("device", "pinned_host")


def halves(state: KVState) -> tuple[list[Any], list[Any]]:
    """Return the frozen leaves, which forks share, and the live leaves, which forks copy."""
    reads, writes = state.split()
    return jax.tree.leaves(reads), jax.tree.leaves(writes)


def _pointers(leaves: list[Any]) -> list[int]:
    """Return the addresses of all leaves that have elements."""
    return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]


@law("The bytes that a state reports for each memory are the bytes of its leaves there.", cases=both_settings)
def bytes_are_the_leaves_bytes(case: Case) -> None:
    """Count the leaves of layers, shared arrays and learned arrays. Also compare the host's bytes with the specs."""
    state = state_of(case)
    leaves = jax.tree.leaves((state.layers, state.shared, state.fitted))
    by_memory = [
        sum(leaf_bytes(leaf) for leaf in leaves if leaf.sharding.memory_kind == memory) for memory in _MEMORIES
    ]
    equal(np.sum(list(state_nbytes(state).values()), axis=0), by_memory, f"bytes in {_MEMORIES}")
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
    addresses = set(_pointers(live))
    for fork in forks:
        shared, copied = halves(fork)
        holds(all(one is other for one, other in zip(shared, frozen, strict=True)), "a fork copies a frozen leaf")
        holds(addresses.isdisjoint(_pointers(copied)), "two forks share a live leaf")
        addresses |= set(_pointers(copied))
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
    unclaimed=_has_host_rows,
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
    """Return the forbidden operations of a traced function on host arrays, and how many fetches it has.

    Two kinds of operations are forbidden: a scatter to a host array, and a copy of a whole host array, by the shapes
    `stored`.
    """
    offenses, fetches = [], 0
    for equation in _equations(jax.make_jaxpr(function)(*args).jaxpr):
        operands = [v for v in equation.invars if hasattr(v.aval, "shape") and _in_host(v)]
        if equation.primitive.name.startswith("scatter") and operands:
            offenses.append(str(equation))
        if equation.primitive.name == "device_put":
            fetches += bool(operands)
            if any(v.aval.shape in stored for v in operands):
                offenses.append(str(equation))
    return offenses, fetches


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _in_host(variable: Any) -> bool:
    """Return whether a variable of a jaxpr lies in host memory."""
    return getattr(variable.aval, "memory_space", None) == jax.memory.Space.Host


# Number of tokens of each row's turn. The second row has none.
_TURN = np.array([7, 0, 4])
_ACTIVE = np.arange(7) < _TURN[:, None]
# A turn of two pieces: 32 tokens, in several blocks of the hooks, and two more. One row ends in the middle of a block.
_LONG_TURN = np.array([34, 0, 21])
_LONG_TOKENS = random_tokens(BATCH, max(_LONG_TURN), seed=4)
_LONG_CHUNK = BATCH * 32
_PIECES = (1, 16)  # single tokens, and an uneven cut of 61


@law("Two turns give the same logits and the same state as one turn with the same tokens.", cases=in_each_mode)
def split_turns_are_one_turn(case: Case) -> None:
    """Compare one turn with two shorter ones. One row has no tokens in the first of them.

    All turns are padded to the same width, so that only one program is compiled.
    """
    once, state = _turn(STEPS[:, :7], [7, 4, 6], state_of(case))
    first, split = _turn(STEPS[:, :7], [3, 0, 3], state_of(case))
    second = np.zeros((BATCH, 7), np.int32)
    second[0, :4], second[1, :4], second[2, :3] = STEPS[0, 3:7], STEPS[1, :4], STEPS[2, 3:6]
    twice, split = _turn(second, [4, 4, 3], split)
    for row, (before, after) in enumerate(((3, 4), (0, 4), (3, 3))):
        parts = np.concatenate([first[row, :before], twice[row, :after]])
        close(parts, once[row, : before + after], 1e-4, f"row {row}'s logits")
    _same_memory(split, state)


def _turn(tokens: np.ndarray, counts: Any, state: KVState) -> tuple[np.ndarray, KVState]:
    """Feed tokens [B, 7] to a state. Return the logits [B, 7, V] and the new state. All laws share this program."""
    logits, state = decode.extend(model(), tokens, counts, state, logits="all")
    return np.asarray(logits), state


def _same_memory(got: KVState, want: KVState, *, codes: bool = True) -> None:
    """Raise Difference if the remembered leaves of two states differ. Without `codes`, integers of few bits may."""
    leaves, wanted = (
        {**remembered(state), **later_rows(state)} if codes else remembered(state) for state in (got, want)
    )
    assert leaves.keys() == wanted.keys()
    for path, leaf in wanted.items():
        if codes or leaf.dtype.kind not in "iu" or leaf.dtype.itemsize >= 4:
            close(leaves[path], leaf, 1e-4, path)


def _same_but_for_ties(got: KVState, want: KVState, counts: Any) -> np.ndarray:
    """Raise Difference if two states differ after a turn of counts [B] tokens. Return which rows have the same codes.

    A number near the middle between two codes may get either code.
    """
    try:
        _same_memory(got, want)
    except Difference:
        held = np.add(LENGTHS, counts)
        same = same_codes(as_seen(got, held), as_seen(want, held))
        holds(same[np.asarray(counts) > 0].any(), "codes differ in every row with new tokens")
        _same_memory(got, want, codes=False)
        return np.asarray(same)
    return np.ones(len(LENGTHS), bool)


@law("A turn gives the same last logits and the same state as its tokens in single steps.", cases=in_each_mode)
def extend_is_steps(case: Case) -> None:
    """Feed rows of seven, zero and four tokens. The logits of a row without tokens must be zeros."""
    by_steps, stepped = run_steps(model(), state_of(case), STEPS[:, :7], _ACTIVE)
    logits, extended = decode.extend(model(), STEPS[:, :7], _TURN, state_of(case))
    last = np.asarray(logits)
    everything, _ = _turn(STEPS[:, :7], _TURN, state_of(case))
    same = _same_but_for_ties(extended, stepped, _TURN)
    for row, step in ((0, 6), (2, 3)):
        close(last[row], by_steps[row, step], 1e-4 if same[row] else NEIGHBOR, f"row {row}'s last logits")
    close(
        last[0], everything[0, 6], 1e-6 if same[0] else NEIGHBOR, "row 0's last logits, and the last of all its logits,"
    )
    holds(not last[1].any(), "a row without new tokens has logits that are not 0")


@law("All logits of a turn equal the logits of its tokens in single steps.", cases=in_each_mode)
def every_logit_of_a_turn_is_a_step_s(case: Case) -> None:
    """Feed rows of seven, zero and four tokens."""
    by_steps, stepped = run_steps(model(), state_of(case), STEPS[:, :7], _ACTIVE)
    everything, extended = _turn(STEPS[:, :7], _TURN, state_of(case))
    exact = _ACTIVE & _same_but_for_ties(extended, stepped, _TURN)[:, None]
    close(everything[exact], by_steps[exact], 1e-4)
    close(everything[_ACTIVE], by_steps[_ACTIVE], NEIGHBOR)


@law(
    "A turn of several pieces gives the same logits and the same state as its tokens in single steps.",
    cases=in_one_mode,
)
def long_turn_is_steps(case: Case) -> None:
    """Feed rows of 34, zero and 21 tokens, with a bound that gives pieces of 32 tokens or fewer.

    The state has the selected units and their counts. So every query has selected the same units as in a single step.
    """
    active = np.arange(max(_LONG_TURN)) < _LONG_TURN[:, None]
    start = state_of(case)
    by_steps, stepped = run_steps(model(), start.fork(), np.where(active, _LONG_TOKENS, 0), active)
    logits, extended = decode.extend(model(), _LONG_TOKENS, _LONG_TURN, start, logits="all", extend_chunk=_LONG_CHUNK)
    got, exact = np.asarray(logits), active & _same_but_for_ties(extended, stepped, _LONG_TURN)[:, None]
    close(got[exact], by_steps[exact], 1e-4, "logits")
    close(got[active], by_steps[active], NEIGHBOR, "logits")


def _cannot_rewind(subject: Subject) -> str | None:
    """Return why a policy is left out of the law of rewinds, or None."""
    state = abstract(Case(subject), "resident")
    try:
        jax.eval_shape(KVState.earliest, state, state.lengths)
    except ConfigError:
        return "it cannot give tokens back"
    return None


@law("A row that gives tokens back goes on as if it had never held them.", cases=in_one_mode, unclaimed=_cannot_rewind)
def tokens_given_back_leave_nothing(case: Case) -> None:
    """Feed other tokens after a turn, take back as many as possible, and go on. Do all of it twice."""
    _, state = _turn(STEPS[:, :7], _TURN, state_of(case))
    plain, start = state.fork(), np.asarray(state.lengths)
    for wrong in (_LONG_TOKENS[:, :7], _LONG_TOKENS[:, 7:14]):
        _, state = _turn(wrong, _TURN[::-1], state)
        held = np.asarray(state.lengths)
        back = np.maximum(np.asarray(state.earliest(state.reached())), start)
        kept = np.minimum(back, held) - start
        state = state.rewind(start + kept)
        _, plain = _turn(wrong, kept, plain)
        close(state.room(), plain.room(), 0, "room")
        got, state = run_steps(model(), state, STEPS[:, 7:10])
        want, plain = run_steps(model(), plain, STEPS[:, 7:10])
        close(got, want, 1e-4, "later logits")
        close(state.last, plain.last, 0, "last tokens")
        start = np.asarray(plain.lengths)


def _piece_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return the cases with small settings and a prompt in pieces, one for each size of a piece."""
    return [Case(subject, piece=piece) for piece in _PIECES]


@law("A prompt in pieces gives the same logits, state and later steps as the prompt in one piece.", cases=_piece_cases)
def prefill_pieces_are_one_prefill(case: Case) -> None:
    """Prefill in pieces of `case.piece` tokens. A number near the middle between two codes may get either code."""
    want_logits, want = prefilled(case.policy, case.fetch)
    logits, state = decode.prefill(
        model(),
        PROMPT,
        LENGTHS,
        case.policy,
        capacity=CAPACITY,
        fetch=case.fetch,
        prefill_chunk=case.piece or max(LENGTHS),
    )
    close(logits, want_logits, 1e-4, "the prompt's logits")
    want_leaves, leaves = as_seen(want, LENGTHS), as_seen(state, LENGTHS)
    same = same_codes(leaves, want_leaves)
    for path, leaf in leaves.items():
        if not path.endswith(" decoded"):
            close(leaf, want_leaves[path], 2e-4, path)
    holds(same.any(), "codes differ in every row")
    got, steps = (run_steps(model(), one, STEPS[:, :3])[0] for one in (state, want))
    close(got[same], steps[same], 2e-4, "later logits")
    close(got, steps, NEIGHBOR, "later logits")
