"""A run whose process dies or hangs, or whose device becomes unusable."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import environment, parent, worker
from gpu.runner import CUT as CUT_OFF
from gpu.runner import DIED, LATE, MEASURED, RAISED, STOPPED, Runner, Task

ROOT = Path(__file__).resolve().parents[2]
CUT = """
import sys, time
from pathlib import Path
from gpu.runner import Runner, Task

def finish(results):
    print("finished", flush=True)
    raise KeyError("no such column")

runner = Runner(Path(sys.argv[1]) / "part.json", {}, 0.5, finish=finish)
runner.watch(0.2)
runner.run({"first": lambda: iter([Task("endless", 0, lambda: time.sleep(600))]), "second": lambda: iter(())})
"""


@pytest.mark.process
def test_a_task_that_does_not_return_is_left_behind(tmp_path):
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tools'}:{ROOT / 'tests' / 'support'}"}
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "finished\n")
    assert time.monotonic() - start < 60
    written = json.loads((tmp_path / "part.json").read_text())["sections"]
    assert (written["first"][-1]["name"], written["first"][-1]["status"]) == ("endless", CUT_OFF)
    assert written["second"][0]["status"] == LATE


def test_a_finish_that_raises_ends_nothing(tmp_path):
    def fail(results):
        raise KeyError("no such column")

    runner = Runner(tmp_path / "part.json", {"dry_run": True, "machine": {}}, 100.0, say=lambda line: None, finish=fail)
    sections = {name: lambda: iter([Task("well", 0, dict)]) for name in ("first", "second")}
    assert runner.run(sections) == 0
    assert [len(rows) for rows in json.loads((tmp_path / "part.json").read_text())["sections"].values()] == [1, 1]


def test_a_broken_context_ends_the_process(tmp_path):
    def illegal():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    runner = Runner(tmp_path / "part.json", {}, 100.0, say=lambda line: None)
    tasks = {"first": lambda: iter([Task("bad", 0, illegal), Task("next", 0, dict)])}
    assert runner.run(tasks) == STOPPED
    again = Runner(
        tmp_path / "part.json", json.loads((tmp_path / "part.json").read_text()), 100.0, say=lambda line: None
    )
    assert again.run(tasks) == 1
    assert [(row["name"], row["status"]) for row in again.results["sections"]["first"]] == [
        ("bad", RAISED),
        ("next", MEASURED),
    ]


DYING = """
import json, os, sys
from pathlib import Path
from gpu.runner import Runner, Task
out = Path(sys.argv[1])
earlier = json.loads((out / "part.json").read_text()) if (out / "part.json").exists() else {}
runner = Runner(out / "part.json", {"machine": {"process": os.getpid()}} | earlier, float(sys.argv[3]))
first = lambda: iter([Task("good", 0, lambda: {"by": os.getpid()}), Task("bad", 0, os.abort), Task("next", 0, dict)])
sys.exit(runner.run({"first": first, "second": lambda: iter([Task("well", 0, dict)])}))
"""


@pytest.mark.process
def test_a_process_that_dies_takes_only_its_task_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tools'}:{ROOT / 'tests' / 'support'}")
    command = [sys.executable, "-c", DYING, str(tmp_path)]
    results = parent.supervise(command, tmp_path / "part.json", time.monotonic() + 60)
    assert results == json.loads((tmp_path / "part.json").read_text())
    first, [second] = results["sections"]["first"], results["sections"]["second"]
    assert [(row["name"], row["status"]) for row in first] == [("good", MEASURED), ("bad", DIED), ("next", MEASURED)]
    assert "exit status -6" in first[1]["error"]
    assert first[0]["by"] == results["machine"]["process"]  # the first process measured it, and no other
    assert second["status"] == MEASURED
    assert parent.exit_status(results) == 1


def test_memory_that_grows_is_looked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "available_bytes", lambda: 8 * environment.GIB)
    monkeypatch.setattr(environment, "grown_bytes", lambda: asked.append(1) or 120 * environment.GIB)
    monkeypatch.setattr(environment.shutil, "which", lambda name: name)
    for name in (environment.POOL_VARIABLE, environment.FRACTION, "TF_CPP_MIN_LOG_LEVEL", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    environment.prepare(None, probe=True)
    assert (environment.pool(), asked) == (100 * environment.GIB, [1])
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    monkeypatch.delenv(environment.POOL_VARIABLE)
    environment.prepare(None, probe=False)
    assert environment.pool() == environment.GIB


@pytest.mark.process
def test_a_probe_of_memory_ends():
    assert environment.grown_bytes(limit=2**28, seconds=5) > 0


@pytest.mark.process
def test_torch_that_fails_is_not_available(monkeypatch):
    def rows(code):
        return parent.torch_rows([sys.executable, "-c", code])

    assert rows("print('loading'); print('{\"rows\": []}')") == {"rows": []}
    assert "exit status 3" in rows("import sys; sys.exit(3)")["not_available"]
    assert "no driver" in rows("raise OSError('no driver')")["not_available"]
    assert "no such file" in parent.torch_rows(["/no/such/program"])["not_available"].lower()
    monkeypatch.setattr(parent, "TORCH_SECONDS", 0.1)
    assert "timed out" in rows("import time; time.sleep(60)")["not_available"]


def test_only_results_of_the_same_machine_are_continued():
    here, there = {"device": "this GPU", "jax": "1.2"}, {"device": "another GPU", "jax": "1.2"}
    assert worker.other_machine({}, here) is None
    assert worker.other_machine(here, here) is None
    assert "another GPU with jax 1.2 and this GPU with jax 1.2" in worker.other_machine(there, here)
    assert "this GPU with jax 1.1 and" in worker.other_machine(here | {"jax": "1.1"}, here)
