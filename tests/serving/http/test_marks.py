"""Reasoning and tool calls in answers: the same parts, whether a mark is one token, a special one or plain text."""

import json
import math
import re

import numpy as np
import pytest
from tiny_text import byte_tokenizer, marked_tokenizer, spelled

from jshadow.serving.http.marks import (
    FORMATS,
    HERMES,
    Ending,
    Splitter,
    Wanted,
    arguments_of,
    calls_of,
    format_of,
    thoughts_of,
)
from jshadow.serving.requests import allowed_words

CALL = '{"name": "f", "arguments": {"a": "<b>"}}'
ONE = f"<tool_call>{CALL}</tool_call>"
F = ("call", "f", '{"a": "<b>"}')
WHY, SO = ("reasoning", "why"), ("content", "so")
THINKS, BEGUN = {"thoughts": "possible"}, {"thoughts": "begun"}
ALL, TWO, FIRST = ({"wanted": Wanted(HERMES, ("f", "g"), most)} for most in (math.inf, 2, 1))
CUT = {"finish": "length"}
MISTRAL, NAMED, PHI, GLM, LLAMA = (
    {"wanted": Wanted(format_of(text), ("f", "g"))}
    for text in ("[TOOL_CALLS]", "[TOOL_CALLS][ARGS]", "<|tool|>", "<|observation|>", "<|python_tag|>")
)
G = ("call", "g", "{}")

