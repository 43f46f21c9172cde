"""docs/add_a_policy.md: its policies, written as they stand there, keep the laws and run in every command."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import byte_models
import pytest
from conftest import REPO
from plugins import strangers

import jshadow
from jshadow.cli.main import main
from jshadow.evaluation.laws import LAWS, run_laws, subject_of
from jshadow.evaluation.plots import plot_memory, style
from jshadow.evaluation.speed import timing
from jshadow.policies import find_policy

PAGE = (REPO / "docs" / "add_a_policy.md").read_text()
BLOCKS = {
    found[1]: block
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    if (found := re.search(r'^    name = "(\w+)"$', block, flags=re.MULTILINE))
}
SNIPPETS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "@register" not in block]
PLACES = {"key_norms": "key_norms:KeyNorms", "page_maxima": "page_maxima:PageMaxima"}
SETTINGS = {"key_norms": "kept=40", "page_maxima": "budget=32"}
MOST_LINES = 60
UNCLAIMED = {
    "key_norms": {"fetch_modes_agree", "steps_leave_the_host_alone"},
    "page_maxima": {"one_program_without_host_rows"},
}


@pytest.fixture
def folder(tmp_path: Path):
    """The files of the page, in the working directory."""
    for name, block in BLOCKS.items():
        (tmp_path / f"{name}.py").write_text(block)
    with strangers(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    jshadow.save(byte_models.PARAMS, path)
    return str(path)


def test_the_page_has_two_small_whole_files():
    assert set(BLOCKS) == set(PLACES)
    for name, block in BLOCKS.items():
        assert block.count("\n") <= MOST_LINES, name
        assert f"Write this to `{name}.py`" in PAGE
        imported = set(re.findall(r"^(?:from|import) (\S+)", block, flags=re.MULTILINE))
        assert imported == {"dataclasses", "jax.numpy", "jshadow.policies"}, "from public modules"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_they_keep_every_law(name, folder):
    outcomes = list(run_laws(subject_of(find_policy(PLACES[name]))))
    assert [outcome.law.name for outcome in outcomes] == list(LAWS)
    assert not [str(broken) for outcome in outcomes for broken in outcome.broken]
    assert {outcome.law.name for outcome in outcomes if outcome.unclaimed} == UNCLAIMED[name]
    assert f"{len(LAWS) - 2} laws kept, 2 not claimed, 0 broken" in PAGE


@pytest.mark.slow
@pytest.mark.process
def test_the_command_works_from_the_folder(folder, capsys):
    """And the page's snippet runs there."""
    env = os.environ | {"PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "jshadow", "laws", "key_norms:KeyNorms", "--law", "consumed_state_says_so"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert re.match(r"ok +consumed_state_says_so \(1 case, [\d.]+ s\)\nkey_norms: 1 law kept", done.stdout)
    [snippet] = SNIPPETS
    exec(compile(snippet, "docs/add_a_policy.md", "exec"), {"KeyNorms": find_policy(PLACES["key_norms"])})
    assert capsys.readouterr().out.startswith("ok A row gives")


def shown(words, capsys) -> dict:
    """What a command prints as JSON."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_and_the_table_of_policies_take_them(checkpoint, folder, capsys):
    sizes = [checkpoint, "--context", "300"]
    for name, setting in SETTINGS.items():
        [plan, *_] = shown(["plan", *sizes, "--policy", PLACES[name], "--set", setting], capsys)["plans"]
        assert plan["chosen"]["policy"]["name"] == name
        assert shown(["policies", "--model", *sizes, "--policies", f"{PLACES[name]}:{setting}"], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_generate_takes_them(name, checkpoint, folder, capsys):
    words = ["generate", checkpoint, "--prompt", "a document " * 12, "--max-new-tokens", "3", "--dtype", "float32"]
    [result] = shown([*words, "--policy", PLACES[name], "--set", SETTINGS[name]], capsys)["results"]
    assert result["report"]["policy"]["name"] == name
    assert len(result["tokens"]) == 3


@pytest.mark.slow
def test_eval_draws_them(checkpoint, folder, capsys):
    """Both are in the results at their share, and in the picture in colors of their own."""
    arguments = ["eval", checkpoint, "--tasks", "agreement", "--lengths", "200", "--samples", "1", "--dtype", "float32"]
    arguments += ["--policies", ",".join(PLACES.values()), "--shares", "0.6", "--out", "results"]
    rows = shown(arguments, capsys)["results"]
    assert {row["name"] for row in rows if row.get("kl") is not None} == {"full", *PLACES}
    figure = plot_memory(rows, measure="kl")
    colors = {line.get_color() for axis in figure.axes for box in axis.containers for line in box.lines[:1]}
    assert {style.look_of(name)["color"] for name in PLACES} <= colors
    assert (folder / "results" / "memory_kl.png").exists()


@pytest.mark.slow
def test_bench(folder, capsys, monkeypatch):
    monkeypatch.setattr(timing, "ON_CPU", (2**16, 32))  # small ceilings
    arguments = ["bench", "layer", "--context", "200", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    arguments += ["--repeats", "1", "--policies", "key_norms:KeyNorms:kept=40", "--fetch", "resident", "--json"]
    arguments += ["--repeats", "1", "--policies", "key_norms:KeyNorms:kept=40", "--fetch", "resident"]
    assert "key_norms" in {row["policy"] for row in shown(arguments, capsys)["results"]}


def test_an_installed_package_is_found_by_name(folder):
    """The page's entry points, as an installer writes them down beside a package."""
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    points = tomllib.loads(text)["project"]["entry-points"]["jshadow.policies"]
    assert points == PLACES
    info = folder / "my_policies-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 0.1\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[jshadow.policies]", *lines, ""]))
    sys.path.insert(0, str(folder))
    assert find_policy("page_maxima").name == "page_maxima"
