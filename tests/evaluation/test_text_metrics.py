"""Scorers on hand-written outputs: right, nearly right, and wrong ones for each scorer."""

import itertools
import json
import random

import pytest

from jshadow.errors import ConfigError
from jshadow.evaluation import text_metrics
from jshadow.evaluation.text_metrics import SCORERS, score

RECORDS = json.dumps([{"order": 17, "name": "Ada", "count": 3}, {"order": 18, "name": "Leo", "count": 5}])
# scorer, answers, output, score
TABLE = [
    ("number", ["123"], "It is 123.", 1),
    ("number", ["123"], "1234", 0),
    ("number", ["7", "9"], "9", 1),
    ("string_match_all", ["AB", "cd"], "ab and CD", 1),
    ("string_match_all", ["AB", "cd"], "ab only", 0.5),
    ("string_match_all", ["x1", "x2", "x3"], "x2", 1 / 3),
    ("string_match_all", ["AB"], "a b", 0),
    ("string_match_part", ["red", "blue"], "It is BLUE", 1),
    ("string_match_part", ["red"], "green", 0),
    ("string_match_part", ["", "x"], "anything", 0),
    ("first_number", ["71"], "The key is 71, not 72", 1),
    ("first_number", ["72"], "71 72", 0),
    ("first_number", ["71"], "none", 0),
    ("first_number", ["71"], "710", 0),
    ("decimal", ["2.5"], "about 2.50", 1),
    ("decimal", ["3"], "3.0", 1),
    ("decimal", ["-3"], "3", 0),
    ("decimal", ["word"], "3", 0),
    ("last_number", ["-4"], "5 then -4", 1),
    ("last_number", ["4"], "5 then -4", 0),
    ("leading_numbers", ["1", "-2", "3", "4"], "1, -2, 3, 4, 9", 1),
    ("leading_numbers", ["1", "-2", "3", "4"], "1 -2 9 4", 0.5),
    ("leading_numbers", ["1", "2"], "1", 0.5),
    ("number_share", ["Paragraph 12"], "Paragraph 12", 1),
    ("number_share", ["Paragraph 12"], "12 or 13", 0.5),
    ("number_share", ["Paragraph 12"], "1 2", 0),
    ("number_share", ["3"], "three", 0),
    ("f1", ["The cat sat."], "the CAT sat", 1),
    ("f1", ["a cat sat down"], "cat sat", 0.8),
    ("f1", ["dog", "cat sat"], "cat", 2 / 3),
    ("f1", ["cat cat"], "cat", 2 / 3),
    ("f1", ["cat"], "the", 0),
    ("f1_line", ["cat"], "\ncat\nQuestion: dog dog", 1),
    ("f1", ["cat"], "cat\nQuestion dog", 0.5),
    ("rouge_l", ["police killed the gunman"], "police kill the gunman", 0.75),
    ("rouge_l", ["police killed the gunman"], "the gunman kill police", 0.5),
    ("rouge_l", ["one", "two three"], "Two, three!", 1),
    ("rouge_l_line", ["one two"], "one two\nthree four", 1),
    ("edit_similarity", ["return x"], "return x", 1),
    ("edit_similarity", ["return x"], "# a comment\nreturn x\nno", 1),
    ("edit_similarity", ["abcd"], "abxd", 0.75),
    ("edit_similarity", ["abcd"], "```", 0),
    ("letter", ["B"], "B", 1),
    ("letter", ["B"], "The correct answer is (B)", 1),
    ("letter", ["B"], " (B) it", 1),
    ("letter", ["B"], "A. But the answer is B.", 1),
    ("letter", ["B"], "A) rather than B)", 0),
    ("letter", ["B"], "Because", 0),
    ("letter", ["A"], "A day", 0),
    ("letter", ["C"], "**C**", 1),
    ("letter", ["C"], "The correct answer is **C**", 1),
    ("letter", ["D"], "I'D", 0),
    ("json_fields", [RECORDS], RECORDS, 1),
    ("json_fields", [RECORDS], f"Here:\n```json\n{RECORDS}\n```", 1),
    ("json_fields", [RECORDS], RECORDS.replace("Leo", "Max"), 5 / 6),
    ("json_fields", [RECORDS], RECORDS[: RECORDS.index("18")], 0.5),
    ("json_fields", [RECORDS], RECORDS.replace("17", '"17"'), 1),
    ("json_fields", [RECORDS], RECORDS.replace("17", "99"), 0.5),
    ("json_fields", [RECORDS], "[" + RECORDS[1:-1].replace("Ada", "Eve") + ", " + RECORDS[1:], 5 / 6),
    ("json_fields", [RECORDS], "no data", 0),
]


@pytest.mark.parametrize(("scorer", "answers", "output", "wanted"), TABLE)
def test_scores_are_those_worked_out_by_hand(scorer, answers, output, wanted):
    assert score(scorer, answers, output) == pytest.approx(wanted)


CLASSES = ["Number", "Number of people", "Place", "Date"]


@pytest.mark.parametrize(
    ("answer", "output", "wanted"),
    [
        ("Place", "Place", 1),
        ("Place", "Place or Date", 0.5),
        ("Number of people", "Number of people", 1),
        ("Number", "Number of people", 0.5),
        ("Place", "Date\nPlace", 0),
        ("Place", "none", 0),
    ],
)
def test_a_class_shares_with_those_named_beside_it(answer, output, wanted):
    assert score("classes", [answer], output, CLASSES) == pytest.approx(wanted)


def test_every_scorer_is_in_a_table_and_gives_nothing_for_nothing():
    assert {row[0] for row in TABLE} | {"classes"} == set(SCORERS)
    for scorer in SCORERS:
        for output in ("", " \n"):
            assert score(scorer, ["1"], output, ["1"]) == 0
        assert score(scorer, [""], "1") == 0


def test_an_unknown_scorer_is_refused():
    with pytest.raises(ConfigError, match="scorer must be one of"):
        score("bleu", ["1"], "1")


def by_table(one: str, other: str) -> int:
    """The longest common subsequence by the usual table."""
    row = [0] * (len(other) + 1)
    for a in one:
        before = row
        row = [0]
        for place, b in enumerate(other):
            row.append(before[place] + 1 if a == b else max(row[-1], before[place + 1]))
    return row[-1]


def test_common_subsequences_are_those_of_the_usual_table():
    rng = random.Random(0)
    for sizes in itertools.product((0, 1, 2, 7, 40), repeat=2):
        one, other = ("".join(rng.choices("abc", k=size)) for size in sizes)
        assert text_metrics.common_subsequence(one, other) == by_table(one, other)
        assert text_metrics.common_subsequence(one.split(), other.split()) <= 1


ANSWERS = [
    ("1234567", "1234567", True),
    ("1234567", " It is 1234567.", True),
    ("1234567", "", False),
    ("1234567", "123456", False),
    ("1234567", "12345678", False),
    ("1234567", "01234567", False),
    ("1234567", "1,234,567", False),
    ("1234567", "1234568 or 1234567", True),
    ("", "anything", False),
]


@pytest.mark.parametrize(("answer", "output", "good"), ANSWERS)
def test_an_answer_is_found_only_whole(answer, output, good):
    assert text_metrics.found(answer, output) is good
