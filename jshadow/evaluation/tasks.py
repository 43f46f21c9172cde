"""Tasks with known answers, made on the spot: no data set, no network.

A task is a function (tokenizer, length, depth, seed) -> Case whose prompt has exactly `length` tokens. Texts are own
filler sentences, or the documentation that ships with Python (which differs between Python versions, so a seed means
one prompt per version). As a program it prints one prompt:

    python -m jshadow.evaluation.tasks needle_docs --model DIR --tokens 2000 --depth 0.5 --seed 0
"""

import argparse
import dataclasses
import functools
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError, JshadowError

CITIES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Hanoi", "Dakar", "Sofia", "Osaka", "Turin", "Delhi", "Nairobi",
)  # fmt: skip
# Short sentences, as this field's usual filler has them. The choice matters: with the story's, of twice the length,
# ShadowKV at rank 32 and budget 256 found 5 of 10 numbers in 4,096 tokens where SmolLM2 with full attention found all.
NOISE = ("The hill is steep.", "The lamp is lit.", "The tea is hot.", "Off we go.", "Home we come again.")
STORY = (
    "A narrow river runs past the old mill.", "Somebody left a lamp on in the kitchen.", "Nothing much happens here.",
    "Rain is on its way from the west.", "The bus will be late again.",
)  # fmt: skip
FACT = "The secret number of {city} is {number}."
HEAD = "Read this text, then answer a question about it.\n\n"
QUESTION = "What is the secret number of {city}? Answer with the number."
PREFIX = "The secret number of {city} is"
TURNS = 4  # facts planted, and questions asked, in a multi-turn task
DIGITS = 7  # of a number, as in this field's other needles
# Of each number where there are several. A small model at one token a digit mixes up long ones with full attention; and
# SnapKV, which keeps three neighbours of what the question looks at, loses their ends in the very first turn.
DIGITS_OF_MANY = 4
NEW_TOKENS = 12  # room for a seven-digit number at one token a digit
FORCED = 64  # tokens of an agreement task that are forced after its prompt
SNAP = 0.02  # a fact moves to the nearest end of a paragraph, line or sentence within this share of the text
MARK = "\N{SECTION SIGN}\N{PILCROW SIGN}\N{SECTION SIGN}"  # stands for a text while a chat template is rendered


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question about one context, in the columns that kvpress uses.

    Attributes:
        context: the long text, with what was planted in it.
        question: what is asked after it.
        answer_prefix: the beginning of the answer, given to the model.
        answer: what must come out; empty where nothing is asked.
        max_new_tokens: tokens that the answer may take.
    """

    context: str
    question: str
    answer_prefix: str
    answer: str
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class Case:
    """What the runner feeds: the samples of one context as token ids.

    Attributes:
        samples: one a turn; all have the same context.
        prompt: token ids up to where the first answer goes on.
        turns: token ids of each later question, from the end of the answer before it.
        forced: token ids that continue the prompt, for teacher forcing.
        planted: index in the prompt of each planted fact's first token.
        instruction: what a user would write before the context.
    """

    samples: tuple[Sample, ...]
    prompt: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...] = ()
    forced: tuple[int, ...] = ()
    planted: tuple[int, ...] = ()
    instruction: str = ""

    @property
    def text(self) -> str:
        """The first turn as its user would type it: no chat template, no answer prefix."""
        return f"{self.instruction}{self.samples[0].context}\n\n{self.samples[0].question}"


# Tokens


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text, no special token added."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer comes with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def opening(tokenizer: Any) -> list[int]:
    """The special tokens that a plain text begins with."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [token for token in tokenizer.encode("", add_special_tokens=True)[:1] if token == bos]


def frame(tokenizer: Any, question: str, prefix: str) -> tuple[list[int], list[int]]:
    """Token ids before and after the context of a question, through the chat template where there is one."""
    content = f"{HEAD}{MARK}\n\n{question}"
    if not has_template(tokenizer):
        before, _, after = content.replace(question, f"Question: {question}\nAnswer: {prefix}").partition(MARK)
        return opening(tokenizer) + encode(tokenizer, before), encode(tokenizer, after)
    before, _, after = render(tokenizer, [content]).partition(MARK)
    return encode(tokenizer, before), encode(tokenizer, after + prefix)


def follow_up(tokenizer: Any, question: str, prefix: str) -> list[int]:
    """Token ids of a later question, from the end of the answer before it."""
    if not has_template(tokenizer):
        return encode(tokenizer, f"\n\nQuestion: {question}\nAnswer: {prefix}")
    return encode(tokenizer, render(tokenizer, ["?", MARK, question]).partition(MARK)[2] + prefix)


