"""Texts of an exact number of tokens, composed of pieces of any length."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.framing import Case, Sample, case_of, encode, frame
from jshadow.evaluation.tasks.texts import noise_pieces

TRIES = 12  # of lengths of the padding; a token more of text is nearly always a token more of the prompt
PROBE = 8  # pieces from which the size of one is guessed
Compose = Callable[[int, str], str]


class TooShort(Exception):
    """The smallest text of a task is longer than its room by so many tokens."""

    def __init__(self, by: int) -> None:
        super().__init__(by)
        self.by = by


class Pieces:
    """A stream that remembers what it gave, so that a text of n pieces begins like one of n + 1."""

    def __init__(self, stream: Iterator[str]) -> None:
        self.stream, self.given = stream, list[str]()

    def first(self, count: int) -> list[str]:
        """The first pieces."""
        self.given += itertools.islice(self.stream, max(0, count - len(self.given)))
        return self.given[:count]


@functools.cache
def noise_text(count: int) -> str:
    """Filler sentences, of which one has more than one token each."""
    return " " + "".join(itertools.islice(noise_pieces(random.Random(0)), count))


def largest(size: Callable[[int], int], least: int, room: int) -> int:
    """The largest count whose size is at most room. Size must grow, about evenly; size(least) must fit."""
    per = max(1.0, (size(least + PROBE) - size(least)) / PROBE)
    low, high = least, 0  # no high yet
    for turn in itertools.count():
        if high == low + 1:
            return low
        if not high:
            guess = low + max(1, int((room - size(low)) / per))
        elif turn % 3 == 2:
            guess = (low + high) // 2  # or uneven pieces could make this a slow walk
        else:
            share = (room - size(low)) / (size(high) - size(low))
            guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if size(guess) <= room else (low, guess)
    raise AssertionError("unreachable")


def fill(tokenizer: Any, compose: Compose, room: int, least: int, after: Callable[[int], str] | None = None) -> str:
    """A text of `room` tokens, or of a few less where the tokenizer allows no other.

    Args:
        tokenizer: of transformers.
        compose: makes the text of a number of pieces, with some padding where it does no harm.
        room: tokens.
        least: the smallest number of pieces.
        after: the text whose beginning is the padding of so many pieces; None: filler sentences.

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
        text = compose(count, tokenizer.decode(spare[:asked]).rstrip("\ufffd"))
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
    """The case whose prompt has `length` tokens, or at most a hundredth less.

    Args:
        tokenizer: of transformers.
        length: tokens of the prompt; where questions are asked apart, of the context.
        compose, least, after: as in `fill`.
        samples: the questions; their contexts are put in.
        apart: ask each question of its own fork of the context.

    Raises:
        ConfigError: length is too short for the task.
    """
    before, behind = frame(tokenizer, samples[0].question, samples[0].answer_prefix, "")
    framing = len(before) + (0 if apart else len(behind))
    try:
        context = fill(tokenizer, compose, length - framing, least, after)
    except TooShort as error:
        raise ConfigError(f"length must be at least {length + error.by} tokens for this task, got {length}") from None
    return case_of(tokenizer, [dataclasses.replace(one, context=context) for one in samples], apart=apart)


def place(sizes: Sequence[int], depth: float) -> int:
    """The place among pieces of these sizes where a share of the text lies before: 0 first, len(sizes) last."""
    target, total = depth * sum(sizes), 0
    for index, size in enumerate(sizes):
        if total + size / 2 > target:
            return index
        total += size
    return len(sizes)


def planted(pieces: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> str:
    """The text of the pieces with each fact before the piece where it lies at its depth; facts keep their order."""
    sizes = [len(piece) for piece in pieces]
    at: dict[int, list[str]] = {}
    for fact, depth in zip(facts, depths, strict=True):
        at.setdefault(place(sizes, depth), []).append(fact)
    return "".join("".join(at.get(index, ())) + piece for index, piece in enumerate([*pieces, ""]))
