"""Needle tasks: facts planted in a long text or table, and questions that ask for them.

The facts of the `needle_*` tasks are numbers of cities. `needle_*_phases` plant a fact at all places within a chunk of
tokens equally often, because a method that selects chunks may miss a fact that begins inside one (arXiv 2609.36322
reports differences of up to 40 points). The `niah_*` tasks follow RULER (arXiv 2404.06654, section 3.1 and appendix B)
with different wording. Their text is filler, documentation instead of essays, or only other needles. So their scores
differ from those on RULER's files.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.framing import (
    HEAD,
    Case,
    Pieces,
    Sample,
    filled,
    numbers,
    place,
    planting,
    uuids,
    word_pairs,
)
from jshadow.evaluation.tasks.texts import documentation, documentation_pieces, noise, noise_pieces, story
from jshadow.weights.templates import follow_up, frame
from jshadow.weights.tokenizer import decode, encode

_CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dakar", "Sofia", "Osaka", "Turin", "Delhi", "Nairobi")
FACT = "The secret number of {city} is {number}."
QUESTION = "What is the secret number of {city}? Answer with the number."
_PREFIX = "The secret number of {city} is"
TURNS = 4  # number of planted facts and of questions in a multi-turn task
_DIGITS = 7  # digits of a number, as in other needle tasks
# Digits of each number if there are several. A small model with one token for each digit confuses several long numbers
# even with full attention. SnapKV keeps three neighbors of each attended token, so it loses the ends of long numbers in
# the first turn.
DIGITS_OF_MANY = 4
NEW_TOKENS = 12  # enough for a seven-digit number with one token for each digit
_SNAP = 0.02  # a fact moves to the nearest end of a paragraph, line or sentence within this share of the text
_NIAH_NEW_TOKENS = 128  # as in RULER
_PASSKEY_NEW_TOKENS = 12


# Cities and numbers


def _snap(tokenizer: Any, text: Sequence[int], target: int) -> int:
    """Return the place near `target` at which a paragraph ends, or else a line, or else a sentence."""
    reach = int(_SNAP * len(text))
    cuts = [target + away for away in sorted(range(-reach, reach + 1), key=abs)]
    before = {cut: decode(tokenizer, text[max(0, cut - 2) : cut]) for cut in cuts if 0 < cut < len(text)}
    for end in ("\n\n", "\n", "."):
        for cut, ends in before.items():
            if ends.endswith(end):
                return cut
    return target


def needles(
    tokenizer: Any, length: int, depth: float, seed: int, *, source: Callable, count: int = 1, digits: int = _DIGITS
) -> Case:
    """Plant `count` facts in a text, and ask for each. The first is at `depth`, the others at equal distances.

    `source` returns the endless token ids of a text for (tokenizer, random generator). Each planted number has `digits`
    digits. The other arguments are those of `make`.
    """
    rng = random.Random(seed)
    cities = rng.sample(_CITIES, count)
    numbers = [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
    questions = [QUESTION.format(city=city) for city in cities]
    prefixes = [_PREFIX.format(city=city) for city in cities]
    head, tail = frame(tokenizer, questions[0], prefixes[0], head=HEAD)
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
    cuts = [_snap(tokenizer, text, int(share * room)) for share in depths]
    context, planted, done = [], {}, 0
    for i in sorted(range(count), key=cuts.__getitem__):
        context += text[done : cuts[i]]
        planted[i], done = len(head) + len(context), cuts[i]
        context += facts[i]
    context += text[done:]
    shown = decode(tokenizer, context).rstrip("\ufffd")  # the last character may be incomplete
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


# The needle tasks of RULER


@dataclasses.dataclass(frozen=True)
class NeedleKind:
    """One kind of needle test: its haystack ("noise", "documentation" or "needles"), and numbers of keys and values.

    In a haystack of needles, `keys` is the number of keys besides the haystack. If the questions are `apart`, each key
    that is asked for has a question of its own, on a fork of one prefill.
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
        """The word for a value in the text."""
        return "code" if self.uuid_values else "number"


def niah(tokenizer: Any, length: int, depth: float, seed: int, *, kind: NeedleKind) -> Case:
    """Plant needles, and ask for some of them. The first one lies at `depth`, and the others at random depths."""
    rng = random.Random(seed)
    keys = uuids(rng) if kind.uuid_keys else word_pairs(rng)
    values = uuids(rng) if kind.uuid_values else numbers(rng, _DIGITS)
    facts = [(key, tuple(itertools.islice(values, kind.values))) for key in itertools.islice(keys, kind.keys)]
    end = "\n\n" if kind.haystack == "documentation" else " "
    needles = [needle(kind, key, value) + end for key, key_values in facts for value in key_values]
    depths = [depth, *(rng.random() for _ in needles[1:])]
    if kind.haystack == "needles":
        pieces = Pieces(needle(kind, key, value) + end for key, value in zip(keys, values, strict=True))
    else:
        pieces = Pieces((noise_pieces if kind.haystack == "noise" else documentation_pieces)(rng))
    head = f"Some special {kind.thing}s are hidden in this text. You will be asked for them.\n\n"
    compose = planting(head, pieces, needles, depths)

    def after(count: int) -> str:
        return end + pieces.first(count + 1)[-1]

    asked = facts[: kind.asked]
    samples = [_ask(kind, group) for group in ([[fact] for fact in asked] if kind.apart else [asked])]
    padding_text = None if kind.haystack == "needles" else after  # a part of a needle must not be used as filler
    return filled(tokenizer, length, compose, samples, apart=kind.apart, after=padding_text)


def needle(kind: NeedleKind, key: str, value: str) -> str:
    """Return the sentence of a needle."""
    return f"The special {kind.thing} of {key} is {value}."


