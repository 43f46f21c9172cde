"""Answers in a form, drawn at random among the tokens that may follow: marks are tokens, and texts never are."""

import concurrent.futures
import json
import re
import threading

import numpy as np
import pytest
from chat_cases import HI, TOOLS, drawn, form, grammars_of, ids_of, params_of
from server_cases import CHAT, COMPLETION, END, NAME, PARAMS, error_of, posted
from tiny_text import byte_tokenizer, marked_tokenizer
from tokenizers_by_kind import merging_tokenizer

from jshadow.engine.rows import WORD
from jshadow.errors import ConfigError
from jshadow.serving.http import forms
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.grammar import Grammars
from jshadow.serving.http.marks import Splitter, Wanted, format_of

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|im_end|>", "  ")
TOKENIZERS = {
    "text": byte_tokenizer(),
    "token": marked_tokenizer(*MARKS),
    "special": marked_tokenizer(*MARKS, special=True),
}
CALLS = {
    "hermes": "<tool_call>",
    "Mistral's list": "[TOOL_CALLS]",
    "Mistral's names": "[TOOL_CALLS][ARGS]",
    "Phi": "<|tool|>",
    "GLM": "<|observation|>",
    "Llama": "<|python_tag|>",
}

PLAIN = {"model": NAME, "prompt": "Hi", "max_tokens": 1}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", CALLS)
def test_a_forced_call_has_the_marks_of_the_family(name, kind):
    """A mark is one token if the tokenizer has it. The splitter reads the call, and nothing is left over."""
    tokenizer, calls, seen = TOKENIZERS[kind], format_of(CALLS[name]), set()
    grammar = form(tokenizer, CALLS[name], tools=TOOLS, tool_choice="required")
    for seed in range(4):
        tokens = drawn(tokenizer, grammar, seed)
        names = [tool["function"]["name"] for tool in TOOLS]
        splitter = Splitter(tokenizer, wanted=Wanted(calls, tuple(names)), ends=frozenset([END]))
        [*deltas] = [delta for token in tokens for delta in splitter.push(token)] + splitter.finish("stop")
        [called] = [delta.call for delta in deltas]
        assert (called[0], set(json.loads(called[1]))) in [("find", {"depth"}), ("wait-a-bit", set())]
        seen.add(called[0])
        marked = [tokenizer.decode([token]) for token in tokens if token > END]
        if kind == "text" or not calls.begin:
            assert not marked
        else:
            assert marked[0] == calls.begin
            assert marked[-1] == (calls.end or marked[-1])
    assert seen == set(names)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_the_name_of_a_tool_is_text_where_a_token_has_that_name(name, special):
    """Also if it is a token that ends an answer."""
    tokenizer = marked_tokenizer("find", *MARKS, special=special)
    find = tokenizer.convert_tokens_to_ids("find")
    grammar = form(tokenizer, CALLS[name], tools=TOOLS[:1], tool_choice="required")
    tokens = drawn(tokenizer, grammar)
    assert not special or find not in tokens
    splitter = Splitter(tokenizer, wanted=Wanted(format_of(CALLS[name]), ("find",)), ends=frozenset([END]))
    [call] = [delta.call for token in tokens for delta in splitter.push(token)] or [
        delta.call for delta in splitter.finish("stop")
    ]
    assert call[0] == "find"
    function = {"name": call[0], "arguments": call[1]}
    told = {"role": "assistant", "content": "find it", "tool_calls": [{"id": "1", "function": function}]}
    assert not special or find not in ids_of(tokenizer, [*HI, told], TOOLS[:1])


