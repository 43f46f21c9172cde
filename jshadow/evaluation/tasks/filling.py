"""Composing texts of an exact number of tokens from pieces of any length."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.framing import Case, Sample, case_of
from jshadow.evaluation.tasks.texts import noise_pieces
from jshadow.weights.templates import frame
from jshadow.weights.tokenizer import decode, encode

TRIES = 12  # how many lengths of padding are tried; one more token of padding nearly always adds one to the prompt
PROBE = 8  # how many pieces are used to estimate the size of one
Compose = Callable[[int, str], str]


class TooShort(Exception):
    """The error that is raised if the smallest text of a task is too long.

    Attributes:
        by: number of excess tokens.
    """

    def __init__(self, by: int) -> None:
        super().__init__(by)
        self.by = by


class Pieces:
    """A stream of pieces that remembers them, so that a text of n + 1 pieces starts with the same n pieces."""

    def __init__(self, stream: Iterator[str]) -> None:
        self.stream, self.given = stream, list[str]()

    def first(self, count: int) -> list[str]:
        """Return the first `count` pieces."""
        self.given += itertools.islice(self.stream, max(0, count - len(self.given)))
        return self.given[:count]


@functools.cache
def noise_text(count: int) -> str:
    """Return a text of `count` filler sentences. It has more than `count` tokens."""
    return " " + "".join(itertools.islice(noise_pieces(random.Random(0)), count))


def largest(size: Callable[[int], int], least: int, room: int) -> int:
    """Return the largest count whose size is at most room, by interpolation search.

    `size` must increase, roughly linearly, and size(least) must be at most room.
    """
    per = max(1.0, (size(least + PROBE) - size(least)) / PROBE)
    low, high = least, 0  # 0 means that no upper bound is known
    for turn in itertools.count():
        if high == low + 1:
            return low
        if not high:
            guess = low + max(1, int((room - size(low)) / per))
        elif turn % 3 == 2:
            guess = (low + high) // 2  # bisection, because interpolation is slow if pieces differ much
        else:
            share = (room - size(low)) / (size(high) - size(low))
            guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if size(guess) <= room else (low, guess)
    raise AssertionError("unreachable")


def fill(tokenizer: Any, compose: Compose, room: int, least: int, after: Callable[[int], str] | None = None) -> str:
    """Compose a text of `room` tokens, or of a few less if the tokenizer allows no other number.

    Args:
        tokenizer: a transformers tokenizer.
        compose: returns the text for (number of pieces, padding). It puts the padding at a harmless place.
        room: number of tokens.
        least: the smallest number of pieces.
        after: returns a text for a number of pieces. Its beginning is used as padding. None uses filler sentences.

    Raises:
        TooShort: the smallest text is longer than room.
    """

    @functools.cache
    def size(count: int) -> int:
        return len(encode(tokenizer, compose(count, "")))

    if size(least) > room:
        raise TooShort(size(least) - room)
    count = largest(size, least, room)
    missing = room - size(count)
    spare = encode(tokenizer, after(count) if after else noise_text(missing + 8))
    best, asked, tried = compose(count, ""), missing, set[int]()
    best_size = size(count)
    while best_size < room and 0 < asked <= len(spare) and asked not in tried and len(tried) < TRIES:
        tried.add(asked)
        text = compose(count, decode(tokenizer, spare[:asked]).rstrip("\ufffd"))
        now = len(encode(tokenizer, text))
        if best_size < now <= room:
            best, best_size = text, now
        asked += room - now
        while asked in tried and now > room:
            asked -= 1
    return best


def filled(
    tokenizer: Any,
    length: int,
    compose: Compose,
    samples: Sequence[Sample],
    *,
    least: int = 0,
    apart: bool = False,
    after: Callable[[int], str] | None = None,
) -> Case:
    """Create the case whose prompt has `length` tokens, or at most 1 % less.

    Args:
        tokenizer: a transformers tokenizer.
        length: number of tokens of the prompt. If the questions are independent, it is the number of tokens of the
            context.
        compose: see `fill`.
        samples: the questions. Their contexts are filled in.
        least: see `fill`.
        apart: whether the questions are independent, each asked on a fork of the context.
        after: see `fill`.

    Raises:
        ConfigError: length is too short for the task.
    """
    before, behind = frame(tokenizer, samples[0].question, samples[0].answer_prefix)
    framing = len(before) + (0 if apart else len(behind))
    try:
        context = fill(tokenizer, compose, length - framing, least, after)
    except TooShort as error:
        raise ConfigError(f"length must be at least {length + error.by} tokens for this task, got {length}") from None
    return case_of(tokenizer, [dataclasses.replace(one, context=context) for one in samples], apart=apart)


def place(sizes: Sequence[int], depth: float) -> int:
    """Return the index of the piece before which to insert a fact, so that about `depth` of the text precedes it.

    Args:
        sizes: lengths of the pieces.
        depth: share of the text, from 0 to 1.

    Returns:
        An index from 0 to len(sizes).
    """
    target, total = depth * sum(sizes), 0
    for index, size in enumerate(sizes):
        if total + size / 2 > target:
            return index
        total += size
    return len(sizes)


def planted(pieces: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
    """Join the pieces, and insert each fact between two pieces at its depth. Facts at one place keep their order."""
    sizes = [len(piece) for piece in pieces]
    at: dict[int, list[str]] = {}
    for fact, depth in zip(facts, depths, strict=True):
        at.setdefault(place(sizes, depth), []).append(fact)
    return "".join("".join(at.get(index, ())) + piece for index, piece in enumerate([*pieces, ""]))
