"""/v1/chat/completions on the tiny model, against `generate` and plain NumPy."""

import base64

import numpy as np
import pytest
from server_cases import (
    CHAT,
    FILES,
    NAME,
    about,
    assert_drawn,
    chat_tokens,
    client_of,
    error_of,
    events_of,
    log_softmax,
    logits_along,
    offline,
    posted,
    tiny_service,
)
from serving_cases import PARAMS

import jshadow
from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.library.library import text_ids
from jshadow.serving import Request
from jshadow.serving.http import prompts

MESSAGES = [{"role": "user", "content": "Where is it?"}]
PROMPT = "<user>Where is it?\n<assistant>"
IDS = PARAMS.tokenizer.encode(PROMPT)
FORM = {"temperature": 0, "max_tokens": 4, "response_format": {"type": "regex", "regex": "[a-z]{4}"}}
DOCUMENT = "".join(map(chr, np.random.default_rng(2).integers(33, 127, 120)))


def chat(client, **body):
    return posted(client, CHAT, **{"messages": MESSAGES, "max_tokens": 8} | body)


def test_a_greedy_answer_is_that_of_generate(client):
    want, answer = offline(IDS, 8), chat(client, temperature=0)
    message = {"role": "assistant", "content": want.text, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert (answer["object"], answer["model"], answer["id"][:9]) == ("chat.completion", "tiny", "chatcmpl-")
    counts = {"prompt_tokens": len(IDS), "completion_tokens": 8, "total_tokens": len(IDS) + 8}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    named = chat(client, max_tokens=None, max_completion_tokens=3)
    assert named["usage"]["completion_tokens"] == 3


def test_a_stream_is_the_whole_answer(client):
    body = {"messages": MESSAGES, "max_tokens": 8, "n": 3, "seed": 3, "logprobs": True}
    whole = chat(client, **body)
    *events, end = events_of(client, CHAT, **body, stream_options={"include_usage": True})
    assert (end["choices"], end["usage"]) == ([], whole["usage"])
    assert {event["object"] for event in (*events, end)} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in (*events, end)}) == 1
    parts = [event["choices"][0] for event in events]
    for choice in whole["choices"]:
        first, *own, last = [part for part in parts if part["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"]["content"] for part in own if part["delta"]) == choice["message"]["content"]
        assert (last["delta"], last["finish_reason"]) == ({}, choice["finish_reason"])
        entries = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 3
    assert "usage" not in events_of(client, CHAT, **body)[-1]


def test_log_probabilities_are_those_of_the_model(client):
    [choice] = chat(client, temperature=0, logprobs=True, top_logprobs=4)["choices"]
    tokens, entries = chat_tokens(choice), choice["logprobs"]["content"]
    assert tokens == offline(IDS, 8).tokens
    want = log_softmax(logits_along(IDS, tokens, 8))
    for row, token, entry in zip(want, tokens, entries, strict=True):
        assert entry["token"] == PARAMS.tokenizer.decode([token])
        assert entry["logprob"] == pytest.approx(row[token], abs=1e-4)
        top = entry["top_logprobs"]
        assert [one["logprob"] for one in top] == pytest.approx(np.sort(row)[::-1][:4], abs=1e-4)
        assert top[0] == {name: entry[name] for name in top[0]}
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


# The fields of a sampler, and those of a row.
DRAWS = [({"temperature": 0.7}, {}), ({"top_k": 3}, {}), ({"top_p": 0.4}, {}), ({"min_p": 0.3}, {})]
DRAWS += [({}, {"presence_penalty": 2.0}), ({}, {"logit_bias": {70: 4.0, 71: -100.0}})]
DRAWS += [({"temperature": 0.0}, {"frequency_penalty": 1.5}), ({"temperature": 0.0}, {"repetition_penalty": 2.0})]


@pytest.mark.parametrize(("sampler", "row"), DRAWS, ids=[next(iter(row or sampler)) for sampler, row in DRAWS])
def test_the_fields_of_drawing_reach_the_draw(client, sampler, row):
    [choice] = chat(client, seed=4, max_tokens=10, logprobs=True, **sampler, **row)["choices"]
    tokens = chat_tokens(choice)
    assert len(tokens) > 2
    assert_drawn(IDS, tokens, 10, RowSettings(Sampler(**{"temperature": 1.0} | sampler), seed=4, **row))


