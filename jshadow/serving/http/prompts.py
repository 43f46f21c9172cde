"""Prompts: the token ids of chats with documents in them, and of completions.

A document that is the first thing in a chat comes as its token ids. So the prompt begins with those of the stored
document. A document at another place is text, which is encoded with the text around it. The text of a mark in a message
is encoded in two parts, so that it does not control the model.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jshadow.errors import PromptError
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.marks import arguments_of, format_of, short_id
from jshadow.serving.http.schemas import FileContent, FilePart, FunctionCall, Message, TemplateSwitches
from jshadow.weights.templates import beginning, document_text, rendered, template_of
from jshadow.weights.tokenizer import encode_parts, mended, placeholder, split_specials

_FileIds = Callable[[FilePart], Sequence[int]]
_OWN_TOOLS = re.compile(r"\w(\.tools\b|\[['\"]tools['\"]\])")  # the tools are read from the system message
_ONE_CALL = "single tool-call"  # the error of a template that refuses several calls in one message
# A template that puts the arguments of an earlier call into its text as they are. Others take them as an object.
_JOINED = re.compile(r"arguments['\"\]]*\s*(\+|~|-?\}\})")
_OBJECT = re.compile(r"arguments['\"\]]*\s*(\||\.|is\b)")


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    file_ids: _FileIds,
    tools: list[dict] | None,
    check: Callable[[str], None],
    switches: TemplateSwitches | None = None,
) -> list[int]:
    """Return the token ids of a chat, up to the beginning of the answer.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat.
        file_ids: returns the token ids of a file, as `document_ids` does.
        tools: the functions that the model may call, for the template.
        check: called with the text before it is encoded. It raises an error if the text is too long.
        switches: what else the template is told.

    Raises:
        ApiError: there is no template, it refuses the chat, or a message has neither text nor a tool call.
    """
    try:
        template = template_of(tokenizer, tools=bool(tools))
    except PromptError as error:
        raise ApiError(400, f"messages: {error}; use /v1/completions", param="messages") from error
    marked = _Marked(tokenizer)
    plain = [_plain(marked, message, place, file_ids, template) for place, message in enumerate(messages)]
    told: dict[str, Any] = {} if switches is None else switches.model_dump(exclude_none=True)
    if _ONE_CALL in template:
        plain = _one_call_each(plain)
    if tools:
        tools = marked.values(tools)
        if _OWN_TOOLS.search(template):
            if plain[0]["role"] != "system":
                plain.insert(0, {"role": "system", "content": ""})
            plain[0]["tools"] = _json(tools) if "<|tool|>" in template else tools
        if "xml_tools" in template:
            told["xml_tools"] = tools
    try:  # with files, the date is the one that the library has told the document
        text = rendered(tokenizer, plain, tools=tools, fixed_date=bool(marked.files), **told)
    except PromptError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error
    check(text)
    if any(text.count(place) != 1 for place in marked.files):
        raise ApiError(400, "messages: the chat template leaves out or repeats a message with a file", param="messages")
    before = beginning(tokenizer).text if marked.files else ""
    stored: list[int] = []
    for place, ids in marked.files.items():
        if text.startswith(before + place):  # the ids of a first file have the text before it in them
            stored, text = [*ids], text.removeprefix(before + place)
        else:
            text = text.replace(place, marked.text(document_text(tokenizer, ids)))
    return stored + encode_parts(tokenizer, text.split(marked.border), begins=not stored)


class _Marked:
    """The texts of a chat, with placeholders.

    Attributes:
        border: the border of two parts of a text that are encoded one by one.
        files: the token ids of each file, by its placeholder.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.border = tokenizer, placeholder()
        self.files: dict[str, Sequence[int]] = {}

    def file(self, ids: Sequence[int]) -> str:
        """Return the placeholder of a file."""
        place = placeholder()
        self.files[place] = ids
        return place

    def text(self, text: str) -> str:
        """Return a text with borders inside the marks in it, so that they do not control the model."""
        return self.border.join(split_specials(self.tokenizer, mended(text)))

    def values(self, value: Any) -> Any:
        """Return a value of JSON, with borders in all of its texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.values(one) for one in value]
        if isinstance(value, dict):
            return {self.text(name): self.values(one) for name, one in value.items()}
        return value


def _plain(marked: _Marked, message: Message, place: int, file_ids: _FileIds, template: str) -> dict[str, Any]:
    """Return a message as the template wants it, with placeholders."""
    field = f"messages.{place}.content"
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"{field} must be text or a list of parts, got none", param=field)
    parts = message.content if isinstance(message.content, list) else []
    texts = [marked.text(message.content)] if isinstance(message.content, str) else []
    for part in parts:
        if isinstance(part, FileContent):
            texts.append(marked.file(file_ids(part.file)))
        else:
            texts.append(marked.text(part.text))
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": "\n\n".join(texts)}
    form = format_of(template)
    short = form is not None and form.short_ids
    calls = f"messages.{place}.tool_calls"
    if message.tool_calls:
        joins = bool(_JOINED.search(template)) and not _OBJECT.search(template)
        plain["tool_calls"] = [
            {
                "id": short_id(call.id) if short else marked.text(call.id),
                "type": "function",
                "function": _called(marked, call.function, f"{calls}.{number}.function", joins),
            }
            for number, call in enumerate(message.tool_calls)
        ]
        if form is not None and "tool_calls" not in template:
            functions = [call["function"] for call in plain.pop("tool_calls")]
            written = [form.written(one["name"], _json(one["arguments"])) for one in functions]
            plain["content"] += "".join(written)
    if message.tool_call_id is not None:
        name = message.tool_call_id
        plain["tool_call_id"] = short_id(name) if short else marked.text(name)
    for name in ("name", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = marked.text(getattr(message, name))
    return plain


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat in which no message has several calls. The answer to a call follows it."""
    told, left = [], list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls", [])
        for number, call in enumerate(calls[:-1]):
            told.append(message | {"tool_calls": [call], "content": "" if number else message["content"]})
            answer = next((one for one in left if one.get("tool_call_id") == call["id"]), None)
            if answer is not None:
                left.remove(answer)
                told.append(answer)
        told.append(message | {"tool_calls": calls[-1:], "content": ""} if calls[1:] else message)
    return told


def _called(marked: _Marked, call: FunctionCall, field: str, joins: bool) -> dict[str, Any]:
    """Return the function of an earlier call. Raises ApiError if its arguments are not the JSON of an object."""
    name = f"{field}.arguments"
    try:
        arguments = marked.values(arguments_of(call.arguments))
    except RecursionError:
        arguments = None
    if arguments is None:
        raise ApiError(400, f"{name} must be the JSON of an object, got {call.arguments!r:.80}", param=name)
    return {"name": marked.text(call.name), "arguments": _json(arguments) if joins else arguments}


def _json(value: Any) -> str:
    """Return JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts of a completion as a list. Raises PromptError if there is none."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    if not prompt:
        raise PromptError("prompt must have at least one text or one list of token ids, got none")
    return [*prompt]
