"""Endless streams of random names and numbers without repetition."""

import random
import uuid
from collections.abc import Callable, Iterator

from jshadow.evaluation.tasks.texts import words


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Yield the values that a function draws, without repetition and without end."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def word_pairs(rng: random.Random) -> Iterator[str]:
    """Yield pairs of plain words, joined by a hyphen."""
    return distinct(lambda: "-".join(rng.sample(words(), 2)))


def uuids(rng: random.Random) -> Iterator[str]:
    """Yield UUIDs of version 4."""
    return distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def numbers(rng: random.Random, digits: int) -> Iterator[str]:
    """Yield numbers of `digits` digits, without leading zeros."""
    return distinct(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def letters(rng: random.Random, alphabet: str, size: int) -> Iterator[str]:
    """Yield strings of `size` letters of the alphabet."""
    return distinct(lambda: "".join(rng.choices(alphabet, k=size)))
