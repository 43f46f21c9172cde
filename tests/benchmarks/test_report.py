"""benchmarks/report.py: a well-formed page of its own with every row, in which no text of a row becomes markup."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import plots
import pytest
import report
from result_rows import AGREEMENT, NEEDLES, TURNS, row

from jshadow.errors import ConfigError

VOID = {"meta", "img", "br", "link", "input"}
HOSTILE = '<script>alert("x")</script><img src="http://example.org/x" onerror=alert(1)>\'"&'
FOUND = [*NEEDLES, row("streaming_llm", control_of="shadowkv")]
ROWS = [*FOUND, *AGREEMENT, *TURNS]


class Reader(HTMLParser):
    """A page: its elements with attributes, its text outside scripts and styles, and its tables as lists of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open  # every element is closed
        self.tags = [tag for tag, _ in self.elements]
        self.images = [attributes for tag, attributes in self.elements if tag == "img"]
        self.of_tasks = [table for table in self.tables if table[0][0] == "prompt, tokens"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A report of all rows."""
    path = tmp_path_factory.mktemp("report") / "r.html"
    report.write_report(ROWS, path, command=["jshadow", "eval", "a model", "--tasks", "needle_noise"])
    return Reader(path)


def test_nothing_comes_from_elsewhere(page):
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    for tag, attributes in page.elements:
        assert not {"srcset", "action", "background", "href"} & attributes.keys(), tag
        for name, value in attributes.items():
            assert not re.search(r"https?:|^//", value), (tag, name)
        assert "src" not in attributes or tag == "img"
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.images)
    assert not re.search(r"@import|url\(|https?://", page.source)
    [policy] = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_every_row_is_in_the_table_of_its_task(page):
    assert [len(table) - 1 for table in page.of_tasks] == [len(FOUND), len(AGREEMENT), len(TURNS)]
    needles, agreement = ([dict(zip(head, line, strict=False)) for line in table] for head, *table in page.of_tasks[:2])
    policies = ["full", "shadowkv", "shadowkv", "quest", "kivi", "streaming_llm (control)"]
    assert [line["policy"] for line in needles] == policies
    wanted = {"score, %": "75.0 ± 12.5", "share, %": "50", "device, MB": "20.00"}
    wanted |= {"of full's, %": "50.0", "full / this": "2.00"}
    assert needles[1].items() >= wanted.items()
    assert page.of_tasks[0][5][-1] == "too small"  # why nothing ran
    assert agreement[1].items() >= {"same next token, %": "90.0 ± 1.0", "KL, nats": "0.0300 ± 0.0100"}.items()
    assert "recall of full, %" not in agreement[1]  # a column without a number is left out
    # cells are sorted by their numbers
    assert {1024.0, 75.0, 20.0} <= {float(a["data-value"]) for t, a in page.elements if t == "td" and "data-value" in a}
    assert page.tags.count("script") == 1


def test_pictures_are_whole_and_named(page):
    captions = ["Score against", "Divergence from", "Needles found", "Right answers"]
    for image, caption in zip(page.images, captions, strict=True):
        assert image["alt"].startswith(caption)
        data = base64.b64decode(image["src"].partition("base64,")[2])
        assert data.startswith(b"<?xml")
        assert data.rstrip().endswith(b"</svg>")


def test_machine_versions_and_command_are_told_in_light_and_dark(page):
    assert "jshadow eval 'a model' --tasks needle_noise" in page.text
    told = dict(page.tables[-1])
    assert told["jax"] == jax.__version__
    assert told["python"].count(".") == 2
    assert "cpu" in told["device"]
    assert "cores" in told["processor"]
    assert "prefers-color-scheme: dark" in page.source
    assert "color-scheme: light dark" in page.source


def test_nothing_in_a_row_is_markup(tmp_path):
    texts = ("policy", "name", "task", "infeasible", "control", "fetch", "prefill")
    report.write_report([row(**dict.fromkeys(texts, HOSTILE))], tmp_path / "r.html", command=HOSTILE)
    page = Reader(tmp_path / "r.html")
    assert page.tags.count("script") == 1
    assert all(image["src"].startswith("data:") for image in page.images)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(HOSTILE) >= 6  # escaped in command, task, policy, reason, control, fetch, prefill


@pytest.mark.parametrize("rows", [[], "rows", {"task": 1}, [{"task": "t", "length": 1, "policy": "p"}], [3]], ids=str)
def test_what_are_no_rows_is_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"rows must be|a row must"):
        report.write_report(rows, tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "r.html"
    target.write_text("before")

    def full(self: Path, text: str, **options: Any) -> int:
        self.write_bytes(text[:10].encode())
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match=r"report must be a file that can be written.*No space"):
            report.write_report(ROWS[:1], target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_without_matplotlib_there_are_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "results.json").write_text(json.dumps({"results": ROWS, "command": "a line", "machine": {"jax": "7"}}))
    assert [path.name for path in report.write_results(tmp_path)] == ["report.html"]
    page = Reader(tmp_path / "report.html")
    assert not page.images
    assert len(page.of_tasks) == 3
    assert "a line" in page.text
    assert dict(page.tables[-1]) == {"jax": "7"}  # where the evaluation ran


def test_the_command_draws_results(tmp_path, capsys):
    """From the file of --out, and from what --json printed."""
    (tmp_path / "printed").write_text(json.dumps({"results": ROWS, "pooled": []}))
    turns = tmp_path / "figures.svg"
    assert report.main([str(tmp_path / "printed"), "--plot", str(turns)]) == 0
    names = [*(f"{name}.png" for name in ("memory_score", "memory_kl", "needles", "turns")), "report.html"]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    assert all((tmp_path / name).stat().st_size for name in names)
    assert turns.read_bytes().startswith(b"<?xml")
    assert report.main([str(tmp_path)]) == 2  # no results.json
    assert "results must be a file that jshadow eval wrote" in capsys.readouterr().err
    assert report.main([str(tmp_path / "printed"), "--plot", "turns.gif"]) == 2
    assert "ends with one of" in capsys.readouterr().err
