"""README.md and the pages of docs/: links lead somewhere, commands and options exist, code runs, figures are true."""

import argparse
import ast
import functools
import re

import pytest
import yaml
from conftest import REPO
from real_shapes import LLAMA_31_8B, PAPERS_SHARE, SMOLLM2

from jshadow.cache.host_memory import POOL_VARIABLE
from jshadow.cli.main import main, parser
from jshadow.evaluation.tasks import TASKS
from jshadow.models.published import published_config
from jshadow.models.registry import FAMILIES
from jshadow.planner.bytes import footprint
from jshadow.policies import POLICIES, parse_policy
from jshadow.policies.settings import setting_types

DOCS = REPO / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
BENCHMARKS = [f"docs/{page}" for page in PAGES if page.startswith("benchmarks/")]
# Pages that GitHub shows.
GITHUB = {page: (REPO / page).read_text() for page in ("README.md", "BENCHMARKS.md", "CONTRIBUTING.md", *BENCHMARKS)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMON = {"-h", "--help", "--version", "--print-completion", "--json", "--no-compile-cache"}
# Pages whose code runs from top to bottom on the small model.
RUNNABLE = {
    "README.md": "7 crowns",
    "getting_started.md": "Paris",
    "batching.md": "def add(a, b):",
    "saved_states.md": "7 crowns",
    "library.md": "7 crowns",
    "serving.md": "7 crowns",
    "speculation.md": "dried fish",
}


def without_code(text: str) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", text)


def code_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return [body for language, body in FENCE.findall(PAGES.get(page) or GITHUB[page]) if language == "python"]


def anchors(text: str, spaces: str) -> set[str]:
    """The anchors of a page's headings. A hyphen stands for each match of `spaces`."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(spaces, "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def nav_pages(entry: object) -> list[str]:
    """All pages of a navigation tree."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in nav_pages(part)]  # type: ignore[attr-defined]


@functools.cache
def options_of(words: tuple[str, ...]) -> frozenset[str]:
    """The options of `jshadow WORDS...`, the subcommand's where it has one."""
    current: argparse.ArgumentParser | None = parser()
    options: set[str] = set()
    for word in ("", *words):
        assert current is not None
        if word:
            current = subcommands(current).get(word)
        if current is None:
            break
        options |= {option for action in current._actions for option in action.option_strings}
    return frozenset(options)


def subcommands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands below a parser, by name."""
    found = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def command_lines(text: str) -> list[str]:
    """Every `jshadow ...` of a page's code, with continued lines joined and comments left out."""
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "console", "bash")]
    lines = [re.sub(r"\s+# .*", "", line) for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    lines = [line.removeprefix("$ ").strip() for line in lines]
    inline = re.findall(r"`(jshadow [^`]*)`", without_code(text))
    return [line for line in [*lines, *inline] if line.startswith("jshadow ")]


def test_the_navigation_has_every_page_once():
    nav = yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"]
    assert sorted(nav_pages(nav)) == sorted(PAGES)


def test_links_lead_to_pages_and_headings():
    wrong = []
    by_mkdocs, by_github = [(DOCS / page, text, r"\s+") for page, text in PAGES.items()], GITHUB.items()
    for page, text, spaces in (*by_mkdocs, *((REPO / page, text, " ") for page, text in by_github)):
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            place, _, anchor = target.partition("#")
            path = page.parent / place if place else page
            if not target.startswith(("https://", "mailto:")) and not (
                path.exists() and (not anchor or anchor in anchors(path.read_text(), spaces))
            ):
                wrong.append(f"{page.name}: {target}")
    assert not wrong


def test_pages_on_github_are_short_and_wait_for_no_figure():
    lines = {page: len(text.splitlines()) for page, text in GITHUB.items()}
    assert lines["README.md"] <= 150
    assert lines["BENCHMARKS.md"] <= 50
    assert BENCHMARKS
    assert max(lines[page] for page in BENCHMARKS) <= 300
    assert all(f"({page})" in GITHUB["BENCHMARKS.md"] for page in BENCHMARKS)
    [block] = code_of("README.md")
    assert block.count("\n") <= 10
    for page, text in GITHUB.items():
        assert not re.findall(r"[A-Z]+_(?:TABLE|COUNT|TODO)|TODO|FIXME|XXX", text), page


def test_commands_and_their_options_exist():
    """An option that stands alone in a sentence belongs to some command, or to a program that is named there."""
    commands, wrong = subcommands(parser()), []
    every = set(options_of(())).union(*(options_of((name,)) for name in commands))
    every |= {"--model_args", "--out", "--help", "--json"}  # the first: lm-evaluation-harness's
    every = every.union(*(options_of((name, part)) for name in commands for part in subcommands(commands[name])))
    for page, text in PAGES.items():
        for line in command_lines(text):
            words = line.split()[1:]
            command = words[0] if words and not words[0].startswith("-") else ""
            named = tuple(word for word in words[:2] if not word.startswith("-")) if command.islower() else ()
            wrong += [line] if command.islower() and command not in commands else []
            wrong += [f"{option} in {line}" for option in OPTION.findall(line) if option not in options_of(named)]
        if "/" not in page:  # benchmarks/ names other programs too
            found = re.findall(r"`(--[a-z][a-z_-]*)", without_code(text))
            wrong += [f"{option} in {page}" for option in found if option not in every]
    assert not wrong


def test_the_reference_has_every_command_and_every_option():
    """Each section of cli.md is a command, and names all of its options; some stand at the top for all commands."""
    sections = dict(re.findall(r"^## jshadow (\S+)\n(.*?)(?=^## |\Z)", PAGES["cli.md"], flags=re.DOTALL | re.MULTILINE))
    commands = subcommands(parser())
    assert sections.keys() == commands.keys()
    for name, text in sections.items():
        parts = subcommands(commands[name])
        known = set(options_of((name,))).union(*(options_of((name, part)) for part in parts))
        named = set(OPTION.findall(text))
        assert named | COMMON == known | COMMON, named ^ known


def test_the_interface_page_has_every_public_name():
    """What jshadow/__init__.py imports is described in api.md; modules are not."""
    tree = ast.parse((REPO / "jshadow" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    public = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert len(public) > 30
    page = re.findall(r"^(?:::: |      heading: )([\w.]+)$", PAGES["api.md"], flags=re.MULTILINE)
    described = {name.rpartition(".")[2] for name in page if name.startswith("jshadow.")}
    assert public - described == {"decode", "policies"}
    for package in ("serving", "library"):
        tree = ast.parse((REPO / "jshadow" / package / "__init__.py").read_text())
        exported = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert exported <= described


def test_python_blocks_compile_and_set_names_settings_that_exist():
    known = {name for policy in POLICIES.values() for name in setting_types(policy)} | {"dense_first", "pyramid"}
    for page, text in PAGES.items():
        for number, body in enumerate(code_of(page)):
            compile(body, f"{page}, block {number + 1}", "exec")
        for name in re.findall(r"--set ([a-z_.]+)=", text) if page != "add_a_policy.md" else ():
            assert name in known or name.split(".")[0] in known, f"{page}: {name}"


def test_the_tables_of_methods_models_and_tasks_are_the_library_s():
    named = re.findall(r"^\| `(\w+)` \| `\w+` \|", PAGES["methods.md"], flags=re.MULTILINE)
    assert sorted(named) == sorted(POLICIES)
    for name, source in ((name, policy.source) for name, policy in POLICIES.items() if "arXiv" in policy.source):
        number = source.split()[1].rstrip(",")
        row = next(line for line in PAGES["methods.md"].splitlines() if line.startswith(f"| `{name}` |"))
        assert number in row or "the same" in row, row
    for name, family in FAMILIES.items():
        assert f"| `{name}` | {family.models} |" in PAGES["models.md"]
    section = PAGES["evaluation.md"].split("## Tasks")[1].split("## Equal")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w*]+)`", row)}
    for task in TASKS:
        assert task in named or any(name.endswith("*") and task.startswith(name[:-1]) for name in named), task
    assert all(name in TASKS or name.endswith("*") for name in named)


@pytest.mark.parametrize("page", ["shadowkv.md", "key_codes.md", "methods.md", "sparse_prefill.md", "long_outputs.md"])
def test_short_examples_run(page):
    """Blocks that only build policies and settings."""
    scope: dict[str, object] = {}
    for body in code_of(page):
        exec(compile(body, page, "exec"), scope)
    assert {name for name in scope if name in ("policy", "packed", "attention")}


def test_packed_bytes_are_the_planner_s():
    """The table of device bytes in key_codes.md."""
    config = FAMILIES["llama"].config_from_hf(published_config("llama-3.1-8b"))
    kinds = [parse_policy("shadowkv", []).paper(), *(POLICIES["shadowkv"].packed(small=small) for small in (0, 1))]
    for tokens in (4096, 32768, 131072):
        capacity = min(tokens + 64, config.context)
        capacity = min(tokens + 64, config.context)
        places = {"capacity": capacity, "prompt": capacity - 64, "fetch": "device_put"}
        sizes = [footprint(config, kind, **places)["device_bytes"] for kind in kinds]
        row = f"| {tokens:,} tokens | {sizes[1] / sizes[0]:.2f} | {sizes[2] / sizes[0]:.2f} |"
        assert row in PAGES["key_codes.md"]


def test_the_bytes_of_smollm2_are_the_planner_s():
    """The tables of README.md and of planning.md."""
    for length in (2048, 4096, 8192):
        used = footprint(SMOLLM2, PAPERS_SHARE, capacity=length + 64, prompt=length, fetch="device_put")
        figures = [f"{used['device_bytes']:,}", f"{used['full_bytes']:,}"]
        ratio = f"{used['full_bytes'] / used['device_bytes']:.2f} "
        assert all(f"| {figure} " in PAGES["planning.md"] for figure in (*figures, ratio.strip()))
        if length == 4096:
            assert all(figure in GITHUB["README.md"] for figure in (*figures, f"{ratio}times fewer"))


@pytest.mark.slow
def test_the_plans_are_the_planner_s(capsys, monkeypatch):
    """The rows of the GPU's plan in planning.md, and of the plan in server.md."""
    sizes = {"capacity": 131072, "prompt": 1024, "fetch": "device_put"}
    for room in (None, 1024):
        row = footprint(LLAMA_31_8B, POLICIES["shadowkv"](budget=2048), **sizes, room=room)
        assert f" {row['device_bytes'] / 2**30:.1f} GiB" in PAGES["planning.md"]
    monkeypatch.delenv(POOL_VARIABLE, raising=False)
    for words in (
        "122880",
        "122880 --room 1024 --host-gib 128 --shared 30",
        "31744 --room 1024 --host-gib 256 --shared 40",
    ):
        assert main(["plan", "llama-3.1-8b", "--gpu", "h200", "--context", *words.split()]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    texts = [*PAGES["planning.md"].splitlines(), *PAGES["server.md"].splitlines()]
    rows = [line.split() for line in texts if line.startswith("│") and "shadowkv" not in line]
    assert len(rows) > 10
    assert all(row in printed for row in rows)


@pytest.mark.real
@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run_on_the_small_model(page, smollm2_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(smollm2_dir.parent)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for body in code_of(page):
        exec(compile(body, page, "exec"), scope)
    out = capsys.readouterr().out
    assert RUNNABLE[page] in out
    if page == "README.md":
        device, host, full = map(int, out.strip().splitlines()[-1].split())
        assert device < full
        assert host > 0
