"""Reasoning and tool calls in the text of answers: the same parts, however the text arrives."""

import math

import pytest

from jshadow.serving.http.marks import Splitter, call_of

THINK = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
MARKED = THINK + "<tool_call>{{ call }}</tool_call>"
CALL = '{"name": "f", "arguments": {"a": "<b>"}}'
F = ("call", "f", '{"a": "<b>"}')

# The template, the settings, the text of the answer, and its parts.
CASES = {
    "plain": ("", {}, "<think>no</think>", [("content", "<think>no</think>")]),
    "thinks": (THINK, {}, "<think>why</think>so", [("reasoning", "why"), ("content", "so")]),
    "thinks from the prompt on": (
        THINK,
        {"prompt_end": "<assistant><think>\n"},
        "why</think>so",
        [("reasoning", "why"), ("content", "so")],
    ),
    "thinks to the end": (THINK, {}, "<think>why <tool", [("reasoning", "why <tool")]),
    "a form has no reasoning": (
        THINK,
        {"prompt_end": "<think>", "formed": True},
        '{"a": "<think>"}',
        [("content", '{"a": "<think>"}')],
    ),
    "begins like a mark": (MARKED, {"most_calls": math.inf}, "a <tool_ca", [("content", "a <tool_ca")]),
    "two calls": (
        MARKED,
        {"most_calls": math.inf},
        f"<think>w</think>x<tool_call>{CALL}</tool_call><tool_call>\n{CALL}\n</tool_call>",
        [("reasoning", "w"), ("content", "x"), F, F],
    ),
    "one call at most": (MARKED, {"most_calls": 1}, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", [F]),
    "no tools": (MARKED, {}, f"<tool_call>{CALL}</tool_call>", [("content", f"<tool_call>{CALL}</tool_call>")]),
    "an unfinished call": (MARKED, {"most_calls": 2}, '<tool_call>{"na', [("content", '<tool_call>{"na')]),
    "no call": (MARKED, {"most_calls": 2}, "<tool_call>[]</tool_call>", [("content", "<tool_call>[]</tool_call>")]),
    "a bare call": ("", {"most_calls": 2}, f"\n{CALL}", [F]),
    "bare JSON that is no call": ("", {"most_calls": 2}, '{"a": 1}', [("content", '{"a": 1}')]),
    "text without marks": ("", {"most_calls": 2}, "It is {so}", [("content", "It is {so}")]),
    "a forced call": ("", {"most_calls": 2, "formed": True}, f"<tool_call>{CALL}</tool_call>", [F]),
}


def joined(deltas):
    """The parts of an answer. Neighbours of one kind are one part."""
    parts = []
    for delta in deltas:
        kind = "call" if delta.call else "reasoning" if delta.reasoning else "content"
        if kind != "call" and parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + getattr(delta, kind))
        else:
            parts.append((kind, *delta.call) if delta.call else (kind, getattr(delta, kind)))
    return parts


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_split_in_one_way(name):
    template, settings, text, want = CASES[name]
    for size in (1, 2, 3, 7, len(text)):
        splitter = Splitter(template, **settings)
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in splitter.push(piece)] + splitter.push("", final=True)
        assert joined(deltas) == want, size
        assert splitter.calls == sum(part[0] == "call" for part in want)


def test_text_is_given_as_soon_as_it_is_known():
    splitter = Splitter(MARKED, most_calls=math.inf)
    told = [
        [(one.content, one.reasoning) for one in splitter.push(piece)] for piece in ("Hi", " <", "b>", "<tool", "s>")
    ]
    assert told == [[("Hi", "")], [(" ", "")], [("<b>", "")], [], [("<tools>", "")]]
    bare = Splitter("", most_calls=math.inf)
    assert [bool(bare.push(piece)) for piece in (" ", "It", " is")] == [False, True, True]


@pytest.mark.parametrize("text", ["", "{", "1", "[]", '{"a": 1}', '{"name": 1}', '{"name": "f"} x'])
def test_what_is_no_call(text):
    assert call_of(text) is None


def test_the_arguments_of_a_call_are_json():
    assert call_of('{"name": "f", "parameters": {"ä": 1}}') == ("f", '{"ä": 1}')
    assert call_of('{"name": "f", "arguments": "{}"}') == ("f", "{}")
    assert call_of('{"name": "f"}') == ("f", "{}")