# The settings, the text of the answer, and its parts. The part of some is their whole text.
CASES = {
    "plain": ({}, "<think>no</think>", None),
    "thinks": (THINKS, "<think>why</think>so", [WHY, SO]),
    "thinks after a line": (THINKS, "\n<think>why</think>so", [("content", "\n"), WHY, SO]),
    "thinks from the prompt on": (BEGUN, "why</think>so", [WHY, SO]),
    "thinks to the limit": (THINKS | CUT, "<think>why <tool", [("reasoning", "why <tool")]),
    "thinks to the end": (THINKS, "<think>why", [WHY, ("content", "why")]),
    "a stop string in the thoughts": (
        THINKS | {"stops": ["h"]},
        "<think>why</think>so, he",
        [WHY, ("content", "so, ")],
    ),
    "a stop string from the prompt on": (
        BEGUN | {"stops": ["y", "o"]},
        "why</think>so",
        [WHY, ("content", "s")],
    ),
    "a form has no reasoning": ({}, '{"a": "<think>"}', None),
    "a mark behind content": (THINKS, "Use <think>so</think>", [("content", "Use <think>so</think>")]),
    "a mark behind the reasoning": (THINKS, "<think>why</think>a<think>", [WHY, ("content", "a<think>")]),
    "two marks in the reasoning": (THINKS, "<think>a<think>b</think>so", [("reasoning", "a<think>b"), SO]),
    "begins like a mark": (ALL, "a <tool_ca", None),
    "two calls": (ALL | THINKS, f"<think>why</think>so{ONE}\n<tool_call>\n{CALL}\n</tool_call>", [WHY, SO, F, F]),
    "one call at most": (FIRST, ONE + ONE, [F]),
    "blanks around a call": (ALL | THINKS, f"<think>why</think>\n\n{ONE}\n", [WHY, F]),
    "text behind a call": (ALL, f"{ONE}\nso", [F, ("content", "\nso")]),
    "no tools": ({}, ONE, None),
    "an unfinished call": (TWO, '<tool_call>{"na', None),
    "a call that the limit cuts": (TWO | CUT, f'so{ONE}<tool_call>{{"name": "f", "argu', [SO, F]),
    "a whole call without its end": (TWO, f"<tool_call>{CALL}", [F]),
    "no call": (TWO, "<tool_call>[]</tool_call>", None),
    "Mistral's list": (MISTRAL, f'[TOOL_CALLS] [{CALL}, {{"name": "g", "arguments": {{}}}}]', [F, G]),
    "Mistral's text before calls": (MISTRAL, f"so[TOOL_CALLS][{CALL}]", [SO, F]),
    "Mistral's list that is cut": (MISTRAL | CUT, f"so[TOOL_CALLS][{CALL[:9]}", [SO]),
    "Mistral's names": (NAMED, '[TOOL_CALLS]f[ARGS]{"a": "<b>"}[TOOL_CALLS]g[ARGS]{}', [F, G]),
    "Mistral's names and ids": (NAMED, '[TOOL_CALLS]f[CALL_ID]ab12cd34e[ARGS]{"a": "<b>"}', [F]),
    "Phi's list": (PHI, f"so<|tool_call|>[{CALL}]<|/tool_call|>", [SO, F]),
    "Phi's object": (PHI, f"<|tool_call|>{CALL}", [F]),
    "GLM's name and object": (GLM, 'f\n{"a": "<b>"}', [F]),
    "GLM's two calls": (GLM, '\nf\n{"a": "<b>"}\ng\n{}', [F, G]),
    "GLM's text": (GLM, "for all\n{}", None),
    "Llama's object": (LLAMA, '\n{"name": "f", "parameters": {"a": "<b>"}}', [F]),
    "Llama's two calls": (LLAMA, f'{CALL}; {{"name": "g", "parameters": {{}}}}', [F, G]),
    "Llama's list": (LLAMA, f'[{CALL}, {{"name": "g", "parameters": null}}]', [F, G]),
    "bare JSON that is no call": (LLAMA, '{"a": 1}', None),
    "bare JSON with another name": (LLAMA, '{"name": "Ada", "age": 36}', None),
    "bare JSON with another name alone": (LLAMA, '[{"name": "f"}, {"name": "Ada"}]', None),
    "bare JSON with other fields": (LLAMA, '{"name": "f", "age": 36}', None),
    "a bare call and text": (LLAMA, '{"name": "f", "parameters": {}} is a call', None),
    "GLM's other name": (GLM, 'h\n{"a": 1}', None),
    "GLM's call and text": (GLM, 'f\n{"a": "<b>"}\nThen.', None),
    "another name": (ALL, '<tool_call>{"name": "h", "arguments": {}}</tool_call>so', None),
    "Mistral's other name": (MISTRAL, '[TOOL_CALLS][{"name": "h", "arguments": {}}]', None),
    "Mistral's name that is none": (NAMED, "[TOOL_CALLS]h[ARGS]{}", None),
    "Phi's other name": (PHI, '<|tool_call|>[{"name": "h"}]<|/tool_call|>', None),
    "Mistral's list and text": (MISTRAL, f"[TOOL_CALLS][{CALL}]\n\nDone.", [F, ("content", "\n\nDone.")]),
    "Mistral's name and text": (
        NAMED,
        '[TOOL_CALLS]f[ARGS]{"a": "<b>"} so[TOOL_CALLS]g[ARGS]{}',
        [F, ("content", " so"), G],
    ),
    "Phi's list and text": (PHI, f"<|tool_call|>[{CALL}] so<|/tool_call|>, so", [F, ("content", " so, so")]),
    "a call and text in its marks": (ALL, f"<tool_call>{CALL} so</tool_call>\n{ONE}", [F, ("content", " so"), F]),
    "a list and a list that is cut": (MISTRAL | CUT, f"[TOOL_CALLS][{CALL}], [{CALL[:9]}", [F]),
    "a list and text that is cut": (MISTRAL | CUT, f"[TOOL_CALLS][{CALL}]\nso", [F, ("content", "\nso")]),
    "a stop string behind a list": (
        MISTRAL | {"stops": ["ne"]},
        f"[TOOL_CALLS][{CALL}]\n\nDone.",
        [F, ("content", "\n\nDo")],
    ),
    "a stop string in thoughts to the end": (THINKS | {"stops": ["h"]}, "<think>why", [WHY, ("content", "w")]),
    "two stop strings in thoughts to the end": (BEGUN | {"stops": ["y", "h"]}, "why", [WHY, ("content", "w")]),
    "thoughts that begin with a stop string": (BEGUN | {"stops": ["w"]}, "why", [WHY]),
    "text without marks": (LLAMA, "It is {so}", None),
}
UNREAD = ("plain", "a form has no reasoning", "a mark behind content", "a mark behind the reasoning")
UNREAD += ("two marks in the reasoning", "no tools")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MARKS += ("<|tool_call|>", "<|/tool_call|>")
TOKENIZERS = {
    "text": byte_tokenizer(),
    "token": marked_tokenizer(*MARKS),
    "special": marked_tokenizer(*MARKS, special=True),
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


def split(tokenizer, ids, finish="stop", **settings):
    splitter = Splitter(tokenizer, **settings)
    deltas = [delta for token in ids for delta in splitter.push(token)] + splitter.finish(finish)
    assert splitter.calls == sum(delta.call is not None for delta in deltas)
    return joined(deltas)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_split_in_one_way(name, kind):
    """A special token that is not read as a mark has no text."""
    settings, text, want = CASES[name]
    want = want or [("content", text)]
    if kind == "special" and name in UNREAD:
        want = [(part, re.sub("</?(think|tool_call)>", "", said)) for part, said in want]
    tokenizer = TOKENIZERS[kind]
    assert split(tokenizer, tokenizer.encode(text), **settings) == want


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    "text", ["<think>why</think>so", f"so {ONE}", f"[TOOL_CALLS][{CALL}]", f"<|tool_call|>[{CALL}]<|/tool_call|>"]
)
def test_the_text_of_a_mark_in_other_tokens_is_plain_text(text, special):
    """As an answer about marks has it, or a form whose text has one in it."""
    tokenizer = marked_tokenizer(*MARKS, special=special)
    for settings in (THINKS | ALL, THINKS | MISTRAL, THINKS | PHI):
        assert split(tokenizer, spelled(tokenizer, text), **settings) == [("content", text)]


