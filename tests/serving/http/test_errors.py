"""Bad requests: the status, the field and the limit of each, and that the next request is answered."""

import json

import pytest
from fastapi.exceptions import RequestValidationError
from pdf_files import pdf
from pydantic import ValidationError
from server_cases import CHAT, CLASSES, COMPLETION, FILES, NAME, PARAMS, client_of, tiny_service
from tiny_text import TEMPLATE

from jshadow.serving.http.errors import validation_error
from jshadow.serving.http.schemas import CompletionRequest

BODY, UPLOAD = 12_000, 3000
HI = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    with (
        tiny_service(folder, waiting=4, body_bytes=BODY, upload_bytes=UPLOAD) as service,
        client_of(service, raise_server_exceptions=False) as client,
    ):
        yield client


def completion(**fields):
    return "POST", COMPLETION, {"json": {"model": NAME, "prompt": "Hi", "max_tokens": 2} | fields}


def chat(content="Hi", **fields):
    messages = [HI | {"content": content}]
    return "POST", CHAT, {"json": {"model": NAME, "messages": messages, "max_tokens": 2} | fields}


def part(**file):
    return chat([{"type": "file", "file": file}])


def sent(body, path=COMPLETION, kind="application/json"):
    return "POST", path, {"content": body, "headers": {"content-type": kind}}


def tool(function):
    head = json.dumps(chat()[2]["json"])[:-1]
    return sent(f'{head}, "tools": [{{"type": "function", "function": {function}}}]}}'.encode(), CHAT)


def upload(data, name="a.txt", **fields):
    return "POST", FILES, {"files": {"file": (name, data)}, "data": fields}


def formed(**form):
    return chat(response_format=form)


def schema(value):
    return formed(type="json_schema", json_schema={"name": "x", "schema": value, "strict": True})


def tooled(choice, **function):
    return chat(tools=[{"type": "function", "function": {"name": "f"} | function}], tool_choice=choice)


