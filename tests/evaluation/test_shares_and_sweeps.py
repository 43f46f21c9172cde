"""`evaluate` at equal shares of full attention's bytes, with several values of a setting, and with learned arrays."""

import io
import json

import jax
import numpy as np
import pytest
import report
from evaluations import CONFIG, records_of, run_cases
from rich.console import Console

from jshadow import cli, load, save, save_fitted
from jshadow.cli import eval as cli_eval
from jshadow.engine.sparse_prefill import VerticalSlash
from jshadow.errors import ConfigError
from jshadow.evaluation import results, runner
from jshadow.evaluation import results as result_rows
from jshadow.evaluation.plan import Entry, label
from jshadow.planner.machine import footprint
from jshadow.policies import H2O, KIVI, LESS, DenseFirst, Full, InfLLM, Pyramid, Quest, ShadowKV, SnapKV, StreamingLLM
from jshadow.policies.settings import policy_settings
from jshadow.policies.shadowkv import TransformCode

LENGTH = 420
pytestmark = pytest.mark.usefixtures("made_up")  # where no model is asked
POLICIES = [StreamingLLM(), H2O(), SnapKV(), InfLLM(), KIVI(), ShadowKV()]
LEARNER = LESS(heavy=8, recent=8, state_rank=2, hidden=8)
SWEEPS = {
    "rank": [ShadowKV(rank=rank, budget=32) for rank in (8, 16)],
    "budget": [ShadowKV(rank=16, budget=budget) for budget in (32, 64)],
}


def evaluate(params, policies, tasks=("agreement",), **options):
    return runner.evaluate(params, list(tasks), [LENGTH], policies, samples=1, **options)


def test_every_policy_is_at_or_under_its_share_of_memory(params):
    """Some policies cannot reach the smaller share."""
    shares, fetch = [0.5, 0.06], "device_put"
    rows = evaluate(params, POLICIES, ["agreement", "needle_noise"], shares=shares, fetch=fetch)
    assert len(rows) == 2 * (1 + 2 * len(POLICIES))
    assert len({row["capacity"] for row in rows if row["infeasible"] is None}) == 1
    for share in shares:
        own = [row for row in rows if row["share"] == share]
        assert {row["name"] for row in own} == {policy.name for policy in POLICIES}
        assert any(row["infeasible"] for row in own) is (share == 0.06)
        for row in own:
            if row["infeasible"]:
                assert row["score"] is row["offloaded_device_bytes"] is row["served_device_bytes"] is None
                assert "the share must be at least" in row["infeasible"]
                assert float(row["infeasible"].partition("at least ")[2].split()[0]) > share
            else:
                assert 0 < row["served_device_bytes"] <= share * row["served_full_bytes"]
    full = [row for row in rows if row["name"] == "full"]
    assert [row["share"] for row in full] == [None, None]
    used = footprint(CONFIG, Full(), capacity=full[0]["capacity"], prompt=LENGTH, dtype="float32", fetch=fetch)
    assert full[0]["offloaded_device_bytes"] == used["device_bytes"]


@pytest.mark.slow
def test_a_smaller_share_agrees_less_and_a_budget_that_takes_no_memory_stays(params, monkeypatch):
    monkeypatch.setattr(runner, "run_cases", run_cases)
    rows = evaluate(params, POLICIES[:3], shares=[0.5, 0.06], fetch="device_put")
    kl = {(row["name"], row["share"]): row["kl"] for row in rows if not row["infeasible"]}
    assert kl["full", None] == pytest.approx(0, abs=1e-6)
    assert all(value > 1e-6 for (name, _), value in kl.items() if name != "full")
    assert kl["h2o", 0.06] > kl["h2o", 0.5]
    rows = evaluate(params, [Quest(budget=256), Quest()], shares=[0.5], fetch="device_put")
    assert [row["settings"].get("budget") for row in rows] == [None, 256, 1024]
    assert rows[1]["served_device_bytes"] == pytest.approx(rows[2]["served_device_bytes"], rel=0.05)
    assert rows[1]["attended_tokens"] < rows[2]["attended_tokens"]


