"""The methods that score the tokens of a prompt for other methods, by name, with their default settings."""

from jshadow.policies.eviction import EvictingPolicy
from jshadow.policies.expected_attention import ExpectedAttention
from jshadow.policies.keydiff import KeyDiff
from jshadow.policies.kvzip import KVzip
from jshadow.policies.snapkv import SnapKV

SCORES = ("snapkv", "expected_attention", "keydiff", "kvzip")


def scorer_of(name: str, kept: int) -> EvictingPolicy:
    """Return the method that scores tokens.

    Args:
        name: a name in SCORES.
        kept: number of tokens that are kept. SnapKV's window has at most half of them.
    """
    if name == "snapkv":
        window = max(1, min(SnapKV.observation_window, kept // 2))
        return SnapKV(max_capacity_prompt=kept, observation_window=window)
    others = {"expected_attention": ExpectedAttention, "keydiff": KeyDiff, "kvzip": KVzip}
    return others[name](kept=kept)
