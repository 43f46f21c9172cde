"""`make gpu` without a GPU: a dry run of all parts, and tasks that fail, raise or run out of time."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from gpu import kernels, parts, report, throughput
from gpu.room import Room
from gpu.runner import FAILED, LATE, MEASURED, NOT_ASKED, NOT_HERE, PARTLY, RAISED, NotHere, Runner, Task
from gpu.sizes import DRY, REAL
from gpu.steps import Steps
from gpu.synthetic import steered

ROOT = Path(__file__).resolve().parents[2]
one_worker = pytest.mark.xdist_group("dry run")  # it takes minutes, so it runs only once
PARTS = ["ceilings", "correctness", "fetch", "decode", "layer", "decode-more", "decode-packed", "compress"]


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The results of a dry run: gpu.json, gpu.md, the finished process, and the folder."""
    out = tmp_path_factory.mktemp("gpu")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'support'}"}
    command = [sys.executable, "-m", "gpu", "--dry-run", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (out / "gpu.json").exists(), done.stderr
    return json.loads((out / "gpu.json").read_text()), (out / "gpu.md").read_text(), done, out


def numbers(value):
    """Return all floats in nested values."""
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers(one)]
    if isinstance(value, list):
        return [n for one in value for n in numbers(one)]
    return [value] if isinstance(value, float) else []


@one_worker
def test_all_parts_of_a_dry_run_report(dry):
    results, page, done, out = dry
    assert done.returncode == 0, done.stderr
    assert list(results["parts"]) == PARTS
    for part, rows in results["parts"].items():
        assert rows
        assert {row["status"] for row in rows} <= {MEASURED, NOT_HERE}, rows
        assert part == "correctness" or all(row["status"] == MEASURED for row in rows)
    assert all(math.isfinite(number) for number in numbers(results["parts"]))
    assert {"device", "driver", "cuda", "jax", "jaxlib", "date", "commit"} <= set(results["machine"])
    for title in ("Correctness", "Ceilings", "Fetch of one layer", "Decode", "One layer's decode step"):
        assert f"## {title}" in page
    assert {path.name for path in out.iterdir()} == {"gpu.json", "gpu.md", "gpu.log"}
    assert page.count("not measured |") == 4  # a dry run reaches no goal


@one_worker
def test_a_dry_run_checks_everything_once(dry):
    rows = {row["name"]: row for row in dry[0]["parts"]["correctness"]}
    assert {f"kernel {name}" for name in kernels.OPS} <= set(rows)
    assert {"fetch modes, float32", "fetch modes, bfloat16", "pinned array beyond 4 GiB", "top_k", "memories"} <= set(
        rows
    )
    assert all(row["ok"] for row in rows.values() if row["status"] == MEASURED)
    assert REAL.big_units * 2 * 4 * 8 * 128 * 2 > 2**32


@one_worker
def test_a_dry_run_decodes_with_the_shares_that_were_set(dry):
    parts = dry[0]["parts"]
    rows = parts["decode"] + parts["decode-more"]
    assert {row["capacity"] for row in parts["decode"]} == {DRY.capacities[0]}
    capacities = {row["capacity"] for row in rows}
    assert capacities == set(DRY.capacities)
    for capacity in capacities:
        batches = [(row["kind"], row["batch"]) for row in rows if row["capacity"] == capacity]
        assert {kind for kind, _ in batches} == {"full", "zero_copy", "device_put"}
        assert {batch for kind, batch in batches if kind != "full"} > {1}
    chunk = DRY.policy.chunk_size * DRY.config.head_dim * 2
    for row in rows:
        per_step = DRY.config.num_layers * row["batch"] * DRY.config.kv_heads * 10 * chunk
        for phase in row["phases"]:
            assert phase["tokens_per_second"] > 0
            assert phase["ratio_to_full"] > 0
            assert phase["share_of_bound"] > 0
            if row["kind"] != "full":
                assert phase["share"] == pytest.approx(phase["share_set"], abs=0.05)
            moved = {"full": 0, "device_put": 1, "zero_copy": 1 - (phase["share"] or 0)}[row["kind"]]
            assert phase["fetched_bytes_per_step"] == pytest.approx(moved * per_step)


@one_worker
def test_a_dry_run_takes_a_layer_apart(dry):
    for row in dry[0]["parts"]["layer"]:
        assert all(milliseconds > 0 for milliseconds in row["milliseconds"].values())
    assert {"scores", "top_k", "rebuild K", "attention", "whole, zero_copy", "whole, device_put"} <= set(
        dry[0]["parts"]["layer"][0]["milliseconds"]
    )