def _ask(kind: NeedleKind, facts: Sequence[tuple[str, tuple[str, ...]]]) -> Sample:
    """Return the question for all values of the given keys."""
    names = [key for key, _ in facts]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    several = len(facts) * len(facts[0][1]) > 1
    thing, verb = (f"{kind.thing}s", "are") if several else (kind.thing, "is")
    question = f"What {verb} the special {thing} of {listed} in this text?" + (" Give all of them." if several else "")
    answers = tuple(value for _, values in facts for value in values)
    prefix = f"The special {thing} of {listed} {verb}"
    return Sample("", question, prefix, answers, _NIAH_NEW_TOKENS, "string_match_all")


def passkey(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Plant a pass key of five digits in filler sentences (arXiv 2305.16300; Retrieve.PassKey of InfiniteBench)."""
    rng = random.Random(seed)
    number, pieces = next(numbers(rng, 5)), Pieces(noise_pieces(rng))
    head = "There is a pass key in this text. Find it and remember it.\n\n"
    fact = f"The pass key is {number}. Remember it. {number} is the pass key. "
    compose = planting(head, pieces, [fact], [depth])
    sample = Sample("", "What is the pass key?", "The pass key is", number, _PASSKEY_NEW_TOKENS)
    return filled(tokenizer, length, compose, [sample])


PHASES = 8  # number of tokens of a chunk, which is the default of ShadowKV


def _needle_at_phase(
    tokenizer: Any,
    length: int,
    depth: float,
    seed: int,
    *,
    source: Callable[[Any, random.Random], Iterator[int]],
) -> Case:
    """Plant one fact, so that the index of its first token modulo PHASES is the seed modulo PHASES."""
    for extra in itertools.count():
        case = needles(tokenizer, length + extra, depth, seed, source=source)
        planted = case.planted[0] - extra
        if planted % PHASES == seed % PHASES:
            break
    sample = case.samples[0]
    head, tail = frame(tokenizer, sample.question, sample.answer_prefix, head=HEAD)
    text = case.prompt[len(head) + extra : len(case.prompt) - len(tail)]
    shown = decode(tokenizer, text).strip("\ufffd")  # the first and the last character may be incomplete
    samples = (dataclasses.replace(sample, context=shown),)
    return dataclasses.replace(case, samples=samples, prompt=(*head, *text, *tail), planted=(planted,))


PHASE_TASKS = {
    f"needle_{name}_phases": functools.partial(_needle_at_phase, source=source)
    for name, source in (("noise", noise), ("story", story), ("docs", documentation))
}


def seed_at_phase(seed: int, index: int) -> int:
    """Return a seed near `seed` whose phase is that of sample number `index`."""
    return seed - seed % PHASES + index % PHASES


_KV_NEW_TOKENS = 50  # as in InfiniteBench
_STAGES_NEW_TOKENS = 32
_LARGEST_STEP = 20  # the largest second number of a sum, so that a small model can compute it
_LONG_KEY = 99_999  # a key with at least as many tokens as any other
_PALETTE = "red blue green yellow black white brown purple orange pink teal gray maroon violet beige cyan"
_COLORS = tuple(_PALETTE.split())


def kv_retrieval(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for the value of one key in a JSON object of random UUIDs.

    The task is that of arXiv 2307.03172, section 4, and of Retrieve.KV of InfiniteBench (arXiv 2402.13718).
    """
    names = uuids(random.Random(seed))
    pieces = Pieces(f'"{key}": "{value}"' for key, value in zip(names, names, strict=False))
    key, value = next(names), next(names)

    def compose(count: int, padding: str) -> str:
        pairs = pieces.first(count)
        at = place([len(pair) for pair in pairs], depth)
        return "{" + ", ".join([*pairs[:at], f'"{key}": "{value}"', *pairs[at:]]) + "}" + padding

    sample = Sample(
        "",
        f'What is the value of the key "{key}" in the JSON object above?',
        f'The value of "{key}" is "',
        value,
        _KV_NEW_TOKENS,
        "string_match_part",
    )
    return filled(tokenizer, length, compose, [sample])


def two_stage(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for a sum, and for the color of that key in a dictionary (2StageRetr of OmniKV, ICLR 2025, appendix A).

    As in the paper, keys are counted from 0, and the question comes after the dictionary. The paper has 200 keys. Here
    there are as many as the length allows.
    """
    rng = random.Random(seed)
    pieces = Pieces(_colors(rng))
    share = rng.random()

    def compose(count: int, padding: str) -> str:
        pairs = ", ".join(f"{key}: {color}" for key, color in enumerate(pieces.first(count)))
        return "{" + pairs + "}" + padding

    def sample(key: int, answer: str) -> Sample:
        second = int(share * min(key, _LARGEST_STEP))
        question = (
            f"The dictionary above has numbers and their colours. Add {key - second} + {second}, look the sum up, "
            "and answer with its colour."
        )
        return Sample("", question, "The colour is", answer, _STAGES_NEW_TOKENS, "string_match_part")

    # The number of keys is known only after filling the text. So the text is filled with a longest question first. The
    # final question is not longer, so the final text has at least as many keys.
    count = filled(tokenizer, length, compose, [sample(_LONG_KEY, _COLORS[0])], least=2).samples[0].context.count(":")
    key = min(int(depth * count), count - 1)
    return filled(tokenizer, length, compose, [sample(key, pieces.first(key + 1)[key])], least=key + 1)


def _colors(rng: random.Random) -> Iterator[str]:
    """Yield random colors without end. Neighbors differ."""
    before = ""
    for _ in itertools.count():
        before = rng.choice([color for color in _COLORS if color != before])
        yield before
