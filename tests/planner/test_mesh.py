"""The planner of several GPUs that share one model: what fits, what they exchange, and what is refused.

Four forced CPU devices hold and exchange what it says.
"""

import dataclasses
import functools
import json

import mesh_measured as four
import pytest
from cases import TINY
from forced_devices import FOUR
from mesh_measured import CAPACITY, CONFIG, EXCHANGED, LENGTHS, MESHES, POLICIES, ROWS

from jshadow.cli.main import main
from jshadow.models.published import published_config
from jshadow.models.registry import family_of
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import Planner, capacity_plan
from jshadow.planner.gpu_specs import GPUS
from jshadow.planner.mesh import mesh_shards, share_of
from jshadow.policies import Full, ShadowKV

H200 = GPUS["h200"]


@functools.cache
def million(name="llama-3-8b-1m", host_limit=None, **mesh):
    hf = published_config(name)
    workload = Workload(1_000_000, max_new_tokens=1024, room=1024, shards=mesh_shards(**mesh))
    gpu = dataclasses.replace(H200, host_limit=host_limit)
    return capacity_plan(family_of(hf).config_from_hf(hf), ShadowKV(), gpu, workload)


MODELS = [("llama-3-8b-1m", 50, 13, 8), pytest.param("llama-3-70b-1m", 18, 4, 3, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "split", "everywhere", "full"), MODELS)
def test_a_million_tokens_on_eight_gpus(name, split, everywhere, full):
    """Left rows are nine tenths of a state if every GPU has all of them."""
    best = million(name, tp=8)
    assert best.chosen.largest_batch >= split
    assert million(name, tp=8, left="everywhere").chosen.largest_batch == everywhere
    assert best.full.largest_batch == full
    assert best.chosen.device_bytes <= H200.memory_bytes