def called(arguments):
    """A chat with an earlier call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return "POST", CHAT, {"json": {"model": NAME, "messages": [HI, {"role": "assistant", "tool_calls": [call]}]}}


EMPTY = {"properties": {"a": {"enum": []}}}
ARGUMENTS = "messages.1.tool_calls.0.function.arguments"
PART = "response_format.json_schema"
FORM = ["response_format", "param=response_format", "short"]
LENGTH, MOST = "code=context_length_exceeded", "must be at most 64 after a prompt of"
CHAT_LENGTH = [f"max_completion_tokens {MOST} 20 tokens, got 65", LENGTH, "param=max_completion_tokens"]
LIMITS = [
    # a request, its status, and texts that its error must have, or its param or its code
    ("no prompt", completion(prompt=""), 400, ["prompt"]),
    ("no prompts", completion(prompt=[]), 400, ["prompt"]),
    ("no messages", chat(messages=[]), 400, ["messages"]),
    ("no content", chat(None), 400, ["messages.0.content"]),
    ("long prompt", completion(prompt=[5] * 321), 400, ["the prompt must have at most 320 tokens, got 321", LENGTH]),
    ("long chat", chat("x" * 500), 400, [str(CLASSES[-1].prompt)]),
    ("long answer", completion(max_tokens=65), 400, [f"max_tokens {MOST} 2 tokens, got 65", LENGTH]),
    ("long answer of a chat", chat(max_tokens=None, max_completion_tokens=65), 400, CHAT_LENGTH),
    ("id too large", completion(prompt=[1, 257]), 400, ["257"]),
    ("id below zero", completion(prompt=[-1]), 400, ["-1", "257"]),
    ("id of 70 bits", completion(prompt=[2**70]), 400, ["257"]),
    ("bias of no token", completion(logit_bias={"999": 1}), 400, ["999", "257"]),
    ("many biases", completion(logit_bias={str(i): 1 for i in range(9)}), 400, ["8", "9"]),
    ("temperature", completion(temperature=-1), 400, ["temperature", "-1"]),
    ("not a number", sent(b'{"model":"tiny","prompt":"a","temperature":NaN}'), 400, ["temperature", "nan"]),
    ("infinite", sent(b'{"model":"tiny","prompt":"a","top_p":1e999}'), 400, ["top_p", "inf"]),
    ("top logprobs alone", chat(top_logprobs=2), 400, ["param=logprobs"]),
    ("logprobs", completion(logprobs=21), 400, ["logprobs", "20", "21"]),
    ("n", completion(n=0), 400, ["n", "1"]),
    ("many prompts", completion(prompt=["a"] * 129), 400, ["128", "129"]),
    ("many stops", completion(stop=["a"] * 17), 400, ["stop", "16"]),
    ("long stop", completion(stop=["a" * 1025]), 400, ["stop", "1024"]),
    ("many answers", completion(prompt=["a"] * 9, n=16), 400, ["128", "9 prompts with n=16"]),
    ("no tokens of so many bytes", completion(prompt="x" * 9000), 400, ["bytes", f"{CLASSES[-1].capacity} tokens"]),
    ("no chat of so many bytes", chat("x" * 9000), 400, ["bytes", f"{CLASSES[-1].capacity} tokens"]),
    ("no stop", completion(stop=[""]), 400, ["stop"]),
    ("type of a field", completion(max_tokens="2"), 400, ["max_tokens"]),
    ("zero for false", completion(echo=0), 400, ["echo", "bool"]),
    ("one for true", completion(include_reasoning=1.0), 400, ["include_reasoning", "bool"]),
    ("true for one", completion(best_of=True), 400, ["best_of", "int"]),
    ("type of the body", sent(b"[1]"), 400, ["body"]),
    ("no body", sent(b""), 400, ["body"]),
    ("unknown field", completion(sea=1), 400, ["sea", "param=sea"]),
    ("unknown field of a chat", chat(sea=1), 400, ["sea", "param=sea"]),
    ("unknown fields", completion(**{str(i): 1 for i in range(1100)}), 400, ["1024", "1103"]),
    ("surrogate", sent(b'{"model":"tiny","prompt":"a","\\ud800":1}'), 400, ["ud800"]),
    ("surrogate prompt", sent(b'{"model":"tiny","prompt":"\\ud800"}'), 400, ["prompt"]),
    ("surrogate tool", tool('{"name": "a", "description": "\\ud800"}'), 400, ["tools"]),
    ("malformed", sent(b'{"model": '), 400, ["JSON"]),
    ("not UTF-8", sent(b'{"model": "\xff"}'), 400, []),
    ("deep", sent(b"[" * 5000), 400, []),
    ("long integer", sent(b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}"), 400, []),
    ("kind of body", sent(b"model=tiny", kind="application/x-www-form-urlencoded"), 400, ["body"]),
    ("another model", completion(model="other"), 404, ["model", "tiny", "other"]),
    ("oversized", sent(b" " * (BODY + 1)), 413, [str(BODY), str(BODY + 1)]),
    ("false schema", schema(False), 400, FORM),
    ("bounds of a schema", schema({"type": "integer", "minimum": 5, "maximum": 3}), 400, FORM),
    ("required of a schema", schema(EMPTY | {"type": "object", "required": ["a"]}), 400, FORM),
    ("reference of a schema", schema({"$ref": "#/$defs/x"}), 400, FORM),
    ("type of a schema", schema({"type": "nonsense"}), 400, FORM),
    ("both of a schema", schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), 400, FORM),
    ("pattern of a schema", schema({"type": "string", "pattern": "("}), 400, FORM),
    ("schema of itself", schema({"$ref": "#"}), 400, FORM[::2]),
    ("no schema", formed(type="json_schema"), 400, [PART, f"param={PART}"]),
    ("no expression", formed(type="regex"), 400, ["param=response_format.regex"]),
    ("expression", formed(type="regex", regex="("), 400, FORM),
    ("no tools", chat(tool_choice="required"), 400, ["tool_choice", "param=tool_choice"]),
    ("another tool", tooled({"type": "function", "function": {"name": "g"}}), 400, ["param=tool_choice"]),
    ("name of a tool", tooled("auto", name="a b"), 400, ["param=tools.0.function.name"]),
    ("a tool named as a special token", tooled("auto", name="<|end|>"), 400, ["param=tools.0.function.name"]),
    ("a forced tool named as a mark", tooled("required", name="<think>"), 400, ["param=tools.0.function.name"]),
    ("arguments that are cut", called('{"a": '), 400, [ARGUMENTS, f"param={ARGUMENTS}"]),
    ("arguments in a list", called("[1]"), 400, [ARGUMENTS, "[1]"]),
    ("arguments in Python", called("{'a': None}"), 400, [ARGUMENTS, "None"]),
    ("arguments of great depth", called("[" * 5000), 400, [ARGUMENTS, "short"]),
    ("impossible tool", tooled("required", parameters={"enum": []}), 400, ["param=tools"]),
    ("unknown file", part(file_id="file-0"), 404, ["file_id", "file-0"]),
    ("no file in a part", part(), 400, ["file_id", "file_data"]),
    ("damaged base64", part(file_data="%%"), 400, ["file_data", "base64"]),
    ("no base64", part(file_data="\x80"), 400, ["file_data", "base64"]),
    ("binary part", part(file_data="/////w=="), 400, ["UTF-8"]),
    ("name of a part", part(file_data="aGk=", filename=".."), 400, ["filename"]),
    ("no messages of tokenize", ("POST", "/tokenize", {"json": {"messages": []}}), 400, ["messages"]),
    ("both of tokenize", ("POST", "/tokenize", {"json": {"prompt": "a", "messages": [HI]}}), 400, ["prompt"]),
    ("detokenize", ("POST", "/detokenize", {"json": {"tokens": [257]}}), 400, ["tokens", "257"]),
    ("detokenize below zero", ("POST", "/detokenize", {"json": {"tokens": [-1]}}), 400, ["tokens", "-1"]),
    ("empty upload", upload(b""), 400, ["a.txt", "text"]),
    ("blank upload", upload(b" \n "), 400, ["a.txt", "text"]),
    ("binary upload", upload(b"\xff\x00\x80"), 400, ["a.txt", "UTF-8"]),
    ("encrypted upload", upload(pdf(password="secret"), "a.pdf"), 400, ["a.pdf", "encrypted"]),
    ("damaged PDF", upload(b"%PDF-1.7\nno more", "a.pdf"), 400, ["a.pdf", "PDF"]),
    (
        "long document",
        upload(b"x" * 1000),
        400,
        ["1006", f"at most {CLASSES[-1].prompt - 15} tokens", LENGTH, "param=file"],
    ),
    ("oversized upload", upload(b"x" * (UPLOAD + 1)), 413, ["file", str(UPLOAD)]),
    ("purpose", upload(b"The sea", purpose="fine-tune"), 400, ["purpose", "fine-tune"]),
    ("no name", upload(b"The sea", ".."), 400, ["filename"]),
    ("long name", upload(b"The sea", "a" * 201), 400, ["filename", "200"]),
    ("no file", ("POST", FILES, {"data": {"purpose": "user_data"}}), 400, ["file"]),
    ("text for a file", ("POST", FILES, {"data": {"file": "a"}}), 400, ["file"]),
    ("form without parts", sent(b"x", FILES, "multipart/form-data"), 400, []),
    ("id of a path", ("GET", FILES + "/..%2f..%2fetc%2fpasswd", {}), 404, []),
    ("id of dots", ("DELETE", FILES + "/%2e%2e", {}), 404, []),
    ("unknown id", ("GET", FILES + "/file-0/content", {}), 404, ["file-0"]),
    ("unknown path", ("GET", "/v2", {}), 404, []),
    ("method", ("GET", CHAT, {}), 405, ["GET", "POST"]),
    ("options", ("OPTIONS", CHAT, {}), 405, []),
    ("head", ("HEAD", FILES, {}), 405, []),
    ("put", ("PUT", FILES, {}), 405, ["PUT", "GET, POST"]),
]


def check_error(answer, texts):
    """Check OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"].endswith("_error")
    others = {f"param={error['param']}", f"code={error['code']}", "short" if len(error["message"]) < 200 else ""}
    assert all(text in error["message"] or text in others for text in texts), error


