"""Chats as texts: the chat template of a tokenizer, and a document with a question in the first message of a chat."""

import bisect
import contextlib
import datetime
import itertools
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from jshadow.errors import PromptError
from jshadow.weights.tokenizer import decode, encode, encode_parts, encode_plain, opening, placeholder, split_specials

DATE = datetime.date(2024, 7, 26)  # the day that Llama 3's template names where it is not told the day
# The codes of strftime: each letter alone, behind a flag or behind a modifier. `strftime` keeps those that it has not.
_CODES = [f"%{flag}{letter}" for flag in (*"-_0^#:EO", "") for letter in string.ascii_letters]
_THOUGHT = "<think>", "</think>"  # around what a model thinks; templates look for them in an answer
_END = "x"  # the end of a text of which the tokens before a document are taken
MOST_STEPS, MOST_SECONDS = 20_000, 10.0  # lines of a compiled template for each message and tool, and time


def has_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_of(tokenizer: Any, *, tools: bool = False) -> str:
    """Return the chat template. Of several, it is that of tools if there are some, the default or the only one.

    Args:
        tools: whether the chat has tools.

    Raises:
        PromptError: there is no template, or none of several is the default.
    """
    if not has_template(tokenizer):
        raise PromptError("the tokenizer has no chat template, so the prompt must be text or token ids")
    found = tokenizer.chat_template
    if isinstance(found, Mapping):
        names = (["tool_use"] if tools else []) + ["default"] + (list(found) if len(found) == 1 else [])
        name = next((name for name in names if name in found), None)
        if name is None:
            told = f"{sorted(found)!r:.200}"
            raise PromptError(f"one of the tokenizer's chat templates must be named 'default', got {told}")
        found = found[name]
    return str(found)


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    answer: bool = True,
    fixed_date: bool = False,
    **told: Any,
) -> str:
    """Return a chat as text.

    Args:
        messages: the messages, as the template wants them.
        tools: the functions that the model may call.
        answer: whether the beginning of the next answer follows.
        fixed_date: whether the template is told `DATE` as today's date, so that a document has the same tokens on
            every day.
        told: what else the template is told.

    Raises:
        PromptError: as `template_of`, or the template refuses the chat or does not come to an end.
    """
    template = template_of(tokenizer, tools=bool(tools))
    options = {"chat_template": _dated(template) if fixed_date else template, "tokenize": False} | told
    try:
        with _bounded(MOST_STEPS * (1 + len(messages) + len(tools or ()))):
            text = tokenizer.apply_chat_template(list(messages), tools, add_generation_prompt=answer, **options)
    except _EndlessError:
        problem = "the chat template does not come to an end, so the prompt must be text or token ids"
        raise PromptError(problem) from None
    except Exception as error:  # a template is a program of the checkpoint and may raise anything
        raise PromptError(f"the chat template refuses the chat: {error or type(error).__name__}"[:500]) from error
    return str(text)