@pytest.mark.slow
def test_the_command_prints_one_line_a_policy(params, tmp_path, capsys):
    save(params, tmp_path / "model")
    call = ["eval", str(tmp_path / "model"), "--tasks", "needle_multiturn", "--lengths", "1000", "--samples", "1"]
    call += ["--policies", "streaming_llm,omnikv", "--shares", "0.5,0.02", "--dtype", "float32"]
    assert cli.main(call) == 0
    out = capsys.readouterr().out
    assert out.count("streaming_llm") == 2
    assert "at least" in out  # omnikv at 2 %
    assert cli.main([*call, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["results"]
    assert {row["share"] for row in told} == {None, 0.5, 0.02}
    assert all(len(row["turns"]) == 4 for row in told if not row["infeasible"])


def test_what_has_no_share_is_told_by_its_settings():
    shown = [
        ("full", None, [], ["100", "full"]),
        ("h2o:heavy=3", 0.5, [], ["50", "h2o"]),
        ("adakv:kept=9", 0.5, [], ["50", "adakv"]),
        ('adakv:kept=9:scores="kvzip"', 0.5, [], ["50", 'adakv:scores="kvzip"']),
        ("h2o:heavy=4", None, [], ["-", "h2o:heavy=4"]),
        ("quest:unit=8", None, ["unit"], ["-", "quest:unit=8"]),
    ]
    common = {"task": "agreement", "length": 64, "infeasible": None, "score": 9.0, "stderr": None}
    common |= {"served_device_bytes": 1, "served_full_bytes": 4}
    rows = [
        common | {"policy": policy, "name": policy.partition(":")[0], "share": share, "sweeps": sweeps}
        for policy, share, sweeps, _ in shown
    ]
    with Console(width=120, record=True, quiet=False, file=io.StringIO()) as console:
        results.show_shares(rows, console)
    text = console.export_text()
    assert "All rows of adakv have kept=9." in text
    told = [line.split("│")[2:4] for line in text.splitlines() if line.startswith("│")]
    assert [[part.strip() for part in line] for line in told] == [cells for *_, cells in shown]


def test_a_prefill_of_the_policy_s_own_is_told(params):
    policy = InfLLM(window=64, sinks=4, budget=64, unit=16, query_block=64)
    rows = evaluate(params, [policy])
    assert {row["name"]: row["prefill"] for row in rows} == {"full": "exact", "infllm": "infllm"}


def test_sweeps_run_beside_shares(params, tmp_path):
    """A policy that belongs to two sweeps runs once, and its row names both."""
    made = evaluate(params, [H2O()], ["agreement", "passkey"], shares=[0.5], sweeps=SWEEPS, out=tmp_path)
    assert len(records_of(tmp_path)) == 2 * (1 + 1 + 3)
    for task in ("agreement", "passkey"):
        rows = [row for row in made if row["task"] == task]
        assert [row["sweeps"] for row in rows] == [[], [], ["rank"], ["rank", "budget"], ["budget"]]
        assert [row["share"] for row in rows] == [None, 0.5, None, None, None]
        settings = [(row["settings"]["rank"], row["settings"]["budget"]) for row in rows[2:]]
        assert settings == [(8, 32), (16, 32), (16, 64)]
        assert not any(row["control_of"] for row in rows)
    assert len({row["capacity"] for row in made}) == 1
    results.write_results(made, tmp_path, {"command": "jshadow eval"})
    *pictures, page = report.write_results(tmp_path)
    names = {path.name for path in pictures}
    assert names >= {"sweep_rank.png", "sweep_budget.png", "memory_score.png", "memory_kl.png"}
    assert names | {"report.html", "results.json", "samples.jsonl"} == {path.name for path in tmp_path.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert "h2o" in page.read_text(encoding="utf-8")


def test_sweeps_and_lists_of_policies_are_read():
    parse = cli_eval.parse_sweeps
    found = parse(["shadowkv:rank=8|16:budget=32", "quest:unit=4|8"])
    assert found == {"rank": SWEEPS["rank"], "unit": [Quest(unit=4), Quest(unit=8)]}
    more = parse(["shadowkv:rank=8|16:budget=32", "shadowkv:rank=24|32", "loki:columns=1|2"])
    assert more["rank"] == [*SWEEPS["rank"], ShadowKV(rank=24), ShadowKV(rank=32)]
    profiles = parse(["shadowkv:keys.profile=3,6,8|0,2,4:keys=transform"])["keys.profile"]
    assert [policy_settings(policy)["keys.profile"] for policy in profiles] == [(3, 6, 8), (0, 2, 4)]
    for wrong in ("shadowkv", "shadowkv:rank=8", "shadowkv:rank=8|", "shadowkv:rank=8|9:budget=8|9", "nobody:rank=1|2"):
        with pytest.raises(ConfigError, match=r"sweep must be|policy must be"):
            parse([wrong])
    coded = "shadowkv:keys=transform:keys.profile=3,6,8"  # a tuple is one setting
    assert cli_eval.split_policies(f"full, {coded}:budget=32,quest") == ["full", f"{coded}:budget=32", "quest"]
    with pytest.raises(ConfigError, match="without empty parts"):
        cli_eval.split_policies("full,,quest")


def test_a_swept_setting_that_another_one_stands_for_is_told_as_given():
    """Bits become a profile. Settings that are not swept have their resolved values."""
    policy = ShadowKV(keys=TransformCode(bits=2.0))
    resolved = policy.resolve(CONFIG, 96)
    assert resolved.keys.bits is None
    swept = result_rows.settings_of(Entry(policy, sweeps=("keys.bits", "rank")), resolved)
    assert swept == policy_settings(resolved) | {"keys.bits": 2.0}
    assert result_rows.settings_of(Entry(policy), resolved) == policy_settings(resolved)


@pytest.mark.slow
def test_learned_arrays_reach_their_policy_alone(params, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run_cases", run_cases)
    learned = LEARNER.fit(params, np.random.default_rng(0).integers(0, 256, 96), steps=3)
    policies = [LEARNER, StreamingLLM(sinks=2, window=14)]
    plain = evaluate(params, policies, out=tmp_path / "out")
    taught = evaluate(params, policies, out=tmp_path / "out", fitted={"less": learned})
    assert [row["fitted"] for row in plain] == [False] * 3
    assert [row["fitted"] for row in taught] == [False, True, False]
    kl = [[row["kl"] for row in rows] for rows in (plain, taught)]
    assert (kl[0][0], kl[0][2]) == (kl[1][0], kl[1][2])
    assert kl[0][1] != kl[1][1]
    save(params, tmp_path / "model")
    file = str(tmp_path / "less.safetensors")
    save_fitted(file, learned, LEARNER, load(tmp_path / "model", dtype="float32"))
    call = ["eval", str(tmp_path / "model"), "--tasks", "agreement", "--lengths", str(LENGTH), "--samples", "1"]
    call += ["--dtype", "float32", "--fitted", file, "--json", "--policies"]
    assert cli.main([*call, label(LEARNER)]) == 0
    [_, row] = json.loads(capsys.readouterr().out)["results"]
    assert row["fitted"]
    assert row["kl"] == pytest.approx(kl[1][1], rel=1e-4)
    assert cli.main([*call, "quest"]) == 2
    assert "fitted must be one file for a policy of --policies" in capsys.readouterr().err


SHAPES = LEARNER.fitted_shapes(CONFIG)
LEARNED = jax.tree.map(lambda shape: np.zeros(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
REFUSED = [
    *((POLICIES, {"shares": [share]}, "shares must be in") for share in (0.0, 1.5, -0.1, True, float("nan"))),
    *(
        ([policy], {"shares": [0.5]}, "shares decide all settings")
        for policy in (Quest(unit=4), Quest(unit=32, budget=32), H2O(heavy=9), DenseFirst(), Pyramid(SnapKV()))
    ),
    *(
        ([H2O()], {"sweeps": sweeps}, "sweeps must map a setting to policies")
        for sweeps in ({"rank": [H2O()]}, {"rank": ["shadowkv"]}, {"depth": [ShadowKV()]})
    ),
    ([InfLLM()], {"prefill": VerticalSlash()}, "infllm attends to a prompt in its own way"),
    ([Quest()], {"fitted": {"less": LEARNED}}, "got those of less"),
    ([LESS()], {"fitted": {"less": LEARNED}}, "the fit of less"),
    ([LESS()], {"fitted": {"less": LEARNED}, "shares": (0.5,)}, "the fit of less"),
]


@pytest.mark.parametrize(("policies", "options", "told"), REFUSED)
def test_what_cannot_be_evaluated_is_refused(params, policies, options, told):
    with pytest.raises(ConfigError, match=told):
        evaluate(params, policies, **options)
