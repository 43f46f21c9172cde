"""Laws about rows: a row gives the same results alone as in a batch, and after it is taken, inserted or paused."""

import functools

import jax
import numpy as np

from jshadow.cache.accounting import state_nbytes
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.errors import CapacityError
from jshadow.evaluation.laws.inputs import (
    BATCH,
    CAPACITY,
    LENGTHS,
    PROMPT,
    STEPS,
    abstract,
    meaningful,
    model,
    prefilled,
    random_tokens,
    run_steps,
    state_of,
    teacher_forced,
)
from jshadow.evaluation.laws.law import Case, Subject, close, equal, holds, in_each_mode, in_one_mode, law
from jshadow.evaluation.laws.seen import NEIGHBOR, as_seen, same_codes
from jshadow.policies.base import Policy

ROOM = 6  # tokens that a row may take after its prompt


def row_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return one case for each row, with small settings in the first fetch mode."""
    return [Case(subject, fetches[0], row=row) for row in range(BATCH)]


@functools.cache
def _alone(policy: Policy, fetch: str, row: int) -> tuple[np.ndarray, KVState]:
    length = LENGTHS[row]
    prompt = PROMPT[row : row + 1, :length]
    logits, state = decode.prefill(model(), prompt, [length], policy, capacity=CAPACITY, fetch=fetch)
    return np.asarray(logits)[0], state


def row_alone(case: Case, row: int) -> tuple[KVState, float]:
    """Prefill a row alone, without padding, and compare its logits with those of the batch.

    Returns:
        The state, which other laws use too, and the tolerance of its later logits. The programs of the row and of the
        batch differ, so a code may differ by one step.
    """
    logits, state = _alone(case.policy, case.fetch, row)
    batch_logits, batch = prefilled(case.policy, case.fetch)
    close(logits, np.asarray(batch_logits)[row], 1e-4, "the prompt's logits")
    same = same_codes(as_seen(state, [LENGTHS[row]]), as_seen(batch, LENGTHS), row).all()
    return state, 1e-4 if same else NEIGHBOR


@law("A row gives the same logits alone as in a batch, and goes on alike if it joins a batch later.", cases=row_cases)
def row_alone_is_row_in_batch(case: Case) -> None:
    """Feed six steps to the row alone. After three of them, its state also replaces a row of the batch."""
    assert case.row is not None
    row = case.row
    alone, tolerance = row_alone(case, row)
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
    alone, tolerance = row_alone(case, 1)
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
def _with_room(policy: Policy, fetch: str, room: int) -> KVState:
    return decode.prefill(model(), PROMPT, LENGTHS, policy, capacity=CAPACITY, fetch=fetch, room=room)[1]


def with_room(case: Case, room: int) -> KVState:
    """Return a new fork of the state of the batch, which was prefilled with a room."""
    return _with_room(case.policy, case.fetch, room).fork()


@law("A room changes no logits and takes the planned bytes, and a step past it is refused.", cases=in_one_mode)
def a_room_changes_no_logits(case: Case) -> None:
    """Prefill with space for six tokens after each prompt, and feed six. Then ask for one more than there is space."""
    state = with_room(case, ROOM)
    planned = abstract(case, case.fetch, room=ROOM)
    holds(state_nbytes(planned) == state_nbytes(state), f"bytes by part: {state_nbytes(planned)} are planned")
    holds(min(state.room()) >= ROOM, f"room {state.room()} is less than {ROOM}")
    logits, state = run_steps(model(), state, STEPS[:, :ROOM])
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
    least = with_room(case, 0)
    wide = least.with_room(ROOM)
    holds(min(wide.room()) >= ROOM, f"room {wide.room()} is less than {ROOM}")
    asked = with_room(case, ROOM)
    holds(wide.specs == asked.specs, "the windows are not those of a prefill with the same room")
    want, _ = run_steps(model(), asked, STEPS[:, :ROOM])
    got, wide = run_steps(model(), wide, STEPS[:, :ROOM])
    equal(got, want, "logits")
    again, _ = run_steps(model(), least.with_room(ROOM), STEPS[:, :ROOM])
    equal(again, want, "logits of a second state with room")
    more = CAPACITY - max(LENGTHS) - ROOM + 1
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
    state = state.insert(1, taken.join(jax.tree.map(spoiled, taken.split()[1])))
    later, _ = run_steps(model(), forks, STEPS[:, 4:5])
    after, state = run_steps(model(), state, STEPS[:, 4:5])
    for row in (0, 2):
        close(after[row], later[row], 1e-5, f"row {row}'s logits beside a poisoned row")
    state = state.insert(1, one.fork(), consume=True)
    after, _ = run_steps(model(), state, STEPS[[0, 0, 0], :1])
    close(after[1, 0], want[0, 0], 1e-5, "logits of a row that replaced a poisoned one")


def spoiled(leaf: jax.Array) -> jax.Array:
    """Return NaNs in place of a leaf that holds numbers of the model in device memory, or else the leaf."""
    if leaf.dtype.kind in "biu" or leaf.ndim < 2 or leaf.sharding.memory_kind != "device":
        return leaf
    return jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding)