@pytest.mark.parametrize("capacity", REAL.capacities)
def test_a_steered_selection_fits_the_real_sizes(capacity):
    policy = steered(REAL.policy.resolve(REAL.config, capacity), REAL.prompt(capacity))
    wheel, count = policy.wheel(capacity), policy.max_selected(capacity)
    assert wheel >= 2 * count
    assert np.asarray(policy.eligible(capacity)).sum() == wheel
    ranks = np.asarray(policy.ranks(policy.chunks))
    assert sorted(ranks) == list(range(policy.chunks))
    near = np.abs(np.diff(ranks))
    assert np.minimum(near, policy.chunks - near).min() > count  # neighboring chunks are never selected together
    assert 1 - policy.moved(capacity) / count == pytest.approx(0.6, abs=0.01)


# What goes wrong


def run(tmp_path, tasks, seconds=100.0, only=None):
    """Run a part of these tasks and a second part that succeeds. Returns the exit status and the rows of both."""
    runner = Runner(tmp_path, {"dry_run": True, "machine": {}}, seconds, say=lambda line: None)
    parts = {"first": lambda: iter(tasks), "second": lambda: iter([Task("well", 0, lambda: {"ok": True})])}
    status = runner.run(parts, only)
    written = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert written == json.loads(json.dumps(runner.results["parts"]))
    return status, written["first"], written["second"]


def test_a_wrong_kernel_is_told(tmp_path, monkeypatch):
    def wrong(*args, **options):
        return pallas_kernels.chunk_scores(*args, **options) + jnp.float32(1e-3)

    monkeypatch.setitem(kernels.OPS, "chunk_scores", kernels.OPS["chunk_scores"]._replace(call=wrong))
    tasks = [task for task in kernels.tasks(DRY) if "scores" in task.name]
    status, [row], [other] = run(tmp_path, tasks)
    assert (status, row["status"], other["status"]) == (1, FAILED, MEASURED)
    assert "error 0.001" in row["wrong"][0]
    page = report.markdown({"dry_run": True, "machine": {}, "parts": {"correctness": [row]}})
    assert "kernel chunk_scores: failed: " in page


def test_what_raises_stops_nothing_else(tmp_path):
    def fail():
        raise ValueError("no such thing")

    status, rows, [other] = run(tmp_path, [Task("bad", 0, fail), Task("good", 0, dict)])
    assert [row["status"] for row in rows] == [RAISED, MEASURED]
    assert "ValueError: no such thing" in rows[0]["error"]
    assert (status, other["status"]) == (1, MEASURED)

    def broken():
        yield Task("good", 0, dict)
        raise OSError("while planning")

    status, rows, _ = run(tmp_path, broken())
    assert (status, [row["status"] for row in rows]) == (1, [MEASURED, RAISED])


def test_what_comes_too_late_is_told_and_no_failure(tmp_path):
    status, rows, [other] = run(tmp_path, [Task("long", 60, dict), Task("short", 0, dict)], seconds=30)
    assert [row["status"] for row in rows] == [LATE, MEASURED]
    assert (status, other["status"]) == (0, MEASURED)


def test_what_this_machine_cannot_do_is_no_failure(tmp_path):
    def absent():
        raise NotHere("no such package")

    status, [row], _ = run(tmp_path, [Task("absent", 0, absent)])
    assert (status, row["status"], row["why"]) == (0, NOT_HERE, "no such package")


def test_parts_that_nobody_asked_for_say_so(tmp_path):
    status, [row], [other] = run(tmp_path, [Task("bad", 0, dict)], only="second")
    assert (status, row["status"], other["status"]) == (0, NOT_ASKED, MEASURED)


def decoding(capacities=(512,), left=lambda: 1e9, **sizes):
    """Return the decode parts at tiny sizes."""
    sizes = dataclasses.replace(DRY, capacities=capacities, **sizes)
    room = Room(sizes, 0, lambda: {"read": 1e10, "matmul_bfloat16": 1e10})
    return throughput.Throughput(sizes, room, left)


@pytest.fixture
def scarce(monkeypatch):
    """Makes states of more than three rows fail for lack of memory."""
    made = throughput.state

    def state(config, policy, batch, *rest):
        if batch > 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for so many rows")
        return made(config, policy, batch, *rest)

    monkeypatch.setattr(throughput, "state", state)


