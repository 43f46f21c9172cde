"""The memory tiers against a plain model of them: bytes, limits, and which state leaves first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_model import TierModel

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
    @initialize(device=LIMITS, host=LIMITS)
    def begin(self, device, host):
        self.left: list[str] = []
        self.model = TierModel(device, host)
        self.tiers = MemoryTiers(TierLimits(device, host), place, lambda key, state: self.left.append(key))

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


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1"])
def test_a_limit_is_a_number_of_bytes(wrong):
    with pytest.raises(ConfigError, match=r"limits\.host must be None or a number of bytes"):
        TierLimits(host=wrong)
