"""README.md and the pages of docs/: links lead somewhere, commands and options exist, code runs, figures are true."""

import argparse
import ast
import json
import re

import pytest
import yaml
from conftest import REPO
from pages import BENCHMARKS, DOCS, GITHUB, PAGES, code_of, command_lines, without_code
from real_shapes import LLAMA_31_8B, PAPERS_SHARE, SMOLLM2

from jshadow.cache.system_memory import POOL_VARIABLE
from jshadow.cli.main import main, parser
from jshadow.evaluation.tasks import TASKS
from jshadow.models.published import published_config, published_names
from jshadow.models.registry import FAMILIES, family_of
from jshadow.planner.gpu_specs import GIB, GPUS
from jshadow.planner.machine import footprint
from jshadow.policies import POLICIES, ShadowKV, parse_policy
from jshadow.policies.settings import setting_types

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMON = {"-h", "--help", "--version", "--print-completion", "--json", "--settings", "--no-compile-cache"}
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


def anchors(text: str, spaces: str) -> set[str]:
    """The anchors of a page's headings. A hyphen stands for each match of `spaces`."""
    titles = re.findall(r"^#+ (.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(spaces, "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def options_below(current: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    """The options of a command and of those below it, by their words."""
    found = {option for action in current._actions for option in action.option_strings}
    table = {words: found}
    for action in current._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                table |= {below: found | own for below, own in options_below(parser, (*words, name)).items()}
    return table


OPTIONS = options_below(parser())
COMMANDS = {words[0] for words in OPTIONS if words}


def test_the_navigation_has_every_page_once():
    nav = yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"]
    assert sorted(re.findall(r"[\w/-]+\.md", str(nav))) == sorted(PAGES)


def test_links_lead_to_pages_and_headings():
    by_mkdocs = [(DOCS / page, text, r"\s+") for page, text in PAGES.items()]
    for page, text, spaces in (*by_mkdocs, *((REPO / page, text, " ") for page, text in GITHUB.items())):
        for place, anchor in re.findall(r"\]\((?!https:|mailto:)([^)\s#]*)#?([^)\s]*)\)", without_code(text)):
            path = page.parent / place if place else page
            assert path.exists(), f"{page.name}: {place}"
            assert not anchor or anchor in anchors(path.read_text(), spaces), f"{page.name}: {place}#{anchor}"


def test_pages_on_github_are_short_and_wait_for_no_figure():
    lines = {page: len(text.splitlines()) for page, text in GITHUB.items()}
    assert lines["README.md"] <= 130
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
    every, wrong = set().union(*OPTIONS.values()) | {"--model_args", "--out"}, []  # the first: lm-evaluation-harness's
    for page, text in PAGES.items():
        for line in command_lines(text):
            words = tuple(word for word in line.split()[1:3] if not word.startswith("-"))
            words = words if words and words[0].islower() and not line.split()[1].startswith("-") else ()
            wrong += [line] if words and words[0] not in COMMANDS else []
            known = OPTIONS.get(words) or OPTIONS.get(words[:1]) or OPTIONS[()]
            wrong += [f"{option} in {line}" for option in OPTION.findall(line) if option not in known]
        if "/" not in page:  # benchmarks/ names other programs too
            words = without_code(text)
            if page == "coming_from.md":  # of each row of a table, what jshadow has stands last
                words = re.sub(r"^\|.*\| (.*) \|$", r"\1", words, flags=re.MULTILINE)
            found = re.findall(r"`(--[a-z][a-z_-]*)", words)
            wrong += [f"{option} in {page}" for option in found if option not in every]
    assert not wrong


def rows_of_tables(page: str) -> list[list[str]]:
    """The rows of a page's tables whose first cell is a GPU or a published model, each with its heading before it."""
    heading, rows = "", list[list[str]]()
    for line in PAGES[page].splitlines():
        heading = line.removeprefix("### ") if line.startswith("### ") else heading
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0].strip("`").split("`")[0] in {*GPUS, *published_names()}:
            rows.append([heading, *cells])
    return rows


@pytest.mark.slow
def test_the_bytes_of_a_request_are_the_planner_s():
    """The first table of on_a_gpu.md, in GB: device bytes, and host bytes after a plus sign."""
    rows = [row[1:] for row in rows_of_tables("on_a_gpu.md") if row[1] in published_names()]
    assert len(rows) == 8
    kinds = [("full", [], "resident"), ("quantized", ["dtype=fp8"], "resident")]
    kinds += [("shadowkv", [f"preset={name}"], "device_put") for name in ("packed", "packed_small")]
    for name, tokens, *cells in rows:
        hf, prompt = published_config(name), int(tokens.replace(",", ""))
        config = family_of(hf).config_from_hf(hf)
        for cell, (policy, settings, fetch) in zip(cells, kinds, strict=True):
            sizes = {"capacity": prompt + 64, "prompt": prompt, "fetch": fetch}
            used = footprint(config, parse_policy(policy, settings), **sizes)
            figures = [f"{used[place] / 1e9:.2f}" for place in ("device_bytes", "host_bytes") if used[place]]
            assert cell == " + ".join(figures), (name, tokens, policy)


@pytest.mark.slow
def test_what_fits_on_a_card_is_the_planner_s(capsys):
    """Every third row of the other tables of on_a_gpu.md, by the two commands of that page."""
    rows = [row for row in rows_of_tables("on_a_gpu.md") if row[1] not in published_names()]
    assert len(rows) == 24
    for model, card, weights, tokens, *cells in rows[::3]:
        gpu, size = re.fullmatch(r"`(\S+)` \((\d+) GB\)", card).groups()
        assert 0 < int(size) - GPUS[gpu].memory_bytes / GIB < 4
        words = ["plan", model, "--context", tokens.replace(",", ""), "--gpu", gpu, "--host-gib", "64", "--json"]
        words += [] if weights == "bfloat16" else ["--quantize", weights]
        found = []
        for more in ([], ["--policy", "quantized", "--set", "dtype=fp8"]):
            assert main([*words, *more]) == 0
            found += json.loads(capsys.readouterr().out)["plans"]
        plans = [
            found[0]["full"],
            found[1]["chosen"],
            *(found[0]["beside"][name] for name in ("packed", "packed_small")),
        ]
        speeds = [one["step"] and f"{one['step']['tokens_per_second']:,.0f}" for one in plans]
        rows_that_fit = [one["largest_batch"] if one["prefill_batch"] else 0 for one in plans]
        fits = [f"{count} ({speed})" if count else "–" for count, speed in zip(rows_that_fit, speeds, strict=True)]
        assert cells == fits, (model, card, tokens)


def test_the_reference_has_every_command_and_every_option():
    """Each section of cli.md is a command, and names all of its options; some stand at the top for all commands."""
    sections = dict(re.findall(r"^## jshadow (\S+)\n(.*?)(?=^## |\Z)", PAGES["cli.md"], flags=re.DOTALL | re.MULTILINE))
    assert sections.keys() == COMMANDS
    for name, text in sections.items():
        known = set().union(*(options for words, options in OPTIONS.items() if words[:1] == (name,)))
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
    known = {name for policy in POLICIES.values() for name in setting_types(policy)}
    for page, text in PAGES.items():
        for number, body in enumerate(code_of(page)):
            compile(body, f"{page}, block {number + 1}", "exec")
        for name in re.findall(r"--set ([a-z_.]+)=", text) if page != "add_a_policy.md" else ():
            assert name in known or name.startswith(("dense_first.", "pyramid.", "preset")), f"{page}: {name}"


def test_the_tables_of_methods_models_and_tasks_are_the_library_s():
    named = re.findall(r"^\| `(\w+)` \| `\w+` \|", PAGES["methods.md"], flags=re.MULTILINE)
    assert sorted(named) == sorted(POLICIES)
    for name, source in ((name, policy.source) for name, policy in POLICIES.items() if "arXiv" in policy.source):
        row, *_ = re.findall(rf"^\| `{name}` \| `.*", PAGES["methods.md"], flags=re.MULTILINE)
        assert source.split()[1].rstrip(",") in row or "the same" in row, row
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
        places = {"capacity": capacity, "prompt": capacity - 64, "fetch": "device_put"}
        sizes = [footprint(config, kind, **places)["device_bytes"] for kind in kinds]
        row = f"| {tokens:,} tokens | {sizes[1] / sizes[0]:.2f} | {sizes[2] / sizes[0]:.2f} |"
        assert row in PAGES["key_codes.md"]


def test_the_bytes_of_smollm2_are_the_planner_s():
    """The table of planning.md."""
    for length in (2048, 4096, 8192):
        used = footprint(SMOLLM2, PAPERS_SHARE, capacity=length + 64, prompt=length, fetch="device_put")
        figures = [f"{used['device_bytes']:,}", f"{used['full_bytes']:,}"]
        ratio = f"{used['full_bytes'] / used['device_bytes']:.2f}"
        assert all(f"| {figure} " in PAGES["planning.md"] for figure in (*figures, ratio))


def test_the_figures_of_the_readme_are_those_of_the_pages():
    """Its three numbers, and those for and against, stand on the pages that have their commands."""
    readme = " ".join(GITHUB["README.md"].split())
    packed = footprint(LLAMA_31_8B, ShadowKV.packed(), capacity=131072, prompt=131008, fetch="device_put")
    full, device, host = (packed[name] / 1e9 for name in ("full_bytes", "device_bytes", "host_bytes"))
    assert f"| {full:.2f} GB | **{device:.2f} GB**, and {host:.2f} GB on the host |" in readme
    speeds = PAGES["benchmarks/gpu.md"], PAGES["benchmarks/ruler.md"], PAGES["on_a_gpu.md"]
    for page, row, figures in (
        (speeds[0], "| full attention | 3 | – | 138.5", "138 tokens/s, 3 requests"),
        (speeds[0], "| `packed()`, zero-copy | 22 | 0 % | 594.3", "**594 to 751 tokens/s**, 22 requests"),
        (speeds[0], "| the same | 22 | 60 % | 750.8", "751"),
        (speeds[0], "| the same | 17 | 60 % | 1,238.1", "1,238 tokens/s, 17 requests"),
        (speeds[0], "| full attention | 1.18 s | 140.0", "140 with full attention"),
        (speeds[0], "| 1.35 s | 149.2", "149 with `packed(small=True)`"),
        (speeds[0], "| 1.34 s | 137.4", "137 tokens/s"),
        (speeds[1], "| **50.1** | **35.2** | **44.5** | **48.2** |", "50.1 % | **48.2 %**"),
        (speeds[1], "| **43.9** | **23.6** | **34.3** | **36.4** |", "36.4 % of 43.9 %"),
        (speeds[2], "| 131,008 | 3 (149) | 6 (294) | 12 (1,181) |", "294 tokens/s"),
        (speeds[2], "| 12 (1,181) |", "1,181 for `packed()`"),
    ):
        assert row in page, row
        assert figures in readme, figures


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
