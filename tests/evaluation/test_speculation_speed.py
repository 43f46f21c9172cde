"""`jshadow bench speculate` and `jshadow bench layer --speculate`: their rows, on a tiny model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from cases import TINY, model

from jshadow import Full, PromptLookup, Quest, SelfDraft
from jshadow.cli.main import main
from jshadow.errors import ConfigError
from jshadow.evaluation.speed.cycle import bench_cycle
from jshadow.evaluation.speed.layer import Shape
from jshadow.evaluation.speed.speculation import Text, acceptance, bench_speculation

SMALL = SelfDraft(tokens=3, policy=Quest(budget=32, unit=8, recent=8, dense_layers=0))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_an_acceptance_is_found_again(share):
    """From the counts of many cycles of eight tokens, of which each is accepted with this probability."""
    rng, cycles = np.random.default_rng(1), 4000
    accepted = (rng.random((cycles, 8)) < share).cumprod(axis=1).sum()
    report = SimpleNamespace(cycles=cycles, proposed_tokens=8 * cycles, accepted_tokens=int(accepted))
    assert acceptance(report) == pytest.approx(share, abs=0.02)


@pytest.mark.slow
def test_the_rows_of_a_text():
    ids = np.tile(np.random.default_rng(0).integers(0, TINY.vocab_size, 11), 6).tolist()
    rows = bench_speculation(model(), Full(), [PromptLookup(tokens=4), SMALL], [Text("copy", ids)], new=20, repeats=2)
    assert [row["system"].partition("(")[0] for row in rows] == ["plain", "PromptLookup", "SelfDraft"]
    for row in rows:
        assert row["same"]
        assert row["new_tokens"] == 20
        assert row["least"] <= row["ratio"] <= row["most"]
    plain, lookup, own = rows
    assert plain["ratio"] == 1
    assert plain["tokens_a_cycle"] is plain["acceptance"] is None
    for row in (lookup, own):
        assert 1 <= row["tokens_a_cycle"] <= 5
        assert 0 <= row["acceptance"] <= 1
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        bench_speculation(model(), Full(), [], [], new=1, repeats=0)


@pytest.mark.slow
def test_a_cycle_of_one_layer(capsys):
    row = bench_cycle(Shape(64, heads=4, kv_heads=2, head_dim=16, dtype="float32"), SMALL, 0.5, repeats=3)
    assert row["tokens_a_cycle"] == 1 + 0.5 + 0.25 + 0.125
    assert row["least"] <= row["ratio"] <= row["most"]
    words = [
        "bench",
        "layer",
        "--context",
        "64",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "16",
        "--repeats",
        "2",
    ]
    words += ["--repeats", "2", "--no-compile-cache", "--speculate", "self:quest:budget=32:unit=8:recent=8:tokens=3"]
    assert main([*words, "--acceptance", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["tokens_a_cycle"] == 4
    assert main([*words, "--acceptance", "0.9"]) == 0
    assert "check, ms" in capsys.readouterr().out


def test_a_cycle_needs_a_drafter_and_an_acceptance(capsys):
    words = ["bench", "layer", "--context", "64", "--speculate"]
    assert main([*words, "prompt_lookup", "--acceptance", "0.9"]) == 2
    assert "--speculate must be self or self:POLICY, with --acceptance" in capsys.readouterr().err
    assert main([*words, "self"]) == 2
    with pytest.raises(ConfigError, match=r"acceptance must lie in \[0, 1\], got 2"):
        bench_cycle(Shape(64), SMALL, 2)
