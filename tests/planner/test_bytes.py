"""Bytes from the config alone, before anything exists: of states, of the kernels of a step and of a prefill."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY
from family_cases import family_config
from policy_inputs import llama
from real_shapes import LLAMA_31_8B, PAPERS_SHARE, SMOLLM2

from jshadow.engine.step import step_writes
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import Workload, abstract_of
from jshadow.planner.gpu import Planner, capacity_plan, checked
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, GPUS
from jshadow.planner.machine import footprint, prefill_peak
from jshadow.planner.pieces import rows_at_once
from jshadow.planner.prefill_time import (
    LAUNCH_SECONDS,
    PREFILL_SHARE,
    attention_operations,
    layer_operations,
    projection_operations,
    rest_operations,
)
from jshadow.policies import H2O, POLICIES, Full, ShadowKV
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
    serving = checked(ONE_LAYER, Workload(122_816, batch=4, fetch=fetch, repeat_share=0.0), GPUS["h200"])
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


A100 = GPUS["a100-80gb"]

ROWS = [(1, 2048, 2048, 1), (24, 2048, 2048, 1), (24, 100, 2048, 12), (50, 100, 2048, 10), (7, 500, 2048, 1)]


def test_rows_at_once():
    for batch, size, chunk, rows in (*ROWS, (8, 4, 2, 1)):
        assert rows_at_once(batch, size, chunk) == rows


def test_the_bound_on_a_gpu():
    """Beside one row's queries and outputs, only what the results need grows with the rows."""

    def peak(config=LLAMA_31_8B, batch=1, **changes):
        settings = dict(batch=batch, tokens=122_880, capacity=123_904, fetch="device_put", backend="gpu")
        return prefill_peak(config, changes.pop("policy", ShadowKV()), **settings | changes)

    one, four = peak(), peak(batch=4)
    row = 122_880 * 32 * 128 * 2
    assert one["attention"] == 2 * row
    assert four["attention"] == 2 * row + 2 * row // 4  # and its keys and values
    assert four["piece"] == one["piece"]
    assert four["hidden"] == 4 * one["hidden"]
    usual = peak(backend="cpu")
    assert usual["attention"] == 0 < one["piece"] < usual["piece"]
    assert peak(dtype="float32") == peak(dtype="float32", backend="cpu")
    assert peak(policy=H2O()) == peak(policy=H2O(), backend="cpu")
    wide = dataclasses.replace(LLAMA_31_8B, q_heads=16, kv_heads=4, head_dim=256)
    assert peak(wide)["attention"] == 2 * row
    assert peak(wide)["piece"] == peak(wide, backend="cpu")["piece"]  # an A100 reads it in pieces


FITS = [
    (120 * 1024, "shadowkv", 1, range(5, 15)),
    (120 * 1024, "h2o", 1, range(6, 40)),
    (1000, "shadowkv", 1, range(100, 1000)),
    (100, "full", 0.1995, range(1, 20)),  # up to 20 prompts go through a layer at once
    (131000, "full", 0.4, range(1)),
]


@pytest.mark.parametrize("fetch", ["device_put", "resident"])
@pytest.mark.parametrize(("context", "name", "share", "fits"), FITS)
def test_one_more_prompt_would_not_fit(context, name, share, fits, fetch):
    gpu = dataclasses.replace(A100, memory_bytes=int(A100.memory_bytes * share))
    policy = POLICIES[name]().resolve(LLAMA_31_8B, context + 64)
    planner = Planner(LLAMA_31_8B, LLAMA_31_8B, gpu, Workload(context, 64, fetch=fetch))
    rows, room = planner.prefill_batch(policy), gpu.memory_bytes - CONTEXT_RESERVE

    def peak(batch):
        sizes = dict(batch=batch, tokens=context, capacity=context + 64, fetch=fetch, backend="gpu")
        return sum(prefill_peak(LLAMA_31_8B, policy, **sizes).values())

    assert rows in fits
    assert rows == 0 or peak(rows) <= room
    assert room < peak(rows + 1)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (0, 16), (5, 9), (14, 30), (64, 64)])
