"""Needles: facts planted in a long text, and questions that ask for them.

There are two families. The `needle_*` tasks are our own, with cities and numbers. The `niah_*` tasks follow RULER
(arXiv 2404.06654, section 3.1 and appendix B) with other words: keys are pairs of words or UUIDs, values are numbers or
UUIDs, and the text is filler, documentation in place of essays, or only other needles. Because the texts differ, scores
are not those of RULER's own files.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.drawing import numbers, uuids, word_pairs
from jshadow.evaluation.tasks.filling import Pieces, filled, planted
from jshadow.evaluation.tasks.framing import HEAD, Case, Sample, encode, follow_up, frame
from jshadow.evaluation.tasks.texts import documentation, documentation_pieces, noise_pieces

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dakar", "Sofia", "Osaka", "Turin", "Delhi", "Nairobi")
FACT = "The secret number of {city} is {number}."
QUESTION = "What is the secret number of {city}? Answer with the number."
PREFIX = "The secret number of {city} is"
TURNS = 4  # facts planted, and questions asked, in a multi-turn task
DIGITS = 7  # of a number, as in this field's other needles
# Of each number where there are several. A small model at one token a digit mixes up long ones with full attention; and
# SnapKV, which keeps three neighbours of what the question looks at, loses their ends in the very first turn.
DIGITS_OF_MANY = 4
NEW_TOKENS = 12  # room for a seven-digit number at one token a digit
SNAP = 0.02  # a fact moves to the nearest end of a paragraph, line or sentence within this share of the text
NIAH_NEW_TOKENS = 128  # RULER's
PASSKEY_NEW_TOKENS = 12


# Cities and numbers


def snap(tokenizer: Any, text: Sequence[int], target: int) -> int:
    """A cut near target where a paragraph ends, else a line, else a sentence; target itself where nothing does."""
    reach = int(SNAP * len(text))
    cuts = [target + away for away in sorted(range(-reach, reach + 1), key=abs)]
    before = {cut: tokenizer.decode(list(text[max(0, cut - 2) : cut])) for cut in cuts if 0 < cut < len(text)}
    for end in ("\n\n", "\n", "."):
        for cut, ends in before.items():
            if ends.endswith(end):
                return cut
    return target


def needles(
    tokenizer: Any, length: int, depth: float, seed: int, *, source: Callable, count: int = 1, digits: int = DIGITS
) -> Case:
    """Plant `count` facts in a text and ask for each; the first is at `depth`, the others spread from there on."""
    rng = random.Random(seed)
    cities = rng.sample(CITIES, count)
    numbers = [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
    questions = [QUESTION.format(city=city) for city in cities]
    prefixes = [PREFIX.format(city=city) for city in cities]
    head, tail = frame(tokenizer, questions[0], prefixes[0])
    form = "{}\n\n" if source is documentation else " {}"
    facts = [
        encode(tokenizer, form.format(FACT.format(city=city, number=number)))
        for city, number in zip(cities, numbers, strict=True)
    ]
    room = length - len(head) - len(tail) - sum(map(len, facts))
    if room < count:
        raise ConfigError(f"length must be at least {length - room + count} tokens for this task, got {length}")
    text = list(itertools.islice(source(tokenizer, rng), room))
    depths = [(depth + i / count) % 1 if i else depth for i in range(count)]
    cuts = [snap(tokenizer, text, int(share * room)) for share in depths]
    context, planted, done = [], {}, 0
    for i in sorted(range(count), key=cuts.__getitem__):
        context += text[done : cuts[i]]
        planted[i], done = len(head) + len(context), cuts[i]
        context += facts[i]
    context += text[done:]
    shown = tokenizer.decode(context).rstrip("\ufffd")  # the last character may be cut
    samples = tuple(
        Sample(shown, question, prefix, number, NEW_TOKENS)
        for question, prefix, number in zip(questions, prefixes, numbers, strict=True)
    )
    turns = tuple(
        tuple(follow_up(tokenizer, question, prefix))
        for question, prefix in zip(questions[1:], prefixes[1:], strict=True)
    )
    prompt = tuple(head + context + tail)
    return Case(samples, prompt, turns, planted=tuple(planted[i] for i in range(count)), instruction=HEAD)


# As RULER has them


@dataclasses.dataclass(frozen=True)
class NeedleKind:
    """One kind of needle test.

    Attributes:
        haystack: "noise", "documentation" or "needles".
        uuid_keys, uuid_values: UUIDs in place of words and numbers.
        keys: keys planted; in a haystack of needles, those that are asked for.
        values: values of each key.
        asked: keys that the question asks for.
        apart: ask for each key in a question of its own, each of a fork of one prefill.
    """

    haystack: str = "documentation"
    uuid_keys: bool = False
    uuid_values: bool = False
    keys: int = 1
    values: int = 1
    asked: int = 1
    apart: bool = False

    @property
    def thing(self) -> str:
        """What a value is called."""
        return "code" if self.uuid_values else "number"


def niah(tokenizer: Any, length: int, depth: float, seed: int, *, kind: NeedleKind) -> Case:
    """Plant needles and ask for some; the first asked for lies at `depth`, the others where the seed says."""
    rng = random.Random(seed)
    keys = uuids(rng) if kind.uuid_keys else word_pairs(rng)
    values = uuids(rng) if kind.uuid_values else numbers(rng, DIGITS)
    facts = [(key, tuple(itertools.islice(values, kind.values))) for key in itertools.islice(keys, kind.keys)]
    end = "\n\n" if kind.haystack == "documentation" else " "
    needles = [needle(kind, key, value) + end for key, own in facts for value in own]
    depths = [depth, *(rng.random() for _ in needles[1:])]
    if kind.haystack == "needles":
        pieces = Pieces(needle(kind, key, value) + end for key, value in zip(keys, values, strict=True))
    else:
        pieces = Pieces((noise_pieces if kind.haystack == "noise" else documentation_pieces)(rng))
    head = f"Some special {kind.thing}s are hidden in this text. You will be asked for them.\n\n"

    def compose(count: int, padding: str) -> str:
        return (head + planted(pieces.first(count), needles, depths)).rstrip() + padding

    def after(count: int) -> str:
        return end + pieces.first(count + 1)[-1]

    asked = facts[: kind.asked]
    samples = [ask(kind, group) for group in ([[fact] for fact in asked] if kind.apart else [asked])]
    own = None if kind.haystack == "needles" else after  # a needle cut short would be no filler
    return filled(tokenizer, length, compose, samples, apart=kind.apart, after=own)


def needle(kind: NeedleKind, key: str, value: str) -> str:
    """The sentence that is planted."""
    return f"The special {kind.thing} of {key} is {value}."


def ask(kind: NeedleKind, facts: Sequence[tuple[str, tuple[str, ...]]]) -> Sample:
    """The question for all values of some keys."""
    names = [key for key, _ in facts]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    several = len(facts) * len(facts[0][1]) > 1
    thing, verb = (f"{kind.thing}s", "are") if several else (kind.thing, "is")
    question = f"What {verb} the special {thing} of {listed} in this text?" + (" Give all of them." if several else "")
    answers = tuple(value for _, values in facts for value in values)
    prefix = f"The special {thing} of {listed} {verb}"
    return Sample("", question, prefix, answers, NIAH_NEW_TOKENS, "string_match_all")


def passkey(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """A pass key of five digits in filler sentences (arXiv 2305.16300; InfiniteBench's Retrieve.PassKey)."""
    rng = random.Random(seed)
    number, pieces = next(numbers(rng, 5)), Pieces(noise_pieces(rng))
    head = "There is a pass key in this text. Find it and remember it.\n\n"
    fact = f"The pass key is {number}. Remember it. {number} is the pass key. "

    def compose(count: int, padding: str) -> str:
        return (head + planted(pieces.first(count), [fact], [depth])).rstrip() + padding

    sample = Sample("", "What is the pass key?", "The pass key is", number, PASSKEY_NEW_TOKENS)
    return filled(tokenizer, length, compose, [sample])
