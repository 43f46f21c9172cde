"""Progress on stderr: lines now and then on a pipe, a bar on a terminal, nothing for quick work."""

import io
import sys
import time

import pytest

from jshadow.cli import progress
from jshadow.cli.progress import SlowProgress, waiting


@pytest.fixture
def quick(monkeypatch):
    """Lines and bars come soon."""
    for name in ("SLOW_SECONDS", "LINE_SECONDS", "REFRESH_SECONDS"):
        monkeypatch.setattr(progress, name, 0.05)


def wait_for(text, read):
    """What was read once it has the text in it; fails after a while."""
    end = time.monotonic() + 20
    while text not in (seen := read()):
        assert time.monotonic() < end, seen
        time.sleep(0.02)
    return seen


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


def test_a_pipe_gets_lines(quick, monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with SlowProgress("evaluating") as report:
        wait_for("jshadow: evaluating: compiling (", err.getvalue)
        report(3, 20)
        wait_for("jshadow: evaluating, 3 of 20 (", err.getvalue)
    ended = err.getvalue()
    time.sleep(0.2)
    assert err.getvalue() == ended
    report.close()


def test_a_terminal_gets_a_bar(quick, monkeypatch):
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    with waiting("compiling the decode step"):
        wait_for("compiling the decode step", err.getvalue)


def test_quick_work_shows_nothing(monkeypatch, capsys):
    for err in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", err)
        with SlowProgress("evaluating") as report:
            report(1, 1)
        assert err.getvalue() == ""
