"""The public API in any order, against dense attention: what a state remembers is what its rows were fed, no more.

A machine holds states beside the plain list of token ids that each row has seen. Every call that answers logits must
answer those of exact attention over that list, by the NumPy oracle; every policy runs where it must lose nothing.
"""

import dataclasses
import functools
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from cases import TINY, mode_of, setting
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from oracle import Full, Oracle

import jshadow
from jshadow.cache.state import KVState
from jshadow.errors import CapacityError, StateMismatch
from jshadow.policies import POLICIES
from jshadow.weights.params import init_params

# Few token ids: greedy rows then meet the stop token. Sizes are few as well, for each new one is a compiled program: a
# policy's states of two rows need a prefill, a step, a turn and the loop of `decode_steps`, and single rows a prefill.
CONFIG = dataclasses.replace(TINY, vocab_size=13, num_layers=2, model_dim=16, ffn_dim=16, head_dim=8)
CAPACITY, PROMPT, TURN = 40, 24, 7  # tokens of a row, of a padded prompt, of a padded turn
SHORT, LONG = 5, 18  # windows are sized as for prompts of this length: nothing is compressed, or some of it is
STEPS, STOP = 3, 4  # of decode_steps
TOLERANCE = 1e-4

generators = st.integers(0, 10**6).map(np.random.default_rng)
turns = st.lists(st.integers(0, TURN), min_size=3, max_size=3)
feeds = st.sampled_from(["extend", "decode_step", "decode_steps"])
branches = st.sampled_from(["prefill", "fork", "save_and_load", "take", "insert"])


params = functools.cache(lambda: init_params(CONFIG, seed=0))
oracle = functools.cache(lambda: Oracle(params().weights, CONFIG, Full()))


@functools.lru_cache(maxsize=100_000)
def dense(tokens: tuple[int, ...]) -> np.ndarray:
    """Logits [V] after these tokens, of exact attention in float64."""
    return oracle().prefill(tokens)


@dataclasses.dataclass(eq=False)
class Held:
    """A state and what it must remember, by row: token ids, steps taken, tokens that it can still take."""

    state: KVState
    rows: list[tuple[int, ...]]
    steps: list[int]
    room: list[int]

    @property
    def batch(self) -> int:
        return len(self.rows)

    def of(self, rows: Iterable[int], state: KVState) -> "Held":
        """Another state that must remember what these rows do."""
        picks = list(rows)
        return Held(state, *([part[row] for row in picks] for part in (self.rows, self.steps, self.room)))

    def check(self, logits: np.ndarray, row: int, back: int = 0) -> None:
        """Fail unless logits [V] are those of the row's last token, or of an earlier one."""
        tokens = self.rows[row]
        np.testing.assert_allclose(logits, dense(tokens[: len(tokens) - back]), atol=TOLERANCE, rtol=0)


