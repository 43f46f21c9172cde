"""A group: a pool of rows of one class that one call steps. The counts are kept on the host."""

from typing import Any

import numpy as np

from jshadow.engine.sampling import NO_TOKEN
from jshadow.serving.classes import PlannedClass
from jshadow.serving.jobs import Job
from jshadow.serving.programs import Pool, Programs

Drawn = list[tuple[int, list[int]]]  # for each active row, its slot and the tokens that a step drew


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
        self._drawn: Any = None
        self._words: np.ndarray | None = None

    @property
    def empty(self) -> bool:
        """Whether all rows are free."""
        return not any(self.jobs)

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
            self._words = np.full((len(self.jobs), len(words)), np.uint32(0xFFFFFFFF))
        self._words[slot] = words

    def release(self, slot: int) -> None:
        """Free a row. Its arrays stay as they are, and are not read again before another row replaces them."""
        self.jobs[slot], self.active[slot] = None, False
        if self._words is not None:
            self._words[slot] = 0xFFFFFFFF

    def start_step(self) -> None:
        """Start a step of the active rows. `drawn` waits for it.

        A program that draws several tokens of a row at once, such as one with speculation, takes the place of
        `Programs.step`. `drawn` then returns all of them.
        """
        assert self.pool is not None
        if self._words is not None:
            self.pool = self.pool._replace(rows=self.programs.masked(self.pool.rows, self._words))
        self._drawn, self.pool = self.programs.step(self.pool, self._fed, self.active)

    def drawn(self) -> Drawn:
        """Return the new tokens of each active row, in order. A row without a token has [NO_TOKEN]."""
        tokens = np.asarray(self._drawn)
        self._drawn = None
        self._fed = np.where(tokens == NO_TOKEN, 0, tokens).astype(np.int32)
        return [(slot, [int(tokens[slot])]) for slot in np.flatnonzero(self.active).tolist()]

    def row(self, slot: int, unfed: list[int]) -> Any:
        """Return the state of one row as a state of its own, after the tokens that were drawn but not fed."""
        assert self.pool is not None
        return self.programs.taken(self.pool, slot, unfed)
