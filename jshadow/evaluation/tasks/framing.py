"""Composing contexts of an exact number of tokens, and turning them and their questions into token ids."""

import dataclasses
import functools
import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.texts import noise_pieces, words
from jshadow.ops.buckets import round_up
from jshadow.weights.templates import follow_up, frame
from jshadow.weights.tokenizer import decode, encode, opening

HEAD = "Read this text, then answer a question about it.\n\n"
_TURN_WIDTH = 32  # later questions are padded to a multiple of this, so that they share compiled programs


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question about one context. The first five fields are the columns of kvpress.

    The context has the planted facts. `answer_prefix` is the beginning of the answer, which is given to the model.
    `answer` is empty if nothing is asked. `scorer` is a name in `scorers.SCORERS`, and `choices` are all classes for
    "classes".
    """

    context: str
    question: str
    answer_prefix: str
    answer: str | tuple[str, ...]
    max_new_tokens: int
    scorer: str = "number"
    choices: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        """The correct answers, always as a tuple."""
        return (self.answer,) if isinstance(self.answer, str) else self.answer


@dataclasses.dataclass(frozen=True)
class Case:
    """The samples of one context as token ids. The runner feeds them to a model.

    Attributes:
        samples: one for each turn or question. All have the same context.
        prompt: token ids up to the end of the first answer prefix. With `questions`, up to the end of the context.
        turns: token ids of each later question of a conversation, from the end of the previous answer on.
        forced: token ids that continue the prompt, for teacher forcing.
        planted: index in the prompt of the first token of each planted fact, if the task records it.
        instruction: the text before the context.
        questions: token ids of each independent question. Each is asked on a fork of the prompt.
        probes: pairs of token ids that are fed after the prompt, each pair on a fork of it, and of token ids that
            follow them. Only the logits of the latter are compared. If they are empty, they are what full attention
            answers greedily.
        truncated: number of tokens that were removed from the middle of the context.
    """

    samples: tuple[Sample, ...]
    prompt: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...] = ()
    forced: tuple[int, ...] = ()
    planted: tuple[int, ...] = ()
    instruction: str = ""
    questions: tuple[tuple[int, ...], ...] = ()
    truncated: int = 0
    probes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def text(self) -> str:
        """The text of the first turn, without chat template and answer prefix."""
        return f"{self.instruction}{self.samples[0].context}\n\n{self.samples[0].question}"

    @property
    def compares(self) -> bool:
        """Whether a policy is compared with full attention on given tokens, instead of being asked for an answer."""
        return bool(self.forced or self.probes)

    @property
    def growth(self) -> int:
        """Number of tokens that a state needs in addition to the prompt.

        With forced tokens, this is their number. With independent questions or probes, it is the longest sum of one and
        its answer. Otherwise it is the sum of all turns and answers.
        """
        if self.probes:
            most = max(sample.max_new_tokens for sample in self.samples)
            return max(padded(len(lead) + (len(after) or most)) for lead, after in self.probes)
        if self.questions:
            pairs = zip(self.questions, self.samples, strict=True)
            return max(padded(len(question)) + sample.max_new_tokens for question, sample in pairs)
        answers = sum(sample.max_new_tokens for sample in self.samples)
        return len(self.forced) or answers + padded(sum(map(len, self.turns)))


def padded(count: int) -> int:
    """Round the number of tokens of a question up, so that similar lengths share a compiled program."""
    return round_up(count, _TURN_WIDTH)


def case_of(
    tokenizer: Any,
    samples: Sequence[Sample],
    *,
    head: str = "",
    apart: bool = False,
    turns: bool = False,
    chat: bool = True,
    drop: int = 0,
) -> Case:
    """Build a case from questions about one context, with the text `head` before it.

    Questions `apart` are independent, each asked on a fork of the context. As `turns`, they are asked one after
    another, with the answers kept in the cache. `chat` is that of `frame`, and `drop` tokens are removed from the
    middle of the context.
    """
    frames = [frame(tokenizer, one.question, one.answer_prefix, head=head, chat=chat) for one in samples]
    ids = encode(tokenizer, samples[0].context, begins=frames[0][0] == opening(tokenizer))
    if drop:
        keep = len(ids) - drop
        ends = ids[: (keep + 1) // 2], ids[len(ids) - keep // 2 :]
        ids = [*ends[0], *ends[1]]
        context = "".join(decode(tokenizer, end) for end in ends)
        samples = [dataclasses.replace(one, context=context) for one in samples]
    prompt = (*frames[0][0], *ids)
    if apart:
        questions = tuple(tuple(after) for _, after in frames)
        return Case(tuple(samples), prompt, questions=questions, instruction=head, truncated=drop)
    later = [tuple(follow_up(tokenizer, one.question, one.answer_prefix)) for one in samples[1:]] if turns else []
    return Case(tuple(samples), (*prompt, *frames[0][1]), turns=tuple(later), instruction=head, truncated=drop)


def _distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Yield the values that a function draws, without repetition and without end."""
    seen: set[str] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def word_pairs(rng: random.Random) -> Iterator[str]:
    """Yield pairs of plain words, joined by a hyphen."""
    return _distinct(lambda: "-".join(rng.sample(words(), 2)))


