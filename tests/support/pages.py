"""README.md and the pages of docs/: their text, their code and their commands."""

import re

from conftest import REPO

DOCS = REPO / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
BENCHMARKS = [f"docs/{page}" for page in PAGES if page.startswith("benchmarks/")]
# Pages that GitHub shows.
GITHUB = {page: (REPO / page).read_text() for page in ("README.md", "BENCHMARKS.md", "CONTRIBUTING.md", *BENCHMARKS)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", text)


def code_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return [body for language, body in FENCE.findall(PAGES.get(page) or GITHUB[page]) if language == "python"]


def shell_lines(text: str) -> list[str]:
    """Every line of a page's commands and of what they print. Continued lines are joined, comments are left out."""
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "console", "bash")]
    lines = [re.sub(r"\s+# .*", "", line) for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ").removeprefix(".venv/bin/").strip() for line in lines]


def command_lines(text: str, *, inline: bool = True) -> list[str]:
    """Every `jshadow ...` of a page's code, also in sentences."""
    lines = shell_lines(text) + (re.findall(r"`(jshadow [^`]*)`", without_code(text)) if inline else [])
    return [line for line in lines if line.startswith("jshadow ")]
