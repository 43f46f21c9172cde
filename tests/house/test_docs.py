"""The pages of docs/: links lead somewhere, commands and options exist, code compiles, and the navigation is whole."""

import argparse
import ast
import functools
import re
from pathlib import Path

import pytest
import yaml

from jshadow.cli.main import parser
from jshadow.evaluation.tasks import TASKS
from jshadow.models.registry import FAMILIES
from jshadow.policies import POLICIES, parse_policy
from jshadow.policies.settings import setting_types

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
pages = pytest.mark.parametrize("page", PAGES)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
COMMON = {"-h", "--help", "--version", "--print-completion", "--json", "--no-compile-cache"}
# Pages whose code runs from top to bottom on the small model.
RUNNABLE = {
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


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


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
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(nav_pages(nav)) == sorted(PAGES)


@pages
def test_links_lead_to_pages_and_headings(page):
    folder = (DOCS / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[page])):
        if target.startswith(("https://", "mailto:")):
            continue
        place, _, anchor = target.partition("#")
        path = (folder / place).resolve() if place else DOCS / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


@pages
def test_commands_and_their_options_exist(page):
    for line in command_lines(PAGES[page]):
        words = line.split()[1:]
        command = words[0] if words and not words[0].startswith("-") else ""
        assert not command.islower() or command in subcommands(parser()), line
        known = options_of(tuple(word for word in words[:2] if not word.startswith("-")) if command.islower() else ())
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line):
            assert option in known, f"{option} in: {line}"


def test_the_reference_has_every_command_and_every_option():
    """Each section of cli.md is a command, and names all of its options; some stand at the top for all commands."""
    sections = dict(re.findall(r"^## jshadow (\S+)\n(.*?)(?=^## |\Z)", PAGES["cli.md"], flags=re.DOTALL | re.MULTILINE))
    commands = subcommands(parser())
    assert sections.keys() == commands.keys()
    for name, text in sections.items():
        parts = subcommands(commands[name])
        known = set(options_of((name,))).union(*(options_of((name, part)) for part in parts))
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert named | COMMON == known | COMMON, named ^ known


@pytest.mark.parametrize("page", [page for page in PAGES if "/" not in page])  # benchmarks/ names other programs too
def test_options_in_prose_exist(page):
    """An option that stands alone in a sentence belongs to some command, or to a program that is named there."""
    commands = subcommands(parser())
    known = set(options_of(())).union(*(options_of((name,)) for name in commands))
    known |= {"--model_args", "--out", "--help", "--json"}  # the first: lm-evaluation-harness's
    known = known.union(*(options_of((name, part)) for name in commands for part in subcommands(commands[name])))
    for option in re.findall(r"`(--[a-z][a-z_-]*)", without_code(PAGES[page])):
        assert option in known, option


def test_the_interface_page_has_every_public_name():
    """What jshadow/__init__.py imports is described in api.md; modules are not."""
    tree = ast.parse((ROOT / "jshadow" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    public = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert len(public) > 30
    page = re.findall(r"^(?:::: |      heading: )([\w.]+)$", PAGES["api.md"], flags=re.MULTILINE)
    described = {name.rpartition(".")[2] for name in page if name.startswith("jshadow.")}
    assert public - described == {"decode", "policies"}
    for package in ("serving", "library"):
        tree = ast.parse((ROOT / "jshadow" / package / "__init__.py").read_text())
        exported = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert exported <= described


@pages
def test_python_blocks_compile(page):
    for number, (language, body) in enumerate(FENCE.findall(PAGES[page])):
        if language == "python":
            compile(body, f"{page}, block {number + 1}", "exec")


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"add_a_policy.md"}))  # whose policies are its own
def test_set_names_settings_that_exist(page):
    known = {name for policy in POLICIES.values() for name in setting_types(policy)}
    for name in re.findall(r"--set ([a-z_.]+)=", PAGES[page]):
        assert name in known or name.split(".")[0] in ("dense_first", "pyramid"), name


