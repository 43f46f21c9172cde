"""Metrics against NumPy; result rows: partial scores, recall of full attention, and the verdict of a control."""

import io
from typing import Any

import numpy as np
import pytest
from result_rows import row
from rich.console import Console

from jshadow.evaluation import metrics, results


def record(*hits: bool, **given: Any) -> dict[str, Any]:
    share = 100 * sum(hits) / max(len(hits), 1)
    return {"score": share, "hits": list(hits), "kl": None, "attended_tokens": 1.0, "hit_rate": None} | given


def test_partial_scores_are_summed_and_shown():
    mine = [record(False, score=50.0, scores=[0.5]), record(True)]
    full = [record(False, score=75.0, scores=[0.75]), record(True)]
    row = results.score_row(mine, full, (0.0, 1.0))
    assert (row["asked"], row["found"], row["found_by_full"], row["found_by_both"]) == (2, 1.5, 1.75, 1.5)
    assert row["recall_of_full"] == pytest.approx(100 * 1.5 / 1.75)
    assert (row["depths"], row["depth_scores"], row["turns"]) == ([0.0, 1.0], [50.0, 100.0], [75.0])


def test_recall_counts_only_what_full_finds():
    row = results.score_row([record(True, False), record(True, True)], [record(False, True), record(True, True)])
    assert (row["asked"], row["found"], row["found_by_full"], row["found_by_both"]) == (4, 3, 3, 2)
    assert row["recall_of_full"] == pytest.approx(200 / 3)
    assert row["turns"] == [100.0, 50.0]
    assert results.score_row([record(True)], [record(False)])["recall_of_full"] is None
    rows = [row | {"policy": "a", "control_of": None}, row | {"policy": "b", "control_of": "a"}] * 2
    policy, control = results.pooled(rows)
    assert (policy["found_by_both"], policy["found_by_full"]) == (4, 6)
    assert policy["recall_of_full"] == pytest.approx(200 / 3)
    assert control["control"].endswith("tells nothing")


@pytest.mark.parametrize(
    ("by_full", "by_control", "good"), [(10, 5, True), (10, 6, False), (0, 0, False), (5, 0, True)]
)
def test_a_control_that_finds_much_is_told(by_full, by_control, good):
    said = results.verdict(by_full, by_control)
    assert said.startswith("ok") is good
    assert ("tells nothing" in said) is not good


def test_perplexity_against_numpy():
    logits = np.random.default_rng(0).normal(0, 2, (5, 11))
    tokens = np.array([3, 0, 10, 3, 7])
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.prod(chances[np.arange(5), tokens]) ** (-1 / 5)
    assert metrics.perplexity(logits, tokens) == pytest.approx(wanted)
    records = [record(score=1.0, kl=0.0, ppl=ppl) for ppl in (2, 8)]
    assert results.score_row(records, records)["ppl"] == pytest.approx(4)
    assert results.score_row([{**records[0], "ppl": None}], records[:1])["ppl"] is None


def test_divergence_against_numpy_and_far_from_overflow():
    rng = np.random.default_rng(0)
    full, other = rng.normal(0, 3, (2, 7, 50)).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (full, other))
    np.testing.assert_allclose(metrics.kl(full, other), (p * np.log(p / q)).sum(-1), rtol=1e-10)
    np.testing.assert_array_equal(metrics.kl(full, full), 0)
    np.testing.assert_array_equal(metrics.top1(full, other), p.argmax(-1) == q.argmax(-1))
    assert np.isfinite(metrics.log_softmax(full * np.float32(1e30))).all()
    np.testing.assert_allclose(metrics.kl(full + np.float32(1000), other), metrics.kl(full, other), atol=1e-3)


def test_mean_and_standard_error():
    values = [0.0, 100.0, 100.0, 50.0]
    mean, stderr = metrics.mean_stderr(values)
    assert (mean, stderr) == (np.mean(values), pytest.approx(np.std(values, ddof=1) / 2))
    assert metrics.mean_stderr([3.0]) == (3.0, None)
    assert [metrics.mean_known([None, 2.0]), metrics.mean_known([None])] == [2.0, None]


SEVERAL = [f"shadowkv:budget=512:outlier_chunks=48:chunk_size=8:local_chunks={count}" for count in range(5)]
NAMED = [
    (SEVERAL, [f"shadowkv:local_chunks={count}" for count in range(5)], "budget=512, outlier_chunks=48, chunk_size=8"),
    ([*SEVERAL[:2], "shadowkv"], [*SEVERAL[:2], "shadowkv"], ""),
    (["quest:unit=8", "h2o:heavy=4"], ["quest:unit=8", "h2o:heavy=4"], ""),
    (['adakv:kept=9:scores="a:b=c"', "adakv:kept=9"], ['adakv:scores="a:b=c"', "adakv"], "kept=9"),
    (
        ["h2o:heavy=4:dense.layers=1", "h2o:heavy=4:dense.layers=2"],
        ["h2o:dense.layers=1", "h2o:dense.layers=2"],
        "heavy=4",
    ),
]


@pytest.mark.parametrize(("labels", "names", "common"), NAMED)
@pytest.mark.parametrize("width", [80, 120, 160])
def test_rows_are_named_by_what_differs_between_them(labels, names, common, width):
    """No two rows look the same in a printed table, and what all of them have is told once."""
    given = {"fetch": "resident", "hit_rate": None, "offloaded_device_bytes": 1, "full_bytes": 2, "control": None}
    rows = [row(label, **given) for label in labels for _ in range(2)]
    for show in (results.show, results.show_shares):
        with Console(width=width, file=io.StringIO(), record=True) as console:
            show(rows, console)
        text = console.export_text()
        column = "".join(line.split("│")[3].strip() for line in text.splitlines() if line.startswith("│"))
        assert all(name in column for name in names)
        assert "\N{HORIZONTAL ELLIPSIS}" not in column
        assert (f"have {common}." in " ".join(text.split())) == bool(common)
    short, _ = results.short_names(labels)
    assert list(short.values()) == names
