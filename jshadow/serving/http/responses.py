"""OpenAI's /v1/responses: its bodies, which become those of a chat, and its events, which come from a chat's chunks.

The server does not keep responses, so `input` has the whole conversation. The server finds by its tokens what it has
read of the conversation before, as in a chat.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jshadow.serving.http.answers import Chat
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.schemas import (
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_TOOLS,
    Body,
    ChatRequest,
    Function,
    JsonSchema,
    No,
    TemplateSwitches,
    few,
)

_LOGPROBS = "message.output_text.logprobs"  # the entry of `include` that asks for log-probabilities


class InputText(Body):
    """A text of a message. An earlier answer may come back as it was sent."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputFile(Body):
    """A document: one that was uploaded before, or the data of one."""

    type: Literal["input_file"]
    file_id: str | None = None
    filename: str | None = None
    file_data: str | None = None


class InputMessage(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText | InputFile], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class CallItem(Body):
    """A call of a function in an earlier answer. `arguments` is JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Body):
    """The result of a function that the model has called."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class ThoughtText(Body):
    """A text of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ThoughtItem(Body):
    """The reasoning before an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ThoughtText], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    encrypted_content: None = None
    status: str | None = None


_Item = InputMessage | CallItem | ResultItem | ThoughtItem
_Items = Annotated[list[_Item], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ResponseTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class TextForm(JsonSchema):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    """Options of the answer's text. `verbosity` is ignored."""

    format: TextForm | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    """Options of the reasoning. The effort "none" switches it off. All else is ignored."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class EventOptions(Body):
    """Options of a stream, which are ignored."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """The body of /v1/responses."""

    model: str
    input: str | _Items
    instructions: str | None = None
    stream: bool = False
    stream_options: EventOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    background: No = False
    truncation: Literal["disabled"] = "disabled"
    # From here on, the fields that are ignored.
    store: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(few)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that a body asks for. A stream ends with its usage."""
    asked, form = body.include or [], None if body.text is None else body.text.format
    fields: dict[str, Any] = {"messages": _messages(body)}
    for name in ("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"):
        fields[name] = getattr(body, name)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["logprobs"] = _LOGPROBS in asked or body.top_logprobs is not None
    fields["stream_options"] = {"include_usage": True} if body.stream else None
    fields["tools"] = [{"type": "function", "function": _told(tool, "type")} for tool in body.tools or []] or None
    fields["tool_choice"] = body.tool_choice
    if isinstance(body.tool_choice, dict) and "name" in body.tool_choice:
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice["name"]}}
    if form is not None:
        schema = {"json_schema": _told(form, "type")} if form.type == "json_schema" else {}
        fields["response_format"] = {"type": form.type, **schema}
    if body.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = _told(body.chat_template_kwargs)
    elif body.reasoning is not None and body.reasoning.effort == "none":
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    return ChatRequest.model_validate(fields)


