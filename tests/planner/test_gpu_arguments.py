"""Arguments of the planner: repeats, and those that it refuses."""

import pytest
from cases import CAPACITY, TINY
from real_shapes import LLAMA_31_8B

from jshadow.cache import offload
from jshadow.errors import CapacityError, ConfigError
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GPUS
from jshadow.policies import Full, ShadowKV

A100 = GPUS["a100-80gb"]


def test_repeats_move_nothing_where_they_are_kept(monkeypatch):
    """A mode that keeps units on the device, as far as the planner sees one."""
    monkeypatch.setattr(offload, "FETCH_MODES", ("resident", "device_put", "zero_copy"))
    monkeypatch.setattr(offload, "memory_of", lambda fetch: "device" if fetch == "resident" else "pinned_host")
    policy = ShadowKV(rank=8, budget=32, outlier_chunks=2)

    def make(**settings):
        return capacity_plan(TINY, policy, A100, Serving(200, max_new_tokens=8, batch=2, **settings))

    moved = make().chosen.step.pcie_bytes
    assert moved > 0
    assert make(fetch="zero_copy", repeat_share=0.0).chosen.step.pcie_bytes == moved
    assert make(fetch="zero_copy").chosen.step.pcie_bytes == round(0.4 * moved)
    assert make(fetch="zero_copy").chosen.repeat_share == 0.6
    assert make(fetch="zero_copy", repeat_share=1.0).chosen.step.pcie_bytes == 0
    none, all_kept = (make(fetch="resident", repeat_share=share).chosen.step for share in (0.0, 1.0))
    assert none.pcie_bytes == all_kept.pcie_bytes == 0
    # Keys and values of the selected chunks are read, but not written, and their codes are not read.
    assert all_kept.hbm_bytes["selected"] == none.hbm_bytes["selected"] / 2
    assert none.hbm_bytes.keys() - all_kept.hbm_bytes.keys() == {"left", "values"}
    with pytest.raises(ConfigError, match=r"repeat_share must lie in \[0, 1\], got 1.5"):
        make(fetch="zero_copy", repeat_share=1.5)


@pytest.mark.parametrize(("small", "fetch", "rows"), [(True, "resident", 37), (False, "zero_copy", 47)])
def test_more_than_2_gib_of_packed_values_in_a_layer_are_planned(small, fetch, rows):
    """The bytes of values have no limit but the memory: the batches of `tools/aot/step_table.py` are the largest."""
    policy, serving = ShadowKV.packed(small=small), Serving(122_816, fetch=fetch)
    side = capacity_plan(LLAMA_31_8B, policy, GPUS["h200"], serving).chosen
    assert side.largest_batch == side.batch == rows
    assert sum(side.row_parts["host rows"]) == 32 * 8 * 15_356 * 544
    assert 2**31 < rows * 8 * 15_356 * 544 < 2**32
    assert side.repeat_share == 0.6


BAD = {
    "context": (dict(context=0), ConfigError, "context must be at least 1, got 0"),
    "too_long": (dict(context=200, max_new_tokens=57), CapacityError, "model's context=256, got 200 [+] 57"),
    "new": (dict(max_new_tokens=-1), ConfigError, "max_new_tokens must be at least 0"),
    "batch": (dict(batch=0), ConfigError, "batch must be at least 1, got 0"),
    "host": (dict(host_limit=-1), ConfigError, "host_limit must be at least 0, got -1"),
    "fetch": (dict(fetch="mail"), ConfigError, "fetch must be"),
    "repeats": (dict(repeat_share=0.5), ConfigError, "repeat_share must be 0 with fetch='device_put'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_told(case):
    arguments, kind, told = BAD[case]
    with pytest.raises(kind, match=told):
        capacity_plan(TINY, Full(), A100, Serving(**{"context": CAPACITY} | arguments))