def test_fewer_rows_where_memory_runs_out(scarce):
    tasks = decoding().longest()
    rows = [next(tasks).run() for _ in range(3)]
    tasks.close()
    assert [(row["kind"], row["batch"]) for row in rows] == [("full", 3), ("zero_copy", 3), ("device_put", 3)]
    assert rows[1]["phases"][1]["share"] == pytest.approx(0.6)


def test_fewer_rows_only_while_there_is_time(scarce, tmp_path):
    part = decoding(left=lambda: -1.0)
    [group, *_] = part.setups(512)
    tasks = [task for task in part.tasks([group]) if task.name.startswith("zero_copy")]
    _, [row], _ = run(tmp_path, tasks)
    assert row["status"] == LATE
    assert "RESOURCE_EXHAUSTED" in row["why"]
    assert part.held is None


def test_setups_without_room_say_so(tmp_path):
    part = decoding(host_bytes=1)
    status, rows, _ = run(tmp_path, [task for task in part.longest() if not task.name.startswith("full")])
    assert (status, [row["status"] for row in rows]) == (0, [NOT_HERE, NOT_HERE])
    assert all("pinned memory" in row["why"] for row in rows)
    assert [row["name"].split(",")[0] for row in rows] == ["zero_copy", "device_put"]


def test_a_second_phase_that_fails_keeps_the_first(tmp_path, monkeypatch):
    phase = Steps.phase

    def fails(self, first, sizes):
        if first:
            raise ArithmeticError("logits are not finite")
        return phase(self, first, sizes)

    monkeypatch.setattr(Steps, "phase", fails)
    part = decoding()
    tasks = (task for task in part.longest() if task.name.startswith("zero_copy"))
    status, [row], _ = run(tmp_path, tasks)
    assert (status, row["status"]) == (1, PARTLY)
    assert row["phases"][0]["tokens_per_second"] > 0
    assert "not finite" in row["phases"][1]["error"]
    assert part.held is None
    page = report.markdown({"dry_run": True, "machine": {}, "parts": {"decode": [row]}})
    assert page.count("| zero_copy |") == 1
    assert "measured in part: error: ArithmeticError" in page


def test_a_whole_part_out_of_time_has_a_status_of_its_own(tmp_path):
    status, _, [other] = run(tmp_path, [Task("long", 60, dict)], seconds=30)
    assert (status, other["status"]) == (3, MEASURED)


def test_ceilings_that_fail_are_replaced_and_marked(tmp_path, monkeypatch):
    asked = []

    def fail(*sizes):
        asked.append(sizes)
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(parts.bench, "ceilings", fail)
    runner = Runner(tmp_path, {"dry_run": True, "machine": {}}, 100.0, say=lambda line: None)
    made = parts.all_parts(DRY, runner, 0)
    assert runner.run({name: made[name] for name in ("ceilings", "fetch")}) == 1
    [row], fetched = runner.results["parts"]["ceilings"], runner.results["parts"]["fetch"]
    assert (row["status"], len(asked)) == (PARTLY, 1)
    assert all(row["share_of_bus"] * 63e9 == pytest.approx(row["bytes_per_second"]) for row in fetched)
    assert "data sheet of the H200: RuntimeError: no pinned memory" in report.markdown(runner.results)


def test_goals():
    phase = {"share_set": 0.6, "ratio_to_full": 3.2, "share_of_bound": 0.4}
    slow = phase | {"share_set": 0.0, "ratio_to_full": 1.2}
    row = {"name": "x", "status": MEASURED, "kind": "zero_copy", "capacity": 9, "batch": 5, "phases": [slow, phase]}
    better = phase | {"ratio_to_full": 9.0}
    others = [
        row | {"kind": "device_put", "phases": [better]},
        row | {"capacity": 8, "phases": [better]},
        row | {"batch": 1, "phases": [better]},
    ]
    found = report.goals({"dry_run": False, "longest": 9, "parts": {"decode": [*others, row]}})
    assert [cells[-1] for cells in found] == ["not measured", "met", "not met", "not met"]
    assert found[1][3] == "zero_copy, 5 x 9; the bound's own is 8.00, 37.5 % needed"
    found = report.goals({"dry_run": False, "longest": 9, "parts": {"decode": others[:2]}})
    assert [cells[-1] for cells in found] == ["not measured"] * 4
