"""Policies from outside: those of docs/add_a_policy.md, and bad ones, whose errors and broken laws say why."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import byte_models
import plots
import pytest
from conftest import REPO
from plots import plot_memory
from plugins import strangers

import jshadow
from jshadow.cli.main import main
from jshadow.evaluation import speed
from jshadow.evaluation.laws import LAWS, LawBroken, run_laws, subject_of
from jshadow.policies import POLICIES, find_policy, parse_policy, split_policy
from jshadow.policies.settings import policy_settings

PAGE = (REPO / "docs" / "add_a_policy.md").read_text()
*FILES, SNIPPET = sorted(
    re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL), key=lambda it: "@register" not in it
)
BLOCKS = {re.findall(r'^    name = "(\w+)"$', block, flags=re.MULTILINE)[0]: block for block in FILES}
# Keeps the newest tokens; what comes in place of the marks makes it bad in one way each.
GOOD = """
import dataclasses
import jax.numpy as jnp
from jshadow.policies import EvictingPolicy, Policy, register

@register(small={"kept": 12}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class Newest(EvictingPolicy):
    kept: int = 64
    name = "newest"

    def slots(self, capacity):
        return min(self.kept, capacity)

    def score(self, spec, prompt):
        position = jnp.arange(prompt.k_post.shape[1], dtype=jnp.float32)
        shape = (spec.batch, spec.kv_heads, prompt.k_post.shape[1])
        return jnp.broadcast_to(position, shape), jnp.zeros_like(prompt.lengths)
"""
# Writes the tokens of rows that pause as well.
IGNORES_VALID = f"""{GOOD}
    def append(self, spec, state, step):
        return super().append(spec, state, step.replace(valid=jnp.ones_like(step.valid)))
"""
# Attends to other tokens where its rows would be offloaded.
BY_MODE = """
import dataclasses
from jshadow.policies import RetrievalPolicy, register

@register(small={"budget": 12, "unit": 4}, lossless=lambda tokens, config: {"budget": tokens, "unit": 4})
@dataclasses.dataclass(frozen=True)
class ByMode(RetrievalPolicy):
    budget: int = 64
    unit: int = 4
    recent: int = 1
    top_p: float = 1.0
    name = "by_mode"

    def summarize(self, spec, keys, there, basis):
        return keys[:, :, :, 0]

    def score(self, spec, summaries, q, basis):
        scores = (q[:, :, :1] * 1.0 @ summaries[:, :, None].swapaxes(-1, -2))[:, :, 0]
        return scores if spec.fetch == "resident" else -scores
"""
NO_LOSSLESS = GOOD.replace(', lossless=lambda tokens, config: {"kept": tokens}', "")
BREAKS_DOWN = NO_LOSSLESS.replace("jnp.zeros_like(prompt.lengths)", "prompt.length")


@pytest.fixture
def folder(tmp_path: Path):
    """The working directory, with the files of the page."""
    for name, block in BLOCKS.items():
        (tmp_path / f"{name}.py").write_text(block)
    with strangers(tmp_path):
        yield tmp_path


def laws(folder: Path, text: str, *options: str) -> int:
    """The exit status of `jshadow laws` on the policy of a file."""
    (folder / "stranger.py").write_text(text)
    return main(["laws", f"stranger:{'ByMode' if 'ByMode' in text else 'Newest'}", *options])


NEWEST = "stranger:Newest"
ABSTRACT = GOOD.replace("def slots", "def places")
NO_DATACLASS = GOOD.replace("@dataclasses.dataclass(frozen=True)\n", "")
NOT_FROZEN = GOOD.replace("(frozen=True)", "(unsafe_hash=True)")
FROZEN = "policy must be a frozen dataclass, got 'stranger:Newest'"
NO_DEFAULT = "policy must have defaults for all settings, got 'stranger:Newest' with none for kept"
TAKEN = "must be unique, got 'quest' of stranger:Newest and jshadow.policies.quest:Quest"
WRONG_SMALL = GOOD.replace('small={"kept"', 'small={"keep"')
SETTINGS = "the small settings of newest has the settings ['kept'], got 'keep'; the nearest: kept"
REFUSED = [
    # a file, what follows `jshadow laws`, and parts of the message
    ("class Newest:\n    pass\n", NEWEST, "must be a subclass of jshadow.policies.Policy"),
    ("def Newest():\n    pass\n", NEWEST, "must be a subclass of jshadow.policies.Policy"),
    (ABSTRACT, NEWEST, "policy must define slots, got 'stranger:Newest' without them"),
    (NO_DATACLASS, NEWEST, FROZEN),
    (NOT_FROZEN, NEWEST, FROZEN),
    (GOOD.replace("kept: int = 64", "kept: int"), NEWEST, NO_DEFAULT),
    (GOOD.replace('name = "newest"', ""), NEWEST, "a policy's name must be an identifier, got ''"),
    (GOOD.replace('"newest"', '"the newest"'), NEWEST, "must be an identifier, got 'the newest'"),
    (GOOD.replace('"newest"', '"quest"'), NEWEST, TAKEN),
    ("class Newest\n", NEWEST, "stranger:Newest': SyntaxError"),
    ("import no_such_module\n", NEWEST, "ModuleNotFoundError: No module named 'no_such_module'"),
    (WRONG_SMALL, NEWEST, SETTINGS),
    (GOOD, "strangr:Newest", "module that can be imported, got 'strangr:Newest'|did you mean stranger?"),
    (GOOD, "stranger:Newst", "must name a class of stranger, got 'Newst'|did you mean Newest?"),
    (GOOD, "stranger:", "must name a class of stranger, got ''"),
    (GOOD, ":Newest", "module that can be imported, got ':Newest'"),
    (GOOD, "newst", "must be one of ['adakv', 'expected_attention', |or module:Class, got 'newst'"),
    (GOOD, "qest", "did you mean quest?"),
    (GOOD, f"{NEWEST} --law gravity", "law must be one of lossless_is_full, "),
    (GOOD, f"{NEWEST} --fetch resident,carrier", "must be among resident, device_put, zero_copy, got 'carrier'"),
    (GOOD, f"{NEWEST} --set budget=3", "--set must be KEY=VALUE with a key of stranger:Newest ['kept']"),
    (
        GOOD,
        f"{NEWEST} --set dense_first.layers=1",
        "must be a setting of stranger:Newest itself, got one of dense_first",
    ),
    (GOOD, "", "policy must be a name or module:Class, got none"),
    (GOOD, "quest --set unit=0", "quest.unit must be an integer at least 1"),
]


@pytest.mark.parametrize(
    ("text", "words", "messages"), REFUSED, ids=[f"{words} {message}" for _, words, message in REFUSED]
)
def test_what_cannot_be_used_is_refused(text, words, messages, folder, capsys):
    (folder / "stranger.py").write_text(text)
    as_policy = [["plan", "no-model", "--policy", words]] if text is GOOD and " " not in words and words else []
    for command in (["laws", *words.split()], *as_policy):
        assert main(command) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("jshadow: ConfigError: ")
        assert all(message in shown.err for message in messages.split("|")), shown.err
    assert text in (GOOD, WRONG_SMALL) or "newest" not in POLICIES


def test_a_law_is_broken_or_not_claimed(folder, capsys):
    """An error on the way breaks it. The other laws still run."""
    names = ["small_is_not_full", "lossless_is_full"]
    options = [part for name in names for part in ("--law", name)]
    assert laws(folder, BREAKS_DOWN, *options, "--json") == 1
    broken, other = json.loads(capsys.readouterr().out)["laws"]
    assert (broken["law"], broken["status"], broken["cases"]) == (names[0], "broken", 1)
    [fault] = broken["broken"]
    assert fault["case"] == "newest small resident"
    assert "AttributeError: 'PromptKV' object has no attribute 'length'" in fault["what"]
    assert (other["law"], other["status"], other["broken"]) == (names[1], "not claimed", [])
    assert main(["laws", NEWEST, *options]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "not claimed lossless_is_full: no lossless settings are registered" in shown
    assert shown[-1] == "newest: 0 laws kept, 1 not claimed, 1 broken"


@pytest.mark.slow
def test_a_law_that_is_kept_is_said_and_settings_that_drop_nothing_break_one(folder, capsys):
    assert laws(folder, NO_LOSSLESS, "--law", "lossless_is_full", "--law", "bytes_are_the_leaves_bytes") == 0
    _, kept, last = capsys.readouterr().out.splitlines()
    assert kept.startswith("ok          bytes_are_the_leaves_bytes (1 case, ")
    assert last == "newest: 1 law kept, 1 not claimed, 0 broken"
    assert main(["laws", NEWEST, "--law", "small_is_not_full", "--set", "kept=90"]) == 1
    assert "differ from full attention's by" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_that_ignores_who_takes_part(folder, capsys):
    """The command tells what the typed error has."""
    name = "inactive_rows_do_not_change"
    assert laws(folder, IGNORES_VALID, "--law", name, "--law", "consumed_state_says_so", "--json") == 1
    told, kept = json.loads(capsys.readouterr().out)["laws"]
    assert (told["status"], kept["status"], kept["broken"]) == ("broken", "ok", [])
    [fault] = told["broken"]
    assert fault["what"].startswith("row 1 of ")
    assert fault["difference"] > fault["tolerance"] == 0
    [outcome] = run_laws(subject_of(find_policy(NEWEST)), names=[name])
    [broken] = outcome.broken
    assert isinstance(broken, LawBroken)
    assert (broken.law, broken.case.fetch, broken.case.policy.kept) == (name, "resident", 12)
    assert str(broken).startswith(f"{name}: newest small resident: row 1 of ")


@pytest.mark.slow
def test_a_policy_that_attends_by_fetch_mode(folder, capsys):
    assert laws(folder, BY_MODE, "--law", "fetch_modes_agree") == 1
    shown = capsys.readouterr().out
    assert "BROKEN      fetch_modes_agree (4 cases" in shown
    assert LAWS["fetch_modes_agree"].statement in shown
    for fetch in ("device_put", "zero_copy"):
        assert f"    by_mode small {fetch}: the steps' logits differ by " in shown
        assert f"by_mode lossless {fetch}" not in shown, "with everything fetched, order does not matter"
    assert "tolerance 0.0001" in shown
    assert shown.endswith("by_mode: 0 laws kept, 0 not claimed, 1 broken\n")


def test_the_list_of_laws(capsys):
    assert main(["laws", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and law.statement in shown for name, law in LAWS.items())
    assert all(law.statement.endswith(".") for law in LAWS.values())


def test_a_place_is_told_from_a_setting_and_a_stranger_comes_last(folder):
    """In NAME:key=value:..., also when the policy is registered by then, and where a setting lacks its value."""
    built_in = list(POLICIES)
    assert built_in == sorted(built_in)
    (folder / "a_newest.py").write_text(GOOD.replace("newest", "a_stranger"))
    for _ in range(2):
        assert split_policy("a_newest:Newest:kept=3") == ("a_newest:Newest", ["kept=3"])
        assert policy_settings(parse_policy(*split_policy("a_newest:Newest:kept=3"))) == {"kept": 3}
    assert split_policy("quest:budget:unit=4") == ("quest", ["budget", "unit=4"])
    assert split_policy("quest") == ("quest", [])
    assert list(POLICIES) == [*built_in, "a_stranger"]


@pytest.mark.slow
@pytest.mark.process
def test_a_new_file_of_the_package_touches_no_other(tmp_path):
    """In a copy of the package with one more file: it is listed in its place, has cases of laws and a look."""
    shutil.copytree(REPO / "jshadow", tmp_path / "jshadow", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "jshadow" / "policies" / "newest.py").write_text(NO_LOSSLESS)
    code = """
import jshadow
from cases import DEVICE_ONLY, LOSSLESS, POLICY_CASES
import plots
from jshadow.policies import POLICIES
names = list(POLICIES)
assert names == sorted(names) and "newest" in names, names
assert POLICY_CASES["newest"].restricted.kept == 12
assert "newest" in DEVICE_ONLY and "newest" not in LOSSLESS
print(jshadow.__file__, plots.look_of("newest")["color"])
"""
    places = [tmp_path, REPO, REPO / "benchmarks", REPO / "tests" / "support"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


PLACES = {"key_norms": "key_norms:KeyNorms", "page_maxima": "page_maxima:PageMaxima"}
CHOSEN = {"key_norms": "kept=40", "page_maxima": "budget=32"}
MOST_LINES = 60
UNCLAIMED = {
    "key_norms": {"fetch_modes_agree", "steps_leave_the_host_alone"},
    "page_maxima": {"one_program_without_host_rows"},
}


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
    exec(compile(SNIPPET, "docs/add_a_policy.md", "exec"), {"KeyNorms": find_policy(PLACES["key_norms"])})
    assert capsys.readouterr().out.startswith("ok A row gives")


def shown(words, capsys) -> dict:
    """What a command prints as JSON."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_and_the_table_of_policies_take_them(checkpoint, folder, capsys):
    sizes = [checkpoint, "--context", "300"]
    for name, setting in CHOSEN.items():
        [plan, *_] = shown(["plan", *sizes, "--policy", PLACES[name], "--set", setting], capsys)["plans"]
        assert plan["chosen"]["policy"]["name"] == name
        assert shown(["policies", "--model", *sizes, "--policies", f"{PLACES[name]}:{setting}"], capsys)


@pytest.mark.slow
def test_eval_draws_them(checkpoint, folder, capsys):
    """Both are in the results at their share, and in the picture in colors of their own."""
    arguments = ["eval", checkpoint, "--tasks", "agreement", "--lengths", "200", "--samples", "1", "--dtype", "float32"]
    arguments += ["--policies", ",".join(PLACES.values()), "--shares", "0.6", "--out", "results"]
    rows = shown(arguments, capsys)["results"]
    assert {row["name"] for row in rows if row.get("kl") is not None} == {"full", *PLACES}
    figure = plot_memory(rows, measure="kl")
    colors = {line.get_color() for axis in figure.axes for box in axis.containers for line in box.lines[:1]}
    assert {plots.look_of(name)["color"] for name in PLACES} <= colors
    assert json.loads((folder / "results" / "results.json").read_text())["results"] == rows


@pytest.mark.slow
def test_bench(folder, capsys, monkeypatch):
    monkeypatch.setattr(speed, "ON_CPU", (2**16, 32))  # small ceilings
    arguments = ["bench", "layer", "--context", "200", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
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
