"""Reasoning and tool calls in the text of an answer, as the model's chat template marks them.

The text is split while it arrives. A text that may be the beginning of a mark is held back until it is known.
"""

import dataclasses
import json
import secrets
from typing import Any

from jshadow.engine.text import overlap

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True)
class Delta:
    """A part of an answer: content, reasoning, or a whole tool call as (name, JSON of the arguments)."""

    content: str = ""
    reasoning: str = ""
    call: tuple[str, str] | None = None


class Splitter:
    """Splits the text of one answer into content, reasoning and tool calls.

    Attributes:
        calls: the number of tool calls so far.
    """

    def __init__(
        self, template: str | None, *, prompt_end: str = "", formed: bool = False, most_calls: float = 0
    ) -> None:
        """Begin an answer.

        Args:
            template: the chat template of the model. Its marks are looked for. None: no mark is.
            prompt_end: the end of the prompt. If it opens the reasoning, the answer begins with reasoning.
            formed: whether a grammar forms the answer. It then has no reasoning, and its calls have marks.
            most_calls: the largest number of calls. Later calls are left out. 0: no call is looked for.
        """
        template, self.most_calls = template or "", most_calls
        self.marks: dict[str, str] = {}
        if THINK_END in template and not formed:
            self.marks[THINK] = THINK_END
        if most_calls:
            self.marks[CALL] = CALL_END
        self.inside = THINK if THINK in self.marks and prompt_end.rstrip().endswith(THINK) else ""
        # Without marks in its template, a model writes the JSON of a call alone.
        self.bare = bool(most_calls) and CALL not in template and not formed and not self.inside
        self.waiting, self.calls = "", 0

    def push(self, text: str, *, final: bool = False) -> list[Delta]:
        """Add text. Return what became known. With `final`, nothing is held back."""
        self.waiting += text
        if self.bare:
            begin = self.waiting.lstrip()
            if begin.startswith("{") or not begin:
                return self._bare() if final else []
            self.bare = False
        deltas: list[Delta] = []
        while self.waiting:
            ends = (self.marks[self.inside],) if self.inside else tuple(self.marks)
            hits = sorted((at, end) for end in ends if (at := self.waiting.find(end)) >= 0)
            if hits:
                at, mark = hits[0]
                deltas += self._part(self.waiting[:at])
                self.waiting = self.waiting[at + len(mark) :]
                self.inside = "" if self.inside else mark
                continue
            if self.inside == CALL and not final:
                break  # a call is given as a whole
            kept = 0 if final else max((overlap(self.waiting, end) for end in ends), default=0)
            part = self.waiting[: len(self.waiting) - kept]
            self.waiting = self.waiting[len(part) :]
            deltas += self._part(part, end="")
            break
        return deltas

    def _part(self, text: str, end: str = CALL_END) -> list[Delta]:
        """Return a part of what `inside` says. `end` is what follows a call."""
        if self.inside == CALL:
            call = call_of(text)
            if call is None:
                return [Delta(content=f"{CALL}{text}{end}")]
            if self.calls >= self.most_calls:
                return []
            self.calls += 1
            return [Delta(call=call)]
        if not text:
            return []
        return [Delta(reasoning=text) if self.inside else Delta(content=text)]

    def _bare(self) -> list[Delta]:
        text, self.waiting = self.waiting, ""
        call = call_of(text)
        if call is None:
            return [Delta(content=text)] if text else []
        self.calls += 1
        return [Delta(call=call)]


def call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the JSON of the arguments of a tool call, or None if the text is not the JSON of a call."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def tool_call(call: tuple[str, str], index: int | None = None) -> dict[str, Any]:
    """Return a call in OpenAI's form, with an id at random. `index` is its number, in a stream."""
    name, arguments = call
    place = {} if index is None else {"index": index}
    function = {"name": name, "arguments": arguments}
    return place | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
