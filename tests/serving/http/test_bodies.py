"""The number of values of a JSON body is bounded before it is parsed."""

import json
import random
import string

import pytest
from server_cases import CHAT, COMPLETION, NAME, error_of

from jshadow.serving.http import access
from jshadow.serving.http.access import MOST_NESTED, MOST_VALUES, check_values
from jshadow.serving.http.errors import ApiError

AWKWARD = string.printable + '"\\,[]{}:é' * 5


def made(rng, depth):
    """A random value with awkward texts in it."""
    kind = rng.randrange(6 if depth else 4)
    text = "".join(rng.choices(AWKWARD, k=rng.randrange(8)))
    if kind < 4:
        return (text, rng.random(), None, rng.randrange(99))[kind]
    values = [made(rng, depth - 1) for _ in range(rng.randrange(5))]
    return values if kind == 4 else {f"{text}{index}": value for index, value in enumerate(values)}


def counted(value):
    """The values of a parsed text, with the names of objects, and its lists and objects."""
    if not isinstance(value, list | dict):
        return int(isinstance(value, str)), 0
    inner = [counted(one) for one in [*value, *(value.values() if isinstance(value, dict) else ())]]
    values, nested = (sum(numbers) for numbers in zip((0, 0), *inner, strict=True))
    return values + 1 + max(0, len(value) - 1), nested + 1


@pytest.mark.parametrize("ascii_only", [False, True])
def test_values_are_counted_as_a_parser_finds_them(monkeypatch, ascii_only):
    for seed in range(300):
        value = made(random.Random(seed), 3)
        data, (values, nested) = json.dumps(value, ensure_ascii=ascii_only).encode(), counted(value)
        monkeypatch.setattr(access, "MOST_VALUES", values)
        monkeypatch.setattr(access, "MOST_NESTED", nested)
        check_values(data)
        for limit, size in (("MOST_VALUES", values), ("MOST_NESTED", nested)):
            if size:
                with monkeypatch.context() as lower:
                    lower.setattr(access, limit, size - 1)
                    with pytest.raises(ApiError, match="lists and objects, got more"):
                        check_values(data)


MANY = {
    "lists": b"[1]," * MOST_NESTED,
    "objects": b'{"a":1},' * MOST_NESTED,
    "numbers": b"1," * MOST_VALUES,
    "texts": b'"",' * MOST_VALUES,
    "names": b'"":' * MOST_VALUES,
    "not JSON": b"[" * MOST_VALUES,
}


@pytest.mark.parametrize(
    ("path", "kind"),
    [*((CHAT, kind) for kind in MANY), *((path, "lists") for path in (COMPLETION, "/tokenize", "/detokenize"))],
)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(client, monkeypatch, path, kind):
    with monkeypatch.context() as never:
        never.setattr(access.json, "loads", lambda _: pytest.fail("it must not be parsed"))
        answer = client.post(path, content=b'{"prompt":[' + MANY[kind], headers={"content-type": "application/json"})
    assert error_of(answer) == (400, "body_too_large")
    assert str(MOST_VALUES) in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_a_body_in_another_encoding_is_refused(client, encoding):
    """The parser would read it, but its values are not counted: this one has a quote in the bytes of a letter."""
    text = '{"model": "' + NAME + '", "prompt": "\u2200", "list": [' + "[1]," * 10 + "0]}"
    answer = client.post(COMPLETION, content=text.encode(encoding), headers={"content-type": "application/json"})
    assert error_of(answer) == (400, None)
    assert "must be JSON in UTF-8" in answer.json()["error"]["message"]


def test_a_long_text_is_one_value(client):
    """It is refused for its length."""
    answer = client.post(COMPLETION, json={"model": NAME, "prompt": '["a\\",' * 2**20})
    assert error_of(answer) == (400, "context_length_exceeded")


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_to_tokenize_is_refused_for_its_length_before_it_is_encoded(client, service, monkeypatch, field):
    text = "!" * 2**20
    body = {"prompt": text} if field == "prompt" else {"messages": [{"role": "user", "content": text}]}
    with monkeypatch.context() as never:
        never.setattr(service.params.tokenizer, "encode", lambda *_, **__: pytest.fail("it must not be encoded"))
        answer = client.post("/tokenize", json={"model": NAME} | body)
    assert error_of(answer) == (400, "context_length_exceeded")
