"""A model and a library of plain Python, for the bookkeeping of the serving engine. A state is a list of tokens."""

import concurrent.futures
import dataclasses
import types

import numpy as np

from jshadow.engine.sampling import NO_TOKEN
from jshadow.errors import CheckpointError, HostMemoryError, NumericalError, PromptError
from jshadow.library.shelf import Stored
from jshadow.library.tiers import DEVICE, HOST, MemoryTiers, Size, TierLimits
from jshadow.policies import Full
from jshadow.serving.classes import EngineOptions, GroupBytes, PlannedClass, RowClass
from jshadow.serving.programs import Pool

PLANS = tuple(
    PlannedClass(RowClass(prompt, room, rows), Full(), None, "resident", GroupBytes(size, 0, 1, 2))
    for prompt, room, rows, size in ((4, 3, 2, 10), (9, 6, 3, 25))
)
STOP, NAN, FAILS = 6, 7, 8  # a drawn token that stops, one that stands for a NaN, a prompt that cannot be read
WORDS = 50


def next_token(history):
    """The token after a history. It depends on all of it."""
    token = hash(tuple(history)) % WORDS
    return NO_TOKEN if token == NAN else token


def expected(request):
    """The tokens of an answer, and the type of its error."""
    if request.prompt[0] == FAILS:
        return [], HostMemoryError
    tokens = []
    stops = {STOP, *(request.stop or ())}
    while len(tokens) < request.max_new_tokens:
        if request.allowed is not None and len(tokens) >= request.allowed.most:
            return tokens, PromptError
        token = next_token([*request.prompt, *tokens])
        if token == NO_TOKEN:
            return tokens, NumericalError
        tokens.append(token)
        if token in stops:
            break
    return tokens, None


@dataclasses.dataclass(frozen=True)
class Grammar:
    """It lets all words follow, and fails after so many."""

    most: int

    def __call__(self, tokens):
        if len(tokens) >= self.most:
            raise PromptError(f"the grammar must end before {self.most} tokens")
        return np.ones(WORDS, bool)


class PlainPrograms:
    """The programs of an engine."""

    options = EngineOptions(turn_chunk=2)
    parts = types.SimpleNamespace(vocab_size=WORDS)

    def masked(self, rows, words):
        return rows

    def begin(self, plan, ids):
        if ids[0] == FAILS:
            raise HostMemoryError("host_bytes must be at most 0, got 1")
        return PlainPrefill(ids, len(ids))

    def advance(self, partial):
        return dataclasses.replace(partial, left=partial.left - 1)

    def finish(self, partial):
        return next_token(partial.ids), list(partial.ids)

    def begin_on(self, plan, base):
        return list(base)

    def extend(self, state, ids):
        return next_token([*state, *ids]), [*state, *ids]

    def row(self, settings, ids):
        return "row"

    def draw(self, logits, rows, active=None):
        return np.atleast_1d(logits), rows

    def pool(self, state, plan):
        return Pool([None] * plan.row_class.rows, "rows")

    def insert(self, pool, slot, state, row):
        return pool._replace(state=[state if place == slot else held for place, held in enumerate(pool.state)])

    def step(self, pool, tokens, active):
        fed = [[*held, int(token)] if on else held for held, token, on in zip(pool.state, tokens, active, strict=True)]
        logits = np.array([next_token(held) if on else 99 for held, on in zip(fed, active, strict=True)])
        return logits, pool._replace(state=fed)

    def taken(self, pool, slot, unfed):
        return [*pool.state[slot], *unfed]

    def fork(self, state):
        return list(state)

    def fed(self, state, unfed):
        return [*state, *unfed]


@dataclasses.dataclass(frozen=True)
class PlainPrefill:
    ids: list
    left: int

    @property
    def done(self):
        return self.left == 0


def plan_rows(programs, job, base):
    """The plan of rows on a document. The prompt half takes a byte for each token."""
    one = min(job.rooms, key=lambda row_class: row_class.room)
    sizes = GroupBytes(5 * one.rows, 0, 1, 2, shared_device=len(base))
    return PlannedClass(RowClass(job.read, one.room, one.rows), Full(), None, "resident", sizes, job.document)


class PlainLibrary:
    """States in the memory tiers of `jshadow.Library`, and in files that can be lost.

    Attributes:
        recent: the keys in the order of their last use.
        files: the states that have left memory, and those that were stored.
        lost: the keys of files that cannot be read.
        ever_lost: whether a file could not be read at some time.
    """

    capacity, fetch = PLANS[1].row_class.capacity, "resident"

    def __init__(self, device, host):
        self.recent, self.files, self.lost, self.reads = [], {}, set(), []
        self.ever_lost = False
        self.tiers = MemoryTiers(TierLimits(device, host), tuple, self.files.__setitem__)

    def longest(self, ids):
        keys = [key for key in self.recent if list(key) == ids[: len(key)]]
        return Stored(max(keys, key=len), len(max(keys, key=len)), 0, "disk") if keys else None

    def prepare(self, key):
        future = concurrent.futures.Future()
        if self.tiers.tier_of(key) is None:
            self.reads.append(future)
        else:
            future.set_result(None)
        return future

    def load(self, key):
        held = self.tiers.get(key)
        if held is None:
            if key in self.lost:
                self.ever_lost = True
                raise CheckpointError("the file must be there, it is gone")
            self._put(key, list(self.files[key]))
        self._use(key)
        return list(key) if held is None else list(held.state)

    def start_store(self, ids, state, **note):
        assert ids == state
        key = tuple(ids)
        self.files[key] = state
        self.lost.discard(key)
        self._put(key, state)
        self._use(key)
        done = concurrent.futures.Future()
        done.set_result(key)
        return done

    def _put(self, key, state):
        half = len(state) // 2
        self.tiers.put(key, state, Size(len(state) - half, half))

    def _use(self, key):
        self.recent = [other for other in self.recent if other != key] + [key]

    def check(self):
        """The tiers are under their limits, by use, and hold the most recent states that fit."""
        tiers, limits = self.tiers, self.tiers.limits
        assert tiers.used(DEVICE) <= limits.device
        assert tiers.used(HOST) <= limits.host
        assert list(tiers.held) == [key for key in self.recent if key in tiers.held]
        sizes = {key: Size(len(key) - len(key) // 2, len(key) // 2) for key in self.recent}
        for key, held in tiers.held.items():
            assert tuple(held.state) == key
            assert held.size == sizes[key]
            assert isinstance(held.state, tuple) == (held.tier == HOST)
        if self.recent and tiers.fitting(sizes[self.recent[-1]]) is not None:
            assert self.recent[-1] in tiers.held
        assert set(self.files) == set(self.recent)
