"""KIVI takes the bytes that the papers state."""

import pytest
from policy_inputs import llama

from jshadow.planner.bytes import footprint
from jshadow.policies import KIVI


@pytest.mark.parametrize(("bits", "group", "gib"), [(2, 32, 3.01), (2, 64, 2.51), (1, 32, 2.01), (1, 64, 1.51)])
def test_kivi_s_bytes_at_128k_are_the_papers(bits, group, gib):
    """The sizes are computed by hand from the papers of KIVI and SpeCache, at 131,072 tokens of Llama-3.1-8B."""
    sizes = footprint(llama(), KIVI(bits=bits, group=group), capacity=131_072, prompt=131_072, fetch="resident")
    assert sizes["device_bytes"] / 2**30 == pytest.approx(gib, rel=0.02)
    words = sum(sizes["parts"][part][0] for part in ("quantized",))
    assert words <= sizes["device_bytes"]
