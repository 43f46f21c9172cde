"""Turning a context and its questions into token ids, with the chat template of the model if it has one."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from jshadow.ops.buckets import round_up

HEAD = "Read this text, then answer a question about it.\n\n"
MARK = "\N{SECTION SIGN}\N{PILCROW SIGN}\N{SECTION SIGN}"  # a placeholder for a text in a chat template
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


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a text without special tokens and without the tokenizer's warning about long texts."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def split_specials(tokenizer: Any, text: str) -> tuple[list[str], list[list[int]]]:
    """Split a text at the texts of special tokens. Return the parts, and the token ids between each two of them.

    A document or a message that has the text of a special token in it, such as "<|im_end|>", must not control the
    model. So the ids are those of plain text.
    """
    plain = _plain_specials(tokenizer)
    if not any(token in text for token in plain):
        return [text], []
    pattern = "|".join(re.escape(token) for token in sorted(plain, key=len, reverse=True))
    return re.split(pattern, text), [plain[found] for found in re.findall(pattern, text)]


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Encode a text of a user. The texts of special tokens in it are plain text."""
    parts, between = split_specials(tokenizer, text)
    ids = encode(tokenizer, parts[0])
    for special, part in zip(between, parts[1:], strict=True):
        ids += [*special, *encode(tokenizer, part)]
    return ids


@functools.lru_cache(maxsize=8)
def _plain_specials(tokenizer: Any) -> dict[str, list[int]]:
    """The token ids of each special token's text as plain text."""
    from jshadow.engine.text import special_tokens  # which imports JAX

    names, backend = list(special_tokens(tokenizer)), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {name: tokenizer.encode(name, add_special_tokens=False, split_special_tokens=True) for name in names}
    copied = type(backend).from_str(backend.to_str())  # other threads encode with `tokenizer` meanwhile
    copied.encode_special_tokens = True
    return {name: copied.encode(name, add_special_tokens=False).ids for name in names}


def has_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def opening(tokenizer: Any) -> list[int]:
    """Return the BOS token in a list if the tokenizer puts it before a plain text, or an empty list."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [token for token in tokenizer.encode("", add_special_tokens=True)[:1] if token == bos]


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
        return opening(tokenizer) + encode(tokenizer, head), encode(tokenizer, after + prefix)
    if not has_template(tokenizer):
        after = f"\n\nQuestion: {question}\nAnswer: {prefix}"
        return opening(tokenizer) + encode(tokenizer, head), encode(tokenizer, after)
    content = f"{head}{MARK}\n\n{question}" if question else f"{head}{MARK}"
    before, _, after = render(tokenizer, [content]).partition(MARK)
    return encode(tokenizer, before), encode(tokenizer, after + prefix)


def follow_up(tokenizer: Any, question: str, prefix: str) -> list[int]:
    """Return the token ids of a later question, from the end of the previous answer on."""
    if not has_template(tokenizer):
        return encode(tokenizer, f"\n\nQuestion: {question}\nAnswer: {prefix}")
    return encode(tokenizer, render(tokenizer, ["?", MARK, question]).partition(MARK)[2] + prefix)


def render(tokenizer: Any, contents: Sequence[str]) -> str:
    """Render messages that alternate between user and assistant as a chat, up to the start of the next answer."""
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
