"""Reasoning and tool calls in an answer, as the model's chat template marks them.

The tokens of an answer are split while they arrive. A mark that is one token of the tokenizer is known by its id: the
same text in other tokens is plain text. A mark of several tokens is searched in the text, and a text that may be the
beginning of one is held back until it is known."""

import dataclasses
import hashlib
import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jshadow.engine.rows import pack_mask
from jshadow.engine.text import TextStream, overlap
from jshadow.serving.requests import Allowed
from jshadow.weights.tokenizer import mended, special_tokens

_Call = tuple[str, str]  # the name of a function, and the JSON of its arguments, which is an object
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


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
_PARAMETERS = '{"name": "NAME", "parameters": '
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
    ("<|python_tag|>", Format("", "", _PARAMETERS, "}")),
    ('"parameters": dict', Format("", "", _PARAMETERS, "}")),
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


def calls_of(text: str, names: tuple[str, ...]) -> tuple[list[_Call], str]:
    """Return the calls that a text begins with, and the text behind them.

    A call is an object with `name`, and `arguments` or `parameters`; or a name and an object behind it. There may be
    several, and lists of them. `names` are those of the functions. All else is text, so nothing of it is lost.
    """
    calls: list[_Call] = []
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


def _call_of(value: Any, names: tuple[str, ...]) -> _Call:
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


def tool_call(call: _Call, index: int | None = None) -> dict[str, Any]:
    """Return a call in OpenAI's form, with an id at random. `index` is its number, in a stream."""
    name, arguments = call
    place = {} if index is None else {"index": index}
    function = {"name": name, "arguments": arguments}
    return place | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def short_id(name: str) -> str:
    """Return an id of nine letters and digits for any id: the same one for the same one."""
    return name if _SHORT_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]


THINK, THINK_END = "<think>", "</think>"
Thoughts = Literal["none", "possible", "begun"]


@dataclasses.dataclass(frozen=True)
class Delta:
    """A part of an answer: content, reasoning, or a whole tool call."""

    content: str = ""
    reasoning: str = ""
    call: _Call | None = None


def mark_id(tokenizer: Any, mark: str) -> int | None:
    """Return the id of the added token that a mark is, or None."""
    return next((index for index, token in tokenizer.added_tokens_decoder.items() if token.content == mark), None)


