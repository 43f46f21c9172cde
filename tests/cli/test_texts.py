"""Texts that reach a command: files with marks of byte order, bytes that are no UTF-8, and poor terminals."""

import io
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from byte_models import PARAMS
from command_line import CAPACITY, FULL, LENGTH, TEXT
from tiny_text import byte_tokenizer

from jshadow.cli.chat import Conversation, questions
from jshadow.cli.console import read_text
from jshadow.cli.generate import read_prompt
from jshadow.cli.main import main
from jshadow.errors import PromptError
from jshadow.library.asking import question_ids
from jshadow.library.shelf import ANSWER, DOCUMENT
from jshadow.weights.params import Params

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
