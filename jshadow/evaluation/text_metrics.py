"""Scorers: from the right answers and a model's output to a number from 0 to 1.

Each is as its suite publishes it: RULER (arXiv 2404.06654), LongBench (arXiv 2308.14508, table 1), LongBench v2
(arXiv 2412.15204), InfiniteBench (arXiv 2402.13718). An empty output always scores 0.
"""

import collections
import json
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from jshadow.errors import ConfigError

Scorer = Callable[[Sequence[str], str, Sequence[str]], float]
LETTERS = "ABCD"
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
CODE_NOISE = ("`", "#", "//")  # a line of code with one of these is a fence or a comment


def score(scorer: str, answers: Sequence[str], output: str, choices: Sequence[str] = ()) -> float:
    """What an output is worth.

    Args:
        scorer: a name in SCORERS.
        answers: what must come out: all of them for "string_match_all", any of them for most others.
        output: what came out.
        choices: all classes, for "classes".

    Returns:
        0 to 1.

    Raises:
        ConfigError: an unknown scorer.
    """
    if scorer not in SCORERS:
        raise ConfigError(f"scorer must be one of {sorted(SCORERS)}, got {scorer!r}")
    if not output.strip() or not any(answers):
        return 0.0
    return float(SCORERS[scorer](answers, output, choices))


# Strings and numbers


def found(answer: str, output: str) -> bool:
    """Whether the number `answer` stands in the output, and not as a part of a longer number."""
    return bool(answer) and re.search(rf"(?<!\d){re.escape(answer)}(?!\d)", output) is not None


def number(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Whether one of the numbers stands in the output, whole."""
    return any(found(answer, output) for answer in answers)


def string_match_all(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Share of the answers that occur in the output, upper case or lower: RULER's score of all but its questions."""
    return sum(answer.lower() in output.lower() for answer in answers) / len(answers)


def string_match_part(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Whether any answer occurs in the output, upper case or lower: RULER's score of its questions."""
    return any(answer and answer.lower() in output.lower() for answer in answers)


def numbers_of(output: str) -> list[str]:
    """The whole numbers in an output, in order."""
    return re.findall(r"\d+", output)


def first_number(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Whether the first number of the output is an answer: InfiniteBench's pass keys and number strings."""
    return numbers_of(output)[:1] in [[answer] for answer in answers]


def decimal(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Whether the first decimal number of the output has the value of an answer: InfiniteBench's Math.Find."""
    first = re.search(r"-?\d+(\.\d+)?", output)
    return first is not None and any(float(first.group()) == to_float(answer) for answer in answers)


def last_number(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Whether the last number of the output, with its sign, is an answer: InfiniteBench's Code.Run."""
    return re.findall(r"-?\d+", output)[-1:] in [[answer] for answer in answers]


def leading_numbers(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Share of the answers, a list of numbers, that come out in order before the first wrong one: Math.Calc."""
    said = re.findall(r"-?\d+", output)
    wrong = (
        place for place, (answer, number_said) in enumerate(zip(answers, said, strict=False)) if answer != number_said
    )
    return next(wrong, min(len(answers), len(said))) / len(answers)


def number_share(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Share of the output's numbers that are the answer's: LongBench's paragraph retrieval and counting."""
    said = numbers_of(output)
    right = {one_number for answer in answers for one_number in numbers_of(answer)}
    return sum(one in right for one in said) / len(said) if said else 0.0


def to_float(text: str) -> float:
    """A number; NaN, which equals nothing, where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# Texts


def normalised(text: str) -> list[str]:
    """The words of a text as SQuAD compares them (arXiv 1606.05250): no case, punctuation or articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def harmonic(common: int, said: int, right: int) -> float:
    """F1 of so many common tokens."""
    return 2 * common / (said + right) if common else 0.0


def f1(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """F1 over normalised words, the best of the answers."""
    said = collections.Counter(normalised(output))
    scores = []
    for answer in answers:
        right = collections.Counter(normalised(answer))
        scores.append(harmonic((said & right).total(), said.total(), right.total()))
    return max(scores)


def common_subsequence(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common subsequence: bits of one integer a row (Hyyrö, 2004)."""
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
    """ROUGE-L, F1 of the longest common subsequence of words (Lin, 2004), the best of the answers."""
    said = re.findall(r"[a-z0-9]+", output.lower())
    right = [re.findall(r"[a-z0-9]+", answer.lower()) for answer in answers]
    return max(harmonic(common_subsequence(said, one), len(said), len(one)) for one in right)


def edit_similarity(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Likeness of the first line of code to the answer, 1 less insertions and deletions over both lengths."""
    lines = output.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in CODE_NOISE)), "")
    return max(harmonic(common_subsequence(line, answer), len(line), len(answer)) for answer in answers)


def of_first_line(scorer: Scorer) -> Scorer:
    """The same scorer on the first line alone, where a model goes on with further examples."""
    return lambda answers, output, choices: scorer(answers, output.lstrip("\n").split("\n")[0], choices)


# Choices


def letter(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Whether the letter chosen is an answer: after "answer is", else the first one that stands alone."""
    output = output.replace("*", "")  # bold
    stated = re.search(rf"answer is:?\s*\(?([{LETTERS}])\b", output, re.IGNORECASE)
    alone = re.search(rf"\(([{LETTERS}])\)|(?<![\w'])([{LETTERS}])(?=[).:,\n]|\s*$)", output)
    chosen = stated.group(1).upper() if stated else alone and (alone.group(1) or alone.group(2))
    return chosen in answers


def classes(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """One over the classes that the output names, if the right one is among them; a part of its name is none."""
    line = output.lstrip("\n").split("\n")[0]
    named = [choice for choice in choices if choice in line]
    scores = []
    for answer in answers:
        meant = [choice for choice in named if choice == answer or choice not in answer]
        scores.append(1 / len(meant) if answer in meant else 0.0)
    return max(scores)


# Data


def json_objects(text: str) -> list[dict[str, Any]]:
    """The flat JSON objects in a text, whatever stands between them, and where it is cut off."""
    objects = []
    for part in re.findall(r"\{[^{}]*\}", text):
        try:
            objects.append(json.loads(part))
        except ValueError:
            continue
    return objects


def json_fields(answers: Sequence[str], output: str, choices: Sequence[str]) -> float:
    """Share of the fields of all records that are right; a record is known by its first field, which counts too.

    Of several records that claim to be one, the first counts.
    """
    records = json_objects(answers[0])
    said: dict[Any, dict[str, Any]] = {}
    for record in json_objects(output):
        said.setdefault(same(record.get(next(iter(records[0])))), record)
    right = 0
    for record in records:
        fields = said.get(same(next(iter(record.values()))), {})
        right += sum(name in fields and same(fields[name]) == same(value) for name, value in record.items())
    return right / sum(map(len, records))


def same(value: Any) -> str:
    """A field as it is compared: a number may come as text, and case does not matter."""
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
    "f1_line": of_first_line(f1),
    "rouge_l": rouge_l,
    "rouge_l_line": of_first_line(rouge_l),
    "edit_similarity": edit_similarity,
    "letter": letter,
    "classes": classes,
    "json_fields": json_fields,
}