def render(tokenizer: Any, contents: Sequence[str]) -> str:
    """The chat text of messages by user and assistant in turn, up to where the assistant begins to write."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# Texts


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """Python's documentation of its own language, paragraph by paragraph."""
    from pydoc_data.topics import topics  # half a megabyte, and only this needs it

    return tuple(f"{part}\n\n" for name in sorted(topics) for part in topics[name].strip().split("\n\n"))


def documentation(tokenizer: Any, rng: random.Random) -> Iterator[int]:
    """Token ids of the documentation from a random paragraph on, without end.

    One paragraph is encoded at a time, so that the tokenizer has no cause to warn of a text longer than the model's.
    """
    parts = paragraphs()
    for index in itertools.count(rng.randrange(len(parts))):
        yield from encode(tokenizer, parts[index % len(parts)])


def repeated(tokenizer: Any, rng: random.Random, *, sentences: Sequence[str]) -> Iterator[int]:
    """Token ids of the same few sentences over and over."""
    del rng  # the same for every seed
    return itertools.cycle(encode(tokenizer, " " + " ".join(sentences)))


noise = functools.partial(repeated, sentences=NOISE)
story = functools.partial(repeated, sentences=STORY)


# Tasks


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
    check(length, depth, seed)
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
    cuts = [snap(tokenizer, text, int((depth + i / count) % 1 * room)) for i in range(count)]
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


def agreement(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Plain documentation: `length` tokens as the prompt, and what really follows them to be forced."""
    check(length, depth, seed)
    begin = opening(tokenizer)
    text = itertools.islice(documentation(tokenizer, random.Random(seed)), length - len(begin) + FORCED)
    ids = (*begin, *text)
    prompt, forced = ids[:length], ids[length:]
    context = tokenizer.decode(list(prompt[len(begin) :])).strip("\ufffd")
    return Case((Sample(context, "", "", "", len(forced)),), prompt, forced=forced)


Task = Callable[[Any, int, float, int], Case]
TASK_TURNS = {"needle_multiturn": TURNS, "needle_multiturn_noise": TURNS}
TASKS: dict[str, Task] = {
    "needle_noise": functools.partial(needles, source=noise),
    "needle_story": functools.partial(needles, source=story),
    "needle_docs": functools.partial(needles, source=documentation),
    "needle_multiturn": functools.partial(needles, source=documentation, count=TURNS, digits=DIGITS_OF_MANY),
    "needle_multiturn_noise": functools.partial(needles, source=noise, count=TURNS, digits=DIGITS_OF_MANY),
    "agreement": agreement,
}


def check(length: Any, depth: Any, seed: Any) -> None:
    """Raise ConfigError unless length and seed are whole numbers in range and depth lies in [0, 1]."""
    for name, value, least in (("length", length, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 1:
        raise ConfigError(f"depth must be a number in [0, 1], got {depth!r}")


def make(task: str, tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """One case of a task.

    Args:
        task: a name in TASKS.
        tokenizer: of transformers; its chat template is used where it has one.
        length: tokens of the prompt, exactly.
        depth: where in the text the (first) fact is planted, 0 the beginning and 1 the end.
        seed: decides the text's offset, the cities and the numbers.

    Raises:
        ConfigError: an unknown task, no tokenizer, or a length, depth or seed out of range.
    """
    if task not in TASKS:
        raise ConfigError(f"task must be one of {sorted(TASKS)}, got {task!r}")
    if tokenizer is None:
        raise ConfigError(f"task {task} needs a tokenizer, and the checkpoint has none")
    return TASKS[task](tokenizer, length, depth, seed)


# Command line


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt of one case; 0 if it worked, 2 after a typed error."""
    from jshadow.params import load_tokenizer

    parser = argparse.ArgumentParser(prog="python -m jshadow.evaluation.tasks", description="Print one prompt.")
    parser.add_argument("task", help=", ".join(TASKS))
    parser.add_argument("--model", required=True, metavar="DIR", help="model directory with a tokenizer")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens in the model's format (default: %(default)s)")
    parser.add_argument("--depth", type=float, default=0.5, help="place of the fact, 0 to 1 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    try:
        case = make(args.task, load_tokenizer(Path(args.model)), args.tokens, args.depth, args.seed)
    except JshadowError as error:
        print(f"jshadow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if args.json:
        settings = {"task": args.task, "tokens": args.tokens, "depth": args.depth, "seed": args.seed}
        rows = [dataclasses.asdict(sample) for sample in case.samples]
        print(json.dumps(settings | {"prompt": case.text, "samples": rows}))
    else:
        print(case.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
