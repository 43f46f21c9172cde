"""Chats as token ids, without a model: as transformers renders them, whatever objects a client sends back."""

import json

import pytest
from chat_cases import FOUND, IDS, TOOL, ids_of, turns
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall, Function
from openai.types.chat.parsed_chat_completion import ParsedChatCompletionMessage
from openai.types.chat.parsed_function_tool_call import ParsedFunction, ParsedFunctionToolCall
from pydantic import ValidationError
from pydantic_core import to_json
from tiny_text import END, byte_tokenizer, marked_tokenizer
from tokenizers_by_kind import SENTENCEPIECE

from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.marks import calls_of, short_id, tool_call
from jshadow.serving.http.schemas import ChatRequest, TokenizeRequest
from jshadow.weights.templates import document_ids, frame, template_of
from jshadow.weights.tokenizer import encode

# What the families' templates do with calls, in few words.
HEAD = "{% if tools %}{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{% endif %}"
ROLE = "{% for m in messages %}<|{{ m.role }}|>"
TEMPLATES = {
    "hermes": HEAD + ROLE + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "either": HEAD + ROLE + "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}</tool_call>{% endfor %}<|im_end|>{% endfor %}<|assistant|>",
    "mistral": "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ c.function | tojson }}{{ c.id }}{% endfor %}]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    "{{ tools | tojson }}",
    "llama": ROLE + "{{ m.content }}{% for c in m.tool_calls or [] %}<|python_tag|>"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}',
    "glm": HEAD + ROLE + "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
    "<|observation|>{% endfor %}{{ m.content }}{% endfor %}<|assistant|>",
    "items": HEAD + ROLE + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %}<arg_key>{{ name }}{{ value }}{% endfor %}{% endfor %}"
    "{% endfor %}",
}


