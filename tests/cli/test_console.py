"""What the commands print: tables that fit the width, progress on stderr, and texts in any encoding."""

import contextlib
import io
import json
import re
import sys
import time
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from byte_models import PARAMS
from command_line import CAPACITY, FULL, LENGTH, TEXT
from few import slow
from real_shapes import LLAMA_31_8B_JSON
from rich.console import Console
from rich.table import Table
from tiny_text import byte_tokenizer

from jshadow.cli import console
from jshadow.cli.chat import Conversation, questions
from jshadow.cli.console import SlowProgress, print_table, read_text, waiting
from jshadow.cli.generate import read_prompt, write_answer
from jshadow.cli.main import main
from jshadow.engine import generation, options
from jshadow.engine.types import PrefillProgress
from jshadow.errors import ConfigError, PromptError
from jshadow.library.library import question_ids
from jshadow.library.shelf import ANSWER, DOCUMENT
from jshadow.weights.params import Params


def drawn(table, width):
    out = Console(width=width, file=io.StringIO())
    print_table(table, out)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 80])
def test_columns_go_into_further_tables(width):
    numbers = [f"{10**12 + index:,}" for index in range(9)]
    table = Table("bytes of something long", *(f"{index} tokens" for index in range(9)))
    table.add_row("a label of several words", *numbers)
    text = drawn(table, width)
    assert all(number in text for number in numbers)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("0 tokens") == 1
    table = Table("label", "x\ny")  # it fits, and stays one
    table.add_row("one", "1")
    assert drawn(table, width).count("label") == 1
    assert "│ one   │ 1 │" in drawn(table, width)


def test_a_column_that_just_fits_stays_in_its_table():
    table = Table("label", "12345", "67890")
    table.add_row("one", "1", "2")
    widths = [drawn(table, width).count("label") for width in (24, 25, 26)]
    assert widths == [2, 1, 1]
    assert max(map(len, drawn(table, 25).splitlines())) == 25


LONG = ["--context", "122880"]


@pytest.mark.parametrize("command", [slow(["plan", *LONG]), ["plan"], ["policies", *LONG, "--model"]])
def test_commands_at_80_columns(command, tmp_path, printed, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    monkeypatch.setattr(console, "console", lambda width=0: Console(width=80))
    out = printed(*command, tmp_path / "config.json")
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    # each number stands whole in its cell
    cells = [cell.strip() for line in out.splitlines() if line.startswith("│") for cell in line.split("│")[2:-1]]
    assert any(re.fullmatch(r"[\d,]{9,}", cell) for cell in cells) or command[0] == "policies"
    assert not any(cell.endswith(",") for cell in cells)


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


@pytest.fixture
def comes(monkeypatch):
    """Lines and bars come soon, on a new stderr. Gives what waits until a text was written to it."""
    for name in ("SLOW_SECONDS", "LINE_SECONDS", "REFRESH_SECONDS"):
        monkeypatch.setattr(console, name, 0.05)

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


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]
HALVES = [("caf\udce9?", "caf\ufffd?"), ("\ud83d\ude00?", "\U0001f600?"), ("a\ud800?", "a\ufffd?")]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_mark_of_byte_order_is_no_part_of_a_prompt(tmp_path, monkeypatch, encoding):
    path, text = tmp_path / "prompt", "Grün, 10 €"
    path.write_bytes(text.encode(encoding))
    assert read_text(str(path), "--text") == text
    assert read_prompt(Namespace(prompt=None, prompt_file=str(path), source=None)) == text
    if encoding != "utf-16":
        monkeypatch.setattr(sys, "stdin", io.StringIO(path.read_text("utf-8")))
        assert read_prompt(Namespace(prompt=None, prompt_file=None, source="-")) == text
        monkeypatch.setattr(sys, "stdin", io.StringIO(path.read_text("utf-8") + "\n/quit\nmore"))
        assert list(questions()) == [text]


@pytest.mark.parametrize("data", [b"\xfe\xff\x00", b"\xff\xfe\x00\xd8", b"caf\xe9"])
def test_a_prompt_of_other_bytes_is_refused(tmp_path, data):
    (tmp_path / "prompt").write_bytes(data)
    with pytest.raises(PromptError, match="prompt must be readable UTF-8 text"):
        read_prompt(Namespace(prompt=None, prompt_file=str(tmp_path / "prompt"), source=None))


@pytest.mark.parametrize(("given", "right"), HALVES)
def test_bytes_of_the_command_line_that_are_no_utf8_are_replaced(given, right):
    """In --prompt, in a question of `library ask`, and in `chat` with and without a document."""
    assert read_prompt(Namespace(prompt=given, prompt_file=None, source=None)) == right
    plain = byte_tokenizer()
    plain.chat_template = None
    for params in (PARAMS, Params(PARAMS.weights, PARAMS.config, plain)):
        tokenizer = params.tokenizer
        for ends in (DOCUMENT, ANSWER, ""):
            assert right in tokenizer.decode(question_ids(params, given, ends, 0))
        talk = Conversation(params, {}, 1, silent=True)
        for state in (None, SimpleNamespace(last=np.zeros(1, np.int32))):
            for talk.document in (False, True):
                talk.state = state
                assert right in tokenizer.decode(talk._encode(given))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_answer_is_printed_to_a_terminal_that_lacks_its_letters(tiny_model, monkeypatch, encoding):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(["generate", tiny_model, "--prompt", TEXT, *FULL, *CAPACITY, *LENGTH]) == 0
    text = out.getvalue().decode(encoding)
    assert "prompt tokens" in text
    assert ("\u2502" in text) == (encoding == "utf-8")  # the border of the table
