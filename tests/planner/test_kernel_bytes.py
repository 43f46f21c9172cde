"""The bytes that the planner counts for a step, beside those that each kernel says it moves. Nothing is compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from real_shapes import LLAMA_31_8B

from jshadow.engine.step import step_writes
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of
from jshadow.planner.gpu import Planner, checked
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GPUS
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv.costs import SECTOR, beside

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