def test_a_file_is_a_stored_document_of_a_chat(client, service):
    """The answer is that of `generate` on the stored state."""
    upload = {"file": ("a.txt", DOCUMENT.encode())}
    file = {"file_id": client.post("/v1/files", files=upload, data={"purpose": "user_data"}).json()["id"]}
    answer = chat(client, messages=about(file, "Who?"), temperature=0)
    stored, rest = f"<user>{DOCUMENT}", "\n\nWho?\n<assistant>"
    library = service.library
    state = library.load(library.longest(PARAMS.tokenizer.encode(stored)).key).with_room(64)
    want = jshadow.generate(PARAMS, PARAMS.tokenizer.encode(rest), max_new_tokens=8, state=state)
    assert answer["choices"][0]["message"]["content"] == want.text
    assert answer["usage"]["prompt_tokens"] == len(stored + rest)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(stored)}
    # The data of the same file, with and without the head of a data URL: found by its tokens.
    data = base64.b64encode(DOCUMENT.encode()).decode()
    for file_data in (data, f"data:text/plain;base64,{data}"):
        same = chat(client, messages=about({"filename": "b.txt", "file_data": file_data}, "Who?"), temperature=0)
        assert (same["choices"], same["usage"]) == (answer["choices"], answer["usage"])
    # Without a number of tokens, the answer has the room that the question leaves.
    long = chat(client, messages=about(file, "Who?"), max_tokens=None, logit_bias={"256": -100})["usage"]
    assert long["completion_tokens"] == 64 - len(rest)
    assert long["prompt_tokens_details"] == {"cached_tokens": len(stored)}


