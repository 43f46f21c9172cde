"""Names and numbers drawn from a seed, each at most once."""

import random
import uuid
from collections.abc import Callable, Iterator

from jshadow.evaluation.tasks.texts import words


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """What a function draws, without what it drew before; without end."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def word_pairs(rng: random.Random) -> Iterator[str]:
    """Pairs of plain words, with a hyphen between them."""
    return distinct(lambda: "-".join(rng.sample(words(), 2)))


def uuids(rng: random.Random) -> Iterator[str]:
    """UUIDs of version 4."""
    return distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def numbers(rng: random.Random, digits: int) -> Iterator[str]:
    """Numbers of so many digits, none of them a leading zero."""
    return distinct(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def letters(rng: random.Random, alphabet: str, size: int) -> Iterator[str]:
    """Strings of so many letters."""
    return distinct(lambda: "".join(rng.choices(alphabet, k=size)))