def uuids(rng: random.Random) -> Iterator[str]:
    """Yield UUIDs of version 4."""
    return _distinct(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def numbers(rng: random.Random, digits: int) -> Iterator[str]:
    """Yield numbers of `digits` digits, without leading zeros."""
    return _distinct(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))


def letters(rng: random.Random, alphabet: str, size: int) -> Iterator[str]:
    """Yield strings of `size` letters of the alphabet."""
    return _distinct(lambda: "".join(rng.choices(alphabet, k=size)))


_TRIES = 12  # how many lengths of padding are tried; one more token of padding nearly always adds one to the prompt
_PROBE = 8  # how many pieces are used to estimate the size of one
Compose = Callable[[int, str], str]


class _TooShort(Exception):
    """The error that is raised if the smallest text of a task is too long, by this many tokens."""


class Pieces:
    """A stream of pieces that remembers them, so that a text of n + 1 pieces starts with the same n pieces."""

    def __init__(self, stream: Iterator[str]) -> None:
        self.stream, self.given = stream, list[str]()

    def first(self, count: int) -> list[str]:
        """Return the first `count` pieces."""
        self.given += itertools.islice(self.stream, max(0, count - len(self.given)))
        return self.given[:count]


@functools.cache
def _noise_text(count: int) -> str:
    """Return a text of `count` filler sentences. It has more than `count` tokens."""
    return " " + "".join(itertools.islice(noise_pieces(random.Random(0)), count))


def largest(size: Callable[[int], int], least: int, room: int) -> int:
    """Return the largest count whose size is at most room, by interpolation search.

    `size` must increase, roughly linearly, and size(least) must be at most room.
    """
    per = max(1.0, (size(least + _PROBE) - size(least)) / _PROBE)
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
        compose: returns the text for (number of pieces, padding). It puts the padding at a harmless place.
        room: number of tokens.
        least: the smallest number of pieces. If its text is too long, TooShort is raised.
        after: returns a text for a number of pieces. Its beginning is used as padding. None uses filler sentences.
    """

    @functools.cache
    def size(count: int) -> int:
        return len(encode(tokenizer, compose(count, "")))

    if size(least) > room:
        raise _TooShort(size(least) - room)
    count = largest(size, least, room)
    missing = room - size(count)
    spare = encode(tokenizer, after(count) if after else _noise_text(missing + 8))
    best, asked, tried = compose(count, ""), missing, set[int]()
    best_size = size(count)
    while best_size < room and 0 < asked <= len(spare) and asked not in tried and len(tried) < _TRIES:
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

    The contexts of the samples are filled in. If the questions are `apart` (independent, each asked on a fork), the
    context has this length. The other arguments are those of `fill`. Raises ConfigError if the length is too short for
    the task.
    """
    before, behind = frame(tokenizer, samples[0].question, samples[0].answer_prefix)
    framing = len(before) + (0 if apart else len(behind))
    try:
        context = fill(tokenizer, compose, length - framing, least, after)
    except _TooShort as error:
        raise ConfigError(
            f"length must be at least {length + error.args[0]} tokens for this task, got {length}"
        ) from None
    return case_of(tokenizer, [dataclasses.replace(one, context=context) for one in samples], apart=apart)


def place(sizes: Sequence[int], depth: float) -> int:
    """Return the index, from 0 to len(sizes), of the piece before which to insert a fact.

    About the share `depth` of the text then precedes it. `sizes` are the lengths of the pieces.
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


def planting(head: str, pieces: Pieces, facts: Sequence[str], depths: Sequence[float]) -> Compose:
    """Return a function for `fill`: the head and some pieces, with the facts planted in them."""
    return lambda count, padding: (head + planted(pieces.first(count), facts, depths)).rstrip() + padding