def test_what_is_split_takes_a_part_of_the_bytes():
    one, tp = million().chosen, million(tp=2).chosen
    chunks = (1_001_024 // 8 - 4, 1_001_024 // 8 + 1)  # of one device, and of both
    assert one.row_parts["left"][0] == 32 * chunks[0] * 8 * 160 * 2
    assert tp.row_parts["left"][0] == 32 * -(-chunks[1] // 2) * 8 * 160 * 2
    for part in ("right", "landmarks", "outliers", "window", "host rows"):
        assert [2 * size for size in tp.row_parts[part]] == list(one.row_parts[part])
    assert one.step.pcie_bytes / one.batch == 2 * tp.step.pcie_bytes / tp.batch
    assert million(tp=4, host_limit=3 * one.row_bytes[1]).chosen.largest_batch == 3  # of all GPUs together


def test_bytes_over_links_by_hand():
    """One layer of 8 query and 4 KV heads of 16, float32, rank 12, 2 rows; 4 selected chunks of 4 tokens."""
    policy, sizes = POLICIES["shadowkv"], {"dtype": "float32", "batch": 2, "max_new_tokens": 71}

    def step(**mesh):
        return capacity_plan(CONFIG, policy, H200, Workload(41, **sizes, shards=mesh_shards(**mesh))).chosen.step

    residual, rows = 2 * CONFIG.model_dim * 4, 2 * 4 * 4
    over_tp = {
        "residual stream": 3 * 2 * residual * 3 // 4,  # of the embedding, the attention's output and the MLP
        "logits": 2 * 96 * 4 * 3 // 4,
        "left rows": rows * 4 * 3 // 4 + rows * 4 * 12 * 4 * 3 // 4,
    }
    assert step(tp=4).link_bytes == over_tp
    assert step(tp=4, left="everywhere").link_bytes == {part: over_tp[part] for part in ("residual stream", "logits")}
    assert step(tp=4).link_seconds == pytest.approx(sum(over_tp.values()) / 450e9)
    both = step(tp=4)
    times = (both.hbm_seconds, both.pcie_seconds, both.flop_seconds, both.gather_seconds, both.link_seconds)
    assert both.tokens_per_second == pytest.approx(2 / sum(times))
    assert step().link_bytes == {}


def test_a_weight_that_cannot_be_split_lies_on_every_device():
    odd = dataclasses.replace(CONFIG, vocab_size=97)
    even, uneven = (
        capacity_plan(
            config, Full(), H200, Workload(41, batch=1, dtype="float32", shards=mesh_shards(tp=2))
        ).chosen.step
        for config in (CONFIG, odd)
    )
    assert uneven.link_bytes["logits"] == 0
    assert 3 * uneven.link_bytes["residual stream"] == 2 * even.link_bytes["residual stream"]


def test_zero_copy_needs_all_left_rows():
    for left, refused in (("split", True), ("everywhere", False)):
        serving = Workload(64, fetch="auto", batch=2, shards=mesh_shards(2, left=left))
        reason = capacity_plan(TINY, POLICIES["shadowkv"], H200, serving).chosen.fetch_reason
        assert ("zero_copy has no kernel" in reason) == refused


def test_the_command(capsys):
    options = ["plan", "llama-3-8b-1m", "--context", "100000", "--gpu", "h200", "--fetch", "device_put"]

    def plan(words):
        assert main([*options, *words.split(), "--json"]) == 0
        [plan] = json.loads(capsys.readouterr().out)["plans"]
        return plan

    wide = plan("--tp 4 --nvlink 400")
    assert (wide["count"], wide["mesh"]) == (4, {"tp": 4, "left": "split"})
    step = wide["chosen"]["step"]
    assert step["link_seconds"] == pytest.approx(sum(step["link_bytes"].values()) / 400e9)
    sizes = plan("--tp 4 --left everywhere")["mesh"]
    assert (sizes["tp"], sizes["left"]) == (4, "everywhere")
    assert main([*options, "--tp", "4"]) == 0
    out = capsys.readouterr().out
    for told in ("tp=4, left=split", "links, GB", "links a token, MB", "Links: bytes that one GPU"):
        assert told in out


def devices(test):
    """Mark a test that asks the process of four devices, which one worker has."""
    for mark in (pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("mesh")):
        test = mark(test)
    return test


@functools.cache
def called(name):
    return FOUR.call(getattr(four, name))


def planner_of(name):
    (_, tp), left = MESHES[name]
    sizes = {"max_new_tokens": CAPACITY - min(LENGTHS), "dtype": "float32", "fetch": "device_put"}
    serving = Workload(min(LENGTHS), **sizes, shards=mesh_shards(tp, left))
    return Planner(share_of(CONFIG, tp), CONFIG, H200, serving)


@devices
@pytest.mark.parametrize("name", MESHES)
def test_each_device_holds_what_is_planned(name):
    """In its own memory and in host memory, to the byte, weights too."""
    (data, tp), _ = MESHES[name]
    planner, found = planner_of(name), called("measure")[name]
    devices = [str(device) for device in range(data * tp)]
    assert found["weights"] == {"device": dict.fromkeys(devices, planner.weights_bytes)}
    for policy, record in found["policies"].items():
        resolved = POLICIES[policy].resolve(CONFIG, CAPACITY)
        device, host = planner.plan_mode(resolved, 1, capped=False).row_bytes
        want = {"device": device * ROWS // data, "pinned_host": host * ROWS // data}
        assert record["held"] == {memory: dict.fromkeys(devices, size) for memory, size in want.items() if size}, policy


# As the table of jshadow/cache/spec.py says: what is split by head or by chunk, and what is whole.
WHOLE = "lengths last counters count chunks units frozen.lengths"
PROMPT = "frozen.left frozen.landmarks candidates outliers frozen.spread resident host.prompt right window"
LATER = f"{PROMPT} live.landmarks live.kept extra cut host.tail"
PARTS = {
    "full": ("cache", ""),
    "snapkv": ("window kept", ""),
    "quest": ("live.summaries recent host.tail frozen.summaries live.selected host.prompt", ""),
    "shadowkv": (PROMPT, ""),
    "packed": (PROMPT, "right.step"),  # of columns that all heads share
    "shadowkv_plus": (LATER, "live.left"),  # of later chunks, which serve all heads
    "plus_int4": (f"{LATER} live.left frozen.later", ""),
}


@devices
@pytest.mark.parametrize("method", POLICIES)
def test_nothing_lies_whole_on_a_device_but_what_the_table_says(method):
    split, whole = (parts.split() for parts in PARTS[method])
    parts = dict.fromkeys(split, "tp") | dict.fromkeys((*whole, *WHOLE.split()), "")
    for path, axes in called("measure")["tp2"]["policies"][method]["splits"].items():
        matching = [part for part in parts if f".{part}" in f".{path}"]
        assert matching, path
        assert " ".join(axes) == parts[max(matching, key=len)], path


@devices
@pytest.mark.parametrize("method", POLICIES)
@pytest.mark.parametrize("mesh", EXCHANGED)
def test_a_compiled_step_sends_what_is_planned(mesh, method):
    """The counters and the logits are left out."""
    step = planner_of(mesh).step(POLICIES[method].resolve(CONFIG, CAPACITY), ROWS)
    assert called("measure")[mesh]["policies"][method]["sent"] == step.sent - step.link_bytes["logits"]


@devices
@pytest.mark.parametrize("method", four.MIDDLE_POLICIES)
def test_a_compiled_step_takes_what_is_planned(method):
    """Its arguments to the byte, and temporaries within the bound, on each of four devices."""
    sizes = {"max_new_tokens": four.NEW, "batch": four.BATCH, "dtype": "float32", "fetch": "resident"}
    serving = Workload(four.CONTEXT, **sizes, shards=mesh_shards(four.TP))
    side = capacity_plan(four.MIDDLE, four.MIDDLE_POLICIES[method], H200, serving)
    arguments, temporaries = called("compile_all")[method]
    assert 0 < temporaries <= sum(side.chosen.temporaries.values())
    given = side.weights_bytes + four.BATCH * side.chosen.row_bytes[0]
    assert 0 <= arguments - given <= 1024  # tokens, lengths and counters are left out
