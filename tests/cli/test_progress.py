"""Progress on stderr: lines now and then on a pipe, a bar on a terminal, nothing for quick work."""

import io
import sys
import time

import pytest

from jshadow.cli import progress
from jshadow.cli.progress import SlowProgress, waiting
from jshadow.engine.prefill.progress import PrefillProgress


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


def test_a_prefill_tells_its_place_and_the_time_left(quick, monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    place = PrefillProgress(layers=2, num_layers=30, units=1, num_units=5, share=0.25, tokens=4000)
    with SlowProgress("prefill") as report:
        report.prefill(place)
        wait_for("jshadow: prefill: layer 3 of 30, unit 1 of 5 (", err.getvalue)
        report.prefill(place.timed(0.05, 10.0))  # a fifth of 4,000 tokens in ten seconds
        wait_for("layer 3 of 30, unit 1 of 5, 80 tokens/s, 38 s left (", err.getvalue)
    end = place._replace(layers=30, units=0, num_units=0, share=1.0)
    report.prefill(end.timed(0.5, 10.0))
    assert report.name == "prefill: layer 30 of 30, 200 tokens/s, 0 s left"


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
