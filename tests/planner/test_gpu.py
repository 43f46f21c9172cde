"""The planner: what fitted on an A100 in the ShadowKV paper fits here, what did not does not, and the rest adds up."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, POLICY_CASES, POLICY_FETCHES, STEPS, TINY, model, prefilled, run_steps
from few import quick
from mesh_measured import BATCH, MIDDLE, step_memory
from real_shapes import LLAMA_31_8B, LLAMA_31_8B_JSON

from jshadow.cache import accounting, offload
from jshadow.cache.accounting import state_nbytes
from jshadow.cli.main import main
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import Workload, abstract_of, on_backend
from jshadow.planner.gpu import capacity_plan, step_bound
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, DEFAULT_GPUS, GIB, GPUS, HOST_GATHER, custom_gpu, gpu_named
from jshadow.planner.machine import abstract_state
from jshadow.planner.mesh import mesh_shards
from jshadow.policies import POLICIES, Full, ShadowKV, StreamingLLM
from jshadow.policies.settings import with_settings

LLAMA_3_8B_1M = dataclasses.replace(LLAMA_31_8B, context=1048576)
A100 = GPUS["a100-80gb"]
PAPERS = ShadowKV(rank=160, outlier_chunks=48)  # and a budget of 1.56 %, the default

# arXiv 2410.21465, table 4: tokens a second of Llama-3-8B-1M on one A100 by batch; None: out of memory.
BATCHES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
OOM = None
TABLE_4 = {
    ("full", 60): (89.19, 111.44, 126.73, 142.62, 147.40, 160.62, OOM, OOM, OOM, OOM, OOM),
    ("full", 122): (65.12, 75.16, 80.77, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM),
    ("full", 244): (40.37, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM),
    ("full", 488): (OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM, OOM),
    ("shadowkv", 60): (89.69, 126.61, 159.41, 184.92, 205.41, 244.20, 306.09, 346.34, 399.65, 428.63, 455.14),
    ("shadowkv", 122): (65.61, 94.28, 115.01, 132.23, 143.77, 166.72, 196.73, 217.24, 239.51, OOM, OOM),
    ("shadowkv", 244): (48.39, 65.95, 78.92, 87.83, 94.07, 104.73, 119.01, OOM, OOM, OOM, OOM),
    ("shadowkv", 488): (29.82, 41.01, 47.13, 50.85, 53.46, OOM, OOM, OOM, OOM, OOM, OOM),
}


@functools.cache
def planned(name="shadowkv", context=122 * 1024, batch=None, count=1, gpu="a100-80gb"):
    policy = PAPERS if name == "shadowkv" else POLICIES[name]()
    serving = Workload(context, batch=batch, shards=mesh_shards(count, left="everywhere"))
    return capacity_plan(LLAMA_3_8B_1M, policy, GPUS[gpu], serving)


@pytest.mark.parametrize(("name", "kilo"), quick([("full", 122), ("shadowkv", 122)], TABLE_4))
def test_table_4_of_the_paper(name, kilo):
    for batch, tokens in zip(BATCHES, TABLE_4[name, kilo], strict=True):
        side = planned(name, kilo * 1024, batch).chosen
        assert side.fits == (batch <= side.largest_batch) == (tokens is not None), batch
        assert (side.device_bytes <= A100.memory_bytes) == side.fits, batch
        if tokens is not None and side.step is not None:
            # What was measured, with 60 % of the chunks kept from the step before, is no faster than the bound.
            step = side.step
            bound = step_bound(A100, step.hbm_bytes, round(0.4 * step.pcie_bytes), step.flops, batch)
            assert bound.bound_tokens_per_second > bound.tokens_per_second > tokens, batch


# The same at 120K tokens beside keys in the transform code, landmarks and values in four bits: no paper's figures.
MACHINE_HOST = 128 * 2**30


@functools.cache
def packed_beside(gpu, batch=None, host_limit=None):
    beside = {"equal": ShadowKV.packed(), "small": ShadowKV.packed(small=True)}
    gpu = dataclasses.replace(GPUS[gpu], host_limit=host_limit)
    return capacity_plan(LLAMA_3_8B_1M, PAPERS, gpu, Workload(122_880, batch=batch), beside=beside)


@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_fifty_packed_requests_fit(gpu):
    """Device and host bytes of 50 requests; the paper's setting holds half as many on an A100."""
    plan = packed_beside(gpu, 50)
    small, chunks = plan.beside["small"], 122_944 // 8 - 4
    assert small.policy.keys.profile == (16, 224, 192)
    assert small.fits
    assert small.largest_batch >= 50
    # A token's code and its part of a landmark, in each of 32 layers
    assert small.row_parts["left"][0] == 32 * 8 * chunks * 176
    assert small.row_parts["landmarks"][0] == 32 * chunks * 8 * (64 + 2)
    assert small.row_parts["spread"][0] == 32 * chunks * 8 * 2
    device = plan.weights_bytes + 50 * small.row_bytes[0] + sum(small.temporaries.values()) + plan.reserve_bytes
    assert small.device_bytes == device <= GPUS[gpu].memory_bytes
    assert small.host_bytes == 50 * 32 * 8 * chunks * 544 <= MACHINE_HOST  # 8 * (64 + 2) bytes, in sectors of 32
    assert plan.chosen.host_bytes * 17 == small.host_bytes * 64  # chunks of 2,048 and of 544 bytes
    if gpu == "a100-80gb":
        assert not plan.chosen.fits
        assert 24 <= plan.chosen.largest_batch <= 30


