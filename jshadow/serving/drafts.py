"""The drafter of a group: what it remembers of each row, and how many tokens it proposes in a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jshadow.engine.speculation.drafter import Drafter, Memory, Pace, check_gives
from jshadow.engine.speculation.run import GuessPlan
from jshadow.errors import ConfigError
from jshadow.serving.jobs import Job

if TYPE_CHECKING:
    from jshadow.serving.groups import Pool, Programs, ReadPrompt


def why_plain(job: Job) -> str | None:
    """Return why no tokens are proposed for the answer of a job, or None: if they are, or the engine has no drafter."""
    drafting = job.plan.drafting
    if drafting is None or drafting.drafter is None:
        return None if drafting is None else drafting.plain
    if job.request.allowed is not None:
        return "a grammar tells the allowed tokens of one place at a time"
    try:
        check_gives(drafting.drafter, drafting.state, [len(job.ids)], job.request.max_new_tokens)
    except ConfigError as error:
        return str(error)
    return None


class Drafts:
    """Proposes tokens for the rows of a group.

    Attributes:
        memory: what the drafter remembers. None before the first row that takes proposals.
        width: how many tokens the newest step proposes for each row.
    """

    def __init__(self, drafter: Drafter, programs: "Programs", rows: int) -> None:
        self.drafter, self.programs = drafter, programs
        self.memory: Memory | None = None
        self.width = 0
        self.pace = Pace(drafter.tokens, drafter.cost, rows)
        self._ready: Any = np.zeros(rows, np.int32)
        self._guesses: Any = None

    @property
    def guessing(self) -> bool:
        """Whether `guess` has started a step whose tokens `drawn` has not taken in yet."""
        return self._guesses is not None

    def insert(self, slot: int, job: Job, token: int, read: "ReadPrompt") -> None:
        """Remember a row. `token` is its first new token, and `read` the result of reading its prompt."""
        if job.plain is None:
            one, ready = self.programs.remembered(self.drafter, job.ids, token, read)
            self.memory = self.programs.with_memory(self.drafter, self.memory, slot, one, len(self._ready))
            self._ready = np.array(self._ready)
            self._ready[slot] = ready
            self.pace.begin(slot)

    def guess(self, pool: "Pool", fed: np.ndarray, jobs: Sequence[Job | None], active: np.ndarray) -> "Pool | None":
        """Choose the width of the next step. Unless a plain step does the same, start it, and return the pool after it.

        A model that proposes tokens reads the newest one even if it proposes none.

        `fed` has the newest token of each row, int32 [rows]. The arguments `jobs` and `active` are those of a `Group`.
        """
        takes, left = np.zeros((2, len(jobs)), np.int32)
        forced = None
        for slot, job in enumerate(jobs):
            if job is not None and active[slot]:
                takes[slot] = job.plain is None
                left[slot] = job.left if takes[slot] and not job.widths else 1  # with 1, nothing is proposed
                forced = job.widths.pop(0) if job.widths else forced
        ready = takes * np.minimum(self._ready, np.maximum(left - 1, 0))
        self.width = self.pace.choose(ready, active) if forced is None else forced
        if self.memory is None or not (self.width or self.drafter.reader):
            self.width = 0
            return None
        plan = GuessPlan(self.drafter, self.width)
        self._guesses, pool, self.memory = self.programs.guess(pool, self.memory, (fed, left), plan)
        return pool

    def draw(self, pool: "Pool", active: np.ndarray) -> tuple[Any, Any, Any, "Pool"]:
        """Start to draw what follows the guesses of `guess`. This consumes the pool.

        Return the tokens [rows, width + 1], how many of them are real [rows], their logits, and the pool.
        """
        return self.programs.draw_guessed(pool, self._guesses, active)

    def hear(self, tokens: Any, counts: Any, jobs: Sequence[Job | None], state: Any) -> None:
        """Tell the drafter the new tokens of each row, of which `counts` are real. `state` is that of the rows."""
        if self.memory is not None:
            takes = np.array([job is not None and job.plain is None for job in jobs])
            heard = self.programs.heard(self.drafter, self.memory, (tokens, counts, takes), state)
            self.memory, self._ready = heard

    def drawn(self, counts: np.ndarray, jobs: Sequence[Job | None]) -> None:
        """Take in how many tokens of each row were drawn, int [rows]."""
        self._ready = np.asarray(self._ready)
        if self.guessing:
            proposed = np.asarray(self._guesses.proposed)
            accepted = np.maximum(counts - 1, 0)
            self.pace.heard(proposed, accepted)
            for slot, job in enumerate(jobs):
                if job is not None:
                    job.proposed += int(proposed[slot])
                    job.accepted += int(accepted[slot])
        self._guesses = None
