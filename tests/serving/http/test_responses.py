"""/v1/responses: the answers are those of chats, also in OpenAI's client, whole, as streams and as later input."""

import json

import openai
import pytest
from server_cases import CHAT, FILES, NAME, PARAMS, posted
from tiny_text import TOOL_TEMPLATE

from jshadow.serving.http.responses import ResponsesRequest, chat_request

RESPONSES = "/v1/responses"
TOWN = {"type": "object", "properties": {"name": {"enum": ["Kiel", "Brest"]}}, "required": ["name"]}
TOWN |= {"additionalProperties": False}
FIND = {"name": "find", "description": "Finds a town.", "parameters": TOWN, "strict": True}
ASKED = {"input": "Where is it?"}, {"messages": [{"role": "user", "content": "Where is it?"}]}
FORM = {"name": "town", "schema": TOWN, "strict": True}
# What a body of /v1/responses says, and a body of a chat that says the same.
SAME = {
    "a text": ASKED,
    "instructions and messages": (
        {"instructions": "Be short.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]},
    ),
    "reasoning": ({**ASKED[0], "chat_template_kwargs": {"enable_thinking": True}},) * 2,
    "a schema": (
        {**ASKED[0], "text": {"format": {"type": "json_schema", **FORM}}},
        {**ASKED[1], "response_format": {"type": "json_schema", "json_schema": FORM}},
    ),
    "a call": (
        {**ASKED[0], "tools": [{"type": "function", **FIND}], "tool_choice": {"type": "function", "name": "find"}},
        {**ASKED[1], "tools": [{"type": "function", "function": FIND}], "tool_choice": "required"},
    ),
}
SAME["reasoning"] = (SAME["reasoning"][0], {**ASKED[1], "chat_template_kwargs": {"enable_thinking": True}})


@pytest.fixture(autouse=True)
def template(monkeypatch):
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", TOOL_TEMPLATE)


@pytest.fixture
def responses(client):
    options = {"base_url": "http://localhost/v1", "api_key": "none", "max_retries": 0}
    return openai.OpenAI(http_client=client, **options).responses


def without_names(value):
    """A response without its random names and its time."""
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if isinstance(value, dict):
        return {name: without_names(one) for name, one in value.items() if name not in ("id", "call_id", "created_at")}
    return value


@pytest.mark.parametrize("case", SAME)
def test_an_answer_is_that_of_the_chat(client, case):
    ours, theirs = SAME[case]
    told = posted(client, RESPONSES, temperature=0, max_output_tokens=40, **ours)
    chat = posted(client, CHAT, temperature=0, max_tokens=40, **theirs)
    [choice] = chat["choices"]
    by_kind = {item["type"]: item for item in told["output"]}
    parts = [by_kind[kind]["content"][0]["text"] for kind in ("reasoning", "message") if kind in by_kind]
    message = choice["message"]
    assert parts == [text for text in (message.get("reasoning_content"), message["content"]) if text]
    calls = [(one["name"], one["arguments"]) for one in told["output"] if one["type"] == "function_call"]
    assert calls == [tuple(call["function"].values()) for call in message.get("tool_calls", ())]
    assert bool(calls) == (case == "a call")
    cut = choice["finish_reason"] == "length"
    assert told["status"] == ("incomplete" if cut else "completed")
    assert told["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    used, usage = told["usage"], chat["usage"]
    assert (used["input_tokens"], used["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert used["total_tokens"] == usage["total_tokens"]
    assert bool(used["output_tokens_details"]["reasoning_tokens"]) == ("reasoning" in by_kind) == (case == "reasoning")


@pytest.mark.parametrize("case", SAME)
def test_a_stream_is_the_whole_response(responses, case):
    """Also as OpenAI's client puts it together. The events are numbered, and each text is that of its pieces."""
    fields = dict(SAME[case][0])
    more = {"extra_body": {"chat_template_kwargs": fields.pop("chat_template_kwargs", {})}}
    body = {"model": NAME, "temperature": 0, "max_output_tokens": 40, **fields, **more}
    whole = json.loads(responses.create(**body).model_dump_json(warnings=False))
    events = [event.model_dump(warnings=False) for event in responses.create(stream=True, **body)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_names(json.loads(json.dumps(events[-1]["response"]))) == without_names(whole)
    for item in events[-1]["response"]["output"]:
        own = [event for event in events if event.get("item_id") == item["id"]]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        added, done = (
            next(event for event in events if event["type"] == f"response.output_item.{kind}" and same(event, item))
            for kind in ("added", "done")
        )
        assert added["item"]["status"] == "in_progress"
        assert done["output_index"] == added["output_index"]
    if whole["status"] == "completed":  # the client's helper has no final response of an answer that the limit has cut
        with responses.stream(**body) as stream:
            final = stream.get_final_response()
        assert (final.output_text, final.usage.model_dump()) == (text_of(whole), whole["usage"])


def text_of(whole):
    """The text of a response's messages."""
    return "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == "message")


def same(event, item):
    return event["item"]["id"] == item["id"]


def test_log_probabilities_are_those_of_the_chat(client):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    told = posted(client, RESPONSES, temperature=0, **ASKED[0], **asked)
    chat = posted(client, CHAT, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2, **ASKED[1])
    assert told["output"][0]["content"][0]["logprobs"] == chat["choices"][0]["logprobs"]["content"]


def test_a_conversation_goes_on_from_the_items_of_an_answer(client, responses):
    """With a call and what the function has returned, and on a stored document."""
    text = b"The lamp of the harbor burns at night."
    file = client.post(FILES, files={"file": ("a.txt", text)}, data={"purpose": "user_data"}).json()["id"]
    content = [{"type": "input_file", "file_id": file}, {"type": "input_text", "text": "Who?"}]
    talk = [{"role": "user", "content": content}]
    body = {"model": NAME, "temperature": 0, "max_output_tokens": 40}
    usage = responses.create(input=talk, **body).usage
    assert usage.input_tokens_details.cached_tokens >= len(text)
    body["tools"] = [{"type": "function", **FIND}]
    first = responses.create(input=talk, tool_choice="required", **body)
    [call] = [item for item in first.output if item.type == "function_call"]
    talk += [item.model_dump(exclude_none=True) for item in first.output]
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "On the left."}]
    second = responses.create(input=talk, tool_choice="none", **body)
    messages = chat_request(ResponsesRequest(input=talk, model=NAME)).model_dump(exclude_none=True)["messages"]
    same = posted(client, CHAT, messages=messages, temperature=0, max_tokens=40)
    assert second.output_text == same["choices"][0]["message"]["content"]
    assert second.usage.input_tokens == same["usage"]["prompt_tokens"]


def test_items_that_follow_each_other_are_one_answer():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Kiel?"}]}
    call = {"type": "function_call", "name": "find", "arguments": "{}"}
    result = {"type": "function_call_output", "output": [{"type": "input_text", "text": "Yes."}]}
    items = [{"role": "user", "content": "Where?"}, thought, said, call | {"call_id": "1"}, call | {"call_id": "2"}]
    items += [result | {"call_id": "1"}, result | {"call_id": "2"}, said, said, {"role": "user", "content": "Thanks."}]
    told = chat_request(ResponsesRequest(model=NAME, input=items)).model_dump(exclude_none=True)["messages"]
    calls = [{"id": name, "type": "function", "function": {"name": "find", "arguments": "{}"}} for name in "12"]
    text = [{"type": "text", "text": "Kiel?"}]
    assert told == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "reasoning_content": "So.", "content": text, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Yes."},
        {"role": "tool", "tool_call_id": "2", "content": "Yes."},
        {"role": "assistant", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Thanks."},
    ]
    silent = chat_request(ResponsesRequest(model=NAME, input="Why?", reasoning={"effort": "none"}))
    assert silent.chat_template_kwargs.enable_thinking is False


WRONG = {
    "previous_response_id": {"previous_response_id": "resp_1"},
    "conversation": {"conversation": "c"},
    "background": {"background": True},
    "input": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "max_output_tokens": {"max_output_tokens": 10**6},
    "tools": {"tools": [{"type": "web_search"}]},
    "truncation": {"truncation": "auto"},
    "text": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_not_supported_is_named(client, field):
    answer = client.post(RESPONSES, json={"model": NAME, **ASKED[0], **WRONG[field]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].split(".")[0] == field
    assert "max_completion_tokens" not in error["message"]
    assert client.post(RESPONSES, json={"model": "other", **ASKED[0]}).status_code == 404
