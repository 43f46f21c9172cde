"""Answers in a form: each fits its schema or its expression, whatever the model would rather write."""

import json
import re

import jsonschema
import pytest
from random_schemas import random_schema
from server_cases import NAME, client_of, tiny_service
from server_truth import events_of

from jshadow.serving import RowClass

CLASSES = (RowClass(32, 208, 4),)
MESSAGES = [{"role": "user", "content": "Where is it?"}]
PLACE = {
    "type": "object",
    "properties": {"town": {"$ref": "#/$defs/Town"}, "depth": {"type": "integer", "minimum": 3, "maximum": 40}},
    "required": ["town"],
    "$defs": {"Town": {"enum": ["Kiel", "Brest"]}},
}
FIND = {"type": "function", "function": {"name": "find_place", "description": "Finds it.", "parameters": PLACE}}
NOTHING = {"type": "function", "function": {"name": "wait-a-bit"}}


@pytest.fixture(scope="module")
def client():

    with tiny_service(classes=CLASSES) as service, client_of(service) as client:
        yield client


def body_of(**body):
    return {"model": NAME, "messages": MESSAGES} | body


def choice_of(client, **body):
    answer = client.post("/v1/chat/completions", json=body_of(**body))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def schema_form(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def answers_fit(client, seeds):
    """Ask for an answer to each random schema. Return how many ended by their length."""
    cut = 0
    for seed in seeds:
        schema = random_schema(seed)
        choice = choice_of(client, response_format=schema_form(schema), seed=seed)
        text = choice["message"]["content"]
        if choice["finish_reason"] == "length":
            cut += 1
            continue
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
        # No blanks but those after commas and colons, outside strings.
        assert "  " not in re.sub(r'"(\\.|[^"\\])*"', '""', text)
    return cut


def test_answers_fit_their_schemas(client):
    assert answers_fit(client, range(12)) <= 2


@pytest.mark.slow
def test_answers_fit_80_schemas(client):
    assert answers_fit(client, range(1000, 1080)) <= 8


def test_other_forms(client):
    bias = {"125": 20}  # towards "}", so that the object ends
    answers = (
        choice_of(client, response_format={"type": "json_object"}, seed=seed, logit_bias=bias) for seed in range(9)
    )
    whole = next(answer for answer in answers if answer["finish_reason"] == "stop")
    assert isinstance(json.loads(whole["message"]["content"]), dict)
    form = {"type": "regex", "regex": r'(ab/|"x\n){3}[0-9]\.'}
    for seed in range(3):
        choice = choice_of(client, response_format=form, seed=seed)
        assert re.fullmatch(form["regex"], choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    completion = {"model": NAME, "prompt": "a", "response_format": form, "n": 2}
    for one in client.post("/v1/completions", json=completion).json()["choices"]:
        assert re.fullmatch(form["regex"], one["text"])
    free = choice_of(client, response_format={"type": "text"}, temperature=0, max_tokens=4)
    assert free["message"] == choice_of(client, temperature=0, max_tokens=4)["message"]


def test_a_stream_in_a_form(client):
    body = body_of(response_format=schema_form(PLACE | {"additionalProperties": False}), seed=5)
    whole = choice_of(client, **body)
    jsonschema.validate(json.loads(whole["message"]["content"]), PLACE)
    deltas = [event["choices"][0]["delta"] for event in events_of(client, "/v1/chat/completions", body)]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]


def call_fits(call):
    assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "wait-a-bit":
        assert arguments == {}
    else:
        assert name == "find_place"
        jsonschema.validate(arguments, PLACE | {"additionalProperties": False})
    return name


FORCED = {"type": "function", "function": {"name": "find_place"}}


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"find_place", "wait-a-bit"}), (FORCED, {"find_place"})], ids=["one", "named"]
)
def test_a_tool_that_must_be_called_is_called(client, choice, names):
    """The tiny model's template has no marks of calls. The arguments have no properties that the tool does not name."""
    seen = set()
    for seed in range(6):
        body = body_of(tools=[FIND, NOTHING], tool_choice=choice, seed=seed)
        answer = choice_of(client, **body)
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        [call] = answer["message"]["tool_calls"]
        seen.add(call_fits(call))
    assert seen == names
    events = events_of(client, "/v1/chat/completions", body)
    [streamed] = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", [])]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_with_tools_and_a_form_the_answer_is_a_call_or_has_the_form(client):
    form, kinds = {"type": "regex", "regex": "[xyz]{4}"}, set()
    for seed in range(12):
        message = choice_of(client, tools=[FIND], response_format=form, seed=seed)["message"]
        if "tool_calls" in message:
            call_fits(message["tool_calls"][0])
        else:
            assert re.fullmatch(form["regex"], message["content"])
        kinds.add("tool_calls" in message)
    assert kinds == {True, False}
    none = choice_of(client, tools=[FIND], tool_choice="none", response_format=form, seed=0)
    assert re.fullmatch(form["regex"], none["message"]["content"])


IMPOSSIBLE = {
    "false": False,
    "bounds": {"type": "integer", "minimum": 5, "maximum": 3},
    "required": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    "reference": {"$ref": "#/$defs/x"},
    "type": {"type": "nonsense"},
    "both": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "pattern": {"type": "string", "pattern": "("},
    "itself": {"$ref": "#"},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_schemas_are_refused(client, name):
    answer = client.post("/v1/chat/completions", json=body_of(response_format=schema_form(IMPOSSIBLE[name])))
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert "response_format" in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": [FIND], "tool_choice": FORCED | {"function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": []}}}]}
            | {"tool_choice": "required"},
            "tools",
        ),
    ],
)
def test_a_form_that_cannot_be_used_is_named(client, change, field):
    answer = client.post("/v1/chat/completions", json=body_of(**change))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
