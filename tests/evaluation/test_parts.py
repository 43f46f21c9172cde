"""Evaluations in parts: how samples are dealt, what is merged, and which parts are refused.

The records of the samples are made up, but for one run of the tiny model.
"""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import byte_models
import pytest
from evaluations import records_of, run_cases

import jshadow
from jshadow.cli.main import main
from jshadow.errors import ConfigError
from jshadow.evaluation import runner, tasks
from jshadow.evaluation.parts import PART_FILE, evaluate_part, merge_parts, part_folder
from jshadow.evaluation.plan import EvalSettings
from jshadow.evaluation.runner import SAMPLES_FILE
from jshadow.ops.parts import Part, deal, parse_part
from jshadow.weights.params import init_params

pytestmark = pytest.mark.usefixtures("made_up")
TASKS: dict[str, Any] = {"tasks": ["agreement", "needle_docs"], "lengths": [240, 300], "policies": [byte_models.SHADOW]}
PARTS = 3
PARAMS = byte_models.PARAMS
NAMES = [f"part-{index}-of-{PARTS}" for index in range(1, PARTS + 1)]


def run_part(index: int, out: Path, *, count: int = PARTS, command: tuple[str, ...] = (), **changes: Any) -> Any:
    """Run one part of the evaluation of this module, with other arguments or settings where they are given."""
    asked = TASKS | {name: changes.pop(name) for name in TASKS if name in changes}
    params = changes.pop("params", PARAMS)
    evaluation = runner.plan_evaluation(params, **asked, asked=EvalSettings(**{"samples": 2} | changes))
    return evaluate_part(evaluation, Part(index, count), out, command=command)


