"""The form of an answer: a grammar for `response_format` and for tools that must be called."""

import json
from typing import Any

from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.grammar import problem, reason_of
from jshadow.serving.http.marks import HERMES, Format, format_mark, format_of, mark_id
from jshadow.serving.http.schemas import ChatRequest, Drawing, ResponseFormat, Tool

# Whitespace inside JSON is bounded, because a model may otherwise write blanks without end.
_WHITESPACE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPEN_KEYS = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")


def form_of(body: Drawing, tokenizer: Any, template: str = "") -> str | None:
    """Return the grammar of an answer in llguidance's language, or None for a free answer.

    With both tools and a form, the answer may be a call or have the form.

    Args:
        body: the body of the request.
        template: the chat template of a chat, which tells how the model writes calls.

    Raises:
        ApiError: a field is missing, llguidance refuses the schema or the expression, or the model may call tools in a
            free answer and its format is none that is read here.
    """
    calls = format_of(template)
    tools = (body.tools or []) if isinstance(body, ChatRequest) and body.tool_choice != "none" else []
    forced = _forced_tools(body, tools) if isinstance(body, ChatRequest) else []
    form = None if body.response_format is None else _answer_rule(body.response_format)
    if forced:
        return _checked(["call"], _call_rules(forced, tokenizer, calls or HERMES), "tools")
    if form is None:
        if tools and calls is None:
            mark = format_mark(template)
            told = "has none of the known marks of tool calls" if mark is None else f"writes tool calls with {mark!r}"
            raise ApiError(
                400,
                f"tools: the model's chat template {told}, so its calls cannot be read; send tool_choice as "
                "'required', a function or 'none'",
                code="unknown_tool_format",
                param="tools",
            )
        return None
    grammar = _checked(["answer"], [form], "response_format")
    if not tools:
        return grammar
    return _checked(["answer", "call"], [form, *_call_rules(tools, tokenizer, calls or HERMES)], "tools")


def has_form(body: Drawing) -> bool:
    """Return whether the answer must have a form or be a call. Only then has it a grammar."""
    formed = body.response_format is not None and body.response_format.type != "text"
    return formed or (isinstance(body, ChatRequest) and body.tool_choice not in (None, "none", "auto"))


def _answer_rule(form: ResponseFormat) -> str | None:
    """Return the rule of a form, or None for free text. Raises ApiError if its field is missing."""
    if form.type == "text":
        return None
    if form.type == "regex":
        if form.regex is None:
            raise ApiError(400, "response_format.regex must be given for the type regex", param="response_format.regex")
        return f"answer: {_regex_rule(form.regex)}"
    if form.type == "json_object":
        return f"answer: {_json_rule({'type': 'object'})}"
    if form.json_schema is None:
        name = "response_format.json_schema"
        raise ApiError(400, f"{name} must be given for the type json_schema", param=name)
    return f"answer: {_json_rule(form.json_schema.schema_)}"


def _json_rule(schema: dict[str, Any] | bool) -> str:
    """Return what a rule has for a JSON schema. References in the schema begin at its own root."""
    try:
        return f"%json {json.dumps(schema if isinstance(schema, bool) else schema | {'x-guidance': _WHITESPACE})}"
    except RecursionError as error:
        raise ApiError(400, "a JSON schema must not be nested so deeply", code="invalid_schema") from error


def _regex_rule(expression: str) -> str:
    """Return what a rule has for a regular expression. llguidance escapes it."""
    from llguidance import LLMatcher

    grammar = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"][0]["lark_grammar"]
    return str(grammar).partition("start: ")[2]


def _forced_tools(body: ChatRequest, tools: list[Tool]) -> list[Tool]:
    """Return the tools of which one must be called. Empty: none must. Raises ApiError for an unknown tool."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if choice == "required":
        found = tools
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        found = [tool for tool in tools if tool.function.name == name]
    if not found:
        raise ApiError(400, f"tool_choice must name one of the tools, got {choice!r:.80}", param="tool_choice")
    return found


def _call_rules(tools: list[Tool], tokenizer: Any, calls: Format) -> list[str]:
    """Return the rules of the call of one of the tools."""
    names = " | ".join(f"call{index}" for index in range(len(tools)))
    rules = [f"call: {_text_rule(tokenizer, calls.begin)} ({names}) {_text_rule(tokenizer, calls.end)}"]
    for index, tool in enumerate(tools):
        name = json.dumps(tool.function.name)  # it is text, also where it is that of a token
        begin = " ".join(name if part == "NAME" else _text_rule(tokenizer, part) for part in calls.opening_parts)
        end = _text_rule(tokenizer, calls.closing)
        rules.append(f"call{index}: {begin} {_json_rule(_closed(tool.function.parameters))} {end}")
    return rules


def _text_rule(tokenizer: Any, text: str) -> str:
    """Return what a rule has for a text. A mark that is one token is that token."""
    token = mark_id(tokenizer, text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, without other properties than those that it names."""
    if any(key in schema for key in _OPEN_KEYS):
        return schema
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list):
        properties = {name: {} for name in required if isinstance(name, str)} | properties
    return {"type": "object"} | schema | {"properties": properties, "additionalProperties": False}


def _checked(names: list[str], rules: list[str], field: str) -> str:
    """Return a grammar that begins with one of the rules `names`. Raises ApiError if llguidance refuses it."""
    grammar = "\n".join([f"start: {' | '.join(names)}", *rules, ""])
    if found := problem(grammar):
        message = f"{field} is refused: {reason_of(found):.300}"
        raise ApiError(400, message, code="invalid_schema", param=field)
    return grammar
