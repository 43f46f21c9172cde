"""`python tools/demo_text.py`: the document of `make demo`, about 2,000 tokens with one planted fact.

The sentences are drawn by a small generator of this file, so that every Python version writes the same text.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

CITY, NUMBER = "Lisbon", "4719362"
FACT = f"The secret number of {CITY} is {NUMBER}."
QUESTION = f"What is the secret number of {CITY}? Answer with the number."
INSTRUCTION = "Read this diary, then answer a question about it."
PARAGRAPHS, SENTENCES = 20, 6
PLANTED_AFTER = 10  # paragraphs

SHIPS = ("Heron", "Blue Anchor", "Marigold", "Northern Lady", "Swift", "Old Margaret", "Pelican", "Evening Star")
PEOPLE = ("the harbor master", "a young sailor", "the baker", "two fishermen", "the lighthouse keeper", "a carpenter")
GOODS = ("apples", "salt", "wool", "lamp oil", "timber", "dried fish", "roof tiles", "barley", "paper", "copper wire")
PLACES = ("the long pier", "the old market", "the customs house", "the boat yard", "the chapel", "the fish hall")
WEATHER = ("rain", "a cold wind", "thick fog", "bright sun", "light snow", "a calm sea")
TIMES = ("In the morning", "At noon", "Late in the afternoon", "After sunset", "Before breakfast", "During the night")
FORMS = (
    "{time} the {ship} brought {goods} to {place}.",
    "{time} {person} carried {goods} from {place} to the {ship}.",
    "There was {weather}, and the {ship} waited beside {place}.",
    "{time} {person} repaired a door of {place}.",
    "The crew of the {ship} sold {goods} and bought {other}.",
    "{time} {person} told a long story about {weather} and {goods}.",
    "Nobody at {place} had seen so much of the {goods} in years.",
    "{time} there was {weather}, so {person} stayed near {place}.",
)


def draws(seed: int) -> Iterator[int]:
    """Yield endless integers of a linear congruential generator (modulus 2^32): the upper 16 bits of each state."""
    state = seed
    while True:
        state = (1664525 * state + 1013904223) % 2**32
        yield state >> 16


def document() -> str:
    """Return the text: paragraphs about a harbor, with `FACT` as a separate paragraph."""
    numbers = draws(7)

    def one(choices: Sequence[str]) -> str:
        return choices[next(numbers) % len(choices)]

    def sentence() -> str:
        return one(FORMS).format(
            time=one(TIMES),
            ship=one(SHIPS),
            goods=one(GOODS),
            other=one(GOODS),
            place=one(PLACES),
            person=one(PEOPLE),
            weather=one(WEATHER),
        )

    paragraphs = [" ".join(sentence() for _ in range(SENTENCES)) for _ in range(PARAGRAPHS)]
    paragraphs.insert(PLANTED_AFTER, FACT)
    return "\n\n".join(paragraphs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the document, and return 0."""
    parser = argparse.ArgumentParser(description="Print the demo's document.")
    parser.add_argument(
        "--question", action="store_true", help="print a prompt: an instruction, the document and a question"
    )
    text = document()
    print(f"{INSTRUCTION}\n\n{text}\n\n{QUESTION}" if parser.parse_args(arguments).question else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