def test_text_is_given_as_soon_as_it_is_known():
    tokenizer = TOKENIZERS["text"]
    splitter, bare = Splitter(tokenizer, **ALL), Splitter(tokenizer, **LLAMA)

    def told(splitter, text):
        return "".join(delta.content for token in tokenizer.encode(text) for delta in splitter.push(token))

    for piece, want in (("Hi", "Hi"), (" <", " "), ("b>", "<b>"), ("<tool", ""), ("s>", "<tools>")):
        assert told(splitter, piece) == want
    assert [told(bare, piece) for piece in (" ", "It", " is")] == ["", " It", " is"]


def test_the_end_token_has_no_text():
    """Though it has one of its own in some tokenizers."""
    tokenizer = TOKENIZERS["text"]
    ids = tokenizer.encode("so<")
    assert split(tokenizer, ids, ends=frozenset(ids[-1:]), **ALL) == [SO]


def test_a_template_tells_whether_an_answer_may_begin_with_reasoning():
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    for prompt_end, want in (
        ("<assistant>", "possible"),
        ("<assistant><think>\n", "begun"),
        ("<think>\n\n</think>\n\n", "none"),
        ("</think>\n<assistant>", "possible"),
    ):
        assert thoughts_of(template, prompt_end) == want
        assert thoughts_of("{{ messages }}", prompt_end) == "none"


def test_a_template_tells_the_format_of_calls():
    """Of formats with the same mark, the one with more marks is asked for first."""
    assert {text: format_of(f"{{{{ tools }}}} {text} {{{{ x }}}}") for text, _ in FORMATS} == dict(FORMATS)
    assert format_of("<tool_call>{{ name }}<arg_key>") is None
    assert format_of("{{ tools }}<tool_call>") is HERMES
    for text in ("", "{{ messages }}", "{% for tool in tools %}{{ tool }}{% endfor %}"):
        assert format_of(text) is None


def test_a_call_is_an_object_with_a_name_and_its_arguments_are_the_json_of_an_object():
    texts = ("", "{", "1", "[]", '{"a": 1}', '{"name": 1}', '{"name": "f"} x', "[" * 100_000, "f {}", "f\n[]")
    wrong = ('"x"', '"[1]"', "[1]", "1", "true")
    for text in (*texts, *(f'{{"name": "f", "arguments": {one}}}' for one in wrong)):
        calls, rest = calls_of(text, ("f",))
        assert rest == text if not calls else (text, rest) == ('{"name": "f"} x', " x"), text
    pairs = ((', "parameters": {"ä": 1}', '{"ä": 1}'), (', "arguments": "{}"', "{}"), ("", "{}"))
    for text, arguments in (*pairs, (', "arguments": ""', "{}"), (', "arguments": null', "{}")):
        assert calls_of(f'{{"name": "f"{text}}}', ("f",)) == ([("f", arguments)], "")


@pytest.mark.parametrize("text", ["{{}}", '"{}"'], ids=["an object", "its text"])
@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '"\\ud83d\\ude00"', '[NaN, {"b": Infinity}]']
)
def test_arguments_are_strict_json(value, text):
    """As clients read it. What JSON has not becomes null, or the sign for a character that is none."""
    given = f'{{"a": {value}}}' if text == "{{}}" else json.dumps(f'{{"a": {value}}}')
    [(_, arguments)], _ = calls_of(f'{{"name": "f", "arguments": {given}}}', ("f",))
    told = json.loads(arguments.encode(), parse_constant=pytest.fail)["a"]
    assert told in (None, "\ufffd", "\U0001f600", [None, {"b": None}])
    assert arguments_of(arguments) == {"a": told} == arguments_of(f'{{"a": {value}}}')


@pytest.mark.parametrize("depth", [300, 2000, 100_000])
def test_deep_arguments_are_a_call_or_text(depth):
    deep = '{"a": ' * depth + "1" + "}" * depth
    for given in (deep, json.dumps(deep)):
        text = f'{{"name": "f", "arguments": {given}}}'
        calls, rest = calls_of(text, ("f",))
        assert (len(calls), rest) in ((1, ""), (0, text))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("settings", [THINKS, BEGUN], ids=["possible", "begun"])
@pytest.mark.parametrize("stop", ["so", "h</", "o, "])
def test_after_a_stop_string_in_the_content_only_end_tokens_may_follow(kind, settings, stop):
    """It does not count in the reasoning, nor across its mark."""
    tokenizer, end = TOKENIZERS[kind], 256
    text = "why so, h</think>so, h</end"
    ids = tokenizer.encode(text if settings is BEGUN else f"<think>{text}")
    ending = Ending(Splitter(tokenizer, **settings, stops=[stop]), len(tokenizer), [end])
    allowed = [allowed_words(ending, ids[:count], len(tokenizer)) for count in range(len(ids) + 1)]
    stopped = [
        tokenizer.decode(ids[:count]) for count, words in enumerate(allowed) if np.bitwise_count(words).sum() == 1
    ]
    assert len(stopped) == len(text) - text.rindex(stop) - len(stop) + 1
    assert (allowed[-1] == Ending(Splitter(tokenizer), len(tokenizer), [end]).ends).all()
