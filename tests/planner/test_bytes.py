"""Bytes before anything exists: the figures of README.md and docs/benchmarks/memory.md, from the config alone."""

import jax
import pytest
from real_shapes import LLAMA_31_8B, PAPERS_SHARE, SMOLLM2

from jshadow.errors import CapacityError
from jshadow.planner.bytes import abstract_state, footprint
from jshadow.policies import POLICIES, Full, ShadowKV


def test_three_times_fewer_bytes_at_4k():
    made = footprint(SMOLLM2, PAPERS_SHARE, capacity=4096 + 64, prompt=4096, fetch="device_put")
    assert made["full_bytes"] == 4160 * 768 * 30
    assert made["full_bytes"] / made["device_bytes"] >= 3.0
    assert made["host_bytes"] == (4160 // 8 - 4) * 8 * 384 * 30  # values of every whole chunk but the local ones


def test_parts_add_up_by_hand():
    made = footprint(SMOLLM2, PAPERS_SHARE, capacity=4160, prompt=4096, fetch="device_put")
    chunks, columns = 516, 192
    layer = {
        "left": chunks * 8 * 32 * 2,
        "right": 32 * columns * 2,
        "landmarks": chunks * columns * 2,
        "candidates": chunks * 3,
        "chunks": 4,
        "outliers": 48 * 8 * columns * 2 * 2,
        "window": (4160 - 508 * 8) * columns * 2 * 2,
        "resident": 3 * 32 * 4,
    }
    assert {part: device for part, (device, _) in made["parts"].items() if device} == {
        part: size * 30 for part, size in layer.items()
    }


def test_llama_8b_at_122k_matches_the_published_arithmetic():
    """Its buffers come to 6.1 times fewer bytes at 122K tokens (rank 160, budget 2048), the selected keys and values
    that it keeps on the device included; here they are temporaries of one layer."""
    made = footprint(
        LLAMA_31_8B, ShadowKV(rank=160, budget=2048), capacity=124928 + 128, prompt=124928, fetch="device_put"
    )
    selected = 2048 * 2 * LLAMA_31_8B.key_columns * 2 * 32
    assert 6.0 < made["full_bytes"] / (made["device_bytes"] + selected) < 6.3
    assert made["host_bytes"] == pytest.approx(32 * 124928 * 2048, rel=0.002)


def test_resident_mode_counts_the_values_as_device_bytes():
    modes = ("device_put", "resident")
    offloaded, resident = (footprint(SMOLLM2, PAPERS_SHARE, capacity=4160, prompt=4096, fetch=mode) for mode in modes)
    assert resident["host_bytes"] == 0
    assert resident["device_bytes"] == offloaded["device_bytes"] + offloaded["host_bytes"]


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_allocated(name):
    state = abstract_state(
        LLAMA_31_8B, POLICIES[name](), batch=8, capacity=131072, prompt=131000, dtype="bfloat16", fetch="device_put"
    )
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


def test_full_counts_itself():
    made = footprint(LLAMA_31_8B, Full(), capacity=131072, prompt=131000)
    assert made["device_bytes"] == made["full_bytes"] == 16 * 2**30


def test_a_row_with_a_room_costs_the_same_after_every_prompt():
    """Without a room, a row that begins with a short prompt needs an exact window for nearly the whole capacity."""
    sizes = {"capacity": 131072, "fetch": "device_put"}
    grown = footprint(LLAMA_31_8B, ShadowKV(), prompt=1024, **sizes)
    made = [footprint(LLAMA_31_8B, ShadowKV(), prompt=prompt, room=1024, **sizes) for prompt in (1024, 8192, 131072)]
    assert made[0] == made[1] == made[2]
    assert made[0]["device_bytes"] < made[0]["full_bytes"] / 6 < grown["full_bytes"] < grown["device_bytes"]
    token = 2 * LLAMA_31_8B.num_layers * LLAMA_31_8B.key_columns * 2
    least = footprint(LLAMA_31_8B, ShadowKV(), prompt=131072, room=0, **sizes)
    assert made[0]["device_bytes"] - least["device_bytes"] == 1024 * token
    for room in (-1, True, 1.5, "8"):
        with pytest.raises(CapacityError, match="room must be an integer of at least 0"):
            footprint(LLAMA_31_8B, ShadowKV(), prompt=1024, room=room, **sizes)
