"""Turning a context and its questions into token ids, with the chat template of the model if it has one."""

import dataclasses
import datetime
import itertools
from collections.abc import Sequence
from typing import Any

from jshadow.errors import PromptError
from jshadow.ops.buckets import round_up
from jshadow.weights.tokenizer import MARK, decode, encode, encode_parts, encode_plain, marked, opening

HEAD = "Read this text, then answer a question about it.\n\n"
DATE = datetime.date(2024, 7, 26)  # the day that Llama 3's template names where it is not told the day
CODES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdDeFGhHIjmMpSTuUVwWxXyYZ"), "%%")  # of strftime
TURN_WIDTH = 32  # later questions are padded to a multiple of this, so that they share compiled programs


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question about one context. The first five fields are the columns of kvpress.

    Attributes:
        context: the long text, including the planted facts.
        question: the question after it.
        answer_prefix: the beginning of the answer, which is given to the model.
        answer: the correct answer, or a tuple of answers. Empty if nothing is asked.
        max_new_tokens: maximum number of tokens of the answer.
        scorer: a name in `text_metrics.SCORERS`.
        choices: all possible classes, for the scorer "classes".
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

    @property
    def text(self) -> str:
        """The text of the first turn, without chat template and answer prefix."""
        return f"{self.instruction}{self.samples[0].context}\n\n{self.samples[0].question}"

    @property
    def growth(self) -> int:
        """Number of tokens that a state needs in addition to the prompt.

        With forced tokens, this is their number. With independent questions, it is the longest sum of a question and
        its answer. Otherwise it is the sum of all turns and answers.
        """
        if self.questions:
            pairs = zip(self.questions, self.samples, strict=True)
            return max(padded(len(question)) + sample.max_new_tokens for question, sample in pairs)
        answers = sum(sample.max_new_tokens for sample in self.samples)
        return len(self.forced) or answers + padded(sum(map(len, self.turns)))


def padded(count: int) -> int:
    """Round the number of tokens of a question up, so that similar lengths share a compiled program."""
    return round_up(count, TURN_WIDTH)


def has_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def frame(
    tokenizer: Any, question: str, prefix: str, head: str = HEAD, *, chat: bool = True
) -> tuple[list[int], list[int]]:
    """Return the token ids before and after the context of a question.

    Args:
        tokenizer: a transformers tokenizer. If it has a chat template, the template is used.
        question: the question after the context.
        prefix: the beginning of the answer.
        head: the text before the context.
        chat: whether the prompt is a chat. If not, the model continues a text, and no template is used.
    """
    if not chat:
        after = "\n\n" + question if question else ""
        return opening(tokenizer) + encode(tokenizer, head, begins=True), encode(tokenizer, after + prefix)
    if not has_template(tokenizer):
        after = f"\n\nQuestion: {question}\nAnswer: {prefix}"
        return opening(tokenizer) + encode(tokenizer, head, begins=True), encode_plain(tokenizer, after)
    asked, between = marked(tokenizer, question, "question")
    before, after_ids = _cut(tokenizer, [f"{head}{MARK}\n\n{asked}" if question else f"{head}{MARK}"], between, prefix)
    return encode(tokenizer, before, begins=True), after_ids


def follow_up(tokenizer: Any, question: str, prefix: str) -> list[int]:
    """Return the token ids of a later question, from the end of the previous answer on."""
    if not has_template(tokenizer):
        return encode_plain(tokenizer, f"\n\nQuestion: {question}\nAnswer: {prefix}")
    asked, between = marked(tokenizer, question, "question")
    return _cut(tokenizer, ["?", MARK, asked], between, prefix)[1]


def _cut(
    tokenizer: Any, contents: Sequence[str], between: Sequence[Sequence[int]], prefix: str
) -> tuple[str, list[int]]:
    """Render messages. Return the text before the first mark, and the token ids after it.

    Args:
        tokenizer: a tokenizer with a chat template.
        contents: as in `render`.
        between: the token ids that come for each later mark.
        prefix: the beginning of the answer.

    Raises:
        PromptError: the template leaves out a message, or repeats one.
    """
    before, *parts = render(tokenizer, contents).split(MARK)
    if len(parts) != len(between) + 1:
        raise PromptError("the chat template leaves out or repeats a message, so no question can follow a document")
    return before, encode_parts(tokenizer, [*parts[:-1], parts[-1] + prefix], between, begins=False)


def render(tokenizer: Any, contents: Sequence[str]) -> str:
    """Render messages that alternate between user and assistant as a chat, up to the start of the next answer.

    The template is told a fixed date, so that a document has the same tokens on every day.
    """
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    template = dated(tokenizer.chat_template) if isinstance(tokenizer.chat_template, str) else None
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)


def dated(template: str) -> str:
    """Return a chat template that names `DATE` where it would name today's date."""
    if "strftime_now" not in template:
        return template
    filters = "".join(f" | replace({code!r}, {DATE.strftime(code)!r})" for code in CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro +%}}{template}"


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
    """Build a case from questions about one context.

    Args:
        tokenizer: a transformers tokenizer.
        samples: at least one question. All have the same context.
        head: the text before the context.
        apart: whether the questions are independent, each asked on a fork of the context.
        turns: whether the questions are asked one after another, with the answers kept in the cache.
        chat: see `frame`.
        drop: number of tokens to remove from the middle of the context.
    """
    frames = [frame(tokenizer, one.question, one.answer_prefix, head, chat=chat) for one in samples]
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
