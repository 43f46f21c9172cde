"""Random calls against plain models: of the memory tiers, and of a library with files, restarts and another process."""

import dataclasses
import functools
import shutil
import tempfile
from typing import Any, NamedTuple

import numpy as np
import pytest
from family_cases import family_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from small_state import POLICY, SMALL, equal

import jshadow
from jshadow.errors import CapacityError, CheckpointError
from jshadow.library import TierLimits
from jshadow.library.files import most_bytes
from jshadow.library.tiers import DEVICE, HOST, MemoryTiers, Size, size_of
from jshadow.policies import Full
from jshadow.weights.params import init_params

KEYS = st.sampled_from("abcdefgh")
SIZES = st.builds(Size, st.integers(0, 12), st.integers(0, 12))
LIMITS = st.one_of(st.none(), st.integers(0, 30))
COUNT, CAPACITY, NO_LIMITS = 5, 40, TierLimits()
TEXTS, FEW = st.integers(0, COUNT - 1), st.integers(0, 3)


class TierModel:
    """A list of rows, and no bookkeeping of bytes. `rows` are [key, size, tier], the least recently used first."""

    def __init__(self, device, host):
        self.limits = {DEVICE: device, HOST: host}
        self.rows = []

    def taken(self, tier):
        here = [size.device * (where == tier) for _, size, where in self.rows]  # a state that moved down has all there
        return sum(here) + sum(size.host for _, size, _ in self.rows) * (tier == HOST)

    def over(self, tier):
        return self.limits[tier] is not None and self.taken(tier) > self.limits[tier]

    def tier_of(self, key):
        return next((tier for name, _, tier in self.rows if name == key), None)

    def put(self, key, size):
        """Put a state. Return its tier, or None, and the keys that leave."""
        others, self.rows = [row for row in self.rows if row[0] != key], []
        for where in (DEVICE, HOST):
            self.rows = [[key, size, where]]
            if not self.over(DEVICE) and not self.over(HOST):
                break
        else:
            self.rows = []
        tier = self.tier_of(key)
        gone = self._made_to_fit(others) if self.rows else []
        self.rows = others + self.rows
        return tier, gone

    def _made_to_fit(self, others):
        """Move the oldest of `others` down until all limits hold. Return the keys that left."""
        new, gone = self.rows, []
        while True:
            self.rows = others + new
            if self.over(DEVICE):
                row = next(row for row in others if row[2] == DEVICE and row[1].device)
                row[2] = HOST
                if self.limits[HOST] is None or row[1].total <= self.limits[HOST]:
                    continue
            elif self.over(HOST):
                row = next(row for row in others if (row[1].host if row[2] == DEVICE else row[1].total))
            else:
                self.rows = new
                return gone
            others.remove(row)
            gone.append(row[0])

    def use(self, key):
        """Make a state the most recently used."""
        self.rows.sort(key=lambda row: row[0] == key)

    def drop(self, key):
        self.rows = [row for row in self.rows if row[0] != key]


def on_host(state):
    """A state here is its key and the memory it is in."""
    return state[0], HOST


class Tiers(RuleBasedStateMachine):
    @initialize(device=LIMITS, host=LIMITS)
    def begin(self, device, host):
        self.left = []
        self.model = TierModel(device, host)
        self.tiers = MemoryTiers(TierLimits(device, host), on_host, lambda key, state: self.left.append(key))

    @rule(key=KEYS, size=SIZES)
    def put(self, key, size):
        self.left.clear()
        assert (self.tiers.put(key, (key, DEVICE), size), self.left) == self.model.put(key, size)

    @rule(key=KEYS)
    def get(self, key):
        held, tier = self.tiers.get(key), self.model.tier_of(key)
        assert (held is not None) == (tier is not None)
        if held is not None:
            self.model.use(key)
            assert held.state == (key, tier)

    @rule(key=KEYS)
    def drop(self, key):
        self.left.clear()
        self.tiers.drop(key)
        self.model.drop(key)
        assert not self.left

    @invariant()
    def bytes_and_order_are_the_model_s(self):
        if hasattr(self, "model"):
            held = [[key, one.size, one.tier] for key, one in self.tiers.held.items()]
            assert held == self.model.rows
            for tier, limit in self.model.limits.items():
                assert self.tiers.used(tier) == self.model.taken(tier)
                assert limit is None or self.model.taken(tier) <= limit


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class Made(NamedTuple):
    """A model, and for each text its ids, its state, its key, the bytes of its file and their upper bound."""

    params: Any
    policy: Any
    texts: list
    states: list
    keys: list
    sizes: list
    most: list

    def library(self, folder, limits=NO_LIMITS):
        options = {"capacity": CAPACITY, "fetch": "device_put", "limits": limits}
        return jshadow.Library(folder, self.params, self.policy, **options)


