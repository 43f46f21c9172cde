"""Scorers on hand-written outputs: right, nearly right, and wrong ones for each scorer."""

import itertools
import json
import random

import pytest

from jshadow.errors import ConfigError
from jshadow.evaluation import metrics
from jshadow.evaluation.metrics import SCORERS, score

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
        assert metrics.common_subsequence(one, other) == by_table(one, other)
        assert metrics.common_subsequence(one.split(), other.split()) <= 1


def test_an_answer_is_found_only_whole():
    for output in ("1234567", " It is 1234567.", "1234568 or 1234567"):
        assert metrics.found("1234567", output), output
    for output in ("", "123456", "12345678", "01234567", "1,234,567"):
        assert not metrics.found("1234567", output), output
    assert not metrics.found("", "anything")
