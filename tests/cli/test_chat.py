"""`jshadow chat` on a pipe: turns on one document, with a gauge below each answer."""

import io
import json
import sys

import pytest
from command_line import FULL, LENGTH, QUEST, TEXT

from jshadow.cli import chat
from jshadow.cli.main import main
from jshadow.engine.prefill.whole import prefill_many

CAPACITY = ("--capacity", "400")  # as in test_library.py


@pytest.fixture
def talk(tiny_model, tmp_path, monkeypatch, capsys):
    """Runs a chat with the lines of its input, and gives its exit status, standard output and stderr."""
    (tmp_path / "book.txt").write_text(TEXT)

    def run(lines, *options, sizes=CAPACITY):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", tiny_model, *LENGTH, *sizes, *options])
        return status, *capsys.readouterr()

    run.book = ["--file", str(tmp_path / "book.txt")]
    return run


@pytest.mark.parametrize("settings", [FULL, pytest.param(QUEST, marks=pytest.mark.slow)], ids=["full", "quest"])
def test_turns_extend_one_state(talk, settings, monkeypatch):
    from jshadow.engine import decode

    calls = []
    monkeypatch.setattr(
        decode, "prefill_many", lambda *given, **named: calls.append(1) or prefill_many(*given, **named)
    )
    status, out, _ = talk(["one?", "", "two?", "/quit", "three?"], *talk.book, *settings, "--json")
    assert status == 0
    assert len(calls) == 1
    first, second = [json.loads(line) for line in out.splitlines()]
    assert [(turn["turn"], turn["question"]) for turn in (first, second)] == [(1, "one?"), (2, "two?")]
    begin, between = "<user>", "\n\none?\n<assistant>"
    assert first["tokens_held"] == len(begin + TEXT + between) + len(first["tokens"])
    # the state holds all tokens of an answer, and the template's end of the answer comes before the next question
    assert second["tokens_held"] == first["tokens_held"] + len("\n<user>two?\n<assistant>") + len(second["tokens"])
    assert 0 < first["device_bytes"] <= first["full_bytes"]
    assert (first["device_bytes"] < first["full_bytes"]) == (first["host_bytes"] > 0) == (settings is QUEST)
    assert first["capacity"] == second["capacity"] == 400 >= second["tokens_held"]


@pytest.mark.slow
def test_the_first_answer_is_that_of_generate(talk, capsys, tiny_model, tmp_path):
    """With full attention, for which it is the same whether the question comes with the document or after it."""
    _, out, _ = talk(["one?"], *talk.book, *FULL, "--json")
    first = json.loads(out)
    (tmp_path / "prompt.txt").write_text(f"{TEXT}\n\none?")
    same = ["generate", tiny_model, "--chat", "--prompt-file", str(tmp_path / "prompt.txt"), *FULL]
    assert main([*same, *LENGTH, "--capacity", str(first["capacity"]), "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["tokens"] == first["tokens"]


def test_the_gauge_stands_below_each_answer_and_why_it_is_large_once(talk, monkeypatch):
    monkeypatch.setattr(chat, "why_larger", lambda report: f"{report.policy.name} has its reasons")
    status, out, err = talk(["one?", "two?"], *talk.book, *FULL)
    assert (status, err) == (0, "")
    assert out.count("(100% of full attention's") == 2
    assert out.count("tokens\n") == 2
    assert out.count("full has its reasons") == 1


def test_a_model_without_a_template_is_asked_in_plain_text(talk, monkeypatch):
    monkeypatch.setattr(chat, "load_model", without_template(chat.load_model))
    _, out, _ = talk(["one?", "two?"], *talk.book, *FULL, "--json")
    first, second = [json.loads(line) for line in out.splitlines()]
    question = "\n\nQuestion: one?\nAnswer:"
    assert first["tokens_held"] == len(TEXT + question) + len(first["tokens"])
    assert second["tokens_held"] == first["tokens_held"] + len(question) + len(second["tokens"])


def without_template(load):
    def changed(args):
        params = load(args)
        params.tokenizer.chat_template = None
        return params

    return changed


def test_an_interrupt_ends_it_cleanly(talk, monkeypatch):
    def interrupted(sign):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    status, out, _ = talk([])
    assert (status, out) == (0, "")


BAD = {
    "no_file": (["--file", "/dev/null/book"], None, "--file must be readable UTF-8 text"),
    "empty": (["--file", "book"], b" \n", "--file must have text in it"),
    "binary": (["--file", "book"], b"GGUF\x00\x01", "got a binary file"),
    "not_utf8": (["--file", "book"], b"\xff\xfe", "--file must be readable UTF-8 text"),
    "room": (["--room", "0"], None, "--room must be at least 1"),
    "both": (["--capacity", "400"], None, "--room must be left out with --capacity"),
    "tokens": (["--max-new-tokens", "0"], None, "--max-new-tokens must be at least 1"),
    "fetch": (["--fetch", "mail"], None, "fetch must be"),
    "full": (["--capacity", "40", "--policy", "full"], None, "prompt + max_new_tokens must be at most capacity=40"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(tiny_model, case, tmp_path, monkeypatch, capsys):
    options, content, told = BAD[case]
    if content is not None:
        (tmp_path / "book").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long question of more than forty tokens\n"))
    room = ["--room", "100"] if case == "both" else []
    assert main(["chat", tiny_model, *room, *options]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert told in line
    assert captured.out == ""


@pytest.mark.parametrize("begun", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["file", "question"])
def test_a_full_conversation_is_told(talk, begun):
    """One that began with a file, or with a question."""
    sizes = {} if begun else {"sizes": ("--room", "120")}
    status, out, err = talk(["a?", "b" * 200], *(talk.book if begun else ()), *FULL, **sizes)
    assert status == 2
    assert "the conversation has room for" in err
    assert out.count("of full attention's") == 1