TOOL = "{% if tools and LAST %}[{{ tools[0].function.name }}]{% endif %}"
SINCE = "{% set at = namespace(last=0) %}"
SINCE += "{% for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
SINCE += "{% for m in messages %}TOOLS<{{ m.role }}>THOUGHTS{{ m.content }}\n{% endfor %}<assistant>"
KEPT = "{% if m.reasoning_content and loop.index0 > at.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
# A template, and whether the tokens of the document, the conversation or nothing are found: on the first turn, on the
# second one, there with a stored conversation, and with an answer of a tool behind that.
CHANGING = {
    "plain": (SINCE.replace("TOOLS", "").replace("THOUGHTS", ""), "document document conversation conversation"),
    "Qwen3 leaves out reasoning before the last question": (
        SINCE.replace("TOOLS", "").replace("THOUGHTS", KEPT),
        "document document document conversation",
    ),
    "Mistral has tools before the last question": (
        SINCE.replace("TOOLS", TOOL.replace("LAST", "loop.index0 == at.last")).replace("THOUGHTS", ""),
        "nothing document document conversation",
    ),
    "Llama has tools before the first question": (
        SINCE.replace("TOOLS", TOOL.replace("LAST", "loop.first")).replace("THOUGHTS", ""),
        "nothing nothing conversation conversation",
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_usage_says_how_much_of_a_conversation_was_stored(client, service, monkeypatch, name):
    """The ids are those without a library. If nothing was stored, so is the answer."""
    template, expected = CHANGING[name]
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", template)
    text = f"{name} {DOCUMENT}"
    upload = {"file": ("a.txt", text.encode())}
    made = {"file_id": client.post("/v1/files", files=upload, data={"purpose": "user_data"}).json()["id"]}
    sent = {"filename": "a.txt", "file_data": base64.b64encode(text.encode()).decode()}
    told = {"role": "assistant", "content": "Me.", "reasoning_content": "So"}
    later = ([], [told, {"role": "user", "content": "Me?"}], [told, {"role": "user", "content": "Me?"}])
    later += ([told, {"role": "tool", "content": "It is."}],)
    tools = [{"type": "function", "function": {"name": "f"}}]
    lengths = {"nothing": 0, "document": len(text_ids(text, PARAMS))}
    with tiny_service() as bare, client_of(bare) as other:
        for place, (want, more) in enumerate(zip(expected.split(), later, strict=True)):
            if place == 2:
                begun = posted(client, "/tokenize", messages=about(made, "Who?"), tools=tools)["tokens"]
                begun += PARAMS.tokenizer.encode(("<think>So</think>" if KEPT in template else "") + "Me.")
                answer = service.engine.submit(Request(begun, 1, store=True, title=""))
                answer.result(60).report.stored.result(60)
                lengths["conversation"] = len(begun)
            answers = []
            for one, file in ((client, made), (client, sent), (other, sent)):
                body = {"messages": [*about(file, "Who?"), *more], "tools": tools}
                count = posted(one, "/tokenize", **body)["tokens"]
                answer = chat(one, **body, **FORM)
                answers.append((count, answer["choices"][0]["message"]["content"], answer["usage"]))
            ids, usage = answers[0][0], answers[0][2]
            assert ids == answers[1][0] == answers[2][0]
            assert answers[0] == answers[1]
            assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (
                len(ids),
                lengths[want],
            )
            assert answers[2][2]["prompt_tokens_details"] == {"cached_tokens": 0}
            assert want != "nothing" or answers[0] == answers[2]


def test_what_openai_clients_send_by_themselves_is_ignored(client):
    names = ("user", "safety_identifier", "prompt_cache_key")
    ignored = dict.fromkeys(names, "a") | {"prompt_cache_retention": "24h", "service_tier": "auto"}
    ignored |= {"metadata": {"a": "b"}, "store": True}
    text = {"prompt": "Hi", "temperature": 0, "max_tokens": 8}
    plain, same = (posted(client, "/v1/completions", **text, **more)["choices"] for more in ({}, ignored))
    assert plain == same
    ignored |= {"reasoning_effort": "low", "verbosity": "low", "modalities": ["text"], "parallel_tool_calls": True}
    ignored |= {"prediction": {"type": "content", "content": "x"}}
    plain = chat(client, temperature=0)
    assert chat(client, temperature=0, **ignored)["choices"] == plain["choices"]
    # An answer as a client returns it, with fields that have nothing in them.
    earlier = plain["choices"][0]["message"] | {"annotations": [], "audio": None}
    turn = [*MESSAGES, earlier, {"role": "user", "content": "And?"}]
    said = f"{PROMPT[: -len('<assistant>')]}<assistant>{earlier['content']}\n<user>And?\n<assistant>"
    assert chat(client, messages=turn)["usage"]["prompt_tokens"] == len(PARAMS.tokenizer.encode(said))


MARKS = """{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor -%}
{% for m in messages %}<{{ m.role }}>{{ m.content.split("</think>")[-1] }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- endfor %}<assistant><think>
"""


def test_reasoning_and_tools_as_the_template_marks_them(client, monkeypatch):
    """The prompt opens the reasoning, and the answer does not close it."""
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", MARKS)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "On the left shelf."},
    ]
    told = client.post("/tokenize", json={"messages": turns, "tools": [tool]}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": told}).json()["prompt"]
    assert text == "[f]<user>Where is it?<assistant><tool_call>f</tool_call><tool>On the left shelf.<assistant><think>"
    body = {"messages": turns, "tools": [tool], "temperature": 0}
    answer, want = chat(client, **body), offline(told, 8).text
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", want)
    assert answer["usage"]["prompt_tokens"] == len(told)
    events = events_of(client, CHAT, max_tokens=8, **body)
    assert "".join(event["choices"][0]["delta"].get("reasoning_content", "") for event in events) == want
    assert chat(client, **body, tool_choice="none")["usage"]["prompt_tokens"] == len(told) - len("[f]")
    formed = chat(client, **body, response_format={"type": "regex", "regex": "[a-z]{4}"})
    assert "reasoning_content" not in formed["choices"][0]["message"]


def test_the_text_of_a_special_token_does_not_control_the_model(client):
    """In messages, their parts and documents it is plain text. The tokens of the template stay."""
    encode, special = PARAMS.tokenizer.encode, PARAMS.tokenizer.all_special_tokens[0]
    plain = [byte for char in special for byte in encode(char)]
    assert len(encode(special)) == 1 < len(plain)
    text, want = f"a{special}b{special}", [*encode("a"), *plain, *encode("b"), *plain]
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": base64.b64encode(text.encode()).decode()}}
    for content in (text, [{"type": "text", "text": text}], [file]):
        body = {"messages": [{"role": "user", "content": content}]}
        ids = client.post("/tokenize", json=body).json()["tokens"]
        assert ids == [*encode("<user>"), *want, *encode("\n<assistant>")]
    assert text_ids(text, PARAMS)[-len(want) :].tolist() == want


def test_stop_strings_count_in_the_content_alone(client, monkeypatch):
    """The answer is reasoning to its limit in the first template, and content in the second."""
    for template, name in ((MARKS, "reasoning_content"), (MARKS.replace("<think>", ""), "content")):
        monkeypatch.setattr(PARAMS.tokenizer, "chat_template", template)
        told = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        want = offline(told, 8).text
        for stop in (want[2:4], [want[1], "~~~"], want[3:]):
            body = {"temperature": 0, "stop": stop}
            answer = chat(client, **body)
            [choice], events = answer["choices"], events_of(client, CHAT, messages=MESSAGES, max_tokens=8, **body)
            cut = min(want.index(one) for one in ([stop] if isinstance(stop, str) else stop) if one in want)
            text, finish = (want, "length") if name == "reasoning_content" else (want[:cut], "stop")
            assert (choice["message"][name], choice["finish_reason"]) == (text, finish)
            assert "".join(event["choices"][0]["delta"].get(name, "") for event in events) == text
            assert events[-1]["choices"][0]["finish_reason"] == finish
            assert answer["usage"]["completion_tokens"] <= 8


@pytest.mark.parametrize("closed", [True, False])
def test_thoughts_that_are_switched_off_in_the_prompt_are_content(client, monkeypatch, closed):
    template = MARKS.strip().replace("<think>", "<think>{% if not enable_thinking %}</think>{% endif %}")
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", template)
    body = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": not closed}}
    message = chat(client, **body)["choices"][0]["message"]
    assert ("reasoning_content" in message, bool(message["content"])) == (not closed, closed)
    told = posted(client, "/tokenize", messages=MESSAGES, chat_template_kwargs=body["chat_template_kwargs"])
    assert chat(client, **body)["usage"]["prompt_tokens"] == told["count"]


def test_named_templates_mark_reasoning_too(client, monkeypatch):
    """And the answer, with what a client adds to it, is accepted as history."""
    for named in ({"default": MARKS}, {"rag": MARKS}, {"default": "", "tool_use": MARKS}):
        monkeypatch.setattr(PARAMS.tokenizer, "chat_template", named)
        tool = {"type": "function", "function": {"name": "f", "parameters": None}}
        body = {"temperature": 0, "tools": [tool], "tool_choice": None, "stream": None, "stop": None}
        message = chat(client, **body)["choices"][0]["message"]
        assert (message["content"], bool(message["reasoning_content"])) == ("", True)
        history = [*MESSAGES, message | {"function_call": None, "tool_calls": None}, *MESSAGES]
        assert chat(client, **body | {"messages": history})["usage"]["prompt_tokens"] > 60


@pytest.mark.parametrize("kind", ["file_id", "file_data"])
def test_one_document_in_many_parts_is_refused_before_it_is_encoded(client, monkeypatch, kind):
    """The parts of a body of a few kilobytes stand for millions of tokens."""
    text = "The sea is calm. " * 4
    made = client.post(FILES, files={"file": ("a.txt", text.encode())}).json()
    data = {"filename": "a.txt", "file_data": base64.b64encode(text.encode()).decode()}
    file = {"file_id": made["id"]} if kind == "file_id" else data
    parts = [{"type": "file", "file": file}] * 300
    with monkeypatch.context() as never:
        never.setattr(prompts, "encode_parts", lambda *_, **__: pytest.fail("it must not be encoded"))
        answer = client.post(
            CHAT, json={"model": NAME, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        )
    assert error_of(answer) == (400, "context_length_exceeded")
