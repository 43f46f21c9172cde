"""`jshadow eval --shares` and `--plot`: policies at one share of full attention's bytes, and a picture of turns."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny_text import byte_tokenizer

from jshadow import cli, load, save, save_fitted
from jshadow.cli import eval as cli_eval
from jshadow.engine.sparse_prefill import VerticalSlash
from jshadow.errors import ConfigError
from jshadow.evaluation import html, plots, results, runner
from jshadow.evaluation.settings import Entry
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import footprint
from jshadow.policies import (
    H2O,
    KIVI,
    LESS,
    DenseFirst,
    Full,
    InfLLM,
    Policy,
    Pyramid,
    Quest,
    ShadowKV,
    SnapKV,
    StreamingLLM,
)
from jshadow.policies.settings import policy_settings
from jshadow.policies.shadowkv import TransformCode
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
LENGTH = 420
POLICIES = [StreamingLLM(), H2O(), SnapKV(), InfLLM(), KIVI(), ShadowKV()]


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, byte_tokenizer())


@pytest.fixture(scope="module")
def rows(params: Params) -> list[dict[str, Any]]:
    """Two tasks, two shares, of which one is out of reach for some."""
    return runner.evaluate(
        params, ["agreement", "needle_noise"], [LENGTH], POLICIES, samples=1, shares=[0.5, 0.06], fetch="device_put"
    )


def test_every_policy_is_at_or_under_its_share(rows: list[dict[str, Any]], params: Params) -> None:
    names = {policy.name for policy in POLICIES}
    assert len(rows) == 2 * (1 + 2 * len(POLICIES))
    assert len({row["capacity"] for row in rows if row["infeasible"] is None}) == 1
    for share in (0.5, 0.06):
        own = [row for row in rows if row["share"] == share]
        assert {row["name"] for row in own} == names
        for row in own:
            if row["infeasible"]:
                assert row["score"] is row["offloaded_device_bytes"] is row["served_device_bytes"] is None
                assert "the share must be at least" in row["infeasible"]
                least = float(row["infeasible"].partition("at least ")[2].split()[0])
                assert least > share
                continue
            assert 0 < row["served_device_bytes"] <= share * row["served_full_bytes"]
    assert any(row["infeasible"] for row in rows if row["share"] == 0.06)
    assert not any(row["infeasible"] for row in rows if row["share"] == 0.5)
    full = [row for row in rows if row["name"] == "full"]
    assert [row["share"] for row in full] == [None, None]
    used = footprint(CONFIG, Full(), capacity=full[0]["capacity"], prompt=LENGTH, dtype="float32", fetch="device_put")
    assert full[0]["offloaded_device_bytes"] == used["device_bytes"]


def test_a_smaller_share_agrees_less(rows: list[dict[str, Any]]) -> None:
    """Of what full attention says next, by its divergence: full itself has none."""
    kl = {
        (row["name"], row["share"]): row["kl"] for row in rows if row["task"] == "agreement" and not row["infeasible"]
    }
    assert kl["full", None] == pytest.approx(0, abs=1e-6)
    assert all(value > 1e-6 for (name, _), value in kl.items() if name != "full")
    assert kl["h2o", 0.06] > kl["h2o", 0.5]


def test_the_command_prints_one_line_a_policy(
    params: Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(params, tmp_path / "model")
    call = [
        "eval",
        str(tmp_path / "model"),
        "--tasks",
        "needle_multiturn",
        "--lengths",
        "1000",
        "--samples",
        "1",
        "--policies",
        "streaming_llm,omnikv",
        "--shares",
        "0.5,0.02",
        "--dtype",
        "float32",
    ]
    picture = tmp_path / "turns.svg"
    assert cli.main([*call, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("streaming_llm") == 2
    assert "at least" in out  # omnikv at 2 %
    text = picture.read_text(encoding="utf-8")
    assert text.lstrip().startswith("<?xml")
    assert [path.name for path in tmp_path.glob(".turns*")] == []
    assert cli.main([*call, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["results"]
    assert {row["share"] for row in told} == {None, 0.5, 0.02}
    assert all(len(row["turns"]) == 4 for row in told if not row["infeasible"])


SWEEPS = {
    "rank": [ShadowKV(rank=rank, budget=32) for rank in (8, 16)],
    "budget": [ShadowKV(rank=16, budget=budget) for budget in (32, 64)],
}


def test_sweeps_run_beside_shares(params: Params, tmp_path: Path) -> None:
    """A step that two sweeps share is run once, and told in both."""
    made = runner.evaluate(
        params, ["agreement", "passkey"], [LENGTH], [H2O()], samples=1, shares=[0.5], sweeps=SWEEPS, out=tmp_path
    )
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 * (1 + 1 + 3)
    for task in ("agreement", "passkey"):
        rows = [row for row in made if row["task"] == task]
        assert [row["sweeps"] for row in rows] == [[], [], ["rank"], ["rank", "budget"], ["budget"]]
        assert [row["share"] for row in rows] == [None, 0.5, None, None, None]
        assert [(row["settings"]["rank"], row["settings"]["budget"]) for row in rows[2:]] == [
            (8, 32),
            (16, 32),
            (16, 64),
        ]
        assert not any(row["control_of"] for row in rows)
    assert len({row["capacity"] for row in made}) == 1
    assert {path.name for path in html.write_results(made, tmp_path)} >= {"sweep_rank.png", "sweep_budget.png"}


def test_what_has_no_share_is_told_by_its_settings() -> None:
    rows = [
        {
            "task": "agreement",
            "length": 64,
            "policy": policy,
            "name": policy.partition(":")[0],
            "share": share,
            "infeasible": None,
            "served_device_bytes": 1,
            "served_full_bytes": 4,
            "score": 9.0,
            "stderr": None,
            "sweeps": sweeps,
        }
        for policy, share, sweeps in (
            ("full", None, []),
            ("h2o:heavy=3", 0.5, []),
            ("h2o:heavy=4", None, []),
            ("quest:unit=8", None, ["unit"]),
        )
    ]
    with Console(width=120, record=True, quiet=False, file=io.StringIO()) as console:
        results.show_shares(rows, console)
    told = [line.split("│")[2:4] for line in console.export_text().splitlines() if line.startswith("│")]
    assert [[part.strip() for part in line] for line in told] == [
        ["100", "full"],
        ["50", "h2o"],
        ["-", "h2o:heavy=4"],
        ["-", "quest:unit=8"],
    ]


@pytest.mark.parametrize("sweeps", [{"rank": [H2O()]}, {"rank": ["shadowkv"]}, {"depth": [ShadowKV()]}])
def test_bad_sweeps_are_refused(params: Params, sweeps: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sweeps must map a setting to policies"):
        runner.evaluate(params, ["agreement"], [LENGTH], [H2O()], samples=1, sweeps=sweeps)


def test_sweeps_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    found = cli_eval.parse_sweeps(["shadowkv:rank=8|16:budget=32", "quest:unit=4|8"])
    assert found == {"rank": SWEEPS["rank"], "unit": [Quest(unit=4), Quest(unit=8)]}
    for wrong in ("shadowkv", "shadowkv:rank=8", "shadowkv:rank=8|", "shadowkv:rank=8|9:budget=8|9", "nobody:rank=1|2"):
        with pytest.raises(ConfigError, match=r"sweep must be|policy must be"):
            cli_eval.parse_sweeps([wrong])
    more = cli_eval.parse_sweeps(["shadowkv:rank=8|16:budget=32", "shadowkv:rank=24|32", "loki:columns=1|2"])
    assert more["rank"] == [*SWEEPS["rank"], ShadowKV(rank=24), ShadowKV(rank=32)]
    profiles = cli_eval.parse_sweeps(["shadowkv:keys.profile=3,6,8|0,2,4:keys=transform"])["keys.profile"]
    assert [policy_settings(policy)["keys.profile"] for policy in profiles] == [(3, 6, 8), (0, 2, 4)]


def test_a_swept_setting_that_another_one_stands_for_is_told_as_given(params: Params) -> None:
    """Bits become a profile; of what is not swept the settings are those that ran."""
    policy = ShadowKV(keys=TransformCode(bits=2.0))
    resolved = policy.resolve(params.config, 96)
    assert resolved.keys.bits is None
    swept = runner.settings_of(Entry(policy, sweeps=("keys.bits", "rank")), resolved)
    assert swept == policy_settings(resolved) | {"keys.bits": 2.0}
    assert runner.settings_of(Entry(policy), resolved) == policy_settings(resolved)


def test_a_tuple_in_a_list_of_policies_is_one_setting() -> None:
    coded = "shadowkv:keys=transform:keys.profile=3,6,8"
    assert cli_eval.split_policies(f"full, {coded}:budget=32,quest") == ["full", f"{coded}:budget=32", "quest"]
    with pytest.raises(ConfigError, match="without empty parts"):
        cli_eval.split_policies("full,,quest")


@pytest.mark.parametrize("shares", [[0.0], [1.5], [-0.1], [True], [float("nan")]])
def test_bad_shares_are_refused(params: Params, shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="shares must be in"):
        runner.evaluate(params, ["agreement"], [LENGTH], POLICIES, samples=1, shares=shares)


@pytest.mark.parametrize(
    "policy", [Quest(unit=4), Quest(unit=32, budget=32), H2O(heavy=9), DenseFirst(), Pyramid(SnapKV())]
)
def test_shares_decide_all_settings(params: Params, policy: Policy) -> None:
    with pytest.raises(ConfigError, match="shares decide all settings"):
        runner.evaluate(params, ["agreement"], [LENGTH], [policy], samples=1, shares=[0.5])


def test_a_prefill_of_the_policy_s_own_is_told(params: Params) -> None:
    policy = InfLLM(window=64, sinks=4, budget=64, unit=16, query_block=64)
    rows = runner.evaluate(params, ["agreement"], [LENGTH], [policy], samples=1)
    assert {row["name"]: row["prefill"] for row in rows} == {"full": "exact", "infllm": "infllm"}
    with pytest.raises(ConfigError, match="infllm attends to a prompt in its own way"):
        runner.evaluate(params, ["agreement"], [LENGTH], [policy], samples=1, prefill=VerticalSlash())


LEARNER = LESS(heavy=8, recent=8, state_rank=2, hidden=8)


@pytest.fixture(scope="module")
def learned(params: Params) -> Any:
    return LEARNER.fit(params, np.random.default_rng(0).integers(0, 256, 96), steps=3)


def test_a_budget_that_takes_no_memory_stays(params: Params) -> None:
    rows = runner.evaluate(
        params, ["agreement"], [LENGTH], [Quest(budget=256), Quest()], samples=1, shares=[0.5], fetch="device_put"
    )
    assert [row["settings"].get("budget") for row in rows] == [None, 256, 1024]
    assert rows[1]["served_device_bytes"] == pytest.approx(rows[2]["served_device_bytes"], rel=0.05)
    assert rows[1]["attended_tokens"] < rows[2]["attended_tokens"]


def test_learned_arrays_reach_their_policy_alone(
    params: Params, learned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = [LEARNER, StreamingLLM(sinks=2, window=14)]
    plain = runner.evaluate(params, ["agreement"], [LENGTH], policies, samples=1, out=tmp_path / "out")
    taught = runner.evaluate(
        params, ["agreement"], [LENGTH], policies, samples=1, out=tmp_path / "out", fitted={"less": learned}
    )
    assert [row["fitted"] for row in plain] == [False] * 3
    assert [row["fitted"] for row in taught] == [False, True, False]
    kl = [[row["kl"] for row in rows] for rows in (plain, taught)]
    assert (kl[0][0], kl[0][2]) == (kl[1][0], kl[1][2])
    assert kl[0][1] != kl[1][1]

    save(params, tmp_path / "model")
    file = str(tmp_path / "less.safetensors")
    save_fitted(file, learned, LEARNER, load(tmp_path / "model", dtype="float32"))
    call = [
        "eval",
        str(tmp_path / "model"),
        "--tasks",
        "agreement",
        "--lengths",
        str(LENGTH),
        "--samples",
        "1",
        "--dtype",
        "float32",
        "--policies",
        results.label(LEARNER),
        "--fitted",
        file,
    ]
    assert cli.main([*call, "--json"]) == 0
    [_, row] = json.loads(capsys.readouterr().out)["results"]
    assert row["fitted"]
    assert row["kl"] == pytest.approx(kl[1][1], rel=1e-4)
    assert cli.main([*call[:-3], "quest", *call[-2:]]) == 2
    assert "fitted must be one file for a policy of --policies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policies", "shares", "told"),
    [([Quest()], (), "got those of less"), ([LESS()], (), "the fit of less"), ([LESS()], (0.5,), "the fit of less")],
)
def test_learned_arrays_that_nobody_can_use_are_refused(
    params: Params, learned: Any, policies: list[Policy], shares: tuple[float, ...], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        runner.evaluate(params, ["agreement"], [LENGTH], policies, samples=1, shares=shares, fitted={"less": learned})


@pytest.mark.parametrize(
    ("path", "tasks", "told"),
    [
        ("turns.gif", ["needle_multiturn"], "ends with one of"),
        ("nowhere/turns.svg", ["needle_multiturn"], "directory that exists"),
        ("turns.svg", ["needle_noise"], "needs a task of several turns"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_first(tmp_path: Path, path: str, tasks: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plots.check_plot(tmp_path / path, tasks, {"needle_multiturn": 4})


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    row = {
        "task": "needle_multiturn",
        "length": 9,
        "policy": "full",
        "name": "full",
        "samples": 1,
        "turns": [100.0, 50.0],
        "served_device_bytes": 5,
        "served_full_bytes": 10,
    }
    target = tmp_path / "turns.png"
    target.mkdir()  # nothing can take its place
    with pytest.raises(ConfigError, match="can be written"):
        plots.plot_turns([row], target)
    assert [path.name for path in tmp_path.iterdir()] == ["turns.png"]
    plots.plot_turns([row], tmp_path / "turns.pdf")
    assert (tmp_path / "turns.pdf").read_bytes().startswith(b"%PDF")
