"""Scorers, which compare the correct answers with a model's output and return a number from 0 to 1.

They follow the definitions of their suites: RULER (arXiv 2404.06654), LongBench (arXiv 2308.14508, table 1), LongBench
v2 (arXiv 2412.15204) and InfiniteBench (arXiv 2402.13718). An empty output always scores 0.
"""

import collections
import json
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from jshadow.errors import check_one_of

Scorer = Callable[[Sequence[str], str, Sequence[str]], float]
LETTERS = "ABCD"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CODE_NOISE = ("`", "#", "//")  # a line with one of these is taken for a code fence or a comment


def score(scorer: str, answers: Sequence[str], output: str, choices: Sequence[str] = ()) -> float:
    """Score an output from 0 to 1, by the name of a scorer in SCORERS.

    "string_match_all" needs all of the answers, and most other scorers need any of them. `choices` are all classes, for
    "classes". Raises ConfigError if the scorer is unknown.
    """
    check_one_of("scorer", scorer, sorted(SCORERS))
    if not output.strip() or not any(answers):
        return 0.0
    return float(SCORERS[scorer](answers, output, choices))


# Strings and numbers


def found(answer: str, output: str) -> bool:
    """Return whether the number `answer` occurs in the output, but not as a part of a longer number."""
    return bool(answer) and re.search(rf"(?<!\d){re.escape(answer)}(?!\d)", output) is not None


def number(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 if one of the numbers occurs in the output, and not as a part of a longer number, else 0."""
    return any(found(answer, output) for answer in answers)


def string_match_all(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return the share of the answers that occur in the output, ignoring case. RULER uses it for all but questions."""
    return sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def string_match_part(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 if any answer occurs in the output, ignoring case, else 0. RULER uses it for questions."""
    return any(answer and answer.lower() in output.lower() for answer in answers)


def _numbers_of(output: str) -> list[str]:
    return re.findall(r"\d+", output)


def first_number(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 if the first number of the output is an answer, else 0 (InfiniteBench: pass keys and number strings)."""
    return _numbers_of(output)[:1] in [[answer] for answer in answers]


def decimal(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 if the first decimal number of the output equals an answer, else 0 (Math.Find of InfiniteBench)."""
    first = re.search(r"-?\d+(\.\d+)?", output)
    return first is not None and any(float(first.group()) == _to_float(answer) for answer in answers)


def last_number(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 if the last number of the output, with its sign, is an answer, else 0 (Code.Run of InfiniteBench)."""
    return re.findall(r"-?\d+", output)[-1:] in [[answer] for answer in answers]


def leading_numbers(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return the share of a list of numbers that come in order before a wrong one (Math.Calc of InfiniteBench)."""
    said = re.findall(r"-?\d+", output)
    wrong = (
        place for place, (answer, number_said) in enumerate(zip(answers, said, strict=False)) if answer != number_said
    )
    return next(wrong, min(len(answers), len(said))) / len(answers)


def number_share(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return the share of the output's numbers that are correct. LongBench uses it for retrieval and counting."""
    said = _numbers_of(output)
    right = {one_number for answer in answers for one_number in _numbers_of(answer)}
    return sum(one in right for one in said) / len(said) if said else 0.0


def _to_float(text: str) -> float:
    """Convert a text to a number. A text that is not a number becomes NaN, which equals nothing."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# Texts


def _normalized(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles, as SQuAD does (arXiv 1606.05250)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _harmonic(common: int, said: int, right: int) -> float:
    """Return the F1 of two texts of `said` and `right` tokens that have `common` in common."""
    return 2 * common / (said + right) if common else 0.0


def f1(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return the F1 over normalized words. The best answer counts."""
    said = collections.Counter(_normalized(output))
    scores = []
    for answer in answers:
        right = collections.Counter(_normalized(answer))
        scores.append(_harmonic((said & right).total(), said.total(), right.total()))
    return max(scores)


def common_subsequence(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common subsequence. Each row of the table is one integer (Hyyrö, 2004)."""
    masks: dict[Any, int] = {}
    for place, item in enumerate(one):
        masks[item] = masks.get(item, 0) | 1 << place
    every = (1 << len(one)) - 1
    row = every
    for item in other:
        hit = row & masks.get(item, 0)
        row = (row + hit | row - hit) & every
    return len(one) - row.bit_count()


def rouge_l(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return ROUGE-L, the F1 of the longest common subsequence of words (Lin, 2004). The best answer counts."""
    said = re.findall(r"[a-z0-9]+", output.lower())
    right = [re.findall(r"[a-z0-9]+", answer.lower()) for answer in answers]
    return max(_harmonic(common_subsequence(said, one), len(said), len(one)) for one in right)


def edit_similarity(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return the similarity of the first line of code to the answer. The best answer counts.

    It is 1 - (insertions + deletions) / (sum of both lengths).
    """
    lines = output.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in _CODE_NOISE)), "")
    return max(_harmonic(common_subsequence(line, answer), len(line), len(answer)) for answer in answers)


def _of_first_line(scorer: Scorer) -> Scorer:
    """Return a scorer that reads only the first line of the output, because a model may continue with more examples."""
    return lambda answers, output, choices: scorer(answers, output.lstrip("\n").split("\n")[0], choices)


# Choices


def letter(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 if the chosen letter is an answer, else 0.

    The chosen letter is the one after "answer is", or else the first letter that stands alone.
    """
    output = output.replace("*", "")  # Markdown for bold text
    stated = re.search(rf"answer is:?\s*\(?([{LETTERS}])\b", output, re.IGNORECASE)
    alone = re.search(rf"\(([{LETTERS}])\)|(?<![\w'])([{LETTERS}])(?=[).:,\n]|\s*$)", output)
    chosen = stated.group(1).upper() if stated else alone and (alone.group(1) or alone.group(2))
    return chosen in answers


def classes(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return 1 / (number of classes that the first line names) if the correct class is among them, else 0.

    A class whose name is a part of the correct one does not count.
    """
    line = output.lstrip("\n").split("\n")[0]
    named = [choice for choice in choices if choice in line]
    scores = []
    for answer in answers:
        meant = [choice for choice in named if choice == answer or choice not in answer]
        scores.append(1 / len(meant) if answer in meant else 0.0)
    return max(scores)


# Data


def _json_objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects without nested objects in a text. Other text and an incomplete object are skipped."""
    objects = []
    for part in re.findall(r"\{[^{}]*\}", text):
        try:
            objects.append(json.loads(part))
        except ValueError:
            continue
    return objects


def json_fields(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Return the share of the fields of all records that are correct.

    Records are matched by their first field, which also counts as a field. If several records have the same first
    field, the first one counts.
    """
    records = _json_objects(answers[0])
    said: dict[Any, dict[str, Any]] = {}
    for record in _json_objects(output):
        said.setdefault(_same(record.get(next(iter(records[0])))), record)
    right = 0
    for record in records:
        fields = said.get(_same(next(iter(record.values()))), {})
        right += sum(name in fields and _same(fields[name]) == _same(value) for name, value in record.items())
    return right / sum(map(len, records))


def _same(value: Any) -> str:
    return str(value).strip().lower()


SCORERS: dict[str, Scorer] = {
    "number": number,
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "first_number": first_number,
    "decimal": decimal,
    "last_number": last_number,
    "leading_numbers": leading_numbers,
    "number_share": number_share,
    "f1": f1,
    "f1_line": _of_first_line(f1),
    "rouge_l": rouge_l,
    "rouge_l_line": _of_first_line(rouge_l),
    "edit_similarity": edit_similarity,
    "letter": letter,
    "classes": classes,
    "json_fields": json_fields,
}