def test_a_host_s_memory_is_a_limit():
    free, limited = packed_beside("h200"), packed_beside("h200", None, MACHINE_HOST)
    pairs = [(limited.chosen, free.chosen)] + [(side, free.beside[name]) for name, side in limited.beside.items()]
    for side, unlimited in pairs:
        assert side.batch == side.largest_batch == min(unlimited.largest_batch, MACHINE_HOST // side.row_bytes[1])
    assert limited.chosen.largest_batch < 20 < free.chosen.largest_batch
    assert 50 <= limited.beside["small"].largest_batch < free.beside["small"].largest_batch
    assert limited.full == free.full  # nothing of it is on the host
    told = limited.to_json()
    assert told["host_limit"] == MACHINE_HOST
    for name, side in limited.beside.items():
        assert told["beside"][name]["policy"]["keys.profile"] == side.policy.keys.profile
        assert told["beside"][name]["ratio"] == limited.ratio_of(side) > told["ratio"]


def test_full_attention_beside_it_is_the_same_as_by_itself():
    assert planned("shadowkv").full == planned("full").chosen
    assert planned("shadowkv", batch=3).full == planned("full", batch=3).chosen
    assert planned("shadowkv", batch=24).full == planned("full").chosen  # no more than fit
    assert planned("full").ratio == 1


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_are_those_of_the_abstract_state(name):
    side = planned(name, batch=3).chosen
    sizes = {"batch": 3, "capacity": 122 * 1024 + 64, "prompt": 122 * 1024, "dtype": "bfloat16"}
    state = abstract_state(LLAMA_3_8B_1M, side.policy, fetch="device_put", **sizes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)), "nothing is allocated"
    parts = state_nbytes(state)
    assert {part: (3 * device, 3 * host) for part, (device, host) in side.row_parts.items()} == parts
    assert side.host_bytes == sum(host for _, host in parts.values()) == offload.host_bytes(state.specs)
    weights = 2 * 8_030_261_248  # parameters, as published
    assert planned(name).weights_bytes == weights
    rest = sum(device for device, _ in parts.values()) + sum(side.temporaries.values())
    assert side.device_bytes == weights + rest + CONTEXT_RESERVE


@pytest.mark.parametrize("name", POLICIES)
def test_every_method_is_given_a_fetch_mode(name):
    """Each on a layer of its own kind too: the message that no kernel serves it names the method."""
    plan = capacity_plan(LLAMA_31_8B, POLICIES[name](), GPUS["h100"], Workload(32_768, fetch="auto")).chosen
    assert plan.fetch_reason.startswith(("resident: ", "device_put: ", "zero_copy: ")), plan.fetch_reason


