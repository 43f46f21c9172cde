"""README.md's code runs as it stands there, on the model it names; the links of every page lead somewhere."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
BENCHMARKS = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/benchmarks/*.md"))]
PAGES = ["README.md", "BENCHMARKS.md", "CONTRIBUTING.md", *BENCHMARKS]
pages = pytest.mark.parametrize("page", PAGES)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_examples_are_as_long_as_they_say():
    assert len(BLOCKS) == 3
    assert BLOCKS[0].count("\n") <= 10
    assert BLOCKS[1].count("\n") <= 23
    assert BLOCKS[2].count("\n") <= 14


@pages
def test_no_page_waits_for_a_figure(page):
    assert not re.findall(r"[A-Z]+_(?:TABLE|COUNT|TODO)|TODO|FIXME|XXX", (ROOT / page).read_text())


@pages
def test_links_lead_to_a_file_and_to_a_heading_in_it(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_benchmarks_is_an_index_of_short_pages():
    text = (ROOT / "BENCHMARKS.md").read_text()
    assert BENCHMARKS
    assert all(f"({page})" in text for page in BENCHMARKS)
    assert len(text.splitlines()) <= 50
    assert max(len((ROOT / page).read_text().splitlines()) for page in BENCHMARKS) <= 300


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_example(index, smollm2_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(smollm2_dir.parent)
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[index], f"README.md, example {index + 1}", "exec"), {})
    out = capsys.readouterr().out
    expected = (("Paris", "nothing to select"), ("def add(a, b):", "The three primary colours"), ("1998", "7 crowns"))
    assert all(text in out for text in expected[index]), out


def test_readme_numbers_are_the_planners():
    """The table of bytes in README.md is what `jshadow plan` says."""
    from real_shapes import PAPERS_SHARE, SMOLLM2

    from jshadow.planner.bytes import footprint

    for length in (2048, 4096, 8192):
        made = footprint(SMOLLM2, PAPERS_SHARE, capacity=length + 64, prompt=length, fetch="device_put")
        assert f"{made['device_bytes']:,}" in README
        assert f"{made['full_bytes']:,}" in README
        assert f"{made['full_bytes'] / made['device_bytes']:.2f}" in README


def test_readme_s_plan_is_the_planner_s(tmp_path, capsys, monkeypatch):
    """Every line of the GPU plan in README.md is printed by the command above it."""
    from real_shapes import LLAMA_31_8B_JSON

    from jshadow.cache.host_memory import POOL_VARIABLE
    from jshadow.cli.main import main

    monkeypatch.delenv(POOL_VARIABLE, raising=False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    assert main(["plan", str(tmp_path / "config.json"), "--context", "122880", "--gpu", "h200"]) == 0
    [block] = [block for block in README.split("```")[1::2] if "│ largest batch" in block]
    assert block.strip() in capsys.readouterr().out