def test_the_table_of_methods_is_the_library_s():
    named = re.findall(r"^\| `(\w+)` \| `\w+` \|", PAGES["methods.md"], flags=re.MULTILINE)
    assert sorted(named) == sorted(POLICIES)
    for name, source in ((name, policy.source) for name, policy in POLICIES.items() if "arXiv" in policy.source):
        number = source.split()[1].rstrip(",")
        row = next(line for line in PAGES["methods.md"].splitlines() if line.startswith(f"| `{name}` |"))
        assert number in row or "the same" in row, row


def test_the_table_of_models_is_the_library_s():
    for name, family in FAMILIES.items():
        assert f"| `{name}` | {family.models} |" in PAGES["models.md"]


def test_tasks_of_the_evaluation_page_exist():
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
    for language, body in FENCE.findall(PAGES[page]):
        if language == "python":
            exec(compile(body, page, "exec"), scope)
    assert {name for name in scope if name in ("policy", "packed", "attention")}


def test_packed_bytes_are_the_planner_s():
    """The table of device bytes in key_codes.md."""
    from jshadow.models.published import published_config
    from jshadow.planner.bytes import footprint

    hf = published_config("llama-3.1-8b")
    config = FAMILIES["llama"].config_from_hf(hf)
    kinds = [parse_policy("shadowkv", []).paper(), *(POLICIES["shadowkv"].packed(small=small) for small in (0, 1))]
    for tokens in (4096, 32768, 131072):
        capacity = min(tokens + 64, config.context)
        sizes = [
            footprint(config, kind, capacity=capacity, prompt=capacity - 64, fetch="device_put")["device_bytes"]
            for kind in kinds
        ]
        row = f"| {tokens:,} tokens | {sizes[1] / sizes[0]:.2f} | {sizes[2] / sizes[0]:.2f} |"
        assert row in PAGES["key_codes.md"]


@pytest.mark.slow
def test_the_plans_are_the_planner_s(capsys, monkeypatch):
    """planning.md: the table of SmolLM2's bytes, and the rows of the GPU plan. server.md: the rows of its plan."""
    from real_shapes import LLAMA_31_8B, PAPERS_SHARE, SMOLLM2

    from jshadow.cache.host_memory import POOL_VARIABLE
    from jshadow.cli.main import main
    from jshadow.planner.bytes import footprint

    page = PAGES["planning.md"]
    for length in (2048, 4096, 8192):
        used = footprint(SMOLLM2, PAPERS_SHARE, capacity=length + 64, prompt=length, fetch="device_put")
        for figure in (f"{used['device_bytes']:,}", f"{used['full_bytes']:,}"):
            assert f"| {figure} " in page
        assert f"| {used['full_bytes'] / used['device_bytes']:.2f} " in page
    sizes = {"capacity": 131072, "prompt": 1024, "fetch": "device_put"}
    for room in (None, 1024):
        row = footprint(LLAMA_31_8B, POLICIES["shadowkv"](budget=2048), **sizes, room=room)
        assert f" {row['device_bytes'] / 2**30:.1f} GiB" in page
    monkeypatch.delenv(POOL_VARIABLE, raising=False)
    plan = ["plan", "llama-3.1-8b", "--context", "122880", "--gpu", "h200"]
    assert main(plan) == 0
    assert main([*plan, "--room", "1024", "--host-gib", "128", "--shared", "30"]) == 0
    shorter = ["plan", "llama-3.1-8b", "--context", "31744", "--gpu", "h200"]
    assert main([*shorter, "--room", "1024", "--host-gib", "256", "--shared", "40"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    texts = [*page.splitlines(), *PAGES["server.md"].splitlines()]
    rows = [line.split() for line in texts if line.startswith("│") and "shadowkv" not in line]
    assert len(rows) > 10
    assert all(row in printed for row in rows)


@pytest.mark.real
@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run_on_the_small_model(page, smollm2_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(smollm2_dir.parent)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for language, body in FENCE.findall(PAGES[page]):
        if language == "python":
            exec(compile(body, page, "exec"), scope)
    assert RUNNABLE[page] in capsys.readouterr().out
