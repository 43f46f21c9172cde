"""Four forced CPU devices hold and exchange what the planner says."""

import functools

import mesh_compiled
import mesh_measured
import pytest
from forced_devices import FOUR
from mesh_measured import CAPACITY, CONFIG, EXCHANGED, LENGTHS, MESHES, POLICIES, ROWS

from jshadow.planner.gpu import Planner, capacity_plan
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GPUS
from jshadow.planner.mesh import MeshSizes, share_of

H200 = GPUS["h200"]
pytestmark = pytest.mark.xdist_group("mesh")  # one worker has the process of four devices


@functools.cache
def measured():
    return FOUR.call(mesh_measured.measure)


@functools.cache
def compiled():
    return FOUR.call(mesh_compiled.compile_all)


def planner_of(name):
    (_, sp, tp), left = MESHES[name]
    sizes = {"max_new_tokens": CAPACITY - min(LENGTHS), "dtype": "float32", "fetch": "device_put"}
    serving = Serving(min(LENGTHS), **sizes, mesh=MeshSizes(tp, sp, left))
    return Planner(share_of(CONFIG, tp), CONFIG, H200, serving)


@pytest.mark.parametrize("name", MESHES)
def test_each_device_holds_what_is_planned(name):
    """In its own memory and in host memory, to the byte, weights too."""
    (data, sp, tp), _ = MESHES[name]
    planner, found = planner_of(name), measured()[name]
    devices = [str(device) for device in range(data * sp * tp)]
    assert found["weights"] == {"device": dict.fromkeys(devices, planner.weights_bytes)}
    for policy, record in found["policies"].items():
        resolved = POLICIES[policy].resolve(CONFIG, CAPACITY)
        device, host = planner.plan_mode(resolved, 1, capped=False).row_bytes
        want = {"device": device * ROWS // data, "pinned_host": host * ROWS // data}
        assert record["held"] == {memory: dict.fromkeys(devices, size) for memory, size in want.items() if size}, policy


# Where each part lies, as the table of jshadow/cache/shards.py says: the axes that split it.
BY_HEAD, BY_UNIT, WHOLE = ["tp"], ["sp", "tp"], []
KEPT = dict.fromkeys(("lengths", "last", "counters", "count", "chunks", "units", "frozen.lengths"), WHOLE)
PARTS = {
    "full": {"cache": BY_UNIT},
    "snapkv": {"kept": BY_UNIT, "window": BY_HEAD},
    "quest": {
        "frozen.summaries": BY_UNIT,
        "live.summaries": BY_HEAD,
        "recent": BY_HEAD,
        "live.selected": BY_UNIT,
        "host.prompt": BY_UNIT,
        "host.tail": BY_HEAD,
    },
    "shadowkv": {
        "frozen.left": BY_UNIT,
        "right": BY_HEAD,
        "frozen.landmarks": BY_UNIT,
        "candidates": BY_UNIT,
        "outliers": BY_UNIT,
        "frozen.spread": BY_UNIT,
        "window": BY_HEAD,
        "resident": BY_UNIT,
        "host.prompt": BY_UNIT,
    },
}
PARTS["packed"] = {"right.step": WHOLE} | PARTS["shadowkv"]  # of columns that all heads share
PARTS["shadowkv_plus"] = PARTS["shadowkv"] | {
    "live.left": WHOLE,  # of later chunks, which serve all heads
    "live.landmarks": BY_HEAD,
    "live.kept": BY_HEAD,
    "extra": BY_HEAD,
    "cut": BY_HEAD,
    "host.tail": BY_HEAD,
}
PARTS["plus_int4"] = PARTS["shadowkv_plus"] | {"live.left": BY_HEAD, "frozen.later": BY_HEAD}


@pytest.mark.parametrize("method", POLICIES)
def test_nothing_lies_whole_on_a_device_but_what_the_table_says(method):
    parts = PARTS[method] | KEPT
    for path, axes in measured()["tp2 sp2"]["policies"][method]["splits"].items():
        matching = [part for part in parts if f".{part}" in f".{path}"]
        assert matching, path
        assert axes == parts[max(matching, key=len)], path


@pytest.mark.parametrize("method", POLICIES)
@pytest.mark.parametrize("mesh", EXCHANGED)
def test_a_compiled_step_sends_what_is_planned(mesh, method):
    """The counters and the logits are left out."""
    step = planner_of(mesh).step(POLICIES[method].resolve(CONFIG, CAPACITY), ROWS)
    want = {"tp": step.sent[0] - step.link_bytes["logits"][0], "sp": step.sent[1]}
    assert measured()[mesh]["policies"][method]["sent"] == want


@pytest.mark.parametrize("method", mesh_compiled.POLICIES)
def test_a_compiled_step_takes_what_is_planned(method):
    """Its arguments to the byte, and temporaries within the bound, on each of tp 2 x sp 2 devices."""
    it = mesh_compiled
    sizes = {"max_new_tokens": it.NEW, "batch": it.ROWS, "dtype": "float32", "fetch": "resident"}
    serving = Serving(it.CONTEXT, **sizes, mesh=MeshSizes(it.TP, it.SP))
    side = capacity_plan(it.MIDDLE, it.POLICIES[method], H200, serving)
    needed = compiled()[method]
    assert 0 < needed["temporaries"] <= sum(side.chosen.temporaries.values())
    given = side.weights_bytes + it.ROWS * side.chosen.row_bytes[0]
    assert 0 <= needed["arguments"] - given <= 1024  # tokens, lengths and counters are left out