@pytest.fixture(scope="module")
def whole(made_up: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The directory and the rows of one run, after a way through JSON."""
    out = tmp_path_factory.mktemp("whole")
    return out, plain(runner.evaluate(PARAMS, **TASKS, samples=2, out=out))


@pytest.fixture(scope="module")
def finished(made_up: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three parts, which is only read."""
    out = tmp_path_factory.mktemp("parts")
    for index in (2, 3, 1):
        run_part(index, out, command=("jshadow", "eval", "a model", "--part", "2/3", "--out", str(out)))
    return out


@pytest.fixture
def parts(finished: Path, tmp_path: Path) -> Path:
    """A copy of the three parts."""
    return Path(shutil.copytree(finished, tmp_path / "parts"))


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate_part` writes what a part has to do, and runs no sample."""
    monkeypatch.setattr("jshadow.evaluation.parts.finish_samples", lambda *_: {})


def plain(rows: list[dict[str, Any]]) -> Any:
    return json.loads(json.dumps(rows))


# How samples are dealt


def test_every_item_is_in_one_part_and_costs_are_balanced():
    for sizes in ([], [5], [1, 2, 3, 4, 5, 6, 7], [9] * 8, [1, 100, 1, 100, 1, 50, 50], [1000, 1, 1]):
        for count in range(1, 10):
            dealt = [deal(sizes, Part(index, count)) for index in range(1, count + 1)]
            assert sorted(itertools.chain(*dealt)) == list(range(len(sizes)))
            assert all(places == sorted(places) for places in dealt)
            for power in (1, 2, 5):  # however the cost grows with the size
                costs = [sum(sizes[place] ** power for place in places) for places in dealt]
                assert max(costs) - min(costs) <= max((size**power for size in sizes), default=0)
    assert [deal([4, 4, 9, 4], Part(index, 2)) for index in (1, 2)] == [[1, 2], [0, 3]]


def test_a_part_is_read_from_its_text_and_has_a_folder(tmp_path):
    assert [parse_part("2/3"), parse_part("01/10"), str(Part(2, 3))] == [Part(2, 3), Part(1, 10), "2/3"]
    assert part_folder(tmp_path, Part(2, 3)) == tmp_path / "part-2-of-3"


@pytest.mark.parametrize(
    "text", ["", "2", "2/", "/3", "0/3", "4/3", "-1/3", "1/0", "0/0", "1/3/5", "a/b", "1 / 3", "2/3\n", "²/3"]
)
def test_other_texts_are_no_part(text):
    with pytest.raises(ConfigError, match="part must be I/N with I from 1 to N"):
        parse_part(text)


# What is merged


def test_three_parts_are_one_run_which_goes_on_from_them(whole, parts, tmp_path, monkeypatch):
    """All figures are equal to the last bit. Each sample ran once, with about as many in each part."""
    (out, rows), merged = whole, tmp_path / "merged"
    assert sorted(path.name for path in parts.iterdir()) == NAMES
    assert merge_parts([parts]) == rows
    assert merge_parts([parts / name for name in reversed(NAMES)], out=merged) == rows
    records = [records_of(parts / name) for name in NAMES]
    keys = [record["key"] for record in itertools.chain(*records)]
    assert len(set(keys)) == len(keys)
    assert all({240, 300} == {record["length"] for record in of_part} for of_part in records)
    assert sorted((merged / SAMPLES_FILE).read_text().splitlines()) == sorted(
        (out / SAMPLES_FILE).read_text().splitlines()
    )
    monkeypatch.setattr(runner, "run_cases", None)
    assert plain(runner.evaluate(PARAMS, **TASKS, samples=2, out=merged)) == rows
    size = (merged / SAMPLES_FILE).stat().st_size
    merge_parts([parts], out=merged)
    assert (merged / SAMPLES_FILE).stat().st_size == size


@pytest.mark.slow
def test_parts_of_a_model_are_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_cases", run_cases)
    asked = {"tasks": ["agreement", "needle_docs"], "lengths": [240]}
    rows = runner.evaluate(PARAMS, **TASKS | asked, samples=2)
    for index in (2, 1):
        run_part(index, tmp_path, count=2, **asked)
    assert merge_parts([tmp_path]) == plain(rows)
    assert rows[1]["kl"] > 0


def test_shares_and_sweeps_are_merged(tmp_path):
    """An infeasible row has no records, and a setting may be a tuple."""
    asked = {"policies": [jshadow.StreamingLLM(), jshadow.OmniKV()], "tasks": ["agreement"], "lengths": [240]}
    settings = {"shares": [0.5, 0.001], "sweeps": {"rank": [jshadow.ShadowKV(rank=rank, budget=64) for rank in (4, 8)]}}
    rows = runner.evaluate(PARAMS, **asked, samples=2, **settings)
    assert any(row["infeasible"] for row in rows)
    for index in (1, 2):
        run_part(index, tmp_path, count=2, **asked, **settings)
    assert merge_parts([tmp_path]) == plain(rows)


def test_each_sample_keeps_its_place(parts):
    """Full attention answers the first sample of a task, and ShadowKV the second, at another depth."""
    for folder in parts.iterdir():
        lines = records_of(folder)
        for line in lines:
            if line["task"] == "needle_docs":
                right = line["sample"] == {"full": 0, "shadowkv": 1}.get(line["policy"].partition(":")[0])
                line |= {"hits": [right], "score": 100.0 * right}
        (folder / SAMPLES_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = [row for row in merge_parts([parts]) if row["task"] == "needle_docs"]
    names = ("full", "shadowkv", "streaming_llm")
    assert [(row["name"], row["length"]) for row in rows] == [(name, length) for length in (240, 300) for name in names]
    for row in rows:
        assert row["depths"] == [0.25, 0.75]
        assert row["depth_scores"] == {"full": [100, 0], "shadowkv": [0, 100]}.get(row["name"], [0, 0])
        assert row["found_by_full"] == 1
        assert row["found_by_both"] == (row["name"] == "full")


@pytest.mark.parametrize("left", [0, 2], ids=["nothing", "two_lines"])
def test_a_part_that_was_killed_goes_on(whole, parts, left, monkeypatch):
    """Its last line is incomplete. Before it has gone on, the merge says what to do."""
    file = parts / NAMES[1] / SAMPLES_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:left]) + lines[left][:30])
    told = rf"part 2/3 in .*{NAMES[1]} has [01] of 3.*\n  jshadow eval 'a model' .*--part 2/3"
    with pytest.raises(ConfigError, match=told):
        merge_parts([parts])
    if not left:
        file.unlink()  # killed before its first sample
        with pytest.raises(ConfigError, match="has 0 of 3"):
            merge_parts([parts])
    ran: list[int] = []
    original = runner.run_cases
    monkeypatch.setattr(runner, "run_cases", lambda *args: ran.extend(args[2]) or original(*args))
    run_part(2, parts)
    assert len(ran) == 3 - left // 2
    assert merge_parts([parts]) == whole[1]


# What is refused


def test_a_missing_part_is_named_with_its_command(parts):
    for name in NAMES[::2]:
        shutil.rmtree(parts / name)
    with pytest.raises(ConfigError) as told:
        merge_parts([parts])
    first, *commands = str(told.value).splitlines()
    assert "parts must be all 3, but there is no part 1/3, 3/3. Run:" in first
    for command, index in zip(commands, (1, 3), strict=True):
        assert command.startswith("  jshadow eval 'a model' --out ")
        assert command.endswith(f" --part {index}/3")
        assert command.count("--part") == 1


def test_a_part_that_is_there_twice_is_refused(parts, tmp_path):
    shutil.copytree(parts / NAMES[0], tmp_path / "again")
    with pytest.raises(ConfigError, match=r"got part 1/3 in .*again and in .*part-1-of-3"):
        merge_parts([parts, tmp_path / "again"])
    assert merge_parts([parts, parts / NAMES[0], f"{parts}/../parts"])  # one folder that is named twice is one part


OTHER_WEIGHTS = dataclasses.replace(PARAMS, weights=init_params(byte_models.CONFIG, seed=5).weights)
OTHERS = [
    (3, {"seed": 1}, "seed is 0 in .* and 1 in "),
    (3, {"samples": 3}, "samples is 2 in .* and 3 in "),
    (3, {"tasks": ["agreement"]}, "tasks is .*needle_docs.* in .* and "),
    (3, {"lengths": [240, 301]}, r"lengths is \[240, 300\] in .* and \[240, 301\] in "),
    (3, {"policies": [jshadow.ShadowKV(rank=8, budget=64)]}, "policies is "),
    (3, {"params": OTHER_WEIGHTS}, "model is "),
    (3, {"fetch": "device_put"}, "fetch is 'resident' in .* and 'device_put' in "),
    (1, {"count": 2}, r"the number of parts is 2 in .*part-1-of-2 and 3 in .*part-1-of-3"),
]


@pytest.mark.usefixtures("unrun")
@pytest.mark.parametrize(("index", "changes", "told"), OTHERS, ids=[next(iter(changes)) for _, changes, _ in OTHERS])
def test_a_part_of_another_evaluation_is_refused(parts, index, changes, told):
    run_part(index, parts, **changes)
    with pytest.raises(ConfigError, match=f"parts must be of one evaluation, but {told}"):
        merge_parts([parts])
    assert index == 3 or merge_parts([parts / name for name in NAMES])


@pytest.mark.usefixtures("unrun")
def test_a_part_of_other_prompts_is_refused(parts, monkeypatch):
    """Even if all settings are the same, such as those of a data file that was changed."""
    real = tasks.sample_of
    monkeypatch.setattr("jshadow.evaluation.plan.sample_of", lambda *args: real(*args[:-1], 7))
    run_part(3, parts)
    with pytest.raises(ConfigError, match="but plan is "):
        merge_parts([parts])


def test_more_parts_than_samples_and_folders_without_parts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="N at most the number of samples=8, got 1/9"):
        run_part(1, tmp_path / "out", count=9)
    assert not (tmp_path / "out").exists()
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"merge must name folders of parts \(with a file part.json\), got "):
            merge_parts([place])


DAMAGES = {
    "cut": (lambda text: text[:-50], "is damaged"),
    "changed": (lambda text: text.replace('"seed": 0', '"seed": 1'), "is damaged: its SHA-256"),
    "newer": (lambda text: text.replace('"format": 1', '"format": 2'), "in format 1, got format 2"),
    "list": (lambda text: "[]", "got format None"),
}


@pytest.mark.parametrize(("change", "told"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_refused(parts, change, told):
    file = parts / NAMES[1] / PART_FILE
    file.write_text(change(file.read_text()))
    with pytest.raises(jshadow.errors.CheckpointError, match=told):
        merge_parts([parts])


BAD = [
    (["m", "--part", "1/3"], "--part must come with --out"),
    (["m", "--part", "3", "--out", "o"], "part must be I/N with I from 1 to N, such as 2/3, got '3'"),
    (["m", "--part", "4/3", "--out", "o"], "part must be I/N with I from 1 to N, got 4/3"),
    (["--tasks", "agreement"], "MODEL must be given, except with --merge"),
    (["m", "--merge", "o"], "--merge must come without MODEL"),
    (["--merge", "o", "--part", "1/3"], "--merge must come without --part"),
    (["--merge", "o", "--seed", "3"], "--merge must come without --seed"),
    (["--merge", "nowhere"], "merge must name folders of parts"),
]


@pytest.mark.parametrize(("words", "told"), BAD)
def test_bad_use_is_one_error(words, told, capsys):
    assert main(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert out == ""
