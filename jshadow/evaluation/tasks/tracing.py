"""The tracing and counting tasks of RULER with different wording. No single place of the text has the answer.

In arXiv 2404.06654, variable tracking is section 3.2, common and frequent words are section 3.3, and the sizes are in
appendix B.
"""

import itertools
import math
import random
import string
from typing import Any

from jshadow.evaluation.tasks.drawing import letters, word_pairs
from jshadow.evaluation.tasks.filling import Pieces, filled, planted
from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.evaluation.tasks.texts import noise_pieces, words

HOPS = 4  # number of assignments from one variable to another
NAME = 5  # letters of a variable
COMMON = 10  # number of words that are asked for
COMMON_TIMES, OTHER_TIMES = 30, 3  # how often these words are in the list, and how often the other words are at most
SHORT, SHORT_COMMON_TIMES, SHORT_OTHER_TIMES = 4096, 6, 1  # the same numbers for prompts of fewer than SHORT tokens
CODED = 6  # letters of a coded word
ALPHA = 2.0  # exponent of the Zipf distribution of coded words
FREQUENT = 3  # number of coded words that are asked for
TOKENS_A_WORD = 50  # the vocabulary has one coded word for this many tokens of the prompt
DOTS = "....."  # the most frequent coded word, which is not asked for


def variable_tracking(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Hide a chain of assignments in filler sentences, and ask which variables have the value of the first one."""
    rng = random.Random(seed)
    names = list(itertools.islice(letters(rng, string.ascii_uppercase, NAME), HOPS + 1))
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

    def compose(count: int, padding: str) -> str:
        return (head + planted(pieces.first(count), lines, depths)).rstrip() + padding

    question = f"Which {len(names)} variables hold the value {value}, at first hand or from another variable?"
    prefix = f"The variables that hold {value} are:"
    return filled(tokenizer, length, compose, [Sample("", question, prefix, tuple(names), 30, "string_match_all")])


def common_words(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for the ten most common words of a numbered list in random order. The depth has no effect."""
    del depth
    rng = random.Random(seed)
    many, few = (SHORT_COMMON_TIMES, SHORT_OTHER_TIMES) if length < SHORT else (COMMON_TIMES, OTHER_TIMES)
    vocabulary = rng.sample(words(), len(words()))
    common = vocabulary[:COMMON]
    others = Pieces(itertools.chain(vocabulary[COMMON:], word_pairs(rng)))
    order = rng.getrandbits(32)

    def compose(count: int, padding: str) -> str:
        listed = common * many + list(itertools.chain(*([word] * few for word in others.first(count // few))))
        listed += [others.first(count // few + 1)[-1]] * (count % few)
        random.Random(order).shuffle(listed)
        numbered = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
        return f"{WORDS_HEAD}\n\n{numbered}{padding}"

    question = f"Which {COMMON} words come most often in the list above?"
    sample = Sample("", question, "The words that come most often are:", tuple(common), 120, "string_match_all")
    return filled(tokenizer, length, compose, [sample])


WORDS_HEAD = (
    "Below is a numbered list of words. Some come more often than the others: remember which. For example, in "
    "1. rye 2. oat 3. rye 4. fig 5. oat 6. nut the words that come most often are: 1. rye 2. oat"
)


def zipf_counts(total: int, most: int) -> list[int]:
    """Return how often each of at most `most` words occurs in a text of about `total` words, most frequent first."""
    zeta = math.pi**2 / 6  # the zeta function at ALPHA = 2
    counts = [round(total / zeta / rank**ALPHA) for rank in range(1, most + 1)]
    return [count for count in counts if count]


def frequent_words(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for the three most frequent coded words of a text that follows Zipf's law. The depth has no effect."""
    del depth
    rng = random.Random(seed)
    vocabulary = max(length // TOKENS_A_WORD, FREQUENT + 2)
    codes = [DOTS, *itertools.islice(letters(rng, string.ascii_lowercase, CODED), vocabulary - 1)]
    order = rng.getrandbits(32)

    def compose(count: int, padding: str) -> str:
        counts = zipf_counts(count, vocabulary)
        text = list(itertools.chain(*([code] * times for code, times in zip(codes, counts, strict=False))))
        random.Random(order).shuffle(text)
        return f"This is a text in code. Count its words and leave out the dots.\n\n{' '.join(text)}{padding}"

    def has_gap(total: int) -> bool:  # between the words that are asked for and the next one
        counts = zipf_counts(total, vocabulary)
        return len(counts) > FREQUENT + 1 and counts[FREQUENT] > counts[FREQUENT + 1] + 1

    least = next(filter(has_gap, itertools.count(20)))
    question = f"Which {FREQUENT} words of the text in code come most often?"
    prefix = "The words that come most often are:"
    answers = tuple(codes[1 : FREQUENT + 1])
    return filled(
        tokenizer, length, compose, [Sample("", question, prefix, answers, 50, "string_match_all")], least=least
    )
