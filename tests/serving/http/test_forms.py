"""Answers in a form: each fits its schema or its expression, whatever the model would rather write."""

import json
import re

import jsonschema
import numpy as np
import pytest
from few import slow
from server_cases import CHAT, COMPLETION, client_of, events_of, posted, tiny_service

from jshadow.serving import RowClass

MESSAGES = [{"role": "user", "content": "Where is it?"}]
PLACE = {
    "type": "object",
    "properties": {"town": {"$ref": "#/$defs/Town"}, "depth": {"type": "integer", "minimum": 3, "maximum": 40}},
    "required": ["town"],
    "$defs": {"Town": {"enum": ["Kiel", "Brest"]}},
}
FIND = {"type": "function", "function": {"name": "find_place", "description": "Finds it.", "parameters": PLACE}}
NOTHING = {"type": "function", "function": {"name": "wait-a-bit"}}
FORCED = {"type": "function", "function": {"name": "find_place"}}


@pytest.fixture(scope="module")
def client():
    with tiny_service(classes=(RowClass(32, 208, 4),)) as service, client_of(service) as client:
        yield client


def choice_of(client, **body):
    return posted(client, CHAT, messages=MESSAGES, **body)["choices"][0]


def schema_form(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][0-9]{2}$", "^(ab|cd)+x?$", r"^\d{4}-\d{2}$")
NAMES = ("name", "size", "a b", 'quote"', "größe", "x_1", "back\\slash", "t")
WORDS = ("red", "green", 'a "b"', "", "ü", "line\nend", 1, -2.5, True, None)