def made_of(params, policy, texts, states=None):
    """`states` has the states of some texts. The others are read."""
    made, folder = Made(params, policy, texts, [], [], [], []), tempfile.mkdtemp()
    with made.library(folder) as library:
        for place, ids in enumerate(texts):
            key = library.store(ids, states[place]) if states and place in states else library.add(ids).key
            state = library.load(key).fork()
            library.remove(key)
            library.store(ids, state)
            made.states.append(state)
            made.keys.append(key)
            made.sizes.append(library.files.directory.bytes_of(key))
            made.most.append(most_bytes(library.files.content(state, library.catalog.entry(key))))
            library.remove(key)
    shutil.rmtree(folder)
    return made


@functools.cache
def plain():
    """Texts of which none begins as another one does."""
    texts = [np.random.default_rng(seed).integers(0, 13, 10 + 3 * seed).tolist() for seed in range(COUNT)]
    return made_of(init_params(SMALL), POLICY, texts)


class Machine(RuleBasedStateMachine):
    """`files` are the texts that have a file, `listed` those that the library knows."""

    made = staticmethod(plain)

    @initialize(device=FEW, host=FEW, rows=FEW, disk=st.integers(0, 6))
    def begin(self, device, host, rows, disk):
        made = self.made()
        self.texts, self.states, self.keys, self.sizes, self.most = made[2:]
        self.size = size_of(self.states[0])
        # "host" states in the host tier, and the host rows of "rows" states in the device tier
        limits = device * self.size.device, host * self.size.total + rows * self.size.host
        self.disk = max(self.most) + disk * max(self.sizes) - 1
        self.limits = TierLimits(*limits, disk=self.disk)
        self.folder = tempfile.mkdtemp()
        self.library, self.other = made.library(self.folder, self.limits), made.library(self.folder)
        self.model = TierModel(*limits)
        self.files, self.listed = set(), set()

    def teardown(self):
        if hasattr(self, "library"):
            self.library.close()
            self.other.close()
            shutil.rmtree(self.folder)

    def written(self, text):
        """Give a text a file if the disk has room. Return whether it has."""
        if sum(self.sizes[other] for other in self.files) + self.most[text] <= self.disk:
            self.files.add(text)
            return True
        return False

    def put(self, text):
        """Put a text into memory. Those that leave are written one after the other. Return its tier."""
        tier, gone = self.model.put(text, self.size)
        for other in gone:
            if other not in self.files and not self.written(other):
                self.listed.discard(other)
        return tier

    # The rules

    @rule(text=TEXTS, durable=st.booleans(), soon=st.booleans())
    def store(self, text, durable, soon):
        store = self.library.start_store if soon else self.library.store
        try:
            stored = store(self.texts[text], self.states[text], durable=durable)
            stored = stored.result(60) if soon else stored
        except CapacityError:
            stored = None
        if text not in self.files:
            assert stored in (self.keys[text], None)
        tier = self.put(text)
        in_memory = tier is not None and not durable
        if text in self.files or in_memory:
            assert stored == self.keys[text]
        elif stored is not None:
            assert self.written(text), "a file exceeds the limit"
        else:
            assert not self.written(text), "a file that has room is refused"
            if text not in self.listed:
                self.model.drop(text)
            return
        self.listed.add(text)

    @rule(text=TEXTS, removes=st.booleans())
    def load_or_remove(self, text, removes):
        call = self.library.remove if removes else self.library.load
        if text not in self.listed:
            with pytest.raises(CheckpointError):
                call(self.keys[text])
            return
        state = call(self.keys[text])
        if removes:
            self.forget(text)
        else:
            self.loaded(text)
            assert equal(state, self.states[text])

    def loaded(self, text):
        tier = self.model.tier_of(text)
        fits_device = self.size.device <= self.limits.device and self.size.host <= self.limits.host
        if tier == DEVICE or (tier is not None and not fits_device):
            self.model.use(text)
        else:
            self.put(text)

    def longest(self, ids):
        """The listed text that is the longest beginning of `ids`, or None."""
        begins = [text for text in self.listed if self.texts[text] == ids[: len(self.texts[text])]]
        return max(begins, key=lambda text: len(self.texts[text]), default=None)

    def forget(self, text):
        self.files.discard(text)
        self.listed.discard(text)
        self.model.drop(text)

    @rule(read=st.booleans())
    def restart(self, read):
        if read and self.listed:
            self.library.prepare(self.keys[min(self.listed)])
        self.library.close()
        self.library = self.made().library(self.folder, self.limits)
        self.model.rows.clear()
        self.listed = set(self.files)

    @rule(text=TEXTS, removes=st.booleans())
    def another_process_stores_or_removes(self, text, removes):
        if not removes:
            self.other.store(self.texts[text], self.states[text])
            self.files.add(text)
            self.listed.add(text)
        elif text in self.files:
            assert equal(self.other.load(self.keys[text]), self.states[text])
            self.other.remove(self.keys[text])
            self.forget(text)

    @invariant()
    def all_is_the_model_s(self):
        if not hasattr(self, "library"):
            return
        for key in self.keys:
            self.library.catalog.wait(key)
        stored = {found.key: found for found in self.library.documents()}
        assert stored.keys() == {self.keys[text] for text in self.listed}
        for text in range(COUNT):
            ids = [*self.texts[text], 1]
            found, longest = self.library.longest(ids), self.longest(ids)
            assert (found and found.key) == (None if longest is None else self.keys[longest])
            if found:
                assert found == stored[found.key]
                assert (found.tier, found.problem) == (self.model.tier_of(longest) or "disk", None)
        held = [(key, one.tier) for key, one in self.library.tiers.held.items()]
        assert held == [(self.keys[text], tier) for text, _, tier in self.model.rows]
        for tier in self.model.limits:
            assert self.library.tiers.used(tier) == self.model.taken(tier) <= getattr(self.limits, tier)
        directory = self.library.files.directory
        assert directory.files() == {self.keys[text]: self.sizes[text] for text in self.files}
        assert not self.library.catalog.writing
        assert not directory.folder.exists() or len(list(directory.folder.iterdir())) == len(self.files)


