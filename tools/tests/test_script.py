"""Tasks that fail, raise or run out of time, and results that are kept for later calls."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from gpu import kernels, parent, parts, report, throughput
from gpu.baseline import Baseline
from gpu.goals import goals
from gpu.room import Room
from gpu.runner import CUT, FAILED, LATE, MEASURED, NOT_HERE, PARTLY, RAISED, NotHere, Runner, Task, save
from gpu.sizes import DRY
from gpu.steps import Steps

import pallas_kernels

MACHINE = {"device": "this GPU", "jax": "1.2", "dry_run": True}


def run(tmp_path, tasks, seconds=100.0):
    """Run a section of these tasks and a second one that succeeds. Returns the exit status and the rows of both."""
    path = tmp_path / "part.json"
    path.unlink(missing_ok=True)
    runner = Runner(path, {"dry_run": True, "machine": {}}, seconds, say=lambda line: None)
    status = runner.run({"first": lambda: iter(tasks), "second": lambda: iter([Task("well", 0, lambda: {"ok": True})])})
    written = json.loads(path.read_text())["sections"]
    assert written == json.loads(json.dumps(runner.results["sections"]))
    return status, written["first"], written["second"]


def test_a_wrong_kernel_is_told(tmp_path, monkeypatch):
    def wrong(*args, **options):
        return pallas_kernels.chunk_scores(*args, **options) + jnp.float32(1e-3)

    monkeypatch.setitem(kernels.OPS, "chunk_scores", kernels.OPS["chunk_scores"]._replace(call=wrong))
    tasks = [task for task in kernels.tasks(DRY) if "chunk_scores" in task.name]
    status, [row], [other] = run(tmp_path, tasks)
    assert (status, row["status"], other["status"]) == (1, FAILED, MEASURED)
    assert "error 0.001" in row["wrong"][0]
    page = report.markdown({"checks": {"dry_run": True, "sections": {"kernels": [row]}}})
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


def decoding(tmp_path, left=lambda: 1e9, **sizes):
    """Return the decode sections at tiny sizes."""
    sizes = dataclasses.replace(DRY, capacities=(512,), **sizes)
    room = Room(sizes, 0, lambda: {"read": 1e10, "matmul_bfloat16": 1e10})
    return throughput.Throughput(sizes, room, left, Baseline(tmp_path / "baseline.json", MACHINE))


def only(part, *wanted):
    """Return the tasks of the configurations (code, fetch mode), compiled together, at the longest context."""
    return part.tasks([part.setups(wanted, part.sizes.capacities[0])])


@pytest.fixture
def scarce(monkeypatch):
    """Makes states of more than three rows fail for lack of memory."""
    made = throughput.state

    def state(config, policy, batch, *rest):
        if batch > 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for so many rows")
        return made(config, policy, batch, *rest)

    monkeypatch.setattr(throughput, "state", state)


FULL, PAPER = ("full", "resident"), (("paper", "zero_copy"), ("paper", "device_put"))


@pytest.mark.slow
def test_fewer_rows_where_memory_runs_out(scarce, tmp_path):
    tasks = only(decoding(tmp_path), FULL, *PAPER)
    rows = [task.run() for task in tasks]
    assert [(row["code"], row["fetch"], row["batch"]) for row in rows] == [(*FULL, 3), (*PAPER[0], 3), (*PAPER[1], 3)]
    assert rows[1]["phases"][1]["share"] == pytest.approx(0.6)


@pytest.mark.slow
def test_fewer_rows_only_while_there_is_time(scarce, tmp_path):
    part = decoding(tmp_path, left=lambda: -1.0)
    _, [row], _ = run(tmp_path, only(part, PAPER[0]))
    assert row["status"] == LATE
    assert "RESOURCE_EXHAUSTED" in row["why"]
    assert part.held is None


def test_setups_without_room_say_so(tmp_path):
    part = decoding(tmp_path, host_bytes=1)
    status, rows, _ = run(tmp_path, only(part, *PAPER))
    assert (status, [row["status"] for row in rows]) == (0, [NOT_HERE, NOT_HERE])
    assert all("pinned memory" in row["why"] for row in rows)
    assert [row["name"] for row in rows] == ["paper, zero_copy, 0 x 512", "paper, device_put, 0 x 512"]


@pytest.mark.slow
def test_a_second_phase_that_fails_keeps_the_first(tmp_path, monkeypatch):
    phase = Steps.phase

    def fails(self, first, sizes):
        if first:
            raise ArithmeticError("logits are not finite")
        return phase(self, first, sizes)

    monkeypatch.setattr(Steps, "phase", fails)
    part = decoding(tmp_path)
    status, [row], _ = run(tmp_path, only(part, PAPER[0]))
    assert (status, row["status"]) == (1, PARTLY)
    assert row["phases"][0]["tokens_per_second"] > 0
    assert "not finite" in row["phases"][1]["error"]
    assert part.held is None
    page = report.markdown({"decode": {"dry_run": True, "sections": {"decode": [row]}}})
    assert page.count("| paper, zero_copy |") == 1
    assert "measured in part: error: ArithmeticError" in page


def test_a_whole_section_out_of_time_has_a_status_of_its_own(tmp_path):
    status, _, [other] = run(tmp_path, [Task("long", 60, dict)], seconds=30)
    assert (status, other["status"]) == (3, MEASURED)


@pytest.mark.slow
def test_ceilings_that_fail_are_replaced_and_marked(tmp_path, monkeypatch):
    asked = []

    def fail(*sizes):
        asked.append(sizes)
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(parts.bench, "ceilings", fail)
    monkeypatch.setenv(parts.environment.POOL_VARIABLE, "1")
    runner = Runner(tmp_path / "checks.json", {"dry_run": True, "machine": {}}, 100.0, say=lambda line: None)
    made = parts.sections("checks", DRY, runner, Baseline(tmp_path / "baseline.json", MACHINE))
    assert runner.run({name: made[name] for name in ("ceilings", "fetch")}) == 1
    row, fetched = runner.results["sections"]["ceilings"][0], runner.results["sections"]["fetch"]
    assert (row["status"], len(asked)) == (PARTLY, 1)
    assert all(row["share_of_bus"] * 63e9 == pytest.approx(row["bytes_per_second"]) for row in fetched)
    assert "data sheet of the H200: RuntimeError: no pinned memory" in report.markdown({"checks": runner.results})


def test_goals():
    def row(code, fetch, ratio, **others):
        phases = [{"share_set": share, "ratio_to_full": ratio, "share_of_bound": 0.4} for share in (0.0, 0.6)]
        name = f"{code}, {fetch}"
        return {"name": name, "status": MEASURED, "code": code, "fetch": fetch, "capacity": 9, "batch": 5} | (
            {"phases": phases} | others
        )

    rows = [row("packed small", "resident", 10.5), row("paper", "zero_copy", 1.5), row("paper", "device_put", 2.0)]
    rows += [row("paper", "zero_copy", 9.0, capacity=8), row("paper", "zero_copy", 9.0, batch=1)]
    found = goals({"decode": {"dry_run": False, "longest": 9, "sections": {"decode": rows}}})
    assert [cells[-1] for cells in found] == [
        "not measured",
        "met",
        "not measured",
        "not met",
        "not met",
        "not measured",
    ]
    assert found[3][2:4] == ("2.00", "paper, device_put; 50.0 % of its bound needed")
    dry = goals({"decode": {"dry_run": True, "longest": 9, "sections": {"decode": rows}}})
    assert [cells[-1] for cells in dry] == ["not measured"] * 6


# Results of earlier calls


@pytest.mark.slow
def test_a_ratio_needs_no_new_measurement_of_full_attention(tmp_path):
    path = tmp_path / "baseline.json"
    Baseline(path, MACHINE).remember(512, 7, 100.0)
    Baseline(path, MACHINE).remember(512, 6, 50.0)  # slower, so it is not kept
    [row] = [task.run() for task in only(decoding(tmp_path), PAPER[0])]
    assert all(phase["ratio_to_full"] == phase["tokens_per_second"] / 100 for phase in row["phases"])
    for other in ({"device": "another GPU"}, {"jax": "1.3"}, {"dry_run": False}):
        baseline = Baseline(path, MACHINE | other)
        assert baseline.best(512) is None
        assert "full attention at 512 tokens of this GPU with jax 1.2 in a dry run is ignored" in baseline.told()[0]
        baseline.remember(512, 1, 10.0)
    assert [entry["tokens_per_second"] for entry in json.loads(path.read_text())["entries"]] == [
        100.0,
        10.0,
        10.0,
        10.0,
    ]
    assert Baseline(path, MACHINE).best(512) == 100.0
    assert Baseline(path, MACHINE).best(1024) is None


def test_a_new_run_of_a_part_deletes_no_earlier_one(tmp_path):
    path = tmp_path / "decode.json"
    rows = [{"name": "done", "status": MEASURED}, {"name": "late", "status": LATE}, {"name": "hung", "status": CUT}]
    earlier = {"machine": {"date": "2026-01-02T03:04:05+00:00"}, "sections": {"decode": rows}, "finished": True}
    save(path, earlier)
    assert parent.prepare_file(path, resume=True) is None
    assert json.loads(path.read_text()) == {"machine": earlier["machine"], "sections": {"decode": rows[:1]}}
    save(path, earlier)
    moved = parent.prepare_file(path, resume=False)
    assert not path.exists()
    assert moved == tmp_path / "decode-2026-01-02T030405+0000.json"
    assert json.loads(moved.read_text()) == earlier
    assert parent.prepare_file(path, resume=False) is None


@pytest.mark.parametrize("key", ["packed keys", "packed fetch"])
def test_the_reference_takes_the_inputs_of_the_real_sizes(key):
    op = kernels.OPS[key]
    for case in op.real:
        inputs = kernels.wide(op.inputs(case))
        arrays, fixed = kernels.parts_of(inputs)
        jax.eval_shape(lambda x, op=op, fixed=fixed: op.call(**x, **fixed, implementation="xla"), arrays)
