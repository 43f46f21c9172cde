"""Several processes run the parts of an evaluation, one of them is killed, and the merged table is that of one run."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import REPO

TASKS = ["--tasks", "agreement", "--lengths", "240", "--samples", "6", "--dtype", "float32"]
POLICY = ["--policies", "shadowkv:rank=12:budget=64:outlier_chunks=2"]
PART = "2/3"
pytestmark = [pytest.mark.slow, pytest.mark.process]


def process(*words, environment=None):
    """`jshadow` in a process of its own, as the workers run it."""
    command = [sys.executable, "-m", "jshadow", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The words of an evaluation, what one run prints as a table, and what it prints as JSON."""
    words = ["eval", tiny_model, *TASKS, *POLICY]
    whole = [*words, "--out", str(tmp_path_factory.mktemp("whole"))]
    return words, process(*whole).stdout, json.loads(process(*whole, "--json").stdout)


@pytest.fixture
def evaluation(whole, tmp_path):
    """The words of an evaluation in parts, and what one run prints."""
    words, table, rows = whole
    return [*words, "--out", str(tmp_path / "results")], table, rows


@pytest.fixture
def killing(tmp_path):
    """An environment in which one part is killed once, in the middle of a sample, and the mark that it leaves."""
    mark, support = tmp_path / "killed", REPO / "tests" / "support" / "killed_once"
    paths = [str(support), str(REPO), os.environ.get("PYTHONPATH", "")]
    variables = {"KILLED_PART": PART, "KILLED_MARK": str(mark), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return os.environ | variables, mark


def test_a_killed_part_is_run_again_alone(evaluation, killing, tmp_path, printed, answer, refused):
    """By the command that the merge names."""
    (words, table, rows), (environment, mark) = evaluation, killing
    merge = ["eval", "--merge", tmp_path / "results"]
    for part in ("1/3", "3/3"):
        assert process(*words, "--part", part).returncode == 0
    assert process(*words, "--part", PART, environment=environment).returncode == -signal.SIGKILL
    assert mark.exists()
    told = refused("has 1 of 2. It goes on with:", *merge)
    assert "part 2/3 in " in told
    again = shlex.split(told.splitlines()[1])
    assert again[0] == "jshadow"
    assert process(*again[1:]).returncode == 0
    assert printed(*merge).endswith(table)  # after the line about the part
    assert answer(*merge, "--out", tmp_path / "merged") == rows
    assert (tmp_path / "merged" / "results.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the extra `workers` is for Linux")
def test_two_workers_of_ray(evaluation, killing, tmp_path, answer):
    """A part of three is killed, and Ray runs it again."""
    (words, table, rows), (environment, mark) = evaluation, killing
    script = [sys.executable, str(REPO / "examples" / "many_workers" / "ray_parts.py")]
    options = ["--parts", "3", "--gpus", "0", "--workers", "2", *words]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run([*script, *options], env=environment | quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    assert table in done.stdout  # Ray may print lines of its workers after it
    assert answer("eval", "--merge", tmp_path / "results") == rows
