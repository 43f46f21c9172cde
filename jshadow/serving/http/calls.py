"""Tool calls as the families of models write them. The chat template of a model tells its family."""

import dataclasses
import hashlib
import json
import math
import re
import secrets
from typing import Any

from jshadow.weights.texts import mended

Call = tuple[str, str]  # the name of a function, and the JSON of its arguments, which is an object
SHORT_ID = re.compile("[A-Za-z0-9]{9}")


@dataclasses.dataclass(frozen=True)
class Format:
    """How a family writes a call.

    Attributes:
        begin: the mark before a call, or "" if calls have none. They are then the whole content of the answer.
        end: the mark after a call, or "" if it goes on to the next one or to the end of the answer.
        opening, closing: the texts before and after the arguments. NAME stands for the name of the function.
        short_ids: whether the template wants ids of nine letters and digits.
    """

    begin: str
    end: str
    opening: str
    closing: str
    short_ids: bool = False

    @property
    def opening_parts(self) -> list[str]:
        """The parts of `opening`, with NAME and the marks in it apart."""
        return [part for part in re.split(r"(NAME|\[[A-Z_]+\])", self.opening) if part]

    def written(self, name: str, arguments: str) -> str:
        """Return the text of a call."""
        return f"{self.begin}{self.opening.replace('NAME', name)}{arguments}{self.closing}{self.end}"

    def may_be_call(self, text: str, names: tuple[str, ...]) -> bool:
        """Return whether a text may be the beginning of calls without a mark. `names` are those of the functions."""
        text = text.lstrip()
        if self.opening.startswith("NAME"):
            return any(text.startswith(f"{name}\n") or f"{name}\n".startswith(text) for name in names)
        return not text or text[0] in "{["


OBJECT, LIST = '{"name": "NAME", "arguments": ', '[{"name": "NAME", "arguments": '
PARAMETERS = '{"name": "NAME", "parameters": '
HERMES = Format("<tool_call>", "</tool_call>", f"\n{OBJECT}", "}\n")
# The first text that a template has tells its format. None: calls in this format are not read here. They are the keys
# of GLM-4.5, the tags of Qwen3-Coder, and calls as Python writes them.
FORMATS: tuple[tuple[str, Format | None], ...] = (
    ("<arg_key>", None),
    ("<function=", None),
    ("[func_name1(", None),
    ("<tool_call>", HERMES),
    ("[ARGS]", Format("[TOOL_CALLS]", "", "NAME[ARGS]", "", short_ids=True)),
    ("[TOOL_CALLS]", Format("[TOOL_CALLS]", "", LIST, "}]", short_ids=True)),
    ("<|tool|>", Format("<|tool_call|>", "<|/tool_call|>", LIST, "}]")),
    ("<|tool_call|>", Format("<|tool_call|>", "<|/tool_call|>", LIST, "}]")),
    ("<|observation|>", Format("", "", "NAME\n", "")),
    ("<|python_tag|>", Format("", "", PARAMETERS, "}")),
    ('"parameters": dict', Format("", "", PARAMETERS, "}")),
)
# The name of a call whose arguments alone are JSON.
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\]|\s*\n)\s*(?=\{)")
_KEYS = {"name", "arguments", "parameters", "id", "type"}  # an object with others is no call
_BETWEEN = re.compile(r"[\s;,]*")


def format_of(template: str) -> Format | None:
    """Return the format of the calls of a model with this chat template. None: it has none, or one that is not read."""
    return next((form for text, form in FORMATS if text in template), None)


def format_mark(template: str) -> str | None:
    """Return the text that tells the format of a template. None: it has none."""
    return next((text for text, _ in FORMATS if text in template), None)


def calls_of(text: str, names: tuple[str, ...]) -> tuple[list[Call], str]:
    """Return the calls that a text begins with, and the text behind them.

    A call is an object with `name`, and `arguments` or `parameters`; or a name and an object behind it. There may be
    several, and lists of them. `names` are those of the functions. All else is text, so nothing of it is lost.
    """
    calls: list[Call] = []
    begin, end = 0, _BETWEEN.match(text, 0).end()  # type: ignore[union-attr]
    while end < len(text):
        named = _NAMED.match(text, end)
        try:
            value, end = json.JSONDecoder().raw_decode(text, named.end() if named else end)
            if named:
                value = {"name": named[1], "arguments": value}
            calls += [_call_of(one, names) for one in (value if isinstance(value, list) and value else [value])]
        except (ValueError, RecursionError):
            break
        begin, end = end, _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return calls, text[begin:]


def _call_of(value: Any, names: tuple[str, ...]) -> Call:
    """Return the call that a value of JSON is. Raises ValueError if it is none."""
    if not isinstance(value, dict) or value.get("name") not in names or not _KEYS.issuperset(value):
        raise ValueError
    given = value.get("arguments", value.get("parameters"))
    arguments = {} if given is None else arguments_of(given) if isinstance(given, str) else _strict(given)
    if not isinstance(arguments, dict):
        raise ValueError
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _strict(value: Any) -> Any:
    """Return a value without what JSON has not: numbers such as NaN become null, and halves of characters U+FFFD."""
    if isinstance(value, list):
        return [_strict(one) for one in value]
    if isinstance(value, dict):
        return {mended(name): _strict(one) for name, one in value.items()}
    if isinstance(value, str):
        return mended(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call from their JSON. None: it is not the JSON of an object. No text is no argument."""
    try:
        value = _strict(json.loads(text)) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tool_call(call: Call, index: int | None = None) -> dict[str, Any]:
    """Return a call in OpenAI's form, with an id at random. `index` is its number, in a stream."""
    name, arguments = call
    place = {} if index is None else {"index": index}
    function = {"name": name, "arguments": arguments}
    return place | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def short_id(name: str) -> str:
    """Return an id of nine letters and digits for any id: the same one for the same one."""
    return name if SHORT_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]
