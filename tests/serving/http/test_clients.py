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
from conftest import CHECKPOINT, REPO
from demo_text import document
from server_cases import about, server_process, until_ready

import jshadow
from jshadow.cli.serve import classes_of

pytestmark = [pytest.mark.real, pytest.mark.process, pytest.mark.xdist_group("server")]
NODE = REPO / ".cache" / "node"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW, CONTEXT, ROOM, SLOTS = 12, 2048, 128, 4
POLICY = jshadow.ShadowKV(rank=32, budget=256)
ARGUMENTS = (
    *("--dtype", "float32", "--policy", "shadowkv", "--set", "rank=32", "--set", "budget=256", "--fetch", "resident"),
    *("--max-context", str(CONTEXT), "--room", str(ROOM), "--slots", str(SLOTS)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def server(folder, smollm2_dir):
    with server_process(CHECKPOINT, *ARGUMENTS, "--library", str(folder)) as process:
        until_ready(process)
        yield process


@pytest.fixture(scope="module")
def truth(folder, server):
    return Truth(folder)


@pytest.fixture(scope="module")
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Truth:
    """The greedy answers of `generate`, with the documents of a server's library."""

    def __init__(self, folder):
        self.params = jshadow.load(CHECKPOINT, dtype="float32")
        self.encode = self.params.tokenizer.encode
        self.library = jshadow.Library(folder, self.params, POLICY, capacity=CONTEXT, fetch="resident")

    def answer(self, ids, new=NEW):
        """The answer after a prompt that is read as a whole."""
        capacity = min(one.capacity for one in classes_of(CONTEXT, ROOM, SLOTS) if one.prompt >= len(ids))
        settings = {"fetch": "resident", "capacity": capacity}
        return jshadow.generate(self.params, ids, POLICY, max_new_tokens=new, **settings)

    def answer_stored(self, ids, new):
        """The answer after a prompt that begins with a stored document, and the number of its stored tokens."""
        stored = self.library.longest(ids[:-1])
        state = self.library.load(stored.key).with_room(ROOM)
        return jshadow.generate(self.params, ids[stored.tokens :], max_new_tokens=new, state=state), stored.tokens

    def chat_ids(self, messages):
        return self.params.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def stored_ids(self, text, question):
        """The prompt of a question on a document, which is encoded alone."""
        messages = [{"role": "user", "content": f"@@@\n\n{question}"}]
        whole = self.params.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, after = whole.split("@@@")
        return [token for part in (before, text, after) for token in self.encode(part)]

    def text_of(self, tokens):
        """A part of the diary of about so many tokens, another for each number."""
        return self.params.tokenizer.decode(self.encode(document())[tokens:][:tokens])

    def parts(self, got, want, ids):
        """Whether the texts part, which they do only where two tokens are equally likely."""
        if got == want.text:
            return False
        tokens = self.encode(got)
        place = next(i for i, (one, other) in enumerate(zip(tokens, want.tokens, strict=False)) if one != other)
        prompt = np.asarray([[*ids, *want.tokens[:place]]])
        logits, _ = jshadow.prefill(self.params, prompt, [prompt.size], capacity=CONTEXT)
        one, other = np.asarray(logits)[0, [tokens[place], want.tokens[place]]]
        assert abs(one - other) < 1e-3, (got, want.text)
        return True


@pytest.fixture(scope="module")
def file(client, truth):
    """A document of about 900 tokens in the library of the server: its id and its text."""
    text = truth.text_of(900)
    return client.files.create(file=("diary.txt", text.encode()), purpose="user_data"), text


def test_unequal_streams_at_once_are_the_answers_of_generate(server, truth, file, record_property):
    """A third asks about the stored document. The others are read as a whole, in both classes of rows."""
    import openai

    count, longest = 16, 700
    rng, jobs = np.random.default_rng(count), []
    lengths = np.random.default_rng(count).permutation(np.geomspace(3, longest, count).astype(int)).tolist()
    words = ["What", "Who", "When", "ship", "storm", "harbor", "keeper", "light", "boat", "winter"]
    for place, length in enumerate(lengths):
        new = int(rng.integers(4, 25))
        if place % 3 == 2:
            question = " ".join(rng.choice(words, 4)) + "?"
            jobs.append((about({"file_id": file[0].id}, question), truth.stored_ids(file[1], question), new))
        else:
            text = " ".join(rng.choice(words, 2)) + " " + truth.text_of(length)
            messages = [{"role": "user", "content": text}]
            jobs.append((messages, truth.chat_ids(messages), new))

    async def ask(client, messages, new):
        parts, usage = [], None
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": new}
        async for chunk in await client.chat.completions.create(model=CHECKPOINT.name, messages=messages, **options):
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
        assert place % 3 != 2 or stored > 800
        parted += truth.parts(text, want, ids)
        assert parted or usage.completion_tokens == len(want.tokens)
    record_property("parted", parted)
    assert parted <= count // 16


def test_models_and_files(client, file):
    assert [model.id for model in client.models.list()] == [CHECKPOINT.name]
    assert client.models.retrieve(CHECKPOINT.name).object == "model"
    stored, _ = file
    assert (stored.filename, stored.purpose) == ("diary.txt", "user_data")
    assert stored.id in [one.id for one in client.files.list()]
    assert client.files.retrieve(stored.id).id == stored.id
    other = client.files.create(file=("b.md", b"# The keeper\nThe keeper is called Ingrid."), purpose="user_data")
    assert client.files.delete(other.id).deleted
    assert other.id not in [one.id for one in client.files.list()]


def test_choices_and_log_probabilities(client, truth):
    settings = {"model": CHECKPOINT.name, "messages": QUESTION, "max_tokens": NEW, "logprobs": True, "top_logprobs": 2}
    first, again = (client.chat.completions.create(n=3, seed=5, **settings).choices for _ in range(2))
    texts = [choice.message.content for choice in first]
    assert texts == [choice.message.content for choice in again]
    assert len(set(texts)) == 3
    greedy = client.chat.completions.create(temperature=0, **settings).choices[0]
    assert greedy.message.content == truth.answer(truth.chat_ids(QUESTION)).text
    for entry in greedy.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    prompt = "The capital of France is"
    text = client.completions.create(model=CHECKPOINT.name, prompt=prompt, max_tokens=4, temperature=0)
    assert text.choices[0].text == truth.answer(truth.encode(prompt), 4).text


class Town(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    sights: list[str] = pydantic.Field(max_length=2)


def test_an_answer_in_a_schema_and_a_tool(client):
    settings = {"model": CHECKPOINT.name, "temperature": 0}
    town = {"messages": QUESTION, "response_format": Town, "max_tokens": ROOM}
    [parsed] = client.chat.completions.parse(**settings, **town).choices
    assert parsed.finish_reason == "stop"
    assert parsed.message.parsed.name in ("Paris", "Rome")
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    settings |= {"tools": [tool]}
    [choice] = client.chat.completions.create(tool_choice="required", messages=messages, **settings).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert set(json.loads(call.function.arguments)) == {"city"}
    # The next turn, with the message as the client returned it.
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    settings |= {"tool_choice": "none"}  # the template knows no tools, so the model may not call one unforced
    with client.chat.completions.stream(messages=messages, max_tokens=NEW, **settings) as stream:
        final = stream.get_final_completion()
    assert final.usage is None or final.usage.completion_tokens
    assert final.choices[0].message.content


@pytest.mark.parametrize("program", ["curl", "node"])
def test_programs_of_the_system(server, truth, program):
    if shutil.which(program) is None or (program == "node" and not (NODE / "node_modules" / "openai").is_dir()):
        pytest.skip("not installed: make test-slow installs the package openai of Node if npm is there")
    body = {"model": CHECKPOINT.name, "messages": QUESTION, "max_tokens": NEW, "temperature": 0}
    words = ["-sS", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    if program == "node":
        words = [str(Path(__file__).with_name("node_client.mjs")), str(NODE), server.url, CHECKPOINT.name]
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told, want = json.loads(done.stdout), truth.answer(truth.chat_ids(QUESTION))
    text = told["text"] if program == "node" else told["choices"][0]["message"]["content"]
    assert (text, told["usage"]["completion_tokens"]) == (want.text, len(want.tokens))
    assert told.get("again", text) == text