@pytest.mark.parametrize("name", ["full", "shadowkv", "shadowkv_plus"])
def test_longer_contexts_hold_fewer_and_go_slower(name):
    plans = [planned(name, context, 2).chosen for context in (4096, 32768, 122 * 1024, 244 * 1024, 1048512)]
    batches = [plan.largest_batch for plan in plans]
    assert batches == sorted(batches, reverse=True)
    assert len(set(batches)) == len(batches)
    for figure in (
        lambda plan: plan.row_bytes[0],
        lambda plan: 1 / plan.step.tokens_per_second,
        lambda plan: sum(plan.temporaries.values()),
        lambda plan: plan.step.flops,
    ):
        assert [figure(plan) for plan in plans] == sorted(map(figure, plans))


def test_bytes_of_a_step_by_hand():
    """Two rows of the tiny model: 2 KV heads of 16, 4 query heads, 3 layers, float32."""
    policy = ShadowKV(rank=12, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
    step = capacity_plan(TINY, policy, A100, Workload(64, max_new_tokens=8, batch=2, dtype="float32")).chosen.step
    chunks, window, selected = 72 // 4 - 2, 72 - 4 * (64 // 4 - 2), 16 // 4
    layer = {
        "left": 2 * selected * 4 * 12 * 4,  # each of the two heads reads its own chunks
        "right": 2 * 12 * 16 * 4,
        "landmarks": 2 * chunks * 16 * 4,
        "candidates": 2 * chunks,
        "chunks": 4,
        "outliers": 2 * 2 * (2 * 4) * 16 * 4,
        "window": 2 * 2 * window * 16 * 4,
        "resident": 2 * selected * 4,
        "scores": 2 * 4 * (4 + 2) * chunks,  # of 4 query heads and of 2 KV heads, written and read
        "selected": 2 * 2 * 2 * selected * 4 * 16 * 4,  # keys and values of 2 heads, written and read
    }
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(TINY)))
    matrices = 4 * (weights - 101 * 32)  # a step reads two rows of the embedding, which are not counted
    assert step.hbm_bytes == {"weights": matrices} | {part: 2 * 3 * size for part, size in layer.items()}
    assert step.pcie_bytes == 2 * 3 * 2 * selected * 4 * 16 * 4
    seconds = (
        sum(step.hbm_bytes.values()) / 2.039e12,
        step.pcie_bytes / 31.5e9,
        step.flops / 312e12,
        step.pcie_bytes / HOST_GATHER,
    )
    assert (step.hbm_seconds, step.pcie_seconds, step.flop_seconds, step.gather_seconds) == pytest.approx(seconds)
    assert step.tokens_per_second == pytest.approx(2 / sum(seconds))
    assert step.bound_tokens_per_second == pytest.approx(2 / max(seconds))


def test_full_attention_reads_all_keys_and_values():
    step = planned("full", batch=4).chosen.step
    assert step.hbm_bytes["cache"] == 4 * (122 * 1024 + 64) * 2 * 1024 * 2 * 32
    assert step.pcie_bytes == 0
    dense = 4 * (122 * 1024 + 64) * 4 * 32 * 128 * 32  # two products with each of 32 query heads
    assert step.flops == dense + 4 * step.hbm_bytes["weights"]


# zero_copy moves misses alone. A policy's prefill and step are compiled already where its laws ran before.
MOVES = [pair for pair in POLICY_FETCHES if not {"probe", "zero_copy"} & {*pair}] + [("shadowkv", "resident")]