def random_schema(rng, depth=3, parts=("part0", "part1")):
    """A JSON schema that some value fits. The top is an object, an array or alternatives, and others refer to parts."""

    def some(values, most, least=0):
        return [values[place] for place in rng.permutation(len(values))[: rng.integers(least, most)]]

    def inner():
        return random_schema(rng, depth - 1, parts)

    if depth == 3 or (depth and rng.random() < 0.6):
        kind = rng.choice(("object", "object", "array", "anyOf"))
    elif parts and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(parts)}"}
    else:
        kind = rng.choice(("integer", "number", "string", "pattern", "enum", "const", "boolean"))
    low, least, width = int(rng.integers(-200, 200)), int(rng.integers(4)), int(rng.integers(6))
    schema = {"type": str(kind)}
    if kind == "object":
        names = some(NAMES, 4)
        required = [name for name in names if rng.random() < 0.6]
        schema |= {"properties": {name: inner() for name in names}, "required": required, "additionalProperties": False}
    elif kind == "array" and rng.random() < 0.2:
        schema |= {"prefixItems": [inner()], "items": False, "minItems": 1}
    elif kind == "array":
        schema |= {"items": inner(), "minItems": min(least, 2), "maxItems": min(least, 2) + width // 2}
    elif kind == "anyOf":
        schema = {"anyOf": [inner() for _ in range(rng.integers(1, 4))]}
    elif kind == "integer" and rng.random() < 0.5:
        schema |= {"minimum": low, "maximum": low + 2 + int(rng.integers(300))}
    elif kind == "integer":
        schema |= {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + int(rng.integers(300))}
    elif kind == "number":
        schema |= {"minimum": low / 20, "maximum": round(low / 20 + float(rng.uniform(0.5, 20)), 2)}
    elif kind == "string":
        schema |= {"minLength": least, "maxLength": least + width}
    elif kind == "pattern":
        schema = {"type": "string", "pattern": str(rng.choice(PATTERNS))}
    elif kind in ("enum", "const"):
        words = some(WORDS, 4, 1)
        schema = {"enum": words} if kind == "enum" else {"const": words[0]}
    elif rng.random() < 0.3:
        schema = {"type": ["boolean", "null"]}
    return schema


@pytest.mark.parametrize(("first", "count", "most_cut"), [(0, 12, 2), slow((1000, 80, 8))])
def test_answers_fit_their_schemas(client, first, count, most_cut):
    """Some answers end by their length."""
    cut = 0
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        parts = {f"part{index}": random_schema(rng, 1, ()) for index in range(2)}
        schema = random_schema(rng) | {"$defs": parts}
        choice = choice_of(client, response_format=schema_form(schema), seed=seed)
        if choice["finish_reason"] == "length":
            cut += 1
            continue
        assert choice["finish_reason"] == "stop"
        text = choice["message"]["content"]
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
        # No blanks but those after commas and colons, outside strings.
        assert "  " not in re.sub(r'"(\\.|[^"\\])*"', '""', text)
    assert cut <= most_cut


def test_other_forms(client):
    settings = {"response_format": {"type": "json_object"}, "logit_bias": {"125": 20}}  # towards "}", so that it ends
    answers = (choice_of(client, seed=seed, **settings) for seed in range(9))
    whole = next(answer for answer in answers if answer["finish_reason"] == "stop")
    assert isinstance(json.loads(whole["message"]["content"]), dict)
    form = {"type": "regex", "regex": r'(ab/|"x\n){3}[0-9]\.'}
    for seed in range(3):
        choice = choice_of(client, response_format=form, seed=seed)
        assert re.fullmatch(form["regex"], choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    for one in posted(client, COMPLETION, prompt="a", response_format=form, n=2)["choices"]:
        assert re.fullmatch(form["regex"], one["text"])
    free = choice_of(client, response_format={"type": "text"}, temperature=0, max_tokens=4)
    assert free["message"] == choice_of(client, temperature=0, max_tokens=4)["message"]


def test_a_stream_in_a_form(client):
    body = {"response_format": schema_form(PLACE | {"additionalProperties": False}), "seed": 5}
    whole = choice_of(client, **body)["message"]["content"]
    jsonschema.validate(json.loads(whole), PLACE)
    deltas = [event["choices"][0]["delta"] for event in events_of(client, CHAT, messages=MESSAGES, **body)]
    assert "".join(delta.get("content", "") for delta in deltas) == whole


def call_fits(call):
    """The arguments have no properties that the tool does not name."""
    assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    schema = {"wait-a-bit": {"const": {}}, "find_place": PLACE | {"additionalProperties": False}}[name]
    jsonschema.validate(arguments, schema)
    return name


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"find_place", "wait-a-bit"}), (FORCED, {"find_place"})], ids=["one", "named"]
)
def test_a_tool_that_must_be_called_is_called(client, choice, names):
    """The tiny model's template has no marks of calls."""
    seen = set()
    for seed in range(6):
        body = {"tools": [FIND, NOTHING], "tool_choice": choice, "seed": seed}
        answer = choice_of(client, **body)
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        [call] = answer["message"]["tool_calls"]
        seen.add(call_fits(call))
    assert seen == names
    events = events_of(client, CHAT, messages=MESSAGES, **body)
    [streamed] = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", [])]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stop", ["{", ['"', "\n"], ["a", "e", "i", "t"], "find_place"])
def test_stop_strings_do_not_count_in_a_call(client, stop):
    body = {"tools": [FIND], "tool_choice": "required", "seed": 3}
    want, answer = choice_of(client, **body), choice_of(client, **body, stop=stop, logprobs=True)
    assert answer["finish_reason"] == "tool_calls"
    [call], [told] = answer["message"]["tool_calls"], want["message"]["tool_calls"]
    assert call["function"] == told["function"]


def test_stop_strings_end_a_form_beside_tools(client):
    form = {"type": "regex", "regex": "[xyz]{2}[!;]abc"}
    answers = [
        choice_of(client, tools=[FIND], response_format=form, stop=["!", ";"], logprobs=True, seed=seed)
        for seed in range(8)
    ]
    contents = [answer["message"]["content"] for answer in answers if answer["message"]["content"]]
    assert contents
    assert all(re.fullmatch("[xyz]{2}", content) for content in contents)
    for answer in answers:
        said = "".join(entry["token"] for entry in answer["logprobs"]["content"])
        assert "tool_calls" in answer["message"] or said[:-1] == answer["message"]["content"]


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
