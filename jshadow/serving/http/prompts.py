"""Prompts: the token ids of chats with documents in them, and of completions.

A document comes in a message as its token ids, and not as text that is encoded with the text around it. So the prompt
begins with the tokens of the stored document, if the document is the beginning of the first message. The same way, the
text of a special token in a message comes as the token ids of plain text, so that it does not control the model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jinja2

from jshadow.errors import PromptError
from jshadow.evaluation.tasks.framing import MARK, encode, split_specials
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.schemas import FileContent, FilePart, Message

FileIds = Callable[[FilePart], Sequence[int]]


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    file_ids: FileIds,
    tools: list[dict] | None,
    check: Callable[[str], None],
) -> list[int]:
    """Return the token ids of a chat, up to the beginning of the answer.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat.
        file_ids: returns the token ids of the text of a file, without those of a template.
        tools: the functions that the model may call, for the template.
        check: called with the text before it is encoded. It raises an error if the text is too long.

    Raises:
        ApiError: there is no template, it refuses the chat, or a message has neither text nor a tool call.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "messages: the tokenizer has no chat template; use /v1/completions", param="messages")
    files: list[Sequence[int]] = []
    plain = [_plain(tokenizer, message, place, files, file_ids) for place, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, tools=tools)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise ApiError(400, f"messages: the chat template refuses the chat: {error}", param="messages") from error
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ApiError(400, "tools must be Unicode texts, got a half of a surrogate pair", param="tools")
    check(text)
    parts = text.split(MARK)
    if len(parts) != len(files) + 1:
        raise ApiError(
            400,
            "messages: the chat template leaves out or repeats a message with a file or a special token",
            param="messages",
        )
    ids = encode(tokenizer, parts[0])
    for file, part in zip(files, parts[1:], strict=True):
        ids += [*file, *encode(tokenizer, part)]
    return ids


def _plain(tokenizer: Any, message: Message, place: int, files: list, file_ids: FileIds) -> dict[str, Any]:
    """Return a message as the template wants it.

    A file, and the text of a special token, becomes a mark. Its ids are added to `files`.
    """

    def marked(text: str) -> str:
        if MARK in text:
            raise ApiError(400, f"{field} must not have the text {MARK!r} in it", param=field)
        pieces, between = split_specials(tokenizer, text)
        files.extend(between)
        return MARK.join(pieces)

    field = f"messages.{place}.content"
    if message.content is None and not message.tool_calls:
        raise ApiError(400, f"{field} must be text or a list of parts, got none", param=field)
    parts = message.content if isinstance(message.content, list) else []
    texts = [marked(message.content)] if isinstance(message.content, str) else []
    for part in parts:
        if isinstance(part, FileContent):
            files.append(file_ids(part.file))
            texts.append(MARK)
        else:
            texts.append(marked(part.text))
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": "\n\n".join(texts)}
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    return plain


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts of a completion as a list. Raises PromptError if there is none."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    if not prompt:
        raise PromptError("prompt must have at least one text or one list of token ids, got none")
    return [*prompt]