TestLibrary = Machine.TestCase
TestLibrary.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@functools.cache
def hybrid(family):
    """A model whose first layer is recurrent, and texts that begin alike. The second one is a turn of a chat.

    Full attention reads the texts, so that it does not matter in which pieces.
    """
    config = family_config(family)
    recurrent = dataclasses.replace(config.recurrent, layers=(0,))
    params = init_params(dataclasses.replace(config, num_layers=2, recurrent=recurrent, layers_without_mlp=()))
    ids, other = np.random.default_rng(1).integers(3, 97, (2, 24)).tolist()
    turn = jshadow.generate(params, ids[:12], Full(), max_new_tokens=6, capacity=CAPACITY, fetch="device_put")
    texts = [ids[:12], ids[:12] + turn.tokens, ids, ids[:16] + other[:6], other[:14]]
    return made_of(params, Full(), texts, {1: turn.state})


@functools.cache
def answer(family, prompt):
    """What the hybrid answers when it reads a prompt as a whole."""
    params = hybrid(family).params
    return jshadow.generate(params, list(prompt), Full(), max_new_tokens=4, capacity=CAPACITY).tokens


class HybridMachine(Machine):
    """The states of a recurrent layer hold all their tokens, and cannot be cut back to fewer."""

    @rule(cut=st.just(24) | st.integers(10, 24), new=st.integers(3, 5))
    def ask(self, cut, new):
        """A prompt may leave a stored text before its end. It continues from the longest stored text before."""
        for text in sorted(self.listed):
            prompt = [*self.texts[text][:cut], new, 7]
            longest, found = self.longest(prompt[:-1]), self.library.longest(prompt[:-1])
            assert (found and found.key) == (None if longest is None else self.keys[longest])
            if found:
                reply = self.library.ask(found.key, prompt[found.tokens :], max_new_tokens=4)
                assert reply.tokens == answer(self.family, tuple(prompt))
                self.loaded(longest)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "examples"), [("qwen3_5", 60), ("lfm2", 20), ("nemotron_h", 20)])
def test_library_of_a_hybrid(family, examples):
    """A delta rule, a short convolution, and Mamba-2."""

    class OfFamily(HybridMachine):
        made = staticmethod(functools.partial(hybrid, family))

    OfFamily.family = family
    run_state_machine_as_test(OfFamily, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))
