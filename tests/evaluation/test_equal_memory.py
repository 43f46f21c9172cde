"""`jshadow eval --shares`: policies at equal shares of full attention's bytes."""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from tiny_text import byte_tokenizer

from jshadow import cli, save
from jshadow.engine.sparse_prefill import VerticalSlash
from jshadow.errors import ConfigError
from jshadow.evaluation import cases, results, runner
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import footprint
from jshadow.policies import (
    H2O,
    KIVI,
    DenseFirst,
    Full,
    InfLLM,
    Pyramid,
    Quest,
    ShadowKV,
    SnapKV,
    StreamingLLM,
)
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
LENGTH = 420
pytestmark = pytest.mark.usefixtures("made_up")  # where no model is asked
POLICIES = [StreamingLLM(), H2O(), SnapKV(), InfLLM(), KIVI(), ShadowKV()]


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, byte_tokenizer())


@pytest.fixture(scope="module")
def rows(params: Params, made_up: None) -> list[dict[str, Any]]:
    """Rows of two tasks and two shares. Some policies cannot reach the smaller share."""
    return runner.evaluate(
        params, ["agreement", "needle_noise"], [LENGTH], POLICIES, samples=1, shares=[0.5, 0.06], fetch="device_put"
    )


def test_every_policy_is_at_or_under_its_share(rows, params):
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


@pytest.mark.slow
def test_a_smaller_share_agrees_less(params, monkeypatch):
    """The divergence from full attention grows. Full attention itself has none."""
    monkeypatch.setattr(runner, "run_case", cases.run_case)
    rows = runner.evaluate(
        params, ["agreement"], [LENGTH], POLICIES[:3], samples=1, shares=[0.5, 0.06], fetch="device_put"
    )
    kl = {(row["name"], row["share"]): row["kl"] for row in rows if not row["infeasible"]}
    assert kl["full", None] == pytest.approx(0, abs=1e-6)
    assert all(value > 1e-6 for (name, _), value in kl.items() if name != "full")
    assert kl["h2o", 0.06] > kl["h2o", 0.5]


@pytest.mark.slow
def test_the_command_prints_one_line_a_policy(params, tmp_path, capsys):
    save(params, tmp_path / "model")
    call = ["eval", str(tmp_path / "model"), "--tasks", "needle_multiturn", "--lengths", "1000", "--samples", "1"]
    call += ["--policies", "streaming_llm,omnikv", "--shares", "0.5,0.02", "--dtype", "float32"]
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


def test_what_has_no_share_is_told_by_its_settings():
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
            ("adakv:kept=9", 0.5, []),
            ('adakv:kept=9:scores="kvzip"', 0.5, []),
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
        ["50", "adakv:kept=9"],
        ["50", 'adakv:kept=9:scores="kvzip"'],
        ["-", "h2o:heavy=4"],
        ["-", "quest:unit=8"],
    ]


@pytest.mark.parametrize("shares", [[0.0], [1.5], [-0.1], [True], [float("nan")]])
def test_bad_shares_are_refused(params, shares):
    with pytest.raises(ConfigError, match="shares must be in"):
        runner.evaluate(params, ["agreement"], [LENGTH], POLICIES, samples=1, shares=shares)


@pytest.mark.parametrize(
    "policy", [Quest(unit=4), Quest(unit=32, budget=32), H2O(heavy=9), DenseFirst(), Pyramid(SnapKV())]
)
def test_shares_decide_all_settings(params, policy):
    with pytest.raises(ConfigError, match="shares decide all settings"):
        runner.evaluate(params, ["agreement"], [LENGTH], [policy], samples=1, shares=[0.5])


def test_a_prefill_of_the_policy_s_own_is_told(params):
    policy = InfLLM(window=64, sinks=4, budget=64, unit=16, query_block=64)
    rows = runner.evaluate(params, ["agreement"], [LENGTH], [policy], samples=1)
    assert {row["name"]: row["prefill"] for row in rows} == {"full": "exact", "infllm": "infllm"}
    with pytest.raises(ConfigError, match="infllm attends to a prompt in its own way"):
        runner.evaluate(params, ["agreement"], [LENGTH], [policy], samples=1, prefill=VerticalSlash())


@pytest.mark.slow
def test_a_budget_that_takes_no_memory_stays(params, monkeypatch):
    monkeypatch.setattr(runner, "run_case", cases.run_case)
    rows = runner.evaluate(
        params, ["agreement"], [LENGTH], [Quest(budget=256), Quest()], samples=1, shares=[0.5], fetch="device_put"
    )
    assert [row["settings"].get("budget") for row in rows] == [None, 256, 1024]
    assert rows[1]["served_device_bytes"] == pytest.approx(rows[2]["served_device_bytes"], rel=0.05)
    assert rows[1]["attended_tokens"] < rows[2]["attended_tokens"]
