"""The HTML report: it is well-formed and self-contained, has every row, and no text of a row becomes markup."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from result_rows import AGREEMENT, NEEDLES, TURNS, row
from tiny_text import byte_tokenizer

from jshadow.errors import ConfigError
from jshadow.evaluation import html, plots, runner
from jshadow.models.config import ModelConfig
from jshadow.policies import Quest, ShadowKV
from jshadow.weights.params import Params, init_params

VOID = {"meta", "img", "br", "link", "input"}
HOSTILE = '<script>alert("x")</script><img src="http://example.org/x" onerror=alert(1)>\'"&'


class Reader(HTMLParser):
    """A parser that collects elements with attributes, text outside scripts and styles, and tables as lists of rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


def read(path: Path) -> Reader:
    found = Reader(path.read_text(encoding="utf-8"))
    assert not found.open  # every element is closed
    return found


ROWS = [*NEEDLES, *AGREEMENT, *TURNS]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of all rows, which is only read."""
    path = tmp_path_factory.mktemp("report") / "r.html"
    html.write_report(ROWS, path, command=["jshadow", "eval", "a model", "--tasks", "needle_noise"])
    return path


@pytest.fixture(scope="module")
def page(file: Path) -> Reader:
    return read(file)


def test_nothing_comes_from_elsewhere(page, file):
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert name not in ("srcset", "action", "background", "href"), (tag, name)
            assert not re.search(r"https?:|^//", value or ""), (tag, name)
            if name == "src":
                assert tag == "img"
                assert value.startswith("data:image/svg+xml;base64,")  # type: ignore[union-attr]
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"@import|url\(|https?://", text)
    [policy] = [a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")  # type: ignore[union-attr]


def test_every_row_is_in_the_table_of_its_task(page):
    tables = [table for table in page.tables if table[0][0] == "prompt, tokens"]
    assert [len(table) - 1 for table in tables] == [len(NEEDLES), len(AGREEMENT), len(TURNS)]
    needles = [dict(zip(tables[0][0], line, strict=False)) for line in tables[0][1:]]
    assert [line["policy"] for line in needles] == ["full", "shadowkv", "shadowkv", "quest", "kivi"]
    assert needles[1]["score, %"] == "75.0 ± 12.5"
    assert needles[1]["share, %"] == "50"
    assert needles[1]["device, MB"] == "20.00"
    assert needles[1]["of full's, %"] == "50.0"
    assert needles[1]["full / this"] == "2.00"
    assert tables[0][5][-1] == "too small"  # why nothing ran
    agreement = [dict(zip(tables[1][0], line, strict=True)) for line in tables[1][1:]]
    assert agreement[1]["same next token, %"] == "90.0 ± 1.0"
    assert agreement[1]["KL, nats"] == "0.0300 ± 0.0100"
    assert "recall of full, %" not in agreement[1]  # a column without a number is left out


def test_cells_are_sorted_by_their_numbers(page):
    values = [float(a["data-value"]) for t, a in page.elements if t == "td" and "data-value" in a]  # type: ignore[arg-type]
    assert {1024.0, 75.0, 20.0} <= set(values)
    assert [t for t, _ in page.elements].count("script") == 1


def test_pictures_are_whole_and_named(page):
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    captions = ["Score against", "Divergence from", "Needles found", "Right answers"]
    assert len(images) == len(captions)
    for image, caption in zip(images, captions, strict=True):
        assert image["alt"].startswith(caption)  # type: ignore[union-attr]
        data = base64.b64decode(image["src"].partition("base64,")[2])  # type: ignore[union-attr]
        assert data.startswith(b"<?xml")
        assert data.rstrip().endswith(b"</svg>")


def test_machine_versions_and_command_are_told(page):
    import jax

    assert "jshadow eval 'a model' --tasks needle_noise" in page.text
    told = dict(page.tables[-1])  # type: ignore[arg-type]
    assert told["jax"] == jax.__version__
    assert told["Python"].count(".") == 2
    assert "cpu" in told["device"]
    assert "cores" in told["processor"]


def test_light_and_dark(file):
    text = file.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "color-scheme: light dark" in text


def test_nothing_in_a_row_is_markup(tmp_path):
    bad = row(
        policy=HOSTILE, name=HOSTILE, task=HOSTILE, infeasible=HOSTILE, control=HOSTILE, fetch=HOSTILE, prefill=HOSTILE
    )
    html.write_report([bad], tmp_path / "r.html", command=HOSTILE)
    page = read(tmp_path / "r.html")
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1
    assert all(attributes["src"].startswith("data:") for tag, attributes in page.elements if tag == "img")  # type: ignore[union-attr]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(HOSTILE) >= 6  # escaped in command, task, policy, reason, control, fetch, prefill


@pytest.mark.parametrize("rows", [[], "rows", {"task": 1}, [{"task": "t", "length": 1, "policy": "p"}], [3]], ids=str)
def test_what_are_no_rows_is_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"rows must be|a row must"):
        html.write_results(rows, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "r.html"
    target.write_text("before")

    def full(self: Path, text: str, **options: Any) -> int:
        self.write_bytes(text[:10].encode())
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match=r"report must be a file that can be written.*No space"):
            html.write_report(ROWS[:1], target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out must be a directory"):
        html.write_results(ROWS[:1], tmp_path / "file")


@pytest.mark.slow
@pytest.mark.usefixtures("made_up")
def test_results_of_an_evaluation(tmp_path):
    config = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
    made = init_params(config, seed=1)
    params = Params(made.weights, made.config, byte_tokenizer())
    rows = runner.evaluate(
        params,
        ["agreement", "needle_noise"],
        [420],
        [ShadowKV(rank=8, budget=32, outlier_chunks=2), Quest()],
        samples=2,
        out=tmp_path,
    )
    rows = json.loads(json.dumps(rows))  # as `--json` prints them
    written = html.write_results(rows, tmp_path, "jshadow eval")
    names = [path.name for path in written]
    assert names[-1] == "report.html"
    assert {"memory_score.png", "memory_kl.png"} <= set(names)
    assert set(names) | {"samples.jsonl"} == {path.name for path in tmp_path.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[:-1])
    page = read(tmp_path / "report.html")
    policies = [line[1] for table in page.tables if table[0][0] == "prompt, tokens" for line in table[1:]]
    assert policies.count("full") == policies.count("quest") == 2
    assert "streaming_llm" in " ".join(policies)
    assert "(control)" in " ".join(policies)


def test_without_matplotlib_there_are_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.results.importlib.util, "find_spec", lambda name: None)
    assert [path.name for path in html.write_results(ROWS, tmp_path)] == ["report.html"]
    page = read(tmp_path / "report.html")
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert sum(table[0][0] == "prompt, tokens" for table in page.tables) == 3
