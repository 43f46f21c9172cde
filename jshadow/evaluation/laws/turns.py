"""Laws about turns and prompts: the state does not depend on how tokens are split into calls."""

from typing import Any

import jax
import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation.laws.inputs import (
    BATCH,
    CAPACITY,
    LENGTHS,
    PROMPT,
    STEPS,
    abstract,
    model,
    prefilled,
    random_tokens,
    remembered,
    run_steps,
    state_of,
)
from jshadow.evaluation.laws.law import Case, Subject, close, holds, in_each_mode, in_one_mode, law
from jshadow.evaluation.laws.seen import NEIGHBOR, as_seen, later_rows, same_codes

# Number of tokens of each row's turn. The second row has none.
TURN = np.array([7, 0, 4])
ACTIVE = np.arange(7) < TURN[:, None]
# A turn of two pieces: 32 tokens, in several blocks of the hooks, and two more. One row ends in the middle of a block.
LONG_TURN = np.array([34, 0, 21])
LONG_TOKENS = random_tokens(BATCH, max(LONG_TURN), seed=4)
LONG_CHUNK = BATCH * 32
PIECES = (1, 16)  # single tokens, and an uneven cut of 61


@law("Two turns give the same logits and the same state as one turn with the same tokens.", cases=in_each_mode)
def split_turns_are_one_turn(case: Case) -> None:
    """Compare one turn with two shorter ones. One row has no tokens in the first of them.

    All turns are padded to the same width, so that only one program is compiled.
    """
    once, state = turn(STEPS[:, :7], [7, 4, 6], state_of(case))
    first, split = turn(STEPS[:, :7], [3, 0, 3], state_of(case))
    second = np.zeros((BATCH, 7), np.int32)
    second[0, :4], second[1, :4], second[2, :3] = STEPS[0, 3:7], STEPS[1, :4], STEPS[2, 3:6]
    twice, split = turn(second, [4, 4, 3], split)
    for row, (before, after) in enumerate(((3, 4), (0, 4), (3, 3))):
        parts = np.concatenate([first[row, :before], twice[row, :after]])
        close(parts, once[row, : before + after], 1e-4, f"row {row}'s logits")
    same_memory(split, state)


def turn(tokens: np.ndarray, counts: Any, state: KVState) -> tuple[np.ndarray, KVState]:
    """Feed tokens [B, 7] to a state. Return the logits [B, 7, V] and the new state. All laws share this program."""
    logits, state = decode.extend(model(), tokens, counts, state, logits="all")
    return np.asarray(logits), state


def same_memory(got: KVState, want: KVState, *, codes: bool = True) -> None:
    """Raise Difference if the remembered leaves of two states differ. Without `codes`, integers of few bits may."""
    leaves, wanted = (
        {**remembered(state), **later_rows(state)} if codes else remembered(state) for state in (got, want)
    )
    assert leaves.keys() == wanted.keys()
    for path, leaf in wanted.items():
        if codes or leaf.dtype.kind not in "iu" or leaf.dtype.itemsize >= 4:
            close(leaves[path], leaf, 1e-4, path)


@law("A turn gives the same last logits and the same state as its tokens in single steps.", cases=in_each_mode)
def extend_is_steps(case: Case) -> None:
    """Feed rows of seven, zero and four tokens. The logits of a row without tokens must be zeros."""
    by_steps, stepped = run_steps(model(), state_of(case), STEPS[:, :7], ACTIVE)
    logits, extended = decode.extend(model(), STEPS[:, :7], TURN, state_of(case))
    last = np.asarray(logits)
    everything, _ = turn(STEPS[:, :7], TURN, state_of(case))
    close(last[0], by_steps[0, 6], 1e-4, "row 0's last logits")
    close(last[2], by_steps[2, 3], 1e-4, "row 2's last logits")
    close(last[0], everything[0, 6], 1e-6, "row 0's last logits, and the last of all its logits,")
    holds(not last[1].any(), "a row without new tokens has logits that are not 0")
    same_memory(extended, stepped)


@law("All logits of a turn equal the logits of its tokens in single steps.", cases=in_each_mode)
def every_logit_of_a_turn_is_a_step_s(case: Case) -> None:
    """Feed rows of seven, zero and four tokens."""
    by_steps, stepped = run_steps(model(), state_of(case), STEPS[:, :7], ACTIVE)
    everything, extended = turn(STEPS[:, :7], TURN, state_of(case))
    close(everything[ACTIVE], by_steps[ACTIVE], 1e-4)
    same_memory(extended, stepped)


@law(
    "A turn of several pieces gives the same logits and the same state as its tokens in single steps.",
    cases=in_one_mode,
)
def long_turn_is_steps(case: Case) -> None:
    """Feed rows of 34, zero and 21 tokens, with a bound that gives pieces of 32 tokens or fewer.

    The state has the selected units and their counts. So every query has selected the same units as in a single step. A
    number near the middle between two codes may get either code.
    """
    active = np.arange(max(LONG_TURN)) < LONG_TURN[:, None]
    start = state_of(case)
    by_steps, stepped = run_steps(model(), start.fork(), np.where(active, LONG_TOKENS, 0), active)
    logits, extended = decode.extend(model(), LONG_TOKENS, LONG_TURN, start, logits="all", extend_chunk=LONG_CHUNK)
    held = np.add(LENGTHS, LONG_TURN)
    same = same_codes(as_seen(extended, held), as_seen(stepped, held))
    holds(same[LONG_TURN > 0].any(), "codes differ in every row with new tokens")
    got, exact = np.asarray(logits), active & same[:, None]
    close(got[exact], by_steps[exact], 1e-4, "logits")
    close(got[active], by_steps[active], NEIGHBOR, "logits")
    same_memory(extended, stepped, codes=False)


def cannot_rewind(subject: Subject) -> str | None:
    """Return why a policy is left out of the law of rewinds, or None."""
    state = abstract(Case(subject), "resident")
    try:
        jax.eval_shape(KVState.earliest, state, state.lengths)
    except ConfigError:
        return "it cannot give tokens back"
    return None


@law("A row that gives tokens back goes on as if it had never held them.", cases=in_one_mode, unclaimed=cannot_rewind)
def tokens_given_back_leave_nothing(case: Case) -> None:
    """Feed other tokens after a turn, take back as many as possible, and go on. Do all of it twice."""
    _, state = turn(STEPS[:, :7], TURN, state_of(case))
    plain, start = state.fork(), np.asarray(state.lengths)
    for wrong in (LONG_TOKENS[:, :7], LONG_TOKENS[:, 7:14]):
        _, state = turn(wrong, TURN[::-1], state)
        held = np.asarray(state.lengths)
        back = np.maximum(np.asarray(state.earliest(state.reached())), start)
        kept = np.minimum(back, held) - start
        state = state.rewind(start + kept)
        _, plain = turn(wrong, kept, plain)
        close(state.room(), plain.room(), 0, "room")
        got, state = run_steps(model(), state, STEPS[:, 7:10])
        want, plain = run_steps(model(), plain, STEPS[:, 7:10])
        close(got, want, 1e-4, "later logits")
        close(state.last, plain.last, 0, "last tokens")
        start = np.asarray(plain.lengths)


def piece_cases(subject: Subject, fetches: tuple[str, ...]) -> list[Case]:
    """Return the cases with small settings and a prompt in pieces, one for each size of a piece."""
    return [Case(subject, piece=piece) for piece in PIECES]


@law("A prompt in pieces gives the same logits, state and later steps as the prompt in one piece.", cases=piece_cases)
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
