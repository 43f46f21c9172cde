"""The memory tiers against a plain model of them: bytes, limits, and which state leaves first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jshadow.errors import ConfigError
from jshadow.library import TierLimits
from jshadow.library.tiers import DEVICE, HOST, MemoryTiers, Size

KEYS = st.sampled_from("abcdefgh")
SIZES = st.builds(Size, st.integers(0, 12), st.integers(0, 12))
LIMITS = st.one_of(st.none(), st.integers(0, 30))


def place(state: tuple[str, str]) -> tuple[str, str]:
    """A state here is its key and the memory it is in."""
    return state[0], HOST


class Tiers(RuleBasedStateMachine):
    """`model` is a list of [key, size, tier], the least recently used first."""

    @initialize(device=LIMITS, host=LIMITS)
    def begin(self, device, host):
        self.left: list[str] = []
        self.model: list[list] = []
        self.limits = {DEVICE: device, HOST: host}
        self.tiers = MemoryTiers(TierLimits(device, host), place, lambda key, state: self.left.append(key))

    def taken(self, tier: str) -> int:
        total = 0
        for _, size, where in self.model:
            if tier == DEVICE:
                total += size.device * (where == DEVICE)
            else:
                total += size.host if where == DEVICE else size.device + size.host
        return total

    def over(self, tier: str) -> bool:
        return self.limits[tier] is not None and self.taken(tier) > self.limits[tier]

    @rule(key=KEYS, size=SIZES)
    def put(self, key, size):
        self.left.clear()
        tier = self.tiers.put(key, (key, DEVICE), size)
        self.model = [row for row in self.model if row[0] != key]
        others, self.model = self.model, []
        for where in (DEVICE, HOST):
            self.model = [[key, size, where]]
            if not self.over(DEVICE) and not self.over(HOST):
                break
        else:
            self.model = []
        assert tier == (self.model[0][2] if self.model else None)
        gone = self.made_to_fit(others) if self.model else []
        self.model = others + self.model
        assert self.left == gone

    def made_to_fit(self, others: list[list]) -> list[str]:
        """Move the oldest of `others` down until all limits hold. Return the keys that left."""
        new, gone = self.model, []
        while True:
            self.model = others + new
            if self.over(DEVICE):
                row = next(row for row in others if row[2] == DEVICE and row[1].device)
                row[2] = HOST
                if self.limits[HOST] is None or row[1].total <= self.limits[HOST]:
                    continue
            elif self.over(HOST):
                row = next(row for row in others if (row[1].host if row[2] == DEVICE else row[1].total))
            else:
                self.model = new
                return gone
            others.remove(row)
            gone.append(row[0])

    @rule(key=KEYS)
    def get(self, key):
        held = self.tiers.get(key)
        rows = [row for row in self.model if row[0] == key]
        assert (held is not None) == bool(rows)
        if held is not None:
            self.model.remove(rows[0])
            self.model.append(rows[0])
            assert held.state == (key, rows[0][2])

    @rule(key=KEYS)
    def drop(self, key):
        self.left.clear()
        self.tiers.drop(key)
        self.model = [row for row in self.model if row[0] != key]
        assert not self.left

    @invariant()
    def bytes_and_order_are_the_model_s(self):
        if hasattr(self, "model"):
            held = [(key, one.size, one.tier) for key, one in self.tiers.held.items()]
            assert held == list(map(tuple, self.model))
            for tier, limit in self.limits.items():
                assert self.tiers.used(tier) == self.taken(tier)
                assert limit is None or self.taken(tier) <= limit


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1"])
def test_a_limit_is_a_number_of_bytes(wrong):
    with pytest.raises(ConfigError, match=r"limits\.host must be None or a number of bytes"):
        TierLimits(host=wrong)