def thoughts_of(template: str, prompt_end: str) -> Thoughts:
    """Return where the reasoning of an answer may be. Templates open it in the prompt, or close it to switch it off."""
    prompt_end = prompt_end.rstrip()
    if THINK_END not in template or prompt_end.endswith(THINK_END):
        return "none"
    return "begun" if prompt_end.endswith(THINK) else "possible"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The tool calls that are looked for in an answer.

    Attributes:
        form: how the model writes them.
        names: the names of the functions.
        most: the largest number of calls. Later ones are left out.
    """

    form: Format
    names: tuple[str, ...]
    most: float = math.inf


class Splitter:
    """Splits one answer into content, reasoning and tool calls. Reasoning is at the beginning alone.

    Attributes:
        calls: the number of tool calls so far.
        stopped: whether a stop string was found in the content.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        thoughts: Thoughts = "none",
        wanted: Wanted | None = None,
        stops: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """Begin an answer.

        Args:
            thoughts: "possible" if the answer may begin with reasoning, "begun" if it does without a mark, else "none".
            wanted: the calls. None: no call is looked for.
            stops: stop strings, before which the content ends.
            ends: the tokens that end the answer, which have no text.
        """
        self.tokenizer, self.wanted, self.stops, self.ends = tokenizer, wanted, tuple(stops), ends
        self.form = None if wanted is None else wanted.form
        self.names = () if wanted is None else wanted.names
        self.calls, self.stopped = 0, False
        self._inside = THINK if thoughts == "begun" else ""
        self._thinking = thoughts == "possible"  # whether reasoning may begin
        self._thoughts = self._waiting = self._call = ""  # text that may begin a mark; text of the call that has begun
        self._tail = ""  # content that may begin a stop string
        self._held = ""  # content that may be a call without a mark, or blanks before a call
        self._loose = self.form is not None
        marks = [] if thoughts == "none" else [THINK, THINK_END]
        marks += [] if self.form is None else [mark for mark in (self.form.begin, self.form.end) if mark]
        self._ids = {index: mark for mark in marks if (index := mark_id(tokenizer, mark)) is not None}
        self._specials = {index: text for text, index in special_tokens(tokenizer).items()}
        self._stream = TextStream(tokenizer)

    def push(self, token: int) -> list[Delta]:
        """Add a token. Return what became known."""
        if token in self.ends:
            return []
        mark = self._ids.get(token)
        if mark in self._marks():
            deltas = self._text(self._stream.finish(), final=True) + self._pass(mark)
            self._stream = TextStream(self.tokenizer)
            return deltas
        if self._inside not in ("", THINK) and token in self._specials:  # such as the mark between name and arguments
            self._call += self._stream.finish() + self._specials[token]
            self._stream = TextStream(self.tokenizer)
            return []
        return self._text(self._stream.push(token))

    def finish(self, finish: str) -> list[Delta]:
        """End the answer. Return what was held back. `finish` tells why it ended, as in `AnswerReport`.

        If it ended by itself inside the reasoning, the content is the reasoning: the model did not mark its answer.
        """
        deltas = self._text(self._stream.finish(), final=True)
        if self._inside == THINK:
            return deltas + (self._content(self._thoughts, final=True) if finish == "stop" else [])
        if self._inside:
            return deltas + self._end_call("", keep=finish != "length")
        deltas += self._content("", final=True)
        held, self._held = self._held, ""
        if self._loose and self.form is not None and not self.form.begin:
            calls, rest = calls_of(held, self.names)
            if calls and not rest.strip():
                return deltas + self._some(calls)
        if self._loose and self.calls and not held.strip():
            return deltas
        return deltas + ([Delta(content=held)] if held else [])

    def _marks(self) -> tuple[str, ...]:
        """The marks that may come now."""
        form = self.form
        if self._inside == THINK:
            return (THINK_END,)
        if self._inside and form is not None:
            return (form.end or form.begin,)
        return ((THINK,) if self._thinking else ()) + ((form.begin,) if form is not None and form.begin else ())

    def _text(self, text: str, *, final: bool = False) -> list[Delta]:
        """Add text, in which marks of several tokens may be. With `final`, no text is held back as a part of one."""
        self._waiting += text
        deltas: list[Delta] = []
        while self._waiting:
            marks = [mark for mark in self._marks() if mark not in self._ids.values()]
            hits = sorted((at, mark) for mark in marks if (at := self._waiting.find(mark)) >= 0)
            if hits:
                at, mark = hits[0]
                part, self._waiting = self._waiting[:at], self._waiting[at + len(mark) :]
                deltas += self._part(part)
                if mark in self._marks():  # reasoning cannot begin behind content
                    deltas += self._pass(mark)
                else:
                    deltas += self._part(mark)
                continue
            kept = 0 if final else max((overlap(self._waiting, mark) for mark in marks), default=0)
            part = self._waiting[: len(self._waiting) - kept]
            self._waiting = self._waiting[len(part) :]
            deltas += self._part(part)
            break
        return deltas

    def _pass(self, mark: str | None) -> list[Delta]:
        """Go past a mark."""
        if mark == THINK:
            self._inside, self._thinking = THINK, False
            return []
        if mark == THINK_END:
            self._inside = ""
            return []
        assert self.form is not None
        assert mark is not None
        if not self._inside:
            deltas = self._content("", final=True)
            self._inside, self._thinking = mark, False
            held, self._held = self._held, ""
            return deltas + ([Delta(content=held)] if held.strip() else [])
        deltas = self._end_call(self.form.end)
        self._inside = mark if not self.form.end else ""
        self._loose = True
        return deltas

    def _part(self, text: str) -> list[Delta]:
        """Return a part of what `_inside` says, or keep it."""
        if not text:
            return []
        if self._inside == THINK:
            self._thoughts += text
            return [Delta(reasoning=text)]
        if self._inside:
            self._call += text
            return []
        return self._content(text)

    def _content(self, text: str, *, final: bool = False) -> list[Delta]:
        """Add content. Return it up to a stop string, or keep it. With `final`, nothing is kept as a part of one."""
        if self.stopped:
            return []
        self._tail += text
        hits = [at for stop in self.stops if (at := self._tail.find(stop)) >= 0]
        self.stopped = bool(hits)
        kept = 0 if final else max((overlap(self._tail, stop) for stop in self.stops), default=0)
        end = min(hits) if hits else len(self._tail) - kept
        self._held += self._tail[:end]
        self._tail = "" if hits else self._tail[end:]
        if self._thinking and self._held.strip():
            self._thinking = False
        if self._loose and self.wanted is not None and self.form is not None:
            if not self._held.strip():
                return []
            if not self.form.begin and self.form.may_be_call(self._held, self.names):
                return []
        self._loose = False
        held, self._held = self._held, ""
        return [Delta(content=held)] if held else []

    def _end_call(self, end: str, *, keep: bool = True) -> list[Delta]:
        """Return the calls between two marks, and the text behind them as content. If there are none, it is content as
        it was written. Without `keep`, a call that has begun is left out.
        """
        text, self._call = self._call, ""
        calls, rest = calls_of(text, self.names)
        if not calls:
            rest = f"{self._inside}{text}{end}" if keep else ""
        elif not rest.strip() or (not keep and rest.lstrip("\n ;,")[:1] in "{["):
            rest = ""
        self._inside, self._loose = "", False
        return self._some(calls) + (self._content(rest, final=True) if rest else [])

    def _some(self, calls: Sequence[_Call]) -> list[Delta]:
        """Return the calls up to the largest number."""
        assert self.wanted is not None
        left = calls[: int(min(self.wanted.most - self.calls, len(calls)))]
        self.calls += len(left)
        return [Delta(call=call) for call in left]


class Ending:
    """The function `Request.allowed` of an answer whose stop strings count in its content alone.

    When one of the stop strings is there, only end tokens may follow.
    """

    def __init__(self, splitter: Splitter, size: int, ends: Sequence[int], allowed: Allowed | None = None) -> None:
        """Begin an answer.

        Args:
            splitter: splits this answer. It is used for nothing else.
            size: number of tokens in the vocabulary.
            ends: the end tokens of the model.
            allowed: tells the tokens that may follow before a stop string. None: all may.
        """
        self.splitter, self.taken, self.allowed = splitter, 0, allowed
        self.all, self.ends = pack_mask(np.ones(size, bool)), pack_mask(np.isin(np.arange(size), ends))

    def __call__(self, drawn: Sequence[int]) -> np.ndarray:
        """Return the tokens that may follow those that were drawn, as in `pack_mask`, uint32 [W]."""
        for token in drawn[self.taken :]:
            self.splitter.push(token)
        self.taken = len(drawn)
        if self.splitter.stopped:
            return self.ends
        return self.all if self.allowed is None else self.allowed(drawn)