@pytest.fixture(params=["bytes", "marks", "llama2"])
def tokenizer(request):
    """Bytes alone, tokens of their own for marks, and a vocabulary of the kind of SentencePiece."""
    if request.param == "llama2":
        return SENTENCEPIECE["llama2"]
    marks = ("<|im_end|>", "<|user|>", "<|assistant|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")
    return byte_tokenizer() if request.param == "bytes" else marked_tokenizer(*marks, special=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_has_the_ids_that_transformers_gives_the_whole_chat(tokenizer, monkeypatch, name):
    """A client sends arguments as JSON. Transformers gets objects, as the templates expect them."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
    whole = turns(dict)
    if name == "mistral":
        for call in whole[2]["tool_calls"]:
            call["id"] = short_id(call["id"])
        whole[3]["tool_call_id"] = short_id(IDS[0])
    for count in (1, 2, 3, 5, 7):
        options = {"add_generation_prompt": True, "tools": [TOOL], "tokenize": False}
        text = tokenizer.apply_chat_template(whole[:count], **options)
        want = tokenizer.encode(text, add_special_tokens=False)
        assert ids_of(tokenizer, turns(json.dumps)[:count], [TOOL]) == want
    assert json.dumps(FOUND, ensure_ascii=False)[1:-1] in text or name == "items"


def test_a_template_that_joins_arguments_with_text_gets_their_json(monkeypatch):
    tokenizer = byte_tokenizer()
    joins = ("'<' + {}.arguments + '>'", "'<' ~ {}['arguments'] ~ '>'", "{}.arguments + '>'", "{}.arguments")
    for joined in joins:
        made = joined.format("m.tool_calls[0].function")
        template = "{% for m in messages %}{% if m.tool_calls %}{{ " + made + " }}{% endif %}{% endfor %}"
        monkeypatch.setattr(tokenizer, "chat_template", template)
        ids = ids_of(tokenizer, turns(json.dumps))
        assert json.loads(tokenizer.decode(ids).strip("<>")) == FOUND


@pytest.mark.parametrize("arguments", ["{", "[]", "1", '"{}"', "find(1)", '{"a": ' * 3000 + "1" + "}" * 3000])
def test_arguments_that_are_no_json_of_an_object_are_refused_by_name(arguments):
    tokenizer = byte_tokenizer()
    with pytest.raises(ApiError) as raised:
        ids_of(tokenizer, turns(lambda _: arguments))
    assert (raised.value.status, raised.value.param) == (400, "messages.2.tool_calls.0.function.arguments")
    assert ids_of(tokenizer, turns(lambda _: "")) == ids_of(tokenizer, turns(lambda _: "{}"))


def test_ids_of_calls_are_short_where_the_template_wants_that():
    for name in ("", "call_1", "ABCDEF12", "x" * 99, "a-2345678", "ü23456789"):
        assert short_id(name) == short_id(name) != name
        assert len(short_id(name)) == 9
        assert short_id(name).isalnum()
    assert short_id("Ab3456789") == "Ab3456789"


SYSTEM = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and 'tools' in m %}"
SYSTEM += "<|tool|>{{ m.tools }}<|/tool|>{% endif %}{% endfor %}"


@pytest.mark.parametrize("first", ["system", "developer", "user"])
def test_tools_come_where_the_template_reads_them(monkeypatch, first):
    """Phi reads them from the system message. SmolLM3 has another name for them."""
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", SYSTEM)
    hi = [{"role": first, "content": "Hi"}]
    text = tokenizer.decode(ids_of(tokenizer, hi, [TOOL]))
    said = "" if first == "user" else "Hi"
    told = f"<|system|>{said}<|tool|>{json.dumps([TOOL])}<|/tool|>"
    assert text == told + ("<|user|>Hi" if first == "user" else "")
    monkeypatch.setattr(
        tokenizer, "chat_template", "<tool_call>{% if xml_tools %}{{ xml_tools[0] | tojson }}{% endif %}"
    )
    assert tokenizer.decode(ids_of(tokenizer, hi, [TOOL])).endswith(json.dumps(TOOL))


@pytest.mark.parametrize(
    ("mark", "want"),
    [
        ("<|tool|>", '<|tool_call|>[{"name": "find", "arguments": %s}]<|/tool_call|>'),
        ("<tool_call>", '<tool_call>\n{"name": "find", "arguments": %s}\n</tool_call>'),
        ("<|observation|>", "find\n%s"),
    ],
)
def test_calls_are_written_as_the_family_does_where_the_template_leaves_them_out(monkeypatch, mark, want):
    """So the model sees what it has called."""
    tokenizer = marked_tokenizer("<|tool_call|>", "<|/tool_call|>", special=True)
    template = mark + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    ids = ids_of(tokenizer, turns(json.dumps)[:3])
    calls = want % json.dumps(FOUND, ensure_ascii=False) + want % "{}"
    assert tokenizer.decode(ids).endswith(f"<|assistant|>{calls}")
    assert ids == tokenizer.encode(tokenizer.decode(ids))


ONE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
ONE += "{{ raise_exception('only single tool-calls') }}{% endif %}"
ONE += "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("shape", ["in order", "backwards", "two calls", "no answers"])
def test_several_calls_come_one_by_one_where_the_template_takes_one(monkeypatch, shape):
    """Each has its answer behind it."""
    tokenizer, chat = byte_tokenizer(), turns(json.dumps)
    monkeypatch.setattr(tokenizer, "chat_template", ONE)
    first, second = f"<|assistant|>{json.dumps(FOUND, ensure_ascii=False)}", "<|assistant|>{}"
    want = f"{first}<|tool|>On the left.{second}<|tool|>{{}}"
    if shape == "backwards":
        chat[3:5] = chat[4:2:-1]
    elif shape == "no answers":
        want = first + second
        del chat[3:5]
    elif shape == "two calls":
        chat[5:5], want = chat[2:5], want * 2
    head, end = "<|system|>Be brief.<|user|>Where is it?", "<|assistant|>On the left.<|user|>And now?"
    assert tokenizer.decode(ids_of(tokenizer, chat)) == head + want + end


LINE = "\u010a"  # a line break in a byte-level vocabulary
FIRST = {"type": "file", "file": {"file_id": "file-1"}}


@pytest.mark.parametrize("document", ["The sea.", "\nThe sea.", "The sea.\n\n", "The sea"])
@pytest.mark.parametrize("place", ["first", "second", "behind a text"])
def test_a_document_that_is_first_ends_with_a_token_and_others_are_text(document, place):
    """Of the vocabulary, tokens hold the border of a document: a line break before it, or a stop and one behind it."""
    tokenizer = byte_tokenizer((".", LINE), (">", LINE), (LINE, LINE))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}<assistant>"
    stored, who = document_ids(tokenizer, document), {"type": "text", "text": "Who?"}
    parts = {"first": [FIRST, who], "second": [FIRST, FIRST, who], "behind a text": [who, FIRST, who]}[place]
    text = "\n\n".join("Who?" if part is who else document for part in parts)
    whole = ids_of(tokenizer, [{"role": "user", "content": text}])
    ids = ids_of(tokenizer, [{"role": "user", "content": parts}], files=lambda _: stored)
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    if place == "behind a text":
        assert ids == whole
    else:
        rest = tokenizer.decode(whole)[len(tokenizer.decode(stored)) :]
        assert ids == stored + encode(tokenizer, rest)
        assert (ids == whole) == (document == "The sea")
    assert place != "first" or ids == stored + frame(tokenizer, "Who?")[1]


NAMED = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}


@pytest.mark.parametrize(
    ("names", "plain", "tooled"),
    [(["default", "tool_use", "rag"], "DHi", "T1"), (["default", "rag"], "DHi", "DHi"), (["rag"], "R", "R")],
)
def test_of_named_templates_the_fitting_one_is_used(monkeypatch, names, plain, tooled):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", {name: NAMED[name] for name in names})
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(ids_of(tokenizer, messages)) == plain
    assert tokenizer.decode(ids_of(tokenizer, messages, [TOOL])) == tooled
    assert template_of(tokenizer) == NAMED["default" if "default" in names else "rag"]


def test_named_templates_without_a_default_are_refused_by_their_names(monkeypatch):
    tokenizer = byte_tokenizer()
    named = ({"rag": "", "tool_use": ""}, "rag"), ({"a": "", "b": ""}, "default")
    for template, told in (*named, ({}, "no chat"), (None, "no chat")):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(ApiError, match=told):
            ids_of(tokenizer, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ x.y.z }}", "{{ messages[9].content.a }}", "{% for %}"],
)
def test_a_template_that_fails_is_the_error_of_the_request(monkeypatch, template):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ApiError, match="refuses the chat") as raised:
        ids_of(tokenizer, [{"role": "user", "content": "Hi"}])
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_a_template_is_told_its_switches_and_nothing_else(monkeypatch):
    tokenizer = byte_tokenizer()
    template = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ thinking }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "Hi"}]
    for switches, want in (({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "<think></think>")):
        assert tokenizer.decode(ids_of(tokenizer, messages, **switches)) == want
    assert tokenizer.decode(ids_of(tokenizer, messages, thinking=True)) == "True"
    for name in ("chat_template", "messages", "tools", "tokenize", "x"):
        for model in (ChatRequest, TokenizeRequest):
            with pytest.raises(ValidationError, match="extra_forbidden"):
                model.model_validate({"model": "m", "messages": messages, "chat_template_kwargs": {name: "{{ 1 }}"}})


def test_the_text_of_a_special_token_is_plain_text_in_calls_reasoning_and_tools(monkeypatch):
    """Also where the template leaves it out."""
    tokenizer = byte_tokenizer()
    messages = turns(lambda given: json.dumps(given | {END: END}))
    messages[2]["reasoning_content"] += END
    messages[2]["tool_calls"][0]["function"]["name"] += END
    messages[2]["tool_calls"][0]["id"] += END
    tool = json.loads(json.dumps(TOOL).replace('"properties": {}', f'"properties": {{"a": {{"enum": ["{END}"]}}}}'))
    for name, count in (("hermes", 7), ("either", 6), ("items", 6)):
        monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
        ids = ids_of(tokenizer, messages, [tool])
        assert 256 not in ids
        assert tokenizer.decode(ids).count(END) == count
        monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name] + END)
        assert ids_of(tokenizer, messages, [tool])[-1] == 256


# The objects of clients


def message(**fields):
    return ChatCompletionMessage.model_validate({"role": "assistant"} | fields)


CALL = ChatCompletionMessageFunctionToolCall(
    id="call_1", type="function", function=Function(name="find", arguments='{"a": 1}')
)
PARSED = ParsedFunctionToolCall(
    id="call_1",
    type="function",
    function=ParsedFunction(name="find", arguments='{"a": 1}', parsed_arguments={"a": 1}),
)
DELTA = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
SAID = {
    "text": message(content="On the left."),
    "no text": message(content=""),
    "null": message(content=None),
    "reasoning": message(content="On the left.", reasoning_content="Look."),
    "reasoning alone": message(content=None, reasoning_content="Look."),
    "a call": message(content=None, tool_calls=[CALL]),
    "text and two calls": message(content="Wait.", tool_calls=[CALL, CALL]),
    "no calls": message(content="So.", tool_calls=[], annotations=[], refusal=None),
    "parsed": ParsedChatCompletionMessage[dict](role="assistant", content="{}", parsed={"a": None}),
    "a parsed call": ParsedChatCompletionMessage[dict](role="assistant", tool_calls=[PARSED]),
    "a delta": ChoiceDelta.model_validate({"role": "assistant", "content": "", "tool_calls": [DELTA]}),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_client_dumps_is_accepted_as_history(name):
    """With nulls for what is not there, or without these."""
    tokenizer, told = marked_tokenizer(), []
    tokenizer.chat_template = TEMPLATES["hermes"]
    for options in ({}, {"exclude_none": True}, {"exclude_unset": True}):
        said = SAID[name].model_dump(**options, warnings=False)
        chat = [{"role": "user", "content": "Hi", "name": None}, said, {"role": "user", "content": "And?"}]
        told.append(tokenizer.decode(ids_of(tokenizer, chat)))
    assert set(told) == {told[0]}
    assert told[0].startswith("<|user|>Hi<|im_end|><|assistant|>")
    assert told[0].count('<tool_call>{"name": "find", "arguments": {"a": 1}}') == len(SAID[name].tool_calls or [])


@pytest.mark.parametrize(
    ("half", "told"), [("\\ud83d", "\ufffd"), ("\\ud83d\\ude00", "\U0001f600"), ("\\udc00x", "\ufffdx")]
)
def test_halves_of_surrogate_pairs_in_a_call_of_the_model_can_be_sent(half, told):
    """The model writes JSON, in which it can name half of a character."""
    [call], _ = calls_of(f'{{"name": "find", "arguments": {{"{half}": "{half}"}}}}', ("find",))
    sent = to_json(tool_call(call))
    assert json.loads(json.loads(sent)["function"]["arguments"]) == {told: told}


def test_a_null_is_a_field_that_is_not_there():
    """In all objects of a body. A schema keeps its own nulls, and a field that must be there is asked for."""
    plain = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body = ChatRequest.model_validate(plain)
    assert ChatRequest.model_validate(plain | dict.fromkeys({*ChatRequest.model_fields, "sea"} - {*plain})) == body
    nulls = {"name": "f", "parameters": None, "strict": None, "description": None}
    tool = ChatRequest.model_validate(plain | {"tools": [{"type": "function", "function": nulls}]}).tools[0]
    assert tool.function.parameters == {}
    schema = {"enum": [None], "default": None}
    form = {"type": "json_schema", "regex": None, "json_schema": {"name": None, "schema": schema}}
    assert ChatRequest.model_validate(plain | {"response_format": form}).response_format.json_schema.schema_ == schema
    for wrong in ({"messages": None}, {"model": None}, {"messages": [None]}, {"sea": 0}):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate(plain | wrong)


def test_the_calls_of_the_server_are_accepted_as_history():
    """Whole ones, and those of a stream, which have a number."""
    tokenizer = byte_tokenizer()
    odd, _ = calls_of(
        '{"name": "find", "arguments": "{\\"a\\": [\\"\\\\ud800\\", NaN]}"}{"name": "find", "arguments": ""}', ("find",)
    )
    for calls in (
        [tool_call(("find", "{}"))],
        [tool_call(("find", '{"a": null}'), index) for index in range(2)],
        [tool_call(call) for call in odd],
    ):
        said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
        assert ids_of(tokenizer, [{"role": "user", "content": "Hi"}, said])