TEXTS = ("<tool_call>", "<|im_end|>x</tool_call>", "a<|end|>b", "[TOOL_CALLS] <|end|>", "two  blanks")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_an_added_token_is_written_in_other_tokens(text, kind):
    """In an expression, an enum and a key. The decoded answer fits, although decoded text has no special tokens."""
    tokenizer = TOKENIZERS[kind]
    schema = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
    for body, want in (
        ({"type": "regex", "regex": f"({re.escape(text)})+x"}, None),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": [text]}}}, text),
        ({"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}, {text: text}),
    ):
        tokens = drawn(tokenizer, form(tokenizer, response_format=body))
        assert tokens[-1] == END
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        assert json.loads(answer) == want if want else re.fullmatch(body["regex"], answer)


def test_special_tokens_in_the_vocabulary_of_the_model_are_no_text_either():
    """As those of a tokenizer that was trained with them."""
    tokenizer = merging_tokenizer()
    schema = {"enum": ["<s> the harbor </s>"]}
    grammar = form(tokenizer, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    for seed in range(3):
        tokens = drawn(tokenizer, grammar, seed, end=1)
        assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True)) == schema["enum"][0]


@pytest.mark.parametrize("more", [1, 10, 64, -3], ids=["one more", "a part of a word", "words", "fewer"])
def test_a_tokenizer_may_have_another_size_than_the_embedding(more):
    """Tokens without an embedding may never follow. Embeddings without a token may not either."""
    size = 257
    added = marked_tokenizer(*(f"<{index}>" for index in range(more))) if more > 0 else byte_tokenizer()
    size = size if more > 0 else len(added) - more
    for text in ("[a-z]{9}", ".{1,9}", "(a|<1>)<0>"):
        for seed in range(3):
            tokens = drawn(added, form(added, response_format={"type": "regex", "regex": text}), seed, size)
            assert max(tokens) < min(size, len(added))
            assert re.fullmatch(text, added.decode(tokens, skip_special_tokens=True))
    words = Grammars(params_of(added, size)).matcher(f"start: /{text}/")([])
    assert words.shape == (-(-size // WORD),)


def test_a_server_with_such_a_tokenizer_answers_in_a_form(client, service, monkeypatch):
    larger = params_of(marked_tokenizer("<0>", "<1>"), PARAMS.config.vocab_size)
    monkeypatch.setattr(service, "grammars", Grammars(larger))
    for text in ("[xyz]{5}", "<0>", "(a|<1>){3}"):
        body = {"messages": HI, "max_tokens": 12, "response_format": {"type": "regex", "regex": text}}
        assert re.fullmatch(text, posted(client, CHAT, **body)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("regex", ["(?=a)b", "a(?!b)c", "(?<=a)b", r"(a)\1"])
def test_the_error_of_an_expression_says_what_is_wrong_with_it(regex):
    pattern = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": regex}}}
    for body in ({"type": "regex", "regex": regex}, pattern):
        with pytest.raises(ApiError, match=r"(look-around|backreferences).* not supported$"):
            form(TOKENIZERS["text"], response_format=body)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_schema_of_itself_alone_is_refused_in_plain_words(schema):
    grammar = form(TOKENIZERS["text"], response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    with pytest.raises(ConfigError, match="refers to itself must be able to end"):
        drawn(TOKENIZERS["text"], grammar)


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ({"required": ["a"]}, {"a"}),
        ({"type": "object", "required": ["a", "b"], "properties": {"b": {"const": 1}}}, {"a", "b"}),
        ({"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}, {"b"}),
        ({}, set()),
    ],
)
def test_arguments_have_the_names_that_are_required(parameters, keys):
    """Though `properties` does not name them."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tokenizer = TOKENIZERS["token"]
    grammar = form(tokenizer, "<tool_call>", tools=[tool], tool_choice="required")
    found = 0
    for seed in range(12):
        tokens = drawn(tokenizer, grammar, seed)
        if tokens[-1] != END:
            continue
        found += 1
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert set(call["arguments"]) == keys
    assert found


# Templates without tools (Gemma 3), and of Qwen3-Coder, GLM-4.5 and calls as Python writes them.
UNREAD = {
    "<start_of_turn>{{ m.content }}": "has none of the known marks",
    "<tool_call><function={{ name }}><parameter={{ key }}>": "writes tool calls with '<function='",
    "<tool_call>{{ name }}<arg_key>": "writes tool calls with '<arg_key>'",
    '<|python_tag|>[func_name1(params_name1=params_value1)], "parameters": dict': r"writes .* with '\[func_name1\('",
}


def test_tools_in_a_format_that_is_not_known_are_refused_by_name():
    """The model would write them in a way that the server cannot read. A forced call is written as the server says."""
    tokenizer = TOKENIZERS["token"]
    for more in ({}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}):
        for template, told in UNREAD.items():
            with pytest.raises(ApiError, match=rf"tools: the model's chat template {told}") as raised:
                form(tokenizer, template, tools=TOOLS, **more)
            assert (raised.value.status, raised.value.param) == (400, "tools")
        assert form(tokenizer, "<tool_call>", tools=TOOLS, **more) is None
    assert form(tokenizer, "", tools=TOOLS, tool_choice="none") is None
    forced = {"type": "function", "function": {"name": "find"}}
    for more in ({"tool_choice": "required"}, {"tool_choice": forced}, {"response_format": {"type": "json_object"}}):
        assert "<[257]>" in form(tokenizer, "", tools=TOOLS, **more)


def chain(count):
    """A schema whose reference leads to a reference, and so on."""
    links = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {}}}


HEAVY = {
    "references": chain(30_000),
    "properties": {"type": "object", "properties": {f"a{number}": {} for number in range(30_000)}},
    "patterns": {"type": "object", "patternProperties": {f"^a{number}$": {} for number in range(800)}},
}


@pytest.mark.parametrize("name", ["references", *(pytest.param(name, marks=pytest.mark.slow) for name in [*HEAVY][1:])])
@pytest.mark.parametrize("field", ["response_format", "tools"])
def test_a_schema_that_takes_the_stack_or_minutes_is_refused(client, name, field):
    """It ended the server, or kept a thread. The next schema is followed as ever."""
    schema = HEAVY[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
    body = {"response_format": form} if field == "response_format" else {"tools": [tool], "tool_choice": "required"}
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = client.post(CHAT, json=asked | body)
    assert error_of(answer) == (400, "invalid_schema")
    assert "too much time or memory" in answer.json()["error"]["message"]
    assert client.post(CHAT, json=asked | {"response_format": {"type": "json_object"}}).status_code == 200


def test_a_schema_that_is_nested_too_deeply_is_refused(client):
    deep = '{"type":"object","properties":{"a":' * 3000 + "{}" + "}}" * 3000
    form = '{"type":"json_schema","json_schema":{"name":"x","schema":' + deep + "}}"
    body = f'{{"model":"{NAME}","messages":[{{"role":"user","content":"Hi"}}],"response_format":{form}}}'
    answer = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_copies_of_a_matcher_go_their_own_ways():
    grammars = grammars_of(byte_tokenizer(), 257, END)
    first = grammars.matcher("start: /a[bc]+d/")
    other = first.copy()
    ids = {letter: byte_tokenizer().encode(letter)[0] for letter in "abcd"}
    masks = first([ids["a"]]), other([])
    found = [np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")) for mask in masks]
    assert [set(allowed) for allowed in found] == [{ids["b"], ids["c"]}, {ids["a"]}]


def test_a_free_answer_does_not_wait_for_the_check_of_a_schema(client, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(forms, "problem", lambda _: begun.set() or ("" if go_on.wait(30) else "late"))
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    formed = asked | {"response_format": {"type": "json_object"}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.post, CHAT, json=formed) for _ in range(2)]
        assert begun.wait(30)
        for path, body in ((CHAT, asked), (CHAT, asked | {"response_format": {"type": "text"}}), (COMPLETION, PLAIN)):
            assert client.post(path, json=body).status_code == 200
        assert not any(one.done() for one in waiting)
        go_on.set()
        assert [one.result(30).status_code for one in waiting] == [200, 200]
