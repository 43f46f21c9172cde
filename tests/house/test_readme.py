"""README.md's code runs as it stands there, on the model it names; the links of every page lead somewhere."""

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


def test_readme_is_short():
    assert README.count("\n") <= 150
    [block] = BLOCKS
    assert block.count("\n") <= 10


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


@pytest.mark.real
def test_the_example_answers(smollm2_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(smollm2_dir.parent)
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    answer, figures = capsys.readouterr().out.strip().splitlines()
    assert "7 crowns" in answer
    device, host, full = map(int, figures.split())
    assert device < full
    assert host > 0


def test_readme_numbers_are_the_planners():
    """The table of bytes in README.md is what `jshadow plan` says."""
    from real_shapes import PAPERS_SHARE, SMOLLM2

    from jshadow.planner.bytes import footprint

    planned = footprint(SMOLLM2, PAPERS_SHARE, capacity=4096 + 64, prompt=4096, fetch="device_put")
    assert f"{planned['device_bytes']:,}" in README
    assert f"{planned['full_bytes']:,}" in README
    assert f"{planned['full_bytes'] / planned['device_bytes']:.2f} times fewer" in README
