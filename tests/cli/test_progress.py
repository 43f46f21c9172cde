"""Progress on stderr: lines now and then on a pipe, a bar on a terminal, nothing for quick work."""

import io
import sys
import time

import pytest

from jshadow.cli import progress
from jshadow.cli.progress import SlowProgress, waiting
from jshadow.engine.prefill.progress import PrefillProgress


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


@pytest.fixture
def comes(monkeypatch):
    """Lines and bars come soon, on a new stderr. Gives what waits until a text was written to it."""
    for name in ("SLOW_SECONDS", "LINE_SECONDS", "REFRESH_SECONDS"):
        monkeypatch.setattr(progress, name, 0.05)

    def wait_for(text):
        end = time.monotonic() + 20
        while text not in (seen := sys.stderr.getvalue()):
            assert time.monotonic() < end, seen
            time.sleep(0.02)

    def on(err):
        monkeypatch.setattr(sys, "stderr", err)
        return wait_for

    return on


def test_a_pipe_gets_lines(comes):
    comes = comes(io.StringIO())
    with SlowProgress("evaluating") as report:
        comes("jshadow: evaluating: compiling (")
        report(3, 20)
        comes("jshadow: evaluating, 3 of 20 (")
    ended = sys.stderr.getvalue()
    time.sleep(0.2)
    assert sys.stderr.getvalue() == ended
    report.close()


def test_a_prefill_tells_its_place_and_the_time_left(comes):
    comes = comes(io.StringIO())
    place = PrefillProgress(layers=2, num_layers=30, units=1, num_units=5, share=0.25, tokens=4000)
    with SlowProgress("prefill") as report:
        report.prefill(place)
        comes("jshadow: prefill: layer 3 of 30, unit 1 of 5 (")
        report.prefill(place.timed(0.05, 10.0))  # a fifth of 4,000 tokens in ten seconds
        comes("layer 3 of 30, unit 1 of 5, 80 tokens/s, 38 s left (")
    end = place._replace(layers=30, units=0, num_units=0, share=1.0)
    report.prefill(end.timed(0.5, 10.0))
    assert report.name == "prefill: layer 30 of 30, 200 tokens/s, 0 s left"


def test_a_terminal_gets_a_bar(comes):
    comes = comes(Terminal())
    with waiting("compiling the decode step"):
        comes("compiling the decode step")


def test_quick_work_shows_nothing(monkeypatch):
    for err in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", err)
        with SlowProgress("evaluating") as report:
            report(1, 1)
        assert err.getvalue() == ""
