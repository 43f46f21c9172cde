"""`jshadow chat` on a pipe: turns on one document, with a gauge below each answer."""

import io
import json
import re
import sys

import pytest
from command_line import CAPACITY, FULL, LENGTH, QUEST, TEXT
from few import slow

from jshadow.cli import chat
from jshadow.cli.main import main
from jshadow.engine import decode


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


@pytest.mark.parametrize("settings", [FULL, slow(QUEST)], ids=["full", "quest"])
def test_turns_extend_one_state(talk, settings, monkeypatch):
    calls, prefill = [], decode.prefill_many
    monkeypatch.setattr(decode, "prefill_many", lambda *given, **named: calls.append(1) or prefill(*given, **named))
    status, out, _ = talk(["one?", "", "two?", "/quit", "three?"], *talk.book, *settings, "--json")
    assert (status, len(calls)) == (0, 1)
    first, second = map(json.loads, out.splitlines())
    assert [(turn["turn"], turn["question"]) for turn in (first, second)] == [(1, "one?"), (2, "two?")]
    assert first["tokens_held"] == len(f"<user>{TEXT}\n\none?\n<assistant>") + len(first["tokens"])
    # the state holds all tokens of an answer, and the template's end of the answer comes before the next question
    assert second["tokens_held"] == first["tokens_held"] + len("\n<user>two?\n<assistant>") + len(second["tokens"])
    assert 0 < first["device_bytes"] <= first["full_bytes"]
    assert (first["device_bytes"] < first["full_bytes"]) == (first["host_bytes"] > 0) == (settings is QUEST)
    assert first["capacity"] == second["capacity"] == 400 >= second["tokens_held"]


@pytest.mark.slow
def test_the_first_answer_is_that_of_generate(talk, answer, tiny_model, tmp_path):
    """With full attention, for which it is the same whether the question comes with the document or after it."""
    _, out, _ = talk(["one?"], *talk.book, *FULL, "--json")
    (tmp_path / "prompt.txt").write_text(f"{TEXT}\n\none?")
    same = ["generate", tiny_model, "--chat", "--prompt-file", tmp_path / "prompt.txt", *FULL]
    [result] = answer(*same, *LENGTH, *CAPACITY)["results"]
    assert result["tokens"] == json.loads(out)["tokens"]


def test_the_gauge_stands_below_each_answer_and_why_it_is_large_once(talk, monkeypatch):
    monkeypatch.setattr(chat, "why_larger", lambda report: f"{report.policy.name} has its reasons")
    status, out, err = talk(["one?", "two?"], *talk.book, *FULL)
    assert (status, err) == (0, "")
    assert [out.count(told) for told in ("(100% of full attention's", "tokens\n", "full has its reasons")] == [2, 2, 1]
    assert re.findall(r"\[([█░]*)\]", out) == ["█" * chat.GAUGE_CELLS] * 2


def test_a_model_without_a_template_is_asked_in_plain_text(talk, monkeypatch):
    load = chat.load_model

    def without_template(args):
        params = load(args)
        params.tokenizer.chat_template = None
        return params

    monkeypatch.setattr(chat, "load_model", without_template)
    _, out, _ = talk(["one?", "two?"], *talk.book, *FULL, "--json")
    first, second = map(json.loads, out.splitlines())
    question = "\n\nQuestion: one?\nAnswer:"
    assert first["tokens_held"] == len(TEXT + question) + len(first["tokens"])
    assert second["tokens_held"] == first["tokens_held"] + len(question) + len(second["tokens"])


def test_an_interrupt_ends_it_cleanly(talk, monkeypatch):
    def interrupted(sign):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert talk([])[:2] == (0, "")


@pytest.mark.parametrize("begun", [True, slow(False)], ids=["file", "question"])
def test_a_full_conversation_is_told(talk, begun):
    """One that began with a file, or with a question."""
    sizes = {} if begun else {"sizes": ("--room", "120")}
    status, out, err = talk(["a?", "b" * 200], *(talk.book if begun else ()), *FULL, **sizes)
    assert status == 2
    assert "the conversation has room for" in err
    assert out.count("of full attention's") == 1


BAD = [
    (["--file", "/dev/null/book"], None, "--file must be readable UTF-8 text"),
    (["--file", "book"], b" \n", "--file must have text in it"),
    (["--file", "book"], b"GGUF\x00\x01", "got a binary file"),
    (["--file", "book"], b"\xff\xff", "--file must be readable UTF-8 text"),
    (["--room", "0"], None, "--room must be at least 1"),
    (["--room", "100", "--capacity", "400"], None, "--room must be left out with --capacity"),
    (["--max-new-tokens", "0"], None, "--max-new-tokens must be at least 1"),
    (["--fetch", "mail"], None, "fetch must be"),
    (["--capacity", "40", "--policy", "full"], None, "prompt + max_new_tokens must be at most capacity=40"),
]


@pytest.mark.parametrize(("options", "content", "told"), BAD)
def test_bad_options_are_one_line(refused, tiny_model, options, content, told, tmp_path, monkeypatch):
    (tmp_path / "book").write_bytes(content or b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long question of more than forty tokens\n"))
    assert refused(told, "chat", tiny_model, *options).count("\n") == 1
