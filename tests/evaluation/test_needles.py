"""The real model with ShadowKV finds the planted facts that it finds with full attention, and a control does not."""

import pytest

from jshadow import ShadowKV, load
from jshadow.evaluation.results import pooled
from jshadow.evaluation.runner import evaluate

POLICY = ShadowKV(rank=32, budget=256)
TASKS = ("needle_noise", "needle_docs")
SAMPLES = 6  # docs/benchmarks/quality.md has ten at three lengths


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load(smollm2_dir, dtype="float32")


@pytest.mark.real
@pytest.mark.timeout(2400)
def test_rank_32_budget_256_finds_what_full_attention_finds(smollm2):
    rows = evaluate(smollm2, TASKS, [2048], [POLICY], samples=SAMPLES, fetch="resident")
    for row in rows:
        print(f"{row['task']:13} {row['length']:5} {row['policy']:32} {row['found']:2} / {row['asked']}")
    [_, shadow, control] = pooled(rows)
    assert shadow["policy"].startswith("shadowkv")
    assert shadow["asked"] == len(TASKS) * SAMPLES
    assert shadow["found_by_full"] >= shadow["asked"] / 2, "full attention finds too little for this to mean anything"
    assert shadow["found_by_both"] >= 0.9 * shadow["found_by_full"]
    assert control["found"] < 0.6 * control["found_by_full"]
    assert control["control"].startswith("ok")


@pytest.mark.real
def test_offloaded_values_find_the_same(smollm2):
    fetches = ("resident", "device_put")
    resident, offloaded = (evaluate(smollm2, TASKS, [1024], [POLICY], samples=2, fetch=fetch) for fetch in fetches)
    assert [row["turns"] for row in offloaded] == [row["turns"] for row in resident]
    assert offloaded[1]["host_bytes"] > 0
    assert offloaded[1]["device_bytes"] < resident[1]["device_bytes"]