def _dated(template: str) -> str:
    """Return a chat template that names `DATE` where it would name today's date."""
    if "strftime_now" not in template:
        return template
    told = {code: DATE.strftime(code) for code in _CODES}
    return (
        "{% macro strftime_now(format) %}{% set now = namespace(text=format.replace('%%', '\\0')) %}"
        f"{{% for code, value in {told!r}.items() %}}{{% set now.text = now.text.replace(code, value) %}}{{% endfor %}}"
        f"{{{{ now.text.replace('\\0', '%') }}}}{{% endmacro +%}}{template}"
    )


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer and its chat template say an answer ends with: none, one or two."""
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    mark = placeholder()
    try:
        text = rendered(tokenizer, _alternating(["?", mark]), answer=False)
    except PromptError:
        return tuple(ids)
    _, found, behind = text.rpartition(mark)
    behind = behind.lstrip() if found else ""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    marks = sorted((name for name in added if behind.startswith(name)), key=len)
    return tuple(dict.fromkeys([*ids, *(added[name] for name in marks[-1:])]))


# A document and questions about it


def frame(
    tokenizer: Any, question: str, prefix: str = "", *, head: str = "", chat: bool = True
) -> tuple[list[int], list[int]]:
    """Return the token ids before and after the context of a question.

    Args:
        tokenizer: a tokenizer of transformers. If it has a chat template, the template is used.
        question: the question after the context.
        prefix: the beginning of the answer.
        head: the text before the context.
        chat: whether the prompt is a chat. If not, the model continues a text, and no template is used.

    Raises:
        PromptError: as `rendered`, or the template leaves out the message or repeats it.
    """
    if not chat:
        after = "\n\n" + question if question else ""
        return opening(tokenizer) + encode(tokenizer, head, begins=True), encode(tokenizer, after + prefix)
    if not has_template(tokenizer):
        after = f"\n\nQuestion: {question}\nAnswer: {prefix}"
        return opening(tokenizer) + encode(tokenizer, head, begins=True), encode_plain(tokenizer, after)
    mark = placeholder()
    asked = "\n\n" + mark.join(split_specials(tokenizer, question)) if question else ""
    before, after_ids = _cut(tokenizer, [f"{head}{mark}{asked}"], mark, prefix)
    return encode(tokenizer, before, begins=True), after_ids


def follow_up(tokenizer: Any, question: str, prefix: str = "") -> list[int]:
    """Return the token ids of a later question, from the end of the previous answer on. Raises as `frame`."""
    if not has_template(tokenizer):
        return encode_plain(tokenizer, f"\n\nQuestion: {question}\nAnswer: {prefix}")
    mark = placeholder()
    return _cut(tokenizer, ["?", mark, mark.join(split_specials(tokenizer, question))], mark, prefix)[1]


def changed_turn(tokenizer: Any, held: Sequence[int], question: str) -> list[int] | None:
    """Return the token ids of a chat and its next question if the template then writes the last answer otherwise.

    Qwen3's template leaves out what the model thought in earlier answers. The beginning of an answer can change too.

    Args:
        tokenizer: a tokenizer with a chat template.
        held: the token ids of the chat, up to the end of the last answer, without a token that ended it.
        question: the next message of the user.

    Returns:
        None if the answer stays, except for blanks around it, or if it is not found in the chat. Otherwise the ids,
        which begin with those of `held` that stay.
    """
    user = [{"role": "user", "content": "?"}]
    mark, text = placeholder(), decode(tokenizer, held, special=True)

    def plain(content: str) -> str:
        return mark.join(split_specials(tokenizer, content))

    try:
        asked, begun = (rendered(tokenizer, user, answer=answer, fixed_date=True) for answer in (False, True))
        start = begun.removeprefix(asked) or mark  # some templates always begin an answer
        before, found, said = text.rpartition(start)
        thoughts, closing, content = said.rpartition(_THOUGHT[1])
        head, opening, thoughts = thoughts.partition(_THOUGHT[0])
        content = plain(head) + opening + plain(thoughts) + closing + plain(content)
        told = [{"role": "assistant", "content": content}]
        later = rendered(tokenizer, [*user, *told, {"role": "user", "content": plain(question)}], fixed_date=True)
    except PromptError:
        return None
    stays = later.replace(mark, "")
    if not found or not later.startswith(asked):
        return None
    if stays.startswith(begun) and stays[len(begun) :].lstrip().startswith(said.strip()):
        return None
    same = next((place for place, pair in enumerate(zip(begun, later, strict=False)) if len({*pair}) > 1), len(begun))
    kept, new = before + begun[len(asked) : same], later[same:]

    def tail(count: int) -> str:
        return decode(tokenizer, held[len(held) - count :], special=True) if count else ""

    # The tokens stay whose text stays. Each character may be of several tokens.
    least = bisect.bisect_left(range(len(held)), len(text) - len(kept), key=lambda count: len(tail(count)))
    for count in range(least, len(held) + 1):
        end = tail(count)
        if text.endswith(end) and len(text) - len(end) <= len(kept):
            ids = list(held[: len(held) - count])
            return ids + encode_parts(tokenizer, (kept[len(text) - len(end) :] + new).split(mark), begins=not ids)
    return None


class _Beginning(NamedTuple):
    """What comes before a document that is the first thing in a chat.

    Attributes:
        text: the text of the chat template before it, or "" without a template.
        ids: its token ids up to the last token that never merges with a text behind it.
        rest: the text that the ids between these and those of the document are decoded to. The last of them may have
            the beginning of the document in it, as that of a blank has.
        most: the largest number of ids that hold `rest`.
    """

    text: str
    ids: list[int]
    rest: str
    most: int

    def begins(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Whether the token ids of a document, as `document_ids` returns them, have this beginning."""
        count = len(self.ids)
        return [*ids[:count]] == self.ids and _known(tokenizer, ids[count:][: self.most]).startswith(self.rest)


