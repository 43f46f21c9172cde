"""A dry run of all parts of `make gpu`, without a GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import dense, kernels, report
from gpu.__main__ import PARTS, main
from gpu.runner import MEASURED, NOT_HERE
from gpu.sizes import DRY, REAL
from gpu.stages import FETCHES

ROOT = Path(__file__).resolve().parents[2]


def whole(test):
    """Mark a test that reads the dry run, which takes minutes, so it runs only once; or that starts another one."""
    for mark in (pytest.mark.slow, pytest.mark.process, pytest.mark.xdist_group("dry run")):
        test = mark(test)
    return test


SECTIONS = {
    "checks": ["kernels", "features", "ceilings", "fetch"],
    "decode": ["decode", "generate", "decode-more"],
    "layers": ["profile", "dense", "stages", "compress"],
}
SETUPS = {
    ("full", "resident"),
    ("packed small", "resident"),
    ("packed", "zero_copy"),
    ("paper", "zero_copy"),
    ("paper", "device_put"),
    ("int4", "resident"),
}


def run(*options):
    """Run the script. Returns the finished process."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}:{ROOT / 'tests' / 'support'}"}
    command = [sys.executable, "-m", "gpu", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The results of a dry run of all parts: the rows by section, the printed results, and the folder."""
    out = tmp_path_factory.mktemp("gpu")
    done = run("--dry-run", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == {part: json.loads((out / f"{part}.json").read_text()) for part in PARTS}
    rows = {name: rows for results in printed.values() for name, rows in results["sections"].items()}
    return rows, printed, out


def numbers(value):
    """Return all floats in nested values."""
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers(one)]
    if isinstance(value, list):
        return [n for one in value for n in numbers(one)]
    return [value] if isinstance(value, float) else []


@whole
def test_all_sections_of_a_dry_run_report(dry):
    rows, printed, out = dry
    assert {part: list(results["sections"]) for part, results in printed.items()} == SECTIONS
    absent = {row["name"] for section in rows.values() for row in section if row["status"] == NOT_HERE}
    assert absent == {"bus and clocks", *(f"full attention, torch, 1 x {size:,}" for size in DRY.capacities)}
    assert all(row["status"] in (MEASURED, NOT_HERE) for section in rows.values() for row in section)
    assert all(math.isfinite(number) for number in numbers(rows))
    for results in printed.values():
        assert results["finished"]
        assert {"device", "driver", "cuda", "jax", "jaxlib", "date", "commit"} <= set(results["machine"])
    page = (out / "gpu.md").read_text()
    assert all(f"## {title}" in page for title, *_ in report.TABLES)
    assert page.count("not measured |") == 6  # a dry run reaches no goal
    files = {f"{part}.{kind}" for part in PARTS for kind in ("json", "log")}
    assert {path.name for path in out.iterdir()} == files | {"gpu.md", "baseline.json"}


@whole
def test_a_dry_run_checks_everything_once(dry):
    rows = {row["name"]: row for section in ("kernels", "features") for row in dry[0][section]}
    assert {f"kernel {name}" for name in kernels.OPS} <= set(rows)
    assert {"fetch modes, float32", "fetch modes, bfloat16", "pinned array beyond 4 GiB", "top_k", "memories"} <= set(
        rows
    )
    assert all(row["ok"] for row in rows.values())
    assert REAL.big_units * 2 * 4 * 8 * 128 * 2 > 2**32


@whole
def test_a_dry_run_decodes_with_the_shares_that_were_set(dry):
    rows, _, out = dry
    assert {(row["code"], row["fetch"]) for row in rows["decode"]} == SETUPS
    assert {row["capacity"] for row in rows["decode"]} == {DRY.capacities[0]}
    assert {(row["capacity"], row["batch"] > 1) for row in rows["decode-more"]} == {(512, True), (1024, False)}
    entries = json.loads((out / "baseline.json").read_text())["entries"]
    best = {entry["capacity"]: entry["tokens_per_second"] for entry in entries}
    assert set(best) == set(DRY.capacities)
    chunk = DRY.policies["paper"].chunk_size * DRY.config.head_dim * 2
    for row in rows["decode"] + rows["decode-more"]:
        per_step = DRY.config.num_layers * row["batch"] * DRY.config.kv_heads * 10 * chunk
        for phase in row["phases"]:
            assert phase["share_of_bound"] > 0
            assert phase["ratio_to_full"] >= 0.999 * phase["tokens_per_second"] / best[row["capacity"]]
            if row["code"] != "full":
                assert phase["share"] == pytest.approx(phase["share_set"], abs=0.05)
            moved = {"resident": 0, "device_put": 1, "zero_copy": 1 - (phase["share"] or 0)}[row["fetch"]]
            if row["code"] == "paper":
                assert phase["fetched_bytes_per_step"] == pytest.approx(moved * per_step)
            assert (phase["fetched_bytes_per_step"] > 0) == (row["fetch"] != "resident")


@whole
def test_a_dry_run_takes_a_layer_apart(dry):
    stages = {row["code"]: row["milliseconds"] for row in dry[0]["stages"] if row["capacity"] == DRY.capacities[0]}
    assert set(stages) == set(FETCHES)
    for code, milliseconds in stages.items():
        assert all(value > 0 for value in milliseconds.values())
        assert {"scores", "select", "rebuild K", "attention"} <= set(milliseconds)
        assert {f"whole, {fetch}" for fetch in FETCHES[code]} <= set(milliseconds)


@whole
def test_a_dry_run_has_a_table_of_kernels(dry):
    rows = dry[0]["profile"]
    assert len(rows) == 4
    for row in rows:
        seconds = [kernel["seconds"] for kernel in row["kernels"]]
        assert seconds == sorted(seconds, reverse=True)
        assert all(kernel["count"] >= 1 for kernel in row["kernels"])
        assert len({kernel["name"] for kernel in row["kernels"]}) == len(seconds) > 50


@whole
def test_a_dry_run_measures_dense_attention_of_others_or_says_why_not(dry):
    for row in dry[0]["dense"]:
        if row["status"] == MEASURED:
            assert row["milliseconds"].keys() | row["not_available"].keys() == set(dense.WAYS)
            assert {dense.OURS, "jax.nn, XLA"} <= row["milliseconds"].keys()
        else:
            assert "torch" in row["why"]


def test_help_and_options_that_belong_together(capsys):
    for options, status, told in ((["--help"], 0, "--resume"), (["--sections", "fetch"], 2, "--sections needs --part")):
        with pytest.raises(SystemExit) as ended:
            main(options)
        assert ended.value.code == status
        assert told in "".join(capsys.readouterr())


@whole
def test_a_machine_without_a_gpu_is_told_and_loses_nothing(tmp_path):
    (tmp_path / "checks.json").write_text('{"sections": {}}')
    done = run("--part", "checks", "--out", str(tmp_path), "--host-gib", "1")
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    assert (tmp_path / "checks.json").read_text() == '{"sections": {}}'


@whole
def test_sections_are_run_by_name(tmp_path):
    done = run("--dry-run", "--part", "checks", "--sections", "ceilings", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "checks.json").read_text())["sections"]) == ["ceilings"]
    done = run("--dry-run", "--part", "checks", "--sections", "ceilings,no", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--sections must be some of kernels, features, ceilings, fetch, got no" in done.stderr
