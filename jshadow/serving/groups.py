"""A group: a pool of rows of one class that one call steps. The counts are kept on the host."""

from typing import Any

import numpy as np

from jshadow.engine.sampling import NO_TOKEN
from jshadow.serving.classes import PlannedClass
from jshadow.serving.drawn import DrawnToken, read_drawn
from jshadow.serving.grammar import FULL_WORD
from jshadow.serving.jobs import Job
from jshadow.serving.programs import Pool, Programs

Drawn = list[tuple[int, list[DrawnToken]]]  # for each active row, its slot and the tokens that a step drew


class Group:
    """A pool of rows. A row is free, reserved by a job that is being read, or active.

    Attributes:
        plan: the class of the rows.
        jobs: the job of each row, or None for a free row.
        active: which rows a step feeds, bool [rows].
        pool: the arrays. None before the first row is inserted.
        base: the stored state whose prompt half all rows share, or None.
    """

    def __init__(self, plan: PlannedClass, programs: Programs, base: Any = None) -> None:
        self.plan, self.programs, self.base = plan, programs, base
        count = plan.row_class.rows
        self.jobs: list[Job | None] = [None] * count
        self.active = np.zeros(count, bool)
        self.pool: Pool | None = None
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
        return slot

    def insert(self, slot: int, state: Any, row: Any, token: int) -> None:
        """Make a reserved row active.

        Args:
            slot: the row.
            state: the state of the row after its prompt. It is only read.
            row: the sampling settings of the row after its first draw.
            token: its first token, which the next step feeds.
        """
        if self.pool is None:
            self.pool = self.programs.pool(state, self.plan)
        self.pool = self.programs.insert(self.pool, slot, state, row)
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
        self._logits, self.pool = self.programs.step(self.pool, self._fed, self.active)

    def start_draw(self) -> None:
        """Start to draw the next tokens from the logits of the step. `drawn` waits for them.

        A program that draws several tokens of a row at once, such as one with speculation, takes the place of
        `Programs.draw`. `drawn` then returns all of them.
        """
        assert self.pool is not None
        rows, logits = self.pool.rows, self._logits
        if self._words is not None:
            rows = self.programs.masked(rows, self._words)
        tokens, rows = self.programs.draw(logits, rows, self.active)
        wanted = any(job is not None and job.request.logprobs is not None for job in self.jobs)
        self._drawn = tokens, self.programs.likely(logits, tokens) if wanted else None
        self._logits, self.pool = None, self.pool._replace(rows=rows)

    def drawn(self) -> Drawn:
        """Return the new tokens of each active row, in order. A row without a token has NO_TOKEN."""
        found = read_drawn(*self._drawn)
        self._drawn = None
        self._fed = np.array([0 if one.token == NO_TOKEN else one.token for one in found], np.int32)
        return [(slot, [found[slot]]) for slot in np.flatnonzero(self.active).tolist()]

    def row(self, slot: int, unfed: list[int]) -> Any:
        """Return the state of one row as a state of its own, after the tokens that were drawn but not fed."""
        assert self.pool is not None
        return self.programs.taken(self.pool, slot, unfed)
