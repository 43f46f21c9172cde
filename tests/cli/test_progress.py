"""Progress on stderr: lines now and then on a pipe, a bar on a terminal, nothing for quick work."""

import contextlib
import io
import re
import sys
import time
from types import SimpleNamespace

import pytest

from jshadow.cli import progress
from jshadow.cli.chat import Conversation
from jshadow.cli.generate import write_answer
from jshadow.cli.progress import SlowProgress, waiting
from jshadow.engine import generation, options
from jshadow.engine.types import PrefillProgress
from jshadow.errors import ConfigError


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


PREFILL, COMPILING, DECODE = "jshadow: prefill: compiling (", "jshadow: compiling the decode step (", ", 2 of 4 ("


class Slow:
    """A generation that yields each piece when progress has come, and fails after the last one if it is told to."""

    options = SimpleNamespace(max_new_tokens=4)

    def __init__(self, comes, error=None, decoding=None):
        self.comes, self.error, self.decoding = comes, error, decoding

    def __iter__(self):
        self.comes(PREFILL)
        yield 0, "fib", 0
        self.comes(COMPILING)
        yield 0, "onacci(n-1", 0
        time.sleep(0.12)
        if self.decoding:
            self.comes(self.decoding)
        yield 0, ")\nreturn 1", 0
        if self.error is not None:
            raise self.error

    def results(self):
        return [SimpleNamespace(state=None)]


def check_answer(written, label=""):
    """Whole lines of progress, and then whole lines of the answer."""
    *lines, first, second, end = written.split("\n")
    assert (first, second, end) == (f"{label}fibonacci(n-1)", "return 1", "")
    assert {re.sub(r"\d+ s\)$", "", line) for line in lines} == {PREFILL, COMPILING}


@pytest.mark.parametrize("error", [None, ConfigError("broken")], ids=["whole", "failed"])
def test_an_answer_is_not_cut_by_progress(comes, monkeypatch, error):
    """Both streams go to one pipe. An answer that ends with a failure also ends with a whole line."""
    comes = comes(both := io.StringIO())
    monkeypatch.setattr(sys, "stdout", both)
    with contextlib.suppress(ConfigError), SlowProgress("prefill") as report:
        write_answer(Slow(comes, error), report, "[full] ", silent=False)
    check_answer(both.getvalue(), "[full] ")


def test_an_answer_that_is_not_shown_has_progress(comes):
    comes = comes(io.StringIO())
    with SlowProgress("prefill") as report:
        write_answer(Slow(comes, decoding=DECODE), report, "[full] ", silent=True)
    assert "fib" not in sys.stderr.getvalue()


def test_an_answer_of_a_chat_is_not_cut_by_progress(comes, monkeypatch):
    comes = comes(both := io.StringIO())
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(generation, "GenerationLoop", lambda *given: Slow(comes))
    monkeypatch.setattr(options, "GenerateOptions", lambda **given: None)
    talk = Conversation(SimpleNamespace(tokenizer=None), {"sampler": None, "seed": 0}, 4, silent=False)
    talk._run([1], 4)
    check_answer(both.getvalue())


def test_quick_work_shows_nothing(monkeypatch):
    for err in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", err)
        with SlowProgress("evaluating") as report:
            report(1, 1)
        assert err.getvalue() == ""
