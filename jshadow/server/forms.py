"""The form of an answer: a grammar for `response_format` and for tools that must be called."""

import json
from typing import Any

from jshadow.server.errors import ApiError
from jshadow.server.grammar import Grammars
from jshadow.server.marks import CALL, CALL_END
from jshadow.server.schemas import ChatRequest, Drawing, ResponseFormat, Tool

# Whitespace inside JSON is bounded, because a model may otherwise write blanks without end.
WHITESPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def form_of(body: Drawing) -> str | None:
    """Return the grammar of an answer as llguidance describes it, or None for a free answer.

    Raises:
        ApiError: a field is missing, or llguidance refuses the schema or the expression.
    """
    tools = body.tools or [] if isinstance(body, ChatRequest) else []
    wanted = forced_tools(body, tools) if isinstance(body, ChatRequest) else []
    if wanted:
        return checked(call_grammar(wanted), "tools")
    form = body.response_format
    return None if form is None or form.type == "text" else checked(grammar_of(form), "response_format")


def grammar_of(form: ResponseFormat) -> str:
    """Return the grammar of a form. Raises ApiError if its field is missing."""
    from llguidance import LLMatcher

    if form.type == "regex":
        if form.regex is None:
            raise ApiError(400, "response_format.regex must be given for the type regex", param="response_format.regex")
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.type == "json_object":
        schema: dict[str, Any] | bool = {"type": "object"}
    elif form.json_schema is None:
        name = "response_format.json_schema"
        raise ApiError(400, f"{name} must be given for the type json_schema", param=name)
    else:
        schema = form.json_schema.schema_
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WHITESPACE))


def forced_tools(body: ChatRequest, tools: list[Tool]) -> list[Tool]:
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


def call_grammar(tools: list[Tool]) -> str:
    """Return the grammar of the call of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Any] = {"anyOf": calls, "x-guidance": WHITESPACE}
    return f'start: "{CALL}" call "{CALL_END}"\ncall: %json {json.dumps(schema)}\n'


def checked(grammar: str, field: str) -> str:
    """Return a grammar. Raises ApiError if llguidance refuses it."""
    problem = Grammars.problem(grammar)
    if problem:
        raise ApiError(400, f"{field} is refused: {problem:.300}", code="invalid_schema", param=field)
    return grammar
