"""Turns a context and its questions into token ids, with the model's chat template where it has one."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jshadow.ops.buckets import round_up

HEAD = "Read this text, then answer a question about it.\n\n"
MARK = "\N{SECTION SIGN}\N{PILCROW SIGN}\N{SECTION SIGN}"  # stands for a text while a chat template is rendered
TURN_WIDTH = 32  # questions after a prompt are padded to a multiple of this, so that they share a compiled program


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question about one context; the first five are the columns that kvpress uses.

    Attributes:
        context: the long text, with what was planted in it.
        question: what is asked after it.
        answer_prefix: the beginning of the answer, given to the model.
        answer: what must come out, or a tuple of such; empty where nothing is asked.
        max_new_tokens: tokens that the answer may take.
        scorer: a name in `text_metrics.SCORERS`.
        choices: all classes that could be the answer, for the scorer "classes".
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
        """What must come out, always as a tuple."""
        return (self.answer,) if isinstance(self.answer, str) else self.answer


@dataclasses.dataclass(frozen=True)
class Case:
    """What the runner feeds: the samples of one context as token ids.

    Attributes:
        samples: one a turn, or one a question; all have the same context.
        prompt: token ids up to where the first answer goes on; with `questions`, up to the end of the context.
        turns: token ids of each later question, from the end of the answer before it.
        forced: token ids that continue the prompt, for teacher forcing.
        planted: index in the prompt of each planted fact's first token, where the task knows it.
        instruction: what a user would write before the context.
        questions: token ids of each question where they are independent: each is asked of its own fork of the prompt.
        truncated: tokens cut out of the middle of the context, so that the prompt fits the model.
    """

    samples: tuple[Sample, ...]
    prompt: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...] = ()
    forced: tuple[int, ...] = ()
    planted: tuple[int, ...] = ()
    instruction: str = ""
    questions: tuple[tuple[int, ...], ...] = ()
    truncated: int = 0

    @property
    def text(self) -> str:
        """The first turn as its user would type it: no chat template, no answer prefix."""
        return f"{self.instruction}{self.samples[0].context}\n\n{self.samples[0].question}"

    @property
    def growth(self) -> int:
        """Tokens that a state needs beyond the prompt: what is forced, all turns and answers, or the largest fork."""
        if self.questions:
            pairs = zip(self.questions, self.samples, strict=True)
            return max(padded(len(question)) + sample.max_new_tokens for question, sample in pairs)
        answers = sum(sample.max_new_tokens for sample in self.samples)
        return len(self.forced) or answers + padded(sum(map(len, self.turns)))


def padded(count: int) -> int:
    """Tokens of a question, rounded up so that near lengths share a compiled program."""
    return round_up(count, TURN_WIDTH)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text, no special token added, and no warning of a long one."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer comes with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def opening(tokenizer: Any) -> list[int]:
    """The special tokens that a plain text begins with."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [token for token in tokenizer.encode("", add_special_tokens=True)[:1] if token == bos]


def frame(
    tokenizer: Any, question: str, prefix: str, head: str = HEAD, *, chat: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids before and after the context of a question.

    Args:
        tokenizer: its chat template is used where it has one.
        question: what is asked after the context.
        prefix: the beginning of the answer.
        head: what a user would write before the context.
        chat: whether this is a chat at all. If not, nothing is put around it: the model goes on with a text.
    """
    if not chat:
        after = "\n\n" + question if question else ""
        return opening(tokenizer) + encode(tokenizer, head), encode(tokenizer, after + prefix)
    if not has_template(tokenizer):
        after = f"\n\nQuestion: {question}\nAnswer: {prefix}"
        return opening(tokenizer) + encode(tokenizer, head), encode(tokenizer, after)
    content = f"{head}{MARK}\n\n{question}" if question else f"{head}{MARK}"
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
    """The case of questions about one context, whose token ids follow from its text alone.

    Args:
        tokenizer: of transformers.
        samples: at least one; all have the same context.
        head: what a user would write before the context.
        apart: ask each question of its own fork of the context.
        turns: ask one after the other, answers stay in the cache.
        chat: as in `frame`.
        drop: tokens to cut out of the middle of the context.
    """
    frames = [frame(tokenizer, one.question, one.answer_prefix, head, chat=chat) for one in samples]
    ids = encode(tokenizer, samples[0].context)
    if drop:
        keep = len(ids) - drop
        ends = ids[: (keep + 1) // 2], ids[len(ids) - keep // 2 :]
        ids = [*ends[0], *ends[1]]
        context = "".join(tokenizer.decode(end) for end in ends)
        samples = [dataclasses.replace(one, context=context) for one in samples]
    prompt = (*frames[0][0], *ids)
    if apart:
        questions = tuple(tuple(after) for _, after in frames)
        return Case(tuple(samples), prompt, questions=questions, instruction=head, truncated=drop)
    later = [tuple(follow_up(tokenizer, one.question, one.answer_prefix)) for one in samples[1:]] if turns else []
    return Case(tuple(samples), (*prompt, *frames[0][1]), turns=tuple(later), instruction=head, truncated=drop)
