"""Groups of rows, and their compiled programs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.state import KVState, is_deleted
from jshadow.engine import decode
from jshadow.engine.placement import commit, commit_arrays
from jshadow.engine.prefill.whole import PartialPrefill, advance_prefill, begin_prefill, finish_prefill
from jshadow.engine.rows import (
    RowSampling,
    RowSettings,
    draw_rows,
    idle_rows,
    likely_tokens,
    row_logits,
    row_of,
    set_row,
)
from jshadow.engine.sampling import NO_TOKEN
from jshadow.engine.speculation.drafter import Drafter, Memory, Progress, Text
from jshadow.engine.speculation.rows import draw_guessed, guess_rows
from jshadow.engine.speculation.run import Guesses, GuessPlan, hear
from jshadow.planner.pieces import pieces_of
from jshadow.policies import Policy
from jshadow.serving.admission import EngineOptions, PlannedClass, RowClass
from jshadow.serving.drafts import Drafts
from jshadow.serving.jobs import Job
from jshadow.serving.requests import FULL_WORD, DrawnToken, read_drawn
from jshadow.weights.params import Params


class Pool(NamedTuple):
    """The arrays of a group: the state and the sampling settings of its rows."""

    state: KVState
    rows: RowSampling


class ReadPrompt(NamedTuple):
    """The result of reading a prompt.

    Attributes:
        logits: for the first token, float32 [1, V].
        state: the state of the row.
        own: the state of the model that proposes tokens, or None.
    """

    logits: Any
    state: Any
    own: Any = None


class Programs:
    """The programs of one model."""

    def __init__(self, params: Params, options: EngineOptions) -> None:
        self.params, self.options = params, options
        self.parts = options.parts(params)

    def begin(self, plan: PlannedClass, ids: Sequence[int]) -> PartialPrefill:
        """Begin to read a prompt into a row of a class."""
        settings: Any = {
            "fetch": plan.fetch,
            "fitted": None if plan.fallback else self.options.fitted,
            "attention": self.options.prefill,
        }
        return self._begin(self.params, plan.policy, plan.row_class, ids, settings)

    def begin_draft(self, plan: PlannedClass, ids: Sequence[int]) -> PartialPrefill | None:
        """Begin to read a prompt into a row of the model that proposes tokens for a class. None: there is no model."""
        if plan.drafter is None or plan.drafter.reader is None:
            return None
        return self._begin(*plan.drafter.reader, plan.row_class, ids, {"fetch": "resident"})

    def _begin(
        self, params: Params, policy: Policy, one: RowClass, ids: Sequence[int], settings: Any
    ) -> PartialPrefill:
        tokens = np.zeros((1, one.prompt), np.int32)
        tokens[0, : len(ids)] = ids
        sizes: Any = {"capacity": one.capacity, "room": one.room, "prefill_chunk": self.options.piece(one)}
        return begin_prefill(params, tokens, [len(ids)], policy, **sizes, **settings)

    def advance(self, partial: PartialPrefill) -> PartialPrefill:
        """Run the next units of a prefill: as many as take `prefill_chunk` tokens through one layer, at least one."""
        job, begun = partial.job, partial.progress.share
        _, size = pieces_of(job.tokens.shape[1], job.options.prefill_chunk)
        read = -(-int(job.lengths.max()) // size) * size  # tokens, with the padding of the last piece
        part = self.options.prefill_chunk / (job.params.config.num_layers * read)
        while True:
            partial = advance_prefill(job.params, partial)
            if partial.done or partial.progress.share - begun >= part * (1 - 1e-6):
                return partial

    def rest(self, partial: PartialPrefill) -> float:
        """Return the tokens of a prompt that are still to be read. A part of a token is some of its layers."""
        return float(partial.job.lengths.max()) * (1 - partial.progress.share)

    def finish(self, partial: PartialPrefill) -> tuple[Array, KVState]:
        """Return the logits [1, V] and the state after the last unit."""
        return finish_prefill(partial.job.params, partial)

    def document(self, library: Any) -> KVState:
        """Return the state of a document of one token, as a library has it."""
        return decode.prefill(
            self.params,
            np.zeros((1, 1), np.int32),
            [1],
            library.policy,
            capacity=library.capacity,
            fetch=library.fetch,
            fitted=library.fitted,
            room=0,
        )[1]

    def begin_on(self, plan: PlannedClass, base: KVState) -> KVState:
        """Return the state of one row that begins as a stored document does. It shares the prompt half."""
        assert plan.specs is not None
        return commit(base.with_windows(plan.specs))

    def extend(self, state: KVState, ids: Sequence[int]) -> tuple[Array, KVState]:
        """Feed at most `turn_chunk` tokens to a state of one row. This consumes the state."""
        tokens = np.zeros((1, self.options.turn_chunk), np.int32)
        tokens[0, : len(ids)] = ids
        return decode.extend(self.params, tokens, [len(ids)], state)

    def row(self, settings: RowSettings, ids: Sequence[int]) -> RowSampling:
        """Return the sampling settings of one row. Raises the errors of `row_of`."""
        return row_of(settings, self.parts, prompt=ids)

    def masked(self, rows: RowSampling, words: np.ndarray) -> RowSampling:
        """Return rows in which the tokens of bit masks may be drawn. `words` is uint32 [rows, W], as in `pack_mask`."""
        held = rows.allowed
        assert held is not None
        return rows.replace(allowed=jax.device_put(words, held.sharding) if held.committed else jnp.array(words))

    def draw(self, logits: Array, rows: RowSampling, active: np.ndarray | None = None) -> tuple[Array, RowSampling]:
        """Draw a token for each row, int32 [rows], from logits [rows, V]. This consumes `rows`.

        `active`, bool [rows], tells which rows count the draw. None: all rows do.
        """
        return draw_rows(rows, logits, None if active is None else jnp.array(active))

    def likely(self, logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
        """Return the log-probabilities of drawn tokens and of the likeliest ones, as `likely_tokens` does.

        The tokens of a row, if there are several, follow one another.
        """
        return likely_tokens(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1))

    def pool(self, state: KVState, plan: PlannedClass) -> Pool:
        """Return a pool of free rows. Their content comes from `state`, and is never read."""
        count, state = plan.row_class.rows, _in(plan.fetch, state)
        held = commit(state.take([0] * count) if plan.document is None else state.share(count))
        # The settings are committed too, as those that a step returns.
        return Pool(held, jax.device_put(idle_rows(self.parts, count), held.lengths.sharding))

    def insert(self, pool: Pool, slot: int, state: KVState, row: RowSampling) -> Pool:
        """Replace a row of a pool. This consumes the pool."""
        return Pool(pool.state.insert(slot, _in(pool.state.fetch, state), consume=True), set_row(pool.rows, slot, row))

    def moved(self, pool: Pool, fetch: str) -> Pool:
        """Return a pool whose offloaded rows lie in the memory of a fetch mode. It shares its other arrays."""
        return pool._replace(state=_in(fetch, pool.state))

    def consumed(self, pool: Pool) -> bool:
        """Whether a call has consumed arrays of a pool."""
        return any(map(is_deleted, [vars(pool.state)["lengths"], *jax.tree.leaves(pool.rows)]))

    def step(self, pool: Pool, tokens: np.ndarray, active: np.ndarray) -> tuple[Array, Pool]:
        """Feed a token to each active row. Return the logits, float32 [rows, V]. This consumes the pool's state.

        Args:
            pool: the rows.
            tokens: int32 [rows].
            active: bool [rows].
        """
        reads, writes = pool.state.split()
        fed = jnp.array(tokens), jnp.array(active)
        logits, writes = row_logits(self.params.weights, fed, reads, writes, config=self.params.config)
        return logits, pool._replace(state=pool.state.join(writes))

    def remembered(self, drafter: Drafter, ids: Sequence[int], token: int, read: ReadPrompt) -> tuple[Memory, int]:
        """Return what a drafter remembers of one row, and how many tokens it can propose.

        Args:
            drafter: the drafter.
            ids: token ids of the prompt.
            token: the first new token.
            read: the result of reading the prompt. Its states are not changed.
        """
        state = read.state
        if read.own is not None:
            memory = drafter.begun(read.own.fork())
        else:
            memory = drafter.begin(Text.of([ids], self.params.config), state)
        memory = memory._replace(live=commit_arrays(memory.live, state.specs[0].shards))
        memory, ready = hear(drafter, memory, np.array([[token]], np.int32), np.ones(1, np.int32), state)
        return memory, int(ready[0])

    def with_memory(self, drafter: Drafter, memory: Memory | None, slot: int, one: Memory, rows: int) -> Memory:
        """Replace a row of what a drafter remembers of `rows` rows. None: nothing yet. This consumes `memory`."""
        return drafter.inserted(drafter.repeated(one, rows) if memory is None else memory, slot, one)

    def guess(
        self, pool: Pool, memory: Memory, at: tuple[np.ndarray, np.ndarray], plan: GuessPlan
    ) -> tuple[Guesses, Pool, Memory]:
        """Let a drafter propose tokens, and the model read them. This consumes the pool's state and the memory.

        Args:
            pool: the rows.
            memory: what the drafter remembers.
            at: the newest token of each row, and how many more it may get, int32 [rows]. 0: it is not active.
            plan: the drafter, and how many tokens it proposes.
        """
        reads, writes = pool.state.split()
        fed, left = map(jnp.array, at)
        guesses, writes, live = guess_rows(
            (self.params.weights, memory.fixed),
            reads,
            writes,
            memory.live,
            (Progress(fed, pool.rows.step, left), pool.rows),
            config=self.params.config,
            plan=GuessPlan(plan.drafter.traced, plan.width),
        )
        return guesses, pool._replace(state=pool.state.join(writes)), memory._replace(live=live)

    def draw_guessed(self, pool: Pool, guesses: Guesses, active: np.ndarray) -> tuple[Array, Array, Array, Pool]:
        """Draw the tokens that follow the guesses, and give wrong guesses back. This consumes the pool.

        Return the tokens int32 [rows, n], how many of them are real [rows], their logits [rows, n, V], and the pool.
        """
        reads, writes = pool.state.split()
        tokens, counts, rows, writes = draw_guessed(pool.rows, guesses, reads, writes, jnp.array(active))
        return tokens, counts, guesses.logits, Pool(pool.state.join(writes), rows)

    def heard(
        self, drafter: Drafter, memory: Memory, new: tuple[Array, Any, np.ndarray], state: KVState
    ) -> tuple[Memory, Array]:
        """Tell a drafter new tokens. Return its memory, and how many tokens it can propose. This consumes `memory`.

        `new` has the tokens [rows] or [rows, n], how many of them are real [rows], and which rows count, bool [rows].
        """
        tokens, counts, takes = new
        return hear(drafter, memory, tokens.reshape(len(takes), -1), jnp.where(takes, counts, 0), state)

    def taken(self, pool: Pool, slot: int, change: tuple[int, Sequence[int]], fetch: str) -> KVState:
        """Return a copy of one row of a pool, as a state of one row with this fetch mode.

        `change` is the number of its newest tokens that the copy gives back, and the tokens that it reads then.
        """
        (surplus, unfed), state = change, _in(fetch, pool.state.take([slot]))
        if surplus:
            state = state.rewind(np.asarray(state.lengths) - surplus)
        return self.fed(state, unfed)

    def fork(self, state: KVState) -> KVState:
        """Return a copy of a state that may be consumed."""
        return state.fork()

    def fed(self, state: KVState, unfed: Sequence[int]) -> KVState:
        """Return a state of one row after further tokens. This consumes the state."""
        for token in unfed:
            _, state = decode.decode_step(self.params, [token], state)
        return state


def _in(fetch: str, state: KVState) -> KVState:
    """Return a state with a fetch mode."""
    return state if state.fetch == fetch else commit(state.with_fetch(fetch))


class Group:
    """A pool of rows. A row is free, reserved by a job that is being read, or active.

    Attributes:
        plan: the class of the rows, as they lie in memory now.
        home: their class as long as device memory is not short.
        jobs: the job of each row, or None for a free row.
        active: which rows a step feeds, bool [rows].
        pool: the arrays. None before the first row is inserted.
        base: the stored state whose prompt half all rows share, or None.
        drafts: what proposes tokens for the rows, or None.
    """

    def __init__(self, plan: PlannedClass, programs: Programs, base: Any = None) -> None:
        self.plan = self.home = plan
        self.programs, self.base = programs, base
        count = plan.row_class.rows
        self.jobs: list[Job | None] = [None] * count
        self.active = np.zeros(count, bool)
        self.pool: Pool | None = None
        self.drafts = None if plan.drafter is None else Drafts(plan.drafter, programs, count)
        self._fed = np.zeros(count, np.int32)
        self._logits: Any = None
        self._drawn: Any = None
        self._words: np.ndarray | None = None

    @property
    def empty(self) -> bool:
        """Whether all rows are free."""
        return not any(self.jobs)

    @property
    def broken(self) -> bool:
        """Whether the rows are lost, because a call that was to change them has failed."""
        return self.pool is not None and self.programs.consumed(self.pool)

    def reserve(self, job: Job) -> int | None:
        """Give a free row to a job, and return its slot. Return None if no row is free."""
        slot = next((slot for slot, other in enumerate(self.jobs) if other is None), None)
        if slot is not None:
            self.jobs[slot] = job
            job.spilled = None if self.plan is self.home else self.plan.fetch
        return slot

    def insert(self, slot: int, read: ReadPrompt, row: Any, token: int) -> None:
        """Make a reserved row active.

        Args:
            slot: the row.
            read: the result of reading its prompt. Its states are not changed.
            row: the sampling settings of the row after its first draw.
            token: its first token, which the next step feeds.
        """
        if self.pool is None:
            self.pool = self.programs.pool(read.state, self.plan)
        self.pool = self.programs.insert(self.pool, slot, read.state, row)
        job = self.jobs[slot]
        if self.drafts is not None and job is not None:
            self.drafts.insert(slot, job, token, read)
        self._fed[slot], self.active[slot] = token, True

    def allow(self, slot: int, words: np.ndarray) -> None:
        """Set the tokens that a row may draw next, uint32 [W], as in `pack_mask`."""
        if self._words is None:
            self._words = np.full((len(self.jobs), len(words)), FULL_WORD)
        self._words[slot] = words

    def release(self, slot: int) -> None:
        """Free a row. Its arrays stay as they are, and are not read again before another row replaces them."""
        self.jobs[slot], self.active[slot] = None, False
        if self._words is not None:
            self._words[slot] = FULL_WORD

    def start_step(self) -> None:
        """Start a step of the active rows. `start_draw` ends it."""
        assert self.pool is not None
        guessed = None
        if self.drafts is not None:
            guessed = self.drafts.guess(self.pool, self._fed, self.jobs, self.active)
        if guessed is not None:
            self.pool = guessed
        else:
            self._logits, self.pool = self.programs.step(self.pool, self._fed, self.active)

    def start_draw(self) -> None:
        """Start to draw the next tokens from the logits of the step. `drawn` waits for them."""
        pool, counts = self.pool, self.active.astype(np.int32)
        assert pool is not None
        if self._words is not None:
            pool = pool._replace(rows=self.programs.masked(pool.rows, self._words))
        if self.drafts is not None and self.drafts.guessing:
            tokens, counts, logits, pool = self.drafts.draw(pool, self.active)
        else:
            logits = self._logits
            tokens, rows = self.programs.draw(logits, pool.rows, self.active)
            pool = pool._replace(rows=rows)
        wanted = any(job is not None and job.request.logprobs is not None for job in self.jobs)
        self._drawn = tokens, counts, self.programs.likely(logits, tokens) if wanted else None
        self._logits, self.pool = None, pool
        if self.drafts is not None:
            self.drafts.hear(tokens, counts, self.jobs, pool.state)

    def drawn(self) -> list[tuple[int, list[DrawnToken]]]:
        """Return the slot and the new tokens of each active row, in order. A row without a token has NO_TOKEN."""
        tokens, counts, likely = self._drawn
        found, counts, self._drawn = read_drawn(tokens, likely), np.asarray(counts), None
        if self.drafts is not None:
            self.drafts.drawn(counts, self.jobs)
        most = len(found) // len(counts)
        new = [(slot, found[slot * most :][: counts[slot]]) for slot in np.flatnonzero(self.active).tolist()]
        for slot, row in new:
            self._fed[slot] = 0 if row[-1].token == NO_TOKEN else row[-1].token
        return new

    def timed(self, seconds: float) -> None:
        """Take in the time of a step of this group that ran alone."""
        if self.drafts is not None:
            self.drafts.pace.timed(self.drafts.width, seconds)

    def row(self, slot: int, surplus: int, unfed: Sequence[int]) -> Any:
        """Return a copy of one row, as a state of one row with the fetch mode of `home`.

        The copy gives back its `surplus` newest tokens, and then reads the tokens `unfed`.
        """
        assert self.pool is not None
        return self.programs.taken(self.pool, slot, (surplus, unfed), self.home.fetch)

    def move(self, plan: PlannedClass) -> None:
        """Move the rows to where another plan of their class has them: `home` or `home.spilled`."""
        if self.pool is not None:
            self.pool = self.programs.moved(self.pool, plan.fetch)
        self.plan = plan
        for job in self.jobs:
            if job is not None:
                job.spilled = job.spilled or (None if plan is self.home else plan.fetch)