@pytest.mark.parametrize(("request_", "status", "texts"), [case[1:] for case in LIMITS], ids=[one[0] for one in LIMITS])
def test_a_bad_request_is_refused_and_the_next_one_is_answered(client, request_, status, texts):
    method, path, options = request_
    answer = client.request(method, path, **options)
    assert answer.status_code == status, answer.text
    if method != "HEAD":  # a response to it has no body
        check_error(answer, texts)
    method, path, options = completion()
    assert client.request(method, path, **options).status_code == 200


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
BAD_TEMPLATES = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "divides by zero": ("{{ 1 / 0 }}", "division by zero"),
    "needs a variable": ("{{ documents_of_mine.first }}", "documents_of_mine"),
    "needs a function": ("{{ f() }}", "'f'"),
    "needs a filter": ("{{ messages | wise }}", "wise"),
    "is cut": ("{% for m in messages %}", "endfor"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "loops": (LOOP.replace("BODY", ""), "does not come to an end"),
    "loops and writes": (LOOP.replace("BODY", "x"), "does not come to an end"),
    "has no default": ({"rag": TEMPLATE, "sql": TEMPLATE}, "must be named 'default', got ['rag', 'sql']"),
    "is not there": (None, "has no chat template"),
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_a_template_that_cannot_be_used_is_the_error_of_the_request(client, monkeypatch, name):
    """Of a chat, of a chat for /tokenize, and of an upload. Completions go on."""
    template, told = BAD_TEMPLATES[name]
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", template)
    for path, body in ((CHAT, {"model": NAME}), ("/tokenize", {}), (CHAT, {"model": NAME, "tools": TOOLS})):
        answer = client.post(path, json=body | {"messages": [HI]})
        assert answer.status_code == 400
        check_error(answer, [told, "param=messages"])
    answer = client.request("POST", FILES, **upload(f"It {name}.".encode())[2])
    if template is None:  # a document and a question are then plain text
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        check_error(answer, [told, "code=invalid_prompt"])
    assert client.request(*completion()[:2], **completion()[2]).status_code == 200


@pytest.mark.parametrize(
    "prompt", [[1] * 9999 + ["a"], ["a"] * 9999 + [1], [[1]] * 9999 + [["a"]], [[1, "a"]] * 9999, [[1.5]] * 9999]
)
def test_of_many_wrong_values_only_the_first_is_told(prompt):
    """The errors of a body of 16 MiB would take seconds and a gigabyte."""
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate({"model": NAME, "prompt": prompt})
    assert raised.value.error_count() <= 5
    assert len(str(validation_error(RequestValidationError(raised.value.errors())))) < 200