def beginning(tokenizer: Any) -> _Beginning:
    """Return what comes before a document. Raises PromptError as `frame`."""
    mark = placeholder()
    text = _cut(tokenizer, [mark], mark, "")[0] if has_template(tokenizer) else ""
    ids = opening(tokenizer) * (not text) + encode(tokenizer, text + _END, begins=True)
    whole = {*tokenizer.added_tokens_decoder} - {tokenizer.unk_token_id}
    count = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in whole), 0)
    return _Beginning(text, ids[:count], _known(tokenizer, ids[count:]).removesuffix(_END), len(ids) - count + 8)


def document_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a document that is the first thing in a chat, from the beginning of the chat on.

    They are those of a message with this text, up to the end of the document. Texts of special tokens in the document
    are plain text. Raises PromptError as `frame`.
    """
    before = beginning(tokenizer)
    first, *parts = split_specials(tokenizer, text)
    ids = encode_parts(tokenizer, [before.text + first, *parts])
    return ids if before.text else before.ids + ids


def document_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of a document from what `document_ids` returned. Raises PromptError as `frame`.

    U+FFFD stands for characters that the tokenizer does not know.
    """
    before = beginning(tokenizer)
    return _known(tokenizer, ids[len(before.ids) :]).removeprefix(before.rest)


def _known(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids, with U+FFFD for each token that stands for characters without a token."""
    runs = itertools.groupby(ids, lambda token: token == tokenizer.unk_token_id)
    return "".join("\ufffd" * len([*run]) if unknown else decode(tokenizer, [*run]) for unknown, run in runs)


def _cut(tokenizer: Any, contents: Sequence[str], mark: str, prefix: str) -> tuple[str, list[int]]:
    """Render messages. Return the text before the first mark, and the token ids after it."""
    before, *parts = render(tokenizer, contents).split(mark)
    if len(parts) != "".join(contents).count(mark):
        raise PromptError("the chat template leaves out or repeats a message, so no question can follow a document")
    return before, encode_parts(tokenizer, [*parts[:-1], parts[-1] + prefix], begins=False)


def render(tokenizer: Any, contents: Sequence[str]) -> str:
    """Render messages that alternate between user and assistant as a chat, up to the start of the next answer.

    The template is told a fixed date, so that a document has the same tokens on every day.
    """
    return rendered(tokenizer, _alternating(contents), fixed_date=True)


def _alternating(contents: Sequence[str]) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


# A template that does not come to an end


class _EndlessError(Exception):
    """A template takes too long."""


@contextlib.contextmanager
def _bounded(most: int) -> Iterator[None]:
    """Raise _EndlessError in this thread after `most` lines of a template, or after `MOST_SECONDS`.

    A loop in a template cannot be ended from outside. So its steps are counted.
    """
    steps, ends = itertools.count(1), time.monotonic() + MOST_SECONDS

    def step(_: FrameType, event: str, __: Any) -> Any:
        if event == "line" and (next(steps) > most or time.monotonic() > ends):
            raise _EndlessError
        return step

    def call(frame: FrameType, _: str, __: Any) -> Any:
        return step if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
