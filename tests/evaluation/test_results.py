"""Metrics against NumPy, scorers on hand-written outputs, and result rows: scores, recall, the verdict of a control."""

import io
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from result_rows import row
from rich.console import Console

from jshadow.errors import ConfigError
from jshadow.evaluation import metrics, results, scorers
from jshadow.evaluation.scorers import SCORERS, score


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


RECORDS = json.dumps([{"order": 17, "name": "Ada", "count": 3}, {"order": 18, "name": "Leo", "count": 5}])
EVE_BEFORE = "[" + RECORDS[1:-1].replace("Ada", "Eve") + ", " + RECORDS[1:]
FOUR = ["1", "-2", "3", "4"]
# scorer, answers, and the score of each output
TABLE = [
    ("number", ["123"], {"It is 123.": 1, "1234": 0}),
    ("number", ["7", "9"], {"9": 1}),
    ("string_match_all", ["AB", "cd"], {"ab and CD": 1, "ab only": 0.5}),
    ("string_match_all", ["x1", "x2", "x3"], {"x2": 1 / 3}),
    ("string_match_all", ["AB"], {"a b": 0}),
    ("string_match_part", ["red", "blue"], {"It is BLUE": 1}),
    ("string_match_part", ["red"], {"green": 0}),
    ("string_match_part", ["", "x"], {"anything": 0}),
    ("first_number", ["71"], {"The key is 71, not 72": 1, "none": 0, "710": 0}),
    ("first_number", ["72"], {"71 72": 0}),
    ("decimal", ["2.5"], {"about 2.50": 1}),
    ("decimal", ["3"], {"3.0": 1}),
    ("decimal", ["-3"], {"3": 0}),
    ("decimal", ["word"], {"3": 0}),
    ("last_number", ["-4"], {"5 then -4": 1}),
    ("last_number", ["4"], {"5 then -4": 0}),
    ("leading_numbers", FOUR, {"1, -2, 3, 4, 9": 1, "1 -2 9 4": 0.5}),
    ("leading_numbers", ["1", "2"], {"1": 0.5}),
    ("number_share", ["Paragraph 12"], {"Paragraph 12": 1, "12 or 13": 0.5, "1 2": 0}),
    ("number_share", ["3"], {"three": 0}),
    ("f1", ["The cat sat."], {"the CAT sat": 1}),
    ("f1", ["a cat sat down"], {"cat sat": 0.8}),
    ("f1", ["dog", "cat sat"], {"cat": 2 / 3}),
    ("f1", ["cat cat"], {"cat": 2 / 3}),
    ("f1", ["cat"], {"the": 0, "cat\nQuestion dog": 0.5}),
    ("f1_line", ["cat"], {"\ncat\nQuestion: dog dog": 1}),
    ("rouge_l", ["police killed the gunman"], {"police kill the gunman": 0.75, "the gunman kill police": 0.5}),
    ("rouge_l", ["one", "two three"], {"Two, three!": 1}),
    ("rouge_l_line", ["one two"], {"one two\nthree four": 1}),
    ("edit_similarity", ["return x"], {"return x": 1, "# a comment\nreturn x\nno": 1}),
    ("edit_similarity", ["abcd"], {"abxd": 0.75, "```": 0}),
    ("letter", ["B"], {"B": 1, "The correct answer is (B)": 1, " (B) it": 1, "A. But the answer is B.": 1}),
    ("letter", ["B"], {"A) rather than B)": 0, "Because": 0}),
    ("letter", ["A"], {"A day": 0}),
    ("letter", ["C"], {"**C**": 1, "The correct answer is **C**": 1}),
    ("letter", ["D"], {"I'D": 0}),
    ("json_fields", [RECORDS], {RECORDS: 1, f"Here:\n```json\n{RECORDS}\n```": 1, "no data": 0}),
    ("json_fields", [RECORDS], {RECORDS.replace("Leo", "Max"): 5 / 6, RECORDS[: RECORDS.index("18")]: 0.5}),
    ("json_fields", [RECORDS], {RECORDS.replace("17", '"17"'): 1, RECORDS.replace("17", "99"): 0.5}),
    ("json_fields", [RECORDS], {EVE_BEFORE: 5 / 6}),
    # a class shares with those named beside it
    ("classes", ["Place"], {"Place": 1, "Place or Date": 0.5, "Date\nPlace": 0, "none": 0}),
    ("classes", ["Number of people"], {"Number of people": 1}),
    ("classes", ["Number"], {"Number of people": 0.5}),
]
CLASSES = ["Number", "Number of people", "Place", "Date"]


@pytest.mark.parametrize(("scorer", "answers", "outputs"), TABLE)
def test_scores_are_those_worked_out_by_hand(scorer, answers, outputs):
    choices = [CLASSES] if scorer == "classes" else []
    assert {output: score(scorer, answers, output, *choices) for output in outputs} == pytest.approx(outputs)


def test_every_scorer_is_in_the_table_and_gives_nothing_for_nothing():
    assert {row[0] for row in TABLE} == set(SCORERS)
    for scorer in SCORERS:
        assert [score(scorer, ["1"], output, ["1"]) for output in ("", " \n")] == [0, 0]
        assert score(scorer, [""], "1") == 0
    with pytest.raises(ConfigError, match="scorer must be one of"):
        score("bleu", ["1"], "1")


def by_table(one: str, other: str) -> int:
    """The longest common subsequence by the usual table."""
    row = [0] * (len(other) + 1)
    for a in one:
        before, row = row, [0]
        for place, b in enumerate(other):
            row.append(before[place] + 1 if a == b else max(row[-1], before[place + 1]))
    return row[-1]


def test_common_subsequences_are_those_of_the_usual_table():
    rng = random.Random(0)
    for sizes in itertools.product((0, 1, 2, 7, 40), repeat=2):
        one, other = ("".join(rng.choices("abc", k=size)) for size in sizes)
        assert scorers.common_subsequence(one, other) == by_table(one, other)
        assert scorers.common_subsequence(one.split(), other.split()) <= 1


def test_an_answer_is_found_only_whole():
    for output in ("1234567", " It is 1234567.", "1234568 or 1234567"):
        assert scorers.found("1234567", output), output
    for output in ("", "123456", "12345678", "01234567", "1,234,567"):
        assert not scorers.found("1234567", output), output
    assert not scorers.found("", "anything")
