"""Bytes before anything exists: the figures of README.md and docs/benchmarks/memory.md, from the config alone.

Also the bytes that the planner counts for a step, beside those that each kernel says it moves. Nothing is compiled.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from real_shapes import LLAMA_31_8B, PAPERS_SHARE, SMOLLM2

from jshadow.engine.step import step_writes
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, abstract_state, footprint
from jshadow.planner.gpu import Planner, checked
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GPUS
from jshadow.policies import POLICIES, Full, ShadowKV
from jshadow.policies.shadowkv.costs import SECTOR, beside


def test_the_bytes_of_smollm2_at_4k_by_hand():
    """Three times fewer than with full attention."""
    modes = ("device_put", "resident")
    made, resident = (footprint(SMOLLM2, PAPERS_SHARE, capacity=4160, prompt=4096, fetch=mode) for mode in modes)
    assert made["full_bytes"] == 4160 * 768 * 30
    assert made["full_bytes"] / made["device_bytes"] >= 3.0
    assert made["host_bytes"] == (4160 // 8 - 4) * 8 * 384 * 30  # values of every whole chunk but the local ones
    assert resident["host_bytes"] == 0
    assert resident["device_bytes"] == made["device_bytes"] + made["host_bytes"]
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
    parts = {part: device for part, (device, _) in made["parts"].items() if device}
    assert parts == {part: size * 30 for part, size in layer.items()}


def test_llama_8b_at_122k_matches_the_published_arithmetic():
    """Its buffers come to 6.1 times fewer bytes at 122K tokens (rank 160, budget 2048), the selected keys and values
    that it keeps on the device included; here they are temporaries of one layer."""
    sizes = {"capacity": 124928 + 128, "prompt": 124928, "fetch": "device_put"}
    made = footprint(LLAMA_31_8B, ShadowKV(rank=160, budget=2048), **sizes)
    selected = 2048 * 2 * LLAMA_31_8B.key_columns * 2 * 32
    assert 6.0 < made["full_bytes"] / (made["device_bytes"] + selected) < 6.3
    assert made["host_bytes"] == pytest.approx(32 * 124928 * 2048, rel=0.002)
    full = footprint(LLAMA_31_8B, Full(), capacity=131072, prompt=131000)
    assert full["device_bytes"] == full["full_bytes"] == 16 * 2**30


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_allocated(name):
    sizes = {"batch": 8, "capacity": 131072, "prompt": 131000, "dtype": "bfloat16", "fetch": "device_put"}
    state = abstract_state(LLAMA_31_8B, POLICIES[name](), **sizes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


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


# Kernels


ONE_LAYER = dataclasses.replace(LLAMA_31_8B, num_layers=1)
KERNELS = {"chunk_logits", "packed_logits", "finish_scores", "select_chunks", "fetch_reconstruct", "sparse_attention"}
CASES = {
    "paper, zero_copy": (ShadowKV(), "zero_copy", {"packed_logits"}),
    "small, zero_copy": (ShadowKV.packed(small=True), "zero_copy", {"chunk_logits"}),
    "small, resident": (ShadowKV.packed(small=True), "resident", {"chunk_logits"}),
}


def kernel_bytes(jaxpr: Any) -> dict[str, int]:
    """Bytes that each Pallas kernel in a jaxpr says it moves, from either memory, by the kernel's name."""
    found: dict[str, int] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            cost = equation.params["cost_estimate"]
            found[equation.params["name"]] = cost.bytes_accessed + cost.remote_bytes_transferred
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= kernel_bytes(inner)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_planner_counts_what_the_kernels_move(case):
    policy, fetch, absent = CASES[case]
    policy = policy.resolve(ONE_LAYER, 122_880)
    serving = checked(ONE_LAYER, Serving(122_816, batch=4, fetch=fetch, repeat_share=0.0))
    planner = Planner(ONE_LAYER, ONE_LAYER, GPUS["h200"], serving)
    state = abstract_of(planner.specs(policy, 4), policy)
    tokens, new = jax.ShapeDtypeStruct((4, 1), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_weights(ONE_LAYER))
    traced = jax.make_jaxpr(
        lambda weights, tokens, new, reads, writes: step_writes(weights, ONE_LAYER, tokens, new, reads, writes)
    )(weights, tokens, new, *state.split())
    moved = {name: size for name, size in kernel_bytes(traced.jaxpr).items() if name in KERNELS}
    assert moved.keys() == KERNELS - absent
    step, without = planner.step(policy, 4), planner.step(policy, 4, passes=False)
    passed = {part: step.hbm_bytes.pop(part) for part in ("scores", "selected", "padding") if part in step.hbm_bytes}
    assert step.hbm_bytes == without.hbm_bytes
    read = sum(step.hbm_bytes.values()) - step.hbm_bytes["weights"] + without.pcie_bytes
    # Queries, masks that are read twice and softmax statistics are not counted.
    assert sum(moved.values()) == pytest.approx(read + passed["scores"] + passed["selected"], rel=0.02)
    assert sum(moved.values()) > 1.2 * read  # what is passed on is no small part


@pytest.mark.parametrize("row", [2048, 1368, 544, 528, 96, 33, 0])
def test_padding_by_counting_sectors(row):
    """A row is read with all sectors that it touches, wherever it begins."""
    places = range(0, row * SECTOR, row) if row else ()
    touched = [SECTOR * ((start + row - 1) // SECTOR - start // SECTOR + 1) - row for start in places]
    assert beside(row) == (sum(touched) / len(touched) if touched else 0)
