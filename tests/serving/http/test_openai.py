"""Conversations of OpenAI's client: what it returns is dumped and sent back as history, turn by turn."""

import json
from typing import Literal

import openai
import pydantic
import pytest
from server_cases import FILES, PARAMS
from tiny_text import TOOL_TEMPLATE

# What a client may make of an answer before it sends it back.
DUMPS = {
    "itself": lambda said: said,
    "dumped": lambda said: said.model_dump(warnings=False),
    "without nulls": lambda said: said.model_dump(exclude_none=True, warnings=False),
    "as set": lambda said: said.model_dump(exclude_unset=True, warnings=False),
    "as JSON": lambda said: json.loads(said.model_dump_json(warnings=False)),
}


class Town(pydantic.BaseModel):
    name: Literal["Kiel", "Brest"]


class Place(Town):
    """Finds a place."""


TOOLS = [openai.pydantic_function_tool(Place, name="find")]
THINKS = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


@pytest.fixture
def chats(client, monkeypatch):
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", TOOL_TEMPLATE)
    options = {"base_url": "http://localhost/v1", "api_key": "none", "max_retries": 0}
    return openai.OpenAI(http_client=client, **options).chat.completions


def user(text):
    return {"role": "user", "content": text}


def answers(chats, method="create", **body):
    """The messages of all choices, of a whole answer or of a stream that the client's helper puts together."""
    body = {"model": "tiny", "max_tokens": 48, "seed": 3} | body
    if method == "stream":
        with chats.stream(**body) as stream:
            return [choice.message for choice in stream.get_final_completion().choices]
    return [choice.message for choice in getattr(chats, method)(**body).choices]


def called(said):
    """The answers of the tools to the calls of a message."""
    return [{"role": "tool", "tool_call_id": call.id, "content": "On the left."} for call in said.tool_calls]


def deltas(chats, **body):
    """The pieces of a stream as messages: the first one, and that of the whole text."""
    chunks = [chunk.choices[0].delta for chunk in chats.create(model="tiny", max_tokens=6, stream=True, **body)]
    text = "".join(delta.content or "" for delta in chunks)
    return chunks[0], chunks[0].model_copy(update={"content": text})


def refused(**_):
    """An answer that another server has refused."""
    return openai.types.chat.ChatCompletionMessage(role="assistant", content=None, refusal="No.")


# The turns of each conversation: how the answer comes about, and what is said after it.
PLAIN, FORCED = {"max_tokens": 6}, {"tools": TOOLS, "tool_choice": "required"}
ENDED = {"logit_bias": {"256": 4}}  # the client's helper raises an error if the limit cuts an answer
NAMED = FORCED | {"tool_choice": {"type": "function", "function": {"name": "find"}}}
CONVERSATIONS = {
    "texts": [("create", PLAIN), ("create", PLAIN), ("create", PLAIN)],
    "a call and its answer": [("create", FORCED), ("create", PLAIN | {"tools": TOOLS, "tool_choice": "none"})],
    "two calls, one named": [("create", FORCED), ("create", NAMED), ("create", PLAIN)],
    "parsed calls": [("parse", FORCED), ("parse", FORCED), ("create", PLAIN)],
    "reasoning": [("create", PLAIN | THINKS), ("create", PLAIN | THINKS), ("create", PLAIN)],
    "streamed texts": [("stream", ENDED), ("stream", ENDED), ("create", PLAIN)],
    "streamed calls": [("stream", FORCED), ("stream", FORCED), ("create", PLAIN)],
    "streamed reasoning": [("stream", ENDED | THINKS), ("stream", ENDED)],
    "three choices": [("create", PLAIN | {"n": 3}), ("create", PLAIN | {"n": 2})],
    "parsed objects": [("parse", {"response_format": Town}), ("stream", {"response_format": Town}), ("create", PLAIN)],
    "log-probabilities": [("create", PLAIN | {"logprobs": True, "top_logprobs": 2}), ("create", PLAIN)],
    "any JSON": [
        ("create", {"response_format": {"type": "json_object"}, "logit_bias": {"125": 20}, "max_tokens": 12}),
        ("create", PLAIN),
    ],
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the client's, of its own parsed objects
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_goes_on_whatever_the_client_makes_of_an_answer(chats, name):
    """All dumps are the same prompt: each answer of n is the end of a conversation of its own."""
    chat, seen = [user("Who?")], set()
    for method, body in CONVERSATIONS[name]:
        choices = answers(chats, method, messages=chat, **body)
        assert len(choices) == body.get("n", 1)
        for said in choices:
            later, counts = called(said) if said.tool_calls else [user("And?")], set()
            for dump in DUMPS.values():
                told = chats.create(model="tiny", messages=[*chat, dump(said), *later], max_tokens=1)
                counts.add(told.usage.prompt_tokens)
            assert len(counts) == 1
            seen.update(name for name, value in said.model_dump(warnings=False).items() if value)
        chat += [said, *later]
    for words, field in (("call", "tool_calls"), ("reasoning", "reasoning_content"), ("parsed objects", "parsed")):
        assert words not in name or field in seen


@pytest.mark.parametrize("kind", ["a document", "pieces of a stream", "a refusal", "an image"])
def test_other_messages_of_a_conversation(chats, client, kind):
    """A document that was uploaded, raw pieces, and a refusal are accepted. An image is refused by name."""
    chat = [user("Who?")]
    if kind == "a document":
        made = client.post(FILES, files={"file": ("a.txt", b"The sea is calm.")}, data={"purpose": "user_data"}).json()
        chat = [user([{"type": "file", "file": {"file_id": made["id"]}}, {"type": "text", "text": "Who?"}])]
        said = answers(chats, messages=chat, **PLAIN)
    elif kind == "pieces of a stream":
        said = deltas(chats, messages=chat)
    else:
        said = [refused()] if kind == "a refusal" else answers(chats, messages=chat, **PLAIN)
    for one in said:
        counts = set()
        for dump in DUMPS.values():
            told = chats.create(model="tiny", messages=[*chat, dump(one), user("And?")], max_tokens=1)
            counts.add((told.usage.prompt_tokens, told.usage.prompt_tokens_details.cached_tokens))
        [(_, stored)] = counts
        assert (stored > 0) == (kind == "a document")
    if kind == "an image":
        image = user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
        with pytest.raises(openai.BadRequestError, match=r"messages\.2\.content") as raised:
            chats.create(model="tiny", messages=[*chat, said[0].model_dump(), image])
        assert raised.value.param.startswith("messages.2.content")
