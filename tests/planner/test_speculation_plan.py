"""The predicted speed of full attention with speculation: `jshadow plan --speculate`."""

import dataclasses
import json

import pytest

from jshadow.cli.main import main
from jshadow.models.published import published_config
from jshadow.models.registry import family_of
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_specs import gpu_named
from jshadow.planner.speculation import Drafting, speculation_plan
from jshadow.policies import Full, Offloaded, Quest, ShadowKV

H200 = gpu_named("h200")
HF = published_config("llama-3.1-8b")
LLAMA = family_of(HF).config_from_hf(HF)
LONG = family_of(published_config("llama-3-8b-1m")).config_from_hf(published_config("llama-3-8b-1m"))
SERVING = Workload(122_880, batch=7)


def test_a_cycle_is_its_drafts_and_its_check():
    policy = Quest(budget=512, unit=16, recent=64, dense_layers=0)
    plan = speculation_plan(LLAMA, H200, SERVING, Drafting(8, 0.93, policy))
    full = capacity_plan(LLAMA, Full(), H200, SERVING).full.step
    sparse = capacity_plan(LLAMA, policy, H200, Workload(122_880, batch=7, fetch="resident")).chosen.step
    assert plan.batch == 7
    assert plan.tokens_a_cycle == pytest.approx((1 - 0.93**9) / 0.07)
    assert plan.step_seconds == pytest.approx(7 / full.tokens_per_second)
    # the check reads what a step reads, and computes nine times as much
    assert plan.check_seconds == pytest.approx(sum(full.hbm_bytes.values()) / 4.8e12 + 9 * full.flops / H200.flops)
    assert plan.draft_seconds == pytest.approx(8 * 7 / sparse.tokens_per_second)
    cycle = plan.check_seconds + plan.draft_seconds
    assert plan.tokens_per_second == pytest.approx(7 * plan.tokens_a_cycle / cycle)
    # two rows of 128 numbers in 16 bits for each unit, 8 heads and 32 layers, beside 32 rows of keys and values
    assert speculation_plan(LLAMA, H200, Workload(122_880), Drafting(8, 0.9, policy)).batch == 7  # 8 without them
    units = -(-(122_880 + 64) // 16)
    assert 0.9 < plan.draft_bytes[0] / (7 * units * 2 * 128 * 2 * 8 * 32) < 1.1
    assert plan.ratio > 1


def test_drafts_that_take_no_time():
    plan = speculation_plan(LLAMA, H200, SERVING, Drafting(4, 0.0))
    assert plan.tokens_a_cycle == 1
    assert plan.draft_seconds == sum(plan.draft_bytes) == 0
    assert plan.ratio < 1
    assert speculation_plan(LLAMA, H200, SERVING, Drafting(4, 1.0)).tokens_a_cycle == 5


def test_keys_and_values_in_host_memory():
    """A million tokens: each pass over the link checks many tokens, and drafts take little beside it."""
    serving, drafting = Workload(1_000_000), Drafting(32, 0.93, ShadowKV(budget=2048), own_cache=True)
    plan = speculation_plan(LONG, H200, serving, drafting, Offloaded())
    step = capacity_plan(LONG, Offloaded(), H200, Workload(1_000_000, batch=plan.batch)).chosen.step
    rows = plan.batch * 1_000_000 * 2 * 8 * 128 * 2 * 32
    assert 1 <= step.pcie_bytes / rows < 1.01
    assert step.gather_seconds == 0  # whole blocks are copied
    assert plan.target_bytes[1] == pytest.approx(rows, rel=0.01)
    assert plan.fetch == "device_put"
    assert plan.draft_seconds < plan.check_seconds / 4
    assert plan.step_seconds == pytest.approx(plan.batch / step.tokens_per_second)
    assert plan.ratio == pytest.approx(
        plan.tokens_a_cycle * plan.step_seconds / (plan.check_seconds + plan.draft_seconds)
    )
    least = capacity_plan(LONG, Offloaded(), H200, Workload(1_000_000, batch=1)).chosen.host_bytes
    small = dataclasses.replace(H200, host_limit=int(1.6 * least))
    assert speculation_plan(LONG, small, Workload(1_000_000), drafting, Offloaded()).batch == 1


def test_the_command(capsys):
    def plan(words):
        assert main(["plan", *words.split()]) == 0
        return capsys.readouterr().out

    short = "llama-3.1-8b --context 122880 --gpu h200 --batch 7 --speculate 8 --acceptance 0.93"
    [found] = json.loads(plan(f"{short} --json"))["plans"]
    assert found["policy"]["name"] == "quest"
    assert found["ratio"] > 2
    assert "tokens a cycle" in plan(f"{short} --drafter prompt_lookup")
    long = "llama-3-8b-1m --context 1000000 --gpu h200 --policy offloaded --speculate 32 --acceptance 0.93"
    out = plan(long)
    assert "drafts of compressed" in out
    assert "in host memory" in out
