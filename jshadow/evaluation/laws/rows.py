"""Laws about rows: a row gives the same results alone as in a batch, and after it is taken, inserted or paused."""

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.cache.accounting import state_nbytes
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

ROOM = 6  # tokens that a row may take after its prompt


def row_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return one case for each row, with small settings in the first fetch mode."""
    return [Case(subject, fetches[0], row=row) for row in range(BATCH)]


@law("A row gives the same logits alone as in a batch.", cases=row_cases)
def row_alone_is_row_in_batch(case: Case) -> None:
    """Prefill the row alone, without padding. The two programs differ, so a code may differ by one step."""
    assert case.row is not None
    row, length = case.row, LENGTHS[case.row]
    logits, state = decode.prefill(
        model(), PROMPT[row : row + 1, :length], [length], case.policy, capacity=CAPACITY, fetch=case.fetch
    )
    batch_logits, batch = prefilled(case.policy, case.fetch)
    close(logits[0], batch_logits[row], 1e-4, "the prompt's logits")
    same = same_codes(as_seen(state, [length]), as_seen(batch, LENGTHS), row).all()
    alone, _ = run_steps(model(), state, STEPS[row : row + 1, :6])
    close(alone[0], teacher_forced(case.policy, case.fetch)[row], 1e-4 if same else NEIGHBOR, "the steps' logits")


@law("Rows that are taken from a batch, one of them twice, continue as they would in that batch.", cases=in_each_mode)
def taken_rows_go_on(case: Case) -> None:
    """Take three rows from a batch of three, so that no other batch size is compiled. Compare the next logits."""
    _, state = run_steps(model(), state_of(case), STEPS[:, :2])
    rows = [2, 0, 2]
    taken = state.take(rows)
    equal(taken.lengths, [LENGTHS[row] + 2 for row in rows], "lengths")
    whole, _ = run_steps(model(), state, STEPS[:, 2:5])
    part, _ = run_steps(model(), taken, STEPS[rows, 2:5])
    close(part, whole[np.asarray(rows)], 1e-5)


@law("A row that joins a batch continues as it would alone, and the other rows continue as before.", cases=in_each_mode)
def joining_rows_go_on(case: Case) -> None:
    """Insert a row whose window has a different size, because the row was prefilled alone."""
    tokens = random_tokens(1, 27, seed=5)
    _, alone = decode.prefill(model(), tokens, [27], case.policy, capacity=CAPACITY, fetch=case.fetch)
    _, alone = run_steps(model(), alone, STEPS[:1, :3])
    state = state_of(case)
    joined = state.insert(1, alone)
    equal(joined.lengths, [61, 30, 5], "lengths")
    before, _ = run_steps(model(), state, STEPS[:, 3:9])
    apart, _ = run_steps(model(), alone, STEPS[1:2, 3:9])
    after, _ = run_steps(model(), joined, STEPS[:, 3:9])
    close(after[1], apart[0], 1e-4, "the joined row's logits")
    for row in (0, 2):
        close(after[row], before[row], 1e-5, f"row {row}'s logits")


@law("A row that takes no part in a step stays equal bit by bit.", cases=in_each_mode)
def inactive_rows_do_not_change(case: Case) -> None:
    """Compare every leaf of the inactive row. Skipped writes to host memory must not change its rows either."""
    # The inactive row holds 28 tokens, so that its next token would begin a new unit of four.
    _, state = run_steps(model(), state_of(case), STEPS[:, :1])
    before = {path: leaf.copy() for path, leaf in meaningful(state).items()}
    _, state = decode.decode_step(model(), STEPS[:, 1], state, active=[True, False, True])
    for path, leaf in meaningful(state).items():
        equal(leaf[1], before[path][1], f"row 1 of {path}")


@law("A room changes no logits and takes the planned bytes, and a step past it is refused.", cases=in_one_mode)
def a_room_changes_no_logits(case: Case) -> None:
    """Prefill with space for six tokens after each prompt, and feed six. Then ask for one more than there is space."""
    _, state = decode.prefill(model(), PROMPT, LENGTHS, case.policy, capacity=CAPACITY, fetch=case.fetch, room=ROOM)
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
    _, least = decode.prefill(model(), PROMPT, LENGTHS, case.policy, capacity=CAPACITY, fetch=case.fetch, room=0)
    wide = least.with_room(ROOM)
    holds(min(wide.room()) >= ROOM, f"room {wide.room()} is less than {ROOM}")
    _, asked = decode.prefill(model(), PROMPT, LENGTHS, case.policy, capacity=CAPACITY, fetch=case.fetch, room=ROOM)
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
    """Share one row three times, with different tokens and pauses. Poison one row, and replace it by a fork."""
    one = state_of(case).take([0])
    state = one.share(BATCH)
    holds(state.batch == BATCH and state.shares_prompt, "the rows do not share their prompt half")
    active = np.array([[True] * 4, [True, False, True, True], [False, True, True, False]])
    logits, state = run_steps(model(), state, STEPS[:, :4], active)
    kept = zip(jax.tree.leaves(state.reads()), jax.tree.leaves(one.reads()), strict=True)
    holds(all(leaf is source for leaf, source in kept), "a step copies an array of the prompt half")
    for row in range(BATCH):
        alone, fork = run_steps(model(), one.fork(), STEPS[row : row + 1, :4][:, active[row]])
        close(logits[row][active[row]], alone[0], 1e-5, f"row {row}'s logits")
        equal(state.take([row]).lengths, fork.lengths, f"row {row}'s length")
    spoiled = jax.tree.map(lambda leaf: jnp.nan * leaf if is_live(leaf) else leaf, state.take([1]).split()[1])
    state = state.insert(1, state.take([1]).join(spoiled))
    want, _ = run_steps(model(), one.fork(), STEPS[:1, :5])
    after, state = run_steps(model(), state, STEPS[:, 4:5])
    close(after[0, 0], want[0, 4], 1e-5, "logits beside a poisoned row")
    state = state.insert(1, one.fork(), consume=True)
    after, _ = run_steps(model(), state, STEPS[[0, 0, 0], :1])
    close(after[1, 0], want[0, 0], 1e-5, "logits of a row that replaced a poisoned one")


def is_live(leaf: jax.Array) -> bool:
    """Return whether a leaf of the changing half holds numbers of the model, and lies in device memory."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and leaf.ndim > 1 and leaf.sharding.memory_kind == "device"
