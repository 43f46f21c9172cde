"""Several processes run the parts of an evaluation, one of them is killed, and the merged table is that of one run."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from jshadow.cli.main import main

TASKS = ["--tasks", "agreement", "--lengths", "240", "--samples", "6", "--dtype", "float32"]
POLICY = ["--policies", "shadowkv:rank=12:budget=64:outlier_chunks=2"]
PART = "2/3"
pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def words(tiny_model: str) -> list[str]:
    """An evaluation, without its directory."""
    return ["eval", tiny_model, *TASKS, *POLICY]


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The table and the JSON that one run prints."""
    out = ["--out", str(tmp_path_factory.mktemp("whole"))]
    table, text = io.StringIO(), io.StringIO()
    for stream, options in ((table, []), (text, ["--json"])):
        with contextlib.redirect_stdout(stream):
            assert main([*words, *out, *options]) == 0
    return table.getvalue(), text.getvalue()


@pytest.fixture
def killing(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment in which one part is killed once, in the middle of a sample, and the mark that it leaves."""
    mark, support = tmp_path / "killed", REPO / "tests" / "support" / "killed_once"
    paths = [str(support), str(REPO), os.environ.get("PYTHONPATH", "")]
    variables = {"KILLED_PART": PART, "KILLED_MARK": str(mark), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return os.environ | variables, mark


def test_a_killed_part_is_run_again_alone(
    words,
    whole,
    killing,
    tmp_path,
    capsys,
):
    """By the command that the merge names."""
    environment, mark = killing
    out = ["--out", str(tmp_path / "results")]
    for part in ("1/3", "3/3"):
        assert main([*words, *out, "--part", part]) == 0
    command = [sys.executable, "-m", "jshadow", *words, *out, "--part", PART]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
    assert mark.exists()
    capsys.readouterr()
    assert main(["eval", "--merge", str(tmp_path / "results")]) == 2
    told = capsys.readouterr().err
    assert "part 2/3 in " in told
    assert "has 1 of 2. It goes on with:" in told
    again = shlex.split(told.splitlines()[1])
    assert again[0] == "jshadow"
    assert main(again[1:]) == 0
    assert main(["eval", "--merge", str(tmp_path / "results")]) == 0
    table = capsys.readouterr().out.partition("\n")[2]  # after the line about the part
    assert table == whole[0]
    assert main(["eval", "--merge", str(tmp_path / "results"), "--json", "--out", str(tmp_path / "merged")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(whole[1])
    assert (tmp_path / "merged" / "report.html").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the extra `workers` is for Linux")
def test_two_workers_of_ray(
    words,
    whole,
    killing,
    tmp_path,
    capsys,
):
    """A part of three is killed, and Ray runs it again."""
    environment, mark = killing
    script = [sys.executable, str(REPO / "examples" / "many_workers" / "ray_parts.py")]
    options = ["--parts", "3", "--gpus", "0", "--workers", "2", *words, "--out", str(tmp_path / "results")]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run([*script, *options], env=environment | quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    assert done.stdout.endswith(whole[0])
    assert main(["eval", "--merge", str(tmp_path / "results"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(whole[1])