def test_attention_counts_the_pairs_of_queries_and_keys(window, first, tokens):
    q, k = np.arange(first, first + tokens)[:, None], np.arange(first + tokens)[None]
    seen = (k <= q) & (True if window is None else k > q - window)
    pairs = seen.sum() * TINY.q_heads * TINY.head_dim
    assert attention_operations(TINY, window, first, tokens) == 4 * pairs  # a score and a weighted value


def test_operations_of_a_recurrent_layer_follow_the_tokens():
    """Its matrix products, counted in NumPy's shapes: the state three times, and a chunk of 64 tokens."""
    config = family_config("qwen3_5").at(0)  # 2 heads of keys and 6 of values, of widths 8 and 12
    state, chunk = 3 * 6 * 8 * 12, 64 * (2 * 2 * 8 + 2 * 6 * 12)
    for first, tokens in ((0, 1), (5, 1000), (100_000, 1000)):
        assert attention_operations(config, None, first, tokens) == 2 * tokens * (state + chunk)
    short = family_config("lfm2").at(0)  # 3 taps over 48 columns
    assert attention_operations(short, None, 100, 1000) == 2 * 1000 * 3 * 48
    conv = {"q": 48 * 48, "k": 48 * 48, "v": 48 * 48, "o": 48 * 48}
    assert projection_operations(short, 10) + rest_operations(short, 10) == 2 * 10 * (sum(conv.values()) + 3 * 48 * 72)


def test_a_layer_counts_its_weights_once_a_token():
    """A product of a token and a matrix takes two operations for each weight."""
    layer = abstract_weights(llama())["layer_0"]
    matrices = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(layer) if len(leaf.shape) >= 2)
    linear = layer_operations(llama(), None, 1000) - attention_operations(llama(), None, 0, 1000)
    assert linear == 2 * 1000 * matrices
    sliding = dataclasses.replace(TINY, sliding_window=8, sliding_layers=(0,))
    plan = capacity_plan(sliding, Full(), GPUS["l4"], Workload(150, fetch="resident"))
    rest = (TINY.num_layers - 1) * layer_operations(TINY, None, 150)
    assert plan.chosen.prefill.flops == layer_operations(TINY, 8, 150) + rest, "sliding layers take less"


def test_what_follows_attention_counts_the_weights_that_a_token_meets():
    """Of an MLP without a gate, of a layer without an MLP, and of 2 of 6 experts in a latent width."""
    moe = family_config("nemotron_h_moe")
    latent = dataclasses.replace(moe, experts=dataclasses.replace(moe.experts, latent_width=24))
    for config, layer in ((family_config("nemotron_h"), 3), (family_config("nemotron_h"), 4), (latent, 0)):
        weights = abstract_weights(config)[f"layer_{layer}"]
        mixer, mlp = weights.get("attention", weights.get("recurrent")), dict(weights.get("mlp", {}))
        parts = [mixer["o"], mlp.pop("experts", {}), *(part for name, part in mlp.items() if name != "router")]
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(part) if leaf.ndim > 1) for part in parts]
        assert rest_operations(config.at(layer), 10) == 2 * 10 * (sum(sizes) - sizes[1] * 4 // 6), layer


def test_the_plan_of_a_prefill():
    plan = capacity_plan(llama(), ShadowKV(), GPUS["h200"], Workload(122_880, fetch="resident"))
    time, full = plan.chosen.prefill, plan.full.prefill
    assert time.flops == full.flops == 32 * layer_operations(llama(), None, 122_880)
    assert time.seconds == pytest.approx(time.flops / (PREFILL_SHARE * 989.5e12))
    assert 0.001 < time.compress_flops / time.flops < 0.003
    assert 32 * 1000 < time.compress_launches < 32 * 2000
    operations = time.compress_flops / time.flops * time.seconds
    assert time.compress_seconds == pytest.approx(operations + LAUNCH_SECONDS * time.compress_launches)
    assert (full.compress_flops, full.compress_launches, full.compress_seconds) == (0, 0, 0)
    assert full.restore_seconds > time.restore_seconds > 0
    device = plan.chosen.row_bytes[0]
    assert time.restore_seconds == pytest.approx(device / 63e9)
    assert time.first_token_seconds > time.restore_seconds
    assert plan.to_json()["chosen"]["prefill"]["seconds"] == time.seconds