@pytest.mark.parametrize(("name", "fetch"), quick([("full", "resident"), ("shadowkv", "device_put")], MOVES))
def test_what_a_step_moves_is_what_steps_count(name, fetch):
    _, state = prefilled(name, "restricted", fetch)
    layers = zip(state.specs, state.layers, strict=True)
    told = [sizes for spec, layer in layers for sizes in spec.policy.step_bytes(spec, layer).values()]
    read, moved = map(sum, zip(*told, strict=True))
    held = sum(device for device, _ in state_nbytes(state).values())
    _, after = run_steps(model(), state.fork(), STEPS[:, :1])
    counted = np.asarray(after.counters.fetched) - np.asarray(state.counters.fetched)
    if name == "offloaded":  # the planner counts a prompt that fills the capacity
        moved = moved * -(-max(LENGTHS) // 8) // -(-CAPACITY // 8)
    assert moved == counted.sum() * accounting.FETCH_QUANTUM
    tiers = any(spec.policy.host_layout(spec) is not None for spec in state.specs)
    assert (moved > 0) == (fetch != "resident" and tiers)
    if name in ("full", "streaming_llm"):
        assert read == held


MIDDLE_CODES = {"lowrank": {"rank": 64}, "transform": {"keys.profile": (32, 64, 32)}}
MIDDLE_POLICIES = {"full": Full(), "streaming_llm": StreamingLLM(window=1000)}
for name, case in POLICY_CASES.items():
    if name.startswith("shadowkv"):
        changes = {"budget": 512, "chunk_size": 8} | MIDDLE_CODES.get(case.restricted.keys.name, {})
        MIDDLE_POLICIES[name] = with_settings(case.restricted, changes)


@pytest.mark.parametrize("name", quick(["full"], MIDDLE_POLICIES))
def test_temporaries_bound_the_compiled_step(name):
    """As XLA compiles it for a CPU in float32; what its arguments take is planned to the byte."""
    sizes = {"batch": BATCH, "dtype": "float32", "fetch": "resident"}
    plan = capacity_plan(MIDDLE, MIDDLE_POLICIES[name], A100, Workload(4096, **sizes))
    state = abstract_state(MIDDLE, plan.chosen.policy, capacity=4160, prompt=4096, **sizes)
    weights = abstract_weights(MIDDLE)
    arguments, temporaries = step_memory(MIDDLE, weights, abstract_of(on_backend(state.specs, "gpu"), state.policy))
    assert temporaries <= sum(plan.chosen.temporaries.values())
    given = plan.weights_bytes + BATCH * plan.chosen.row_bytes[0]
    assert 0 <= arguments - given <= 1024  # tokens, lengths and counters are left out


def test_several_gpus_split_weights_and_heads():
    """What belongs to a head is split; ShadowKV's left factor is of all heads together, and each GPU needs it."""
    one, two, full = planned(batch=4), planned(batch=4, count=2), planned("full", batch=4, count=2)
    for part in ("landmarks", "right", "outliers", "window", "host rows"):
        assert [2 * size for size in two.chosen.row_parts[part]] == list(one.chosen.row_parts[part])
    assert two.chosen.row_parts["left"] == one.chosen.row_parts["left"]
    assert 2 * full.chosen.row_bytes[0] == one.full.row_bytes[0]
    assert two.chosen.host_bytes == one.chosen.host_bytes
    assert one.weights_bytes < 2 * two.weights_bytes < one.weights_bytes * 1.001  # norms are on each
    assert one.chosen.largest_batch < two.chosen.largest_batch
    assert two.chosen.step.tokens_per_second > one.chosen.step.tokens_per_second
    assert planned(count=8).chosen.largest_batch > two.chosen.largest_batch


def test_how_many_fit():
    """A prefill fits fewer rows than a step. Of a prompt of a million tokens, none fits."""
    small, large = (planned(gpu=gpu).chosen.largest_batch for gpu in ("h100", "h200"))
    assert planned().chosen.largest_batch == small < large
    side = planned(context=120 * 1024).chosen
    assert 0 < side.prefill_batch < side.largest_batch
    plan = planned("full", 1048512)
    assert (plan.chosen.largest_batch, plan.chosen.batch, plan.chosen.step, plan.ratio) == (0, 0, None, None)
    assert not plan.chosen.fits
    asked = planned("full", 1048512, 1).chosen
    assert not asked.fits
    assert asked.step is not None
    assert asked.device_bytes > A100.memory_bytes


def test_repeats_move_nothing_where_they_are_kept():
    policy = ShadowKV(rank=8, budget=32, outlier_chunks=2)

    def step(**settings):
        return capacity_plan(TINY, policy, A100, Workload(200, max_new_tokens=8, batch=2, **settings)).chosen.step

    moved = step().pcie_bytes
    assert moved > 0
    for share, kept in ((None, 0.6), (0.0, 0.0), (1.0, 1.0)):
        assert step(fetch="zero_copy", repeat_share=share).pcie_bytes == round((1 - kept) * moved)
    none, all_kept = (step(fetch="resident", repeat_share=share) for share in (0.0, 1.0))
    assert none.pcie_bytes == all_kept.pcie_bytes == 0
    # Keys and values of the selected chunks are read, but not written, and their codes are not read.
    assert all_kept.hbm_bytes["selected"] == none.hbm_bytes["selected"] / 2
    assert none.hbm_bytes.keys() - all_kept.hbm_bytes.keys() == {"left", "values"}


@pytest.mark.parametrize(("small", "fetch", "rows"), [(True, "resident", 37), (False, "zero_copy", 47)])
def test_more_than_2_gib_of_packed_values_in_a_layer_are_planned(small, fetch, rows):
    """The bytes of values have no limit but the memory: the batches of `tools/aot/step_table.py` are the largest."""
    policy, serving = ShadowKV.packed(small=small), Workload(122_816, fetch=fetch)
    side = capacity_plan(LLAMA_31_8B, policy, GPUS["h200"], serving).chosen
    assert side.largest_batch == side.batch == rows
    assert sum(side.row_parts["host rows"]) == 32 * 8 * 15_356 * 544
    assert 2**31 < rows * 8 * 15_356 * 544 < 2**32
    assert side.repeat_share == 0.6


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_figures_are_of_the_right_order(gpu):
    """Of a slip in a unit or a digit."""
    assert 20 <= gpu.memory_bytes / GIB <= 190
    assert 3e11 <= gpu.hbm_bytes_per_second <= 8e12
    assert gpu.pcie_bytes_per_second in (31.5e9, 63e9)
    assert 70e12 <= gpu.flops <= 2.3e15
    # operations for each byte that is read: between a card of 2020 and a card for large batches
    assert 70 <= gpu.flops / gpu.hbm_bytes_per_second <= 450


def test_cards_of_servers_and_of_desks_are_known():
    assert {"a100-80gb", "h100", "h200", "b200", "l4", "l40s", "rtx-4090", "rtx-5090"} <= set(GPUS)
    assert [gpu_named(name).name for name in DEFAULT_GPUS] == list(DEFAULT_GPUS)


def test_a_gpu_by_its_figures():
    gpu = custom_gpu(None, gib=16, bandwidth=500, link=12.5, tflops=50)
    assert (gpu.memory_bytes, gpu.hbm_bytes_per_second) == (16 * GIB, 500e9)
    assert (gpu.pcie_bytes_per_second, gpu.flops) == (12.5e9, 50e12)
    known = GPUS["h100"]
    changed = custom_gpu(known, gib=None, bandwidth=None, link=25, tflops=None)
    assert (changed.name, changed.pcie_bytes_per_second, changed.flops) == ("h100, changed", 25e9, known.flops)
    assert custom_gpu(known, gib=None, bandwidth=None, link=None, tflops=None) == known


def test_the_command_plans_a_gpu_by_its_figures(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))

    def plan(words):
        sizes = ["--context", "8192", "--policy", "quest", "--fetch", "device_put", "--json"]
        assert main(["plan", str(tmp_path / "config.json"), *sizes, *words.split()]) == 0
        [plan] = json.loads(capsys.readouterr().out)["plans"]
        return plan

    figures = "--gpu-gib 139.8 --bandwidth 4800 --link 63 --tflops 989.5"
    gpu = plan(figures)["gpu"]
    assert gpu["nvlink_bytes_per_second"] == gpu["pcie_bytes_per_second"] == 63e9
    own, known = plan(f"{figures} --nvlink 450"), plan("--gpu h200")
    assert own["gpu"].pop("name") == "custom GPU"
    assert known["gpu"].pop("name") == "h200"
    assert own == known
