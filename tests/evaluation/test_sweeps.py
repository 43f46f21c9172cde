"""Sweeps: `evaluate` with several values of one setting, and how the command line reads them."""

import pytest
from tiny_text import byte_tokenizer

from jshadow.cli import eval as cli_eval
from jshadow.errors import ConfigError
from jshadow.evaluation import html, rows, runner
from jshadow.evaluation.settings import Entry
from jshadow.models.config import ModelConfig
from jshadow.policies import (
    H2O,
    Quest,
    ShadowKV,
)
from jshadow.policies.settings import policy_settings
from jshadow.policies.shadowkv import TransformCode
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
LENGTH = 420


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, byte_tokenizer())


SWEEPS = {
    "rank": [ShadowKV(rank=rank, budget=32) for rank in (8, 16)],
    "budget": [ShadowKV(rank=16, budget=budget) for budget in (32, 64)],
}


@pytest.mark.usefixtures("made_up")
def test_sweeps_run_beside_shares(params, tmp_path):
    """A policy that belongs to two sweeps runs once, and its row names both."""
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


@pytest.mark.parametrize("sweeps", [{"rank": [H2O()]}, {"rank": ["shadowkv"]}, {"depth": [ShadowKV()]}])
def test_bad_sweeps_are_refused(params, sweeps):
    with pytest.raises(ConfigError, match="sweeps must map a setting to policies"):
        runner.evaluate(params, ["agreement"], [LENGTH], [H2O()], samples=1, sweeps=sweeps)


def test_sweeps_are_read(capsys):
    found = cli_eval.parse_sweeps(["shadowkv:rank=8|16:budget=32", "quest:unit=4|8"])
    assert found == {"rank": SWEEPS["rank"], "unit": [Quest(unit=4), Quest(unit=8)]}
    for wrong in ("shadowkv", "shadowkv:rank=8", "shadowkv:rank=8|", "shadowkv:rank=8|9:budget=8|9", "nobody:rank=1|2"):
        with pytest.raises(ConfigError, match=r"sweep must be|policy must be"):
            cli_eval.parse_sweeps([wrong])
    more = cli_eval.parse_sweeps(["shadowkv:rank=8|16:budget=32", "shadowkv:rank=24|32", "loki:columns=1|2"])
    assert more["rank"] == [*SWEEPS["rank"], ShadowKV(rank=24), ShadowKV(rank=32)]
    profiles = cli_eval.parse_sweeps(["shadowkv:keys.profile=3,6,8|0,2,4:keys=transform"])["keys.profile"]
    assert [policy_settings(policy)["keys.profile"] for policy in profiles] == [(3, 6, 8), (0, 2, 4)]


def test_a_swept_setting_that_another_one_stands_for_is_told_as_given(params):
    """Bits become a profile. Settings that are not swept have their resolved values."""
    policy = ShadowKV(keys=TransformCode(bits=2.0))
    resolved = policy.resolve(params.config, 96)
    assert resolved.keys.bits is None
    swept = rows.settings_of(Entry(policy, sweeps=("keys.bits", "rank")), resolved)
    assert swept == policy_settings(resolved) | {"keys.bits": 2.0}
    assert rows.settings_of(Entry(policy), resolved) == policy_settings(resolved)


def test_a_tuple_in_a_list_of_policies_is_one_setting():
    coded = "shadowkv:keys=transform:keys.profile=3,6,8"
    assert cli_eval.split_policies(f"full, {coded}:budget=32,quest") == ["full", f"{coded}:budget=32", "quest"]
    with pytest.raises(ConfigError, match="without empty parts"):
        cli_eval.split_policies("full,,quest")