class StateMachine(RuleBasedStateMachine):
    """Rules are calls of the API.

    Subclasses say the policy, the fetch mode, how many rows a state may have, for which shortest prompts windows are
    sized, and the pieces of prompts (`prefill_chunk`).
    """

    name, fetch, batches, least, pieces = "full", "resident", (2,), (SHORT,), (PROMPT,)
    states = Bundle("states")

    def __init__(self) -> None:
        super().__init__()
        self.policy = setting(self.name, "lossless", CONFIG, CAPACITY)
        self.folder = tempfile.TemporaryDirectory()
        self.alive: list[Held] = []

    # Rules. Hypothesis leaves some out of each example: there are two, so that neither leaves much untried.

    @initialize(target=states, picks=turns, rng=generators)
    def begin(self, picks, rng):
        return self.prefill(None, None, picks, rng)

    @rule(target=states, held=consumes(states), call=feeds, counts=turns, rng=generators)
    def go_on(self, held, call, counts, rng):
        return getattr(self, call)(held, counts[: held.batch], rng)

    @rule(target=states, held=states, how=branches, other=states, picks=turns, call=feeds, counts=turns, rng=generators)
    def branch(self, held, how, other, picks, call, counts, rng):
        """What is made of a state goes on; the state itself is kept as well."""
        made = getattr(self, how)(held, other, picks, rng)
        return made if made is held else getattr(self, call)(made, counts[: made.batch], rng)

    def prefill(self, held: Held | None, other: Held | None, picks: list[int], rng: np.random.Generator) -> Held:
        """A new state, without regard to another."""
        lengths = rng.integers(
            self.least[picks[0] % len(self.least)], PROMPT + 1, self.batches[picks[1] % len(self.batches)]
        )
        return self.hold(self.prefilled(lengths.tolist(), self.pieces[picks[2] % len(self.pieces)], rng))

    def prefilled(self, lengths: list[int], chunk: int, rng: np.random.Generator) -> Held:
        """Prompts of these lengths."""
        tokens = rng.integers(0, CONFIG.vocab_size, (len(lengths), PROMPT))
        sizes = {"capacity": CAPACITY, "shortest": max(least for least in self.least if least <= min(lengths))}
        ((logits, state),) = jshadow.prefill_many(
            params(), tokens, lengths, [self.policy], fetch=self.fetch, prefill_chunk=chunk, **sizes
        )
        rows = [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]
        held = Held(state, rows, [0] * len(rows), [CAPACITY - length for length in lengths])
        for row in range(held.batch):
            held.check(logits[row], row)
        return held

    def extend(self, held: Held, counts: list[int], rng: np.random.Generator) -> Held:
        tokens = rng.integers(0, CONFIG.vocab_size, (held.batch, TURN))
        new = [tuple(row[:count].tolist()) for row, count in zip(tokens, counts, strict=True)]

        def call():
            return jshadow.extend(params(), tokens, counts, held.state, logits="all")

        if self.refused(held, new, call):
            return held
        logits, state = call()
        after = self.fed(held, state, new)
        for row, count in enumerate(counts):
            for index in range(count):
                after.check(logits[row, index], row, back=count - 1 - index)
        return after

    def decode_step(self, held: Held, counts: list[int], rng: np.random.Generator) -> Held:
        """One token for the rows whose count is not 0."""
        active = [count > 0 for count in counts]
        tokens = rng.integers(0, CONFIG.vocab_size, held.batch)
        new = [(int(token),) if on else () for token, on in zip(tokens, active, strict=True)]

        def call():
            return jshadow.decode_step(params(), tokens, held.state, active=active)

        if self.refused(held, new, call):
            return held
        logits, state = call()
        after = self.fed(held, state, new)
        for row in np.flatnonzero(active):
            after.check(logits[row], row)
        return after

    def decode_steps(self, held: Held, counts: list[int], rng: np.random.Generator) -> Held:
        """Greedy tokens: none may lie below the best by more than rounding."""
        first = rng.integers(0, CONFIG.vocab_size, held.batch)

        def call():
            return jshadow.decode_steps(params(), first, held.state, STEPS, stop=[STOP])

        if self.refused(held, [(0,) * STEPS] * held.batch, call):
            return held
        emitted, state = call()
        emitted = emitted.tolist()
        new = [
            (int(token), *out[: out.index(STOP) if STOP in out else STEPS - 1])
            for token, out in zip(first, emitted, strict=True)
        ]
        after = self.fed(held, state, [row[:STEPS] for row in new])
        for row, out in enumerate(emitted):
            fed = len(new[row])
            assert out[fed:] == [-1] * (STEPS - fed)
            for index in range(fed):
                tokens = after.rows[row]
                logits = dense(tokens[: len(tokens) - (fed - 1 - index)])
                assert logits[out[index]] >= logits.max() - 2 * TOLERANCE
        return after

    def fork(self, held: Held, *_: object) -> Held:
        return self.hold(held.of(range(held.batch), held.state.fork()))

    def save_and_load(self, held: Held, *_: object) -> Held:
        file = Path(self.folder.name) / "state"
        jshadow.save_state(file, held.state, params(), tokens=held.rows)
        loaded = jshadow.load_state(file, params(), None if self.policy.name in POLICIES else self.policy)
        return self.hold(held.of(range(held.batch), loaded))

    def take(self, held: Held, _: Held, picks: list[int], rng: np.random.Generator) -> Held:
        """As many rows as a state may have."""
        picks = [pick % held.batch for pick in picks[: self.batches[sum(picks) % len(self.batches)]]]
        return self.hold(held.of(picks, held.state.take(picks)))

    def insert(self, held: Held, other: Held, picks: list[int], rng: np.random.Generator) -> Held:
        """A row prefilled alone, or one of another state, replaces a row.

        Only a row out of a larger window may be refused, or find less room than it had.
        """
        row, pick = picks[0] % held.batch, picks[1] % other.batch
        if picks[2] % 2:
            one = other.of([pick], other.state.take([pick]))
        else:
            one = self.prefilled([int(rng.integers(SHORT, PROMPT + 1))], PROMPT, rng)
        shrinks = one.state.specs[0].window > held.state.specs[0].window
        try:
            state = held.state.insert(row, one.state)
        except StateMismatch as error:
            if not shrinks or "more than fit this state's window" not in str(error):
                raise
            return held
        new = held.of(range(held.batch), state)
        new.rows[row], new.steps[row], new.room[row] = one.rows[0], one.steps[0], int(state.room()[row])
        assert (0 if shrinks else one.room[0]) <= new.room[row] <= CAPACITY - len(one.rows[0])
        return self.hold(new)

    def hold(self, held: Held) -> Held:
        """Keep a new state, whose room must be what it promises."""
        assert held.state.room().tolist() == held.room
        self.alive.append(held)
        return held

    def refused(self, held: Held, new: list[tuple[int, ...]], call: Callable[[], object]) -> bool:
        """Whether a row lacks the room for its new tokens; then the call must say so, and consume nothing."""
        if all(len(more) <= room for more, room in zip(new, held.room, strict=True)):
            return False
        with pytest.raises(CapacityError, match="has room for"):
            call()
        held.state.check_alive()
        return True

    def fed(self, held: Held, state: KVState, new: list[tuple[int, ...]]) -> Held:
        """What a call made of a state that it consumed, once every row took its new tokens."""
        self.alive.remove(held)
        after = held.of(range(held.batch), state)
        for row, more in enumerate(new):
            after.rows[row] += more
            after.steps[row] += len(more)
            after.room[row] -= len(more)
        return self.hold(after)

    @invariant()
    def states_hold_what_they_were_fed(self):
        for held in self.alive:
            assert held.state.lengths.tolist() == [len(row) for row in held.rows]
            assert held.state.last.tolist() == [row[-1] for row in held.rows]
            assert held.state.counters.steps.tolist() == held.steps
            assert (held.state.batch, held.state.capacity, held.state.fetch) == (held.batch, CAPACITY, self.fetch)

    def teardown(self):
        """Whatever is left still knows what it knew, whichever of its forks and copies went on."""
        for held in list(self.alive):
            self.decode_step(held, held.room, np.random.default_rng(0))
        self.folder.cleanup()


def run(name: str, fetch: str, examples: int, steps: int, **fields: object) -> None:
    """Let a machine run; each policy and mode has its own, reproducible examples."""
    machine = type(f"{name}_{fetch}", (StateMachine,), {"name": name, "fetch": fetch, **fields})
    counts = {"max_examples": examples, "stateful_step_count": steps}
    chosen = settings(database=None, suppress_health_check=list(HealthCheck), **counts)
    run_machine(seed(zlib.crc32(machine.__name__.encode()))(machine), settings=chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "specache", "shadowkv_plus"])
def test_any_order_of_calls_is_dense_attention(name):
    run(name, mode_of(name), examples=8, steps=8)


@pytest.mark.slow
def test_many_orders_of_calls():
    """Of states with one or three rows and windows of two sizes, whose prompts are read in pieces or at once."""
    sizes = {"batches": (1, 3), "least": (SHORT, LONG), "pieces": (PROMPT, 5)}
    run("shadowkv", "zero_copy", examples=8, steps=12, **sizes)
