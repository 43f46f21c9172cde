"""Result rows: partial scores, recall of full attention, and the verdict of a control."""

from typing import Any

import pytest

from jshadow.evaluation import results


def test_partial_scores_are_summed_and_shown() -> None:
    common = {"kl": None, "attended_tokens": 1.0, "hit_rate": None}
    mine = [common | {"score": 50.0, "hits": [False], "scores": [0.5]}, common | {"score": 100.0, "hits": [True]}]
    full = [common | {"score": 75.0, "hits": [False], "scores": [0.75]}, common | {"score": 100.0, "hits": [True]}]
    row = results.score_row(mine, full, (0.0, 1.0))
    assert (row["asked"], row["found"], row["found_by_full"], row["found_by_both"]) == (2, 1.5, 1.75, 1.5)
    assert row["recall_of_full"] == pytest.approx(100 * 1.5 / 1.75)
    assert (row["depths"], row["depth_scores"], row["turns"]) == ([0.0, 1.0], [50.0, 100.0], [75.0])


def record(*hits: bool) -> dict[str, Any]:
    share = 100 * sum(hits) / len(hits)
    return {"score": share, "hits": list(hits), "kl": None, "attended_tokens": 1.0, "hit_rate": None}


def test_recall_counts_only_what_full_finds() -> None:
    row = results.score_row([record(True, False), record(True, True)], [record(False, True), record(True, True)])
    assert (row["asked"], row["found"], row["found_by_full"], row["found_by_both"]) == (4, 3, 3, 2)
    assert row["recall_of_full"] == pytest.approx(200 / 3)
    assert row["turns"] == [100.0, 50.0]
    assert results.score_row([record(True)], [record(False)])["recall_of_full"] is None
    rows = [row | {"policy": "a", "control_of": None}, row | {"policy": "b", "control_of": "a"}] * 2
    policy, control = results.pooled(rows)
    assert (policy["found_by_both"], policy["found_by_full"], policy["recall_of_full"]) == (
        4,
        6,
        pytest.approx(200 / 3),
    )
    assert control["control"].endswith("tells nothing")


@pytest.mark.parametrize(
    ("by_full", "by_control", "good"), [(10, 5, True), (10, 6, False), (0, 0, False), (5, 0, True)]
)
def test_a_control_that_finds_much_is_told(by_full: int, by_control: int, good: bool) -> None:
    said = results.verdict(by_full, by_control)
    assert said.startswith("ok") is good
    assert ("tells nothing" in said) is not good
