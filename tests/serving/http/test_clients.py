"""The official clients against a running server on SmolLM2: each answer is that of `generate` with the same split."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
import pytest
from real_server import ARGUMENTS, MODEL, ROOM, Truth, wait_ready
from server_cases import server_process

from jshadow.cli.demo_text import document

pytestmark = [pytest.mark.real, pytest.mark.process, pytest.mark.xdist_group("server")]
NODE = Path(__file__).resolve().parents[3] / ".cache" / "node"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def server(folder):
    with server_process(MODEL, *ARGUMENTS, "--library", str(folder)) as process:
        wait_ready(process)
        yield process


@pytest.fixture(scope="module")
def truth(folder, server):
    return Truth(folder)


@pytest.fixture
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(tokens, truth):
    """A part of the diary of about so many tokens, another for each number."""
    ids = truth.params.tokenizer.encode(document())
    return truth.params.tokenizer.decode(ids[tokens:][:tokens])


def chat_ids(truth, messages):
    return truth.params.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def file(server, truth):
    """A document of about 900 tokens in the library of the server: its id and its text."""
    import openai

    text = text_of(900, truth)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        return client.files.create(file=("diary.txt", text.encode()), purpose="user_data"), text


def about(file, question):
    return [
        {"role": "user", "content": [{"type": "file", "file": {"file_id": file}}, {"type": "text", "text": question}]}
    ]


def stored_ids(truth, text, question):
    """The prompt of `about`. The document is encoded alone."""
    tokenizer = truth.params.tokenizer
    [before, after] = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"@@@\n\n{question}"}], add_generation_prompt=True, tokenize=False
    ).split("@@@")
    return [token for part in (before, text, after) for token in tokenizer.encode(part)]


def assert_same(truth, got, want, ids):
    """The texts are equal, or part where two tokens are equally likely. Return whether they part."""
    if got == want.text:
        return False
    tokens = truth.params.tokenizer.encode(got)
    place = next(i for i, (one, other) in enumerate(zip(tokens, want.tokens, strict=False)) if one != other)
    import jshadow

    logits, _ = jshadow.prefill(
        truth.params, np.asarray([[*ids, *want.tokens[:place]]]), [len(ids) + place], capacity=2048
    )
    one, other = np.asarray(logits)[0, [tokens[place], want.tokens[place]]]
    assert abs(one - other) < 1e-3, (got, want.text)
    return True


def test_unequal_streams_at_once_are_the_answers_of_generate(server, truth, file, record_property):
    """A third asks about the stored document. The others are read as a whole, in both classes of rows."""
    import openai

    count, longest = 16, 700
    lengths = np.random.default_rng(count).permutation(np.geomspace(3, longest, count).astype(int)).tolist()
    rng, jobs = np.random.default_rng(count), []
    words = ["What", "Who", "When", "ship", "storm", "harbor", "keeper", "light", "boat", "winter"]
    for place, length in enumerate(lengths):
        new = int(rng.integers(4, 25))
        if place % 3 == 2:
            question = " ".join(rng.choice(words, 4)) + "?"
            jobs.append((about(file[0].id, question), stored_ids(truth, file[1], question), new))
        else:
            text = " ".join(rng.choice(words, 2)) + " " + text_of(length, truth)
            messages = [{"role": "user", "content": text}]
            jobs.append((messages, chat_ids(truth, messages), new))

    async def ask(client, messages, new):
        parts, usage = [], None
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": new}
        async for chunk in await client.chat.completions.create(model=MODEL.name, messages=messages, **options):
            parts += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        return "".join(parts), usage

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, messages, new) for messages, _, new in jobs))

    parted = 0
    for place, ((text, usage), (_, ids, new)) in enumerate(zip(asyncio.run(ask_all()), jobs, strict=True)):
        want, stored = truth.answer_stored(ids, new) if place % 3 == 2 else (truth.answer(ids, new), 0)
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (len(ids), stored), place
        parted += assert_same(truth, text, want, ids)
        assert parted or usage.completion_tokens == len(want.tokens)
    record_property("parted", parted)
    assert parted <= count // 16


def test_models_and_files(client, file):
    assert [model.id for model in client.models.list()] == [MODEL.name]
    assert client.models.retrieve(MODEL.name).object == "model"
    stored, _ = file
    assert (stored.filename, stored.purpose) == ("diary.txt", "user_data")
    assert stored.id in [one.id for one in client.files.list()]
    assert client.files.retrieve(stored.id).id == stored.id
    other = client.files.create(file=("b.md", b"# The keeper\nThe keeper is called Ingrid."), purpose="user_data")
    assert client.files.delete(other.id).deleted
    assert other.id not in [one.id for one in client.files.list()]


def test_a_chat_with_a_file(client, truth, file):
    answer = client.chat.completions.create(
        model=MODEL.name, messages=about(file[0].id, "Who keeps it?"), temperature=0, max_tokens=NEW
    )
    want, stored = truth.answer_stored(stored_ids(truth, file[1], "Who keeps it?"), NEW)
    assert answer.choices[0].message.content == want.text
    assert answer.usage.prompt_tokens_details.cached_tokens == stored > 800


def test_choices_and_log_probabilities(client, truth):
    settings = {"model": MODEL.name, "messages": QUESTION, "max_tokens": NEW, "logprobs": True, "top_logprobs": 2}
    first, again = (client.chat.completions.create(n=3, seed=5, **settings).choices for _ in range(2))
    texts = [choice.message.content for choice in first]
    assert texts == [choice.message.content for choice in again]
    assert len(set(texts)) == 3
    greedy = client.chat.completions.create(temperature=0, **settings).choices[0]
    assert greedy.message.content == france(truth).text
    for entry in greedy.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    text = client.completions.create(model=MODEL.name, prompt="The capital of France is", max_tokens=4, temperature=0)
    ids = truth.params.tokenizer.encode("The capital of France is")
    assert text.choices[0].text == truth.answer(ids, 4).text


class Town(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    sights: list[str] = pydantic.Field(max_length=2)


def test_an_answer_in_a_schema_and_a_tool(client):
    parsed = client.chat.completions.parse(
        model=MODEL.name, messages=QUESTION, response_format=Town, temperature=0, max_tokens=ROOM
    )
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].message.parsed.name in ("Paris", "Rome")
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    settings = {"model": MODEL.name, "messages": messages, "tools": [tool], "temperature": 0}
    choice = client.chat.completions.create(tool_choice="required", **settings).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert set(json.loads(call.function.arguments)) == {"city"}
    # The next turn, with the message as the client returned it.
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    with client.chat.completions.stream(
        **settings | {"messages": [*messages, choice.message, result]}, max_tokens=NEW
    ) as stream:
        final = stream.get_final_completion()
    assert final.usage is None or final.usage.completion_tokens
    assert final.choices[0].message.content


def france(truth):
    return truth.answer(chat_ids(truth, QUESTION), NEW)


def test_curl(server, truth):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {"model": MODEL.name, "messages": QUESTION, "max_tokens": NEW, "temperature": 0}
    command = ["curl", "-sS", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
    done = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == france(truth).text


def test_the_client_for_node(server, truth):
    if shutil.which("node") is None or not (NODE / "node_modules" / "openai").is_dir():
        pytest.skip("Node or its package openai is not installed: make test-slow installs the package if npm is there")
    script = str(Path(__file__).with_name("node_client.mjs"))
    command = ["node", script, str(NODE), server.url, MODEL.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told, want = json.loads(done.stdout), france(truth)
    assert (told["text"], told["usage"]["completion_tokens"]) == (want.text, len(want.tokens))
