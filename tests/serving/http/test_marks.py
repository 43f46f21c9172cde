"""Reasoning and tool calls in the text of answers: the same parts, however the text arrives."""

import math

import pytest

from jshadow.serving.http.marks import Splitter, call_of

THINK = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
MARKED = THINK + "<tool_call>{{ call }}</tool_call>"
CALL = '{"name": "f", "arguments": {"a": "<b>"}}'
ONE = f"<tool_call>{CALL}</tool_call>"
F = ("call", "f", '{"a": "<b>"}')
WHY, SO, FORMED = ("reasoning", "why"), ("content", "so"), {"formed": True}
ALL, TWO = {"most_calls": math.inf}, {"most_calls": 2}

# The template, the settings, the text of the answer, and its parts. The part of some is their whole text.
CASES = {
    "plain": ("", {}, "<think>no</think>", None),
    "thinks": (THINK, {}, "<think>why</think>so", [WHY, SO]),
    "thinks from the prompt on": (THINK, {"prompt_end": "<assistant><think>\n"}, "why</think>so", [WHY, SO]),
    "thinks to the end": (THINK, {}, "<think>why <tool", [("reasoning", "why <tool")]),
    "a form has no reasoning": (THINK, FORMED | {"prompt_end": "<think>"}, '{"a": "<think>"}', None),
    "begins like a mark": (MARKED, ALL, "a <tool_ca", None),
    "two calls": (MARKED, ALL, f"<think>why</think>so{ONE}<tool_call>\n{CALL}\n</tool_call>", [WHY, SO, F, F]),
    "one call at most": (MARKED, {"most_calls": 1}, ONE + ONE, [F]),
    "no tools": (MARKED, {}, ONE, None),
    "an unfinished call": (MARKED, TWO, '<tool_call>{"na', None),
    "no call": (MARKED, TWO, "<tool_call>[]</tool_call>", None),
    "a bare call": ("", TWO, f"\n{CALL}", [F]),
    "bare JSON that is no call": ("", TWO, '{"a": 1}', None),
    "text without marks": ("", TWO, "It is {so}", None),
    "a forced call": ("", TWO | FORMED, ONE, [F]),
}


def joined(deltas):
    """The parts of an answer. Neighbours of one kind are one part."""
    parts = []
    for delta in deltas:
        kind = "call" if delta.call else "reasoning" if delta.reasoning else "content"
        if kind == "call":
            parts.append((kind, *delta.call))
        elif parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + getattr(delta, kind))
        else:
            parts.append((kind, getattr(delta, kind)))
    return parts


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_split_in_one_way(name):
    template, settings, text, want = CASES[name]
    want = want or [("content", text)]
    for size in (1, 2, 3, 7, len(text)):
        splitter = Splitter(template, **settings)
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in splitter.push(piece)] + splitter.push("", final=True)
        assert joined(deltas) == want, size
        assert splitter.calls == sum(part[0] == "call" for part in want)


def test_text_is_given_as_soon_as_it_is_known():
    splitter, bare = Splitter(MARKED, **ALL), Splitter("", **ALL)
    for piece, told in (("Hi", ["Hi"]), (" <", [" "]), ("b>", ["<b>"]), ("<tool", []), ("s>", ["<tools>"])):
        assert [(one.content, one.reasoning) for one in splitter.push(piece)] == [(text, "") for text in told]
    assert [bool(bare.push(piece)) for piece in (" ", "It", " is")] == [False, True, True]


def test_a_call_is_an_object_with_a_name_and_its_arguments_are_json():
    for text in ("", "{", "1", "[]", '{"a": 1}', '{"name": 1}', '{"name": "f"} x'):
        assert call_of(text) is None, text
    for text, arguments in ((', "parameters": {"ä": 1}', '{"ä": 1}'), (', "arguments": "{}"', "{}"), ("", "{}")):
        assert call_of(f'{{"name": "f"{text}}}') == ("f", arguments)
