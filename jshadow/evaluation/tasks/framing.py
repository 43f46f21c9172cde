"""Turning a context and its questions into token ids, with the chat template of the model if it has one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jshadow.ops.layout import round_up
from jshadow.weights.templates import follow_up, frame
from jshadow.weights.tokenizer import decode, encode, opening

HEAD = "Read this text, then answer a question about it.\n\n"
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
        chat: whether the prompt is a chat, as in `frame`.
        drop: number of tokens to remove from the middle of the context.
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