def _told(value: Body, *left_out: str) -> dict[str, Any]:
    return value.model_dump(exclude_none=True, by_alias=True, exclude={*left_out})


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat. Reasoning, text and calls that follow each other are one answer."""
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    open_answer: dict[str, Any] | None = None  # one to which more can belong

    def answer(holds: str) -> dict[str, Any]:
        nonlocal open_answer
        if open_answer is None or holds in open_answer:
            open_answer = {"role": "assistant"}
            messages.append(open_answer)
        return open_answer

    for item in items:
        if isinstance(item, ThoughtItem):
            thoughts = "\n\n".join(part.text for part in item.content or item.summary)
            answer("reasoning_content")["reasoning_content"] = thoughts
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            held = answer("").setdefault("tool_calls", [])
            held.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ResultItem):
            open_answer = None
            text = item.output if isinstance(item.output, str) else "\n\n".join(part.text for part in item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.role == "assistant":
            answer("content")["content"] = _content(item)
        else:
            open_answer = None
            messages.append({"role": item.role, "content": _content(item)})
    return messages


def _content(message: InputMessage) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "file", "file": _told(part, "type")}
        if isinstance(part, InputFile)
        else {"type": "text", "text": part.text}
        for part in message.content
    ]


_FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}


def own_fields(error: ApiError) -> ApiError:
    """Return an error about a field of a chat as one about the field of the body that it came from."""
    for theirs, ours in _FIELDS.items():
        if error.param is not None and error.param.split(".")[0] == theirs:
            text = str(error).replace(error.param, ours).replace(theirs, ours)
            return ApiError(error.status, text, code=error.code, param=ours)
    return error


class ResponseAnswer:
    """The answer to one body, in the form of a response or of the events of its stream."""

    def __init__(self, body: ResponsesRequest, chat: Chat, count: Callable[[str], int]) -> None:
        """Take the chat that answers. `count` returns the number of tokens of a text."""
        self.body, self.chat, self.count = body, chat, count
        kept = _told(body, "input", "stream", "stream_options", "include", "chat_template_kwargs", "background")
        defaults: dict[str, Any] = {
            "instructions": None,
            "max_output_tokens": None,
            "temperature": None,
            "top_p": None,
            "metadata": {},
        }
        choices = {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "reasoning": None}
        self.head = {
            "id": _name("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            **defaults,
            **choices,
            **{"text": {"format": {"type": "text"}}},
            **kept,
            "store": False,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for the answer, and return the response."""
        told = await self.chat.whole()
        [choice] = told["choices"]
        message, logprobs = choice["message"], choice["logprobs"]
        thoughts, output = message.get("reasoning_content", ""), []
        if thoughts:
            output.append(_thoughts(_name("rs"), thoughts))
        if message["content"]:
            output.append(_message(_name("msg"), message["content"], logprobs and logprobs["content"]))
        output += [_call(_name("fc"), call) for call in message.get("tool_calls", ())]
        return self._response(output, choice["finish_reason"], told["usage"], thoughts)

    def _response(
        self, output: list[dict[str, Any]], finish: str | None, usage: dict[str, Any] | None, thoughts: str = ""
    ) -> dict[str, Any]:
        """Return the response. `finish` None: it has begun."""
        ended = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        more: dict[str, Any] = {"status": ended, "output": output, "usage": None}
        if ended == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
            if output:
                output[-1]["status"] = "incomplete"
        if usage is not None:
            details = {"reasoning_tokens": self.count(thoughts) if thoughts else 0}
            more["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": details | usage.get("completion_tokens_details", {}),
                "total_tokens": usage["total_tokens"],
            }
        return self.head | more

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream, each with its number."""
        number, stream, finish, usage = 0, _Output(), None, None

        def numbered(event: dict[str, Any]) -> dict[str, Any]:
            nonlocal number
            number += 1
            return event | {"sequence_number": number - 1}

        for name in ("created", "in_progress"):
            yield numbered({"type": f"response.{name}", "response": self._response([], None, None)})
        async for chunk in self.chat.events():
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                for event in stream.push(choice["delta"], choice["logprobs"]):
                    yield numbered(event)
        for event in stream.close():
            yield numbered(event)
        response = self._response(stream.items, finish, usage, stream.thoughts)
        yield numbered({"type": f"response.{response['status']}", "response": response})


class _Output:
    """The items of a stream. One is open at a time.

    Attributes:
        items: the items that are complete.
        thoughts: the text of the reasoning.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.thoughts = ""
        self._kind = self._name = self._text = ""  # of the open item: "reasoning", "output" or "" if none is open
        self._logprobs: list[dict[str, Any]] = []

    def push(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Yield the events of what a chunk of a chat adds."""
        entries = logprobs["content"] if logprobs else []
        if text := delta.get("reasoning_content"):
            yield from self._more("reasoning", text, [])
        if (text := delta.get("content")) or entries:
            yield from self._more("output", text or "", entries)
        for call in delta.get("tool_calls", ()):
            yield from self.close()
            yield from self._whole_call(call)

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the end of the open item, if there is one."""
        if not self._kind:
            return
        done = self._item()
        [part] = done["content"]
        yield self._at(f"response.{self._kind}_text.done", "text", self._text)
        yield self._at("response.content_part.done", "part", part)
        yield {"type": "response.output_item.done", "output_index": len(self.items), "item": done}
        self.items.append(done)
        self.thoughts += self._text if self._kind == "reasoning" else ""
        self._kind = ""

    def _more(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            yield from self.close()
            self._kind, self._name, self._text, self._logprobs = kind, _name(_PREFIX[kind]), "", []
            begun, [part] = self._item(), self._item()["content"]
            item = begun | {"status": "in_progress", "content": []}
            yield {"type": "response.output_item.added", "output_index": len(self.items), "item": item}
            yield self._at("response.content_part.added", "part", part)
        self._text += text
        self._logprobs += logprobs
        more = self._at(f"response.{kind}_text.delta", "delta", text)
        yield more | ({"logprobs": logprobs} if kind == "output" else {})

    def _item(self) -> dict[str, Any]:
        if self._kind == "reasoning":
            return _thoughts(self._name, self._text)
        return _message(self._name, self._text, self._logprobs)

    def _at(self, kind: str, field: str, value: Any) -> dict[str, Any]:
        """Return an event about the one content part of the open item."""
        logprobs = {"logprobs": self._logprobs} if kind == "response.output_text.done" else {}
        place = {"output_index": len(self.items), "content_index": 0}
        return {"type": kind, "item_id": self._name, **place, field: value, **logprobs}

    def _whole_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        done = _call(_name("fc"), call)
        place = {"output_index": len(self.items)}
        about = {"item_id": done["id"], **place}
        begun = done | {"arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "item": begun, **place}
        yield {"type": "response.function_call_arguments.delta", "delta": done["arguments"], **about}
        whole = {"arguments": done["arguments"], "name": done["name"]}
        yield {"type": "response.function_call_arguments.done", **whole, **about}
        yield {"type": "response.output_item.done", "item": done, **place}
        self.items.append(done)


_PREFIX = {"reasoning": "rs", "output": "msg"}


def _name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _message(name: str, text: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _thoughts(name: str, text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"id": name, "type": "reasoning", "status": "completed", "summary": [], "content": [part]}


def _call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    told = {"call_id": call["id"], **call["function"]}
    return {"id": name, "type": "function_call", "status": "completed", **told}
