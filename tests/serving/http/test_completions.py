"""/v1/completions, /tokenize and /detokenize on the tiny model, against `generate` and plain NumPy."""

import numpy as np
import pytest
from server_cases import NAME, PARAMS
from server_truth import END, events_of, log_softmax, logits_along, offline

TEXT = "Where is the harbor?"
# Text that repeats has chunks with equal scores, and rounding would choose among them.
LONG = "".join(map(chr, np.random.default_rng(1).integers(32, 127, 110)))
IDS = PARAMS.tokenizer.encode(TEXT)


def post(client, **body):
    answer = client.post("/v1/completions", json={"model": NAME, "prompt": TEXT, "max_tokens": 8} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def letters(count):
    """The form of an answer of letters, each of which is a token of the tiny model."""
    return {"type": "regex", "regex": f"[a-z]{{{count}}}"}


@pytest.mark.parametrize("text", [TEXT, LONG], ids=["short", "long"])
def test_a_greedy_answer_is_that_of_generate(client, text):
    ids = PARAMS.tokenizer.encode(text)
    want = offline(ids, 12)
    for prompt in (text, ids, [text], [ids]):
        answer = post(client, prompt=prompt, max_tokens=12, temperature=0)
        [choice] = answer["choices"]
        finish = "stop" if want.tokens[-1] == END else "length"
        assert (choice["text"], choice["finish_reason"]) == (want.text, finish)
        assert answer["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": len(want.tokens),
            "total_tokens": len(ids) + len(want.tokens),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", NAME, "cmpl-")


def test_several_prompts_with_several_choices(client):
    prompts = ["Hello", "Good day", TEXT]
    answer = post(client, prompt=prompts, n=2, seed=5, temperature=0)
    want = [offline(PARAMS.tokenizer.encode(text), 8) for text in prompts]
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in want for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    usage = answer["usage"]
    new = 2 * sum(len(one.tokens) for one in want)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), new)


def test_a_stream_is_the_whole_answer(client):
    body = {"model": NAME, "prompt": [TEXT, "Hello"], "max_tokens": 8, "n": 2, "seed": 3, "logprobs": 2}
    whole = post(client, **body)
    events = events_of(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1
    parts = [event["choices"][0] for event in events[:-1]]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * 8 + [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [value for part in own[:-1] for value in part["logprobs"][name]] == values


def test_a_seed_draws_the_same_tokens_and_each_choice_others(client):
    first, again = (post(client, n=4, seed=7, max_tokens=12)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in again]
    assert len(set(texts)) == 4
    # Choice number c draws with the seed + c.
    assert [post(client, seed=7 + c, max_tokens=12)["choices"][0]["text"] for c in range(4)] == texts
    assert post(client, seed=8, temperature=1.0, max_tokens=12)["choices"][0]["text"] == texts[1]  # OpenAI's default
    free = {post(client, max_tokens=12)["choices"][0]["text"] for _ in range(3)}
    assert len(free) == 3


def test_log_probabilities_are_those_of_the_model(client):
    """Neither the penalty nor the form changes them."""
    [choice] = post(client, logprobs=3, prompt=LONG, frequency_penalty=1.5, response_format=letters(8))["choices"]
    ids, told = PARAMS.tokenizer.encode(LONG), choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    tokens = client.post("/tokenize", json={"prompt": choice["text"]}).json()["tokens"]
    want = log_softmax(logits_along(ids, tokens, 8))
    np.testing.assert_allclose(told["token_logprobs"], want[range(8), tokens], atol=1e-4)
    for row, top in zip(want, told["top_logprobs"], strict=True):
        likely = {}
        for token in np.argsort(-row)[:3]:  # bytes that are no characters have one text, and the likeliest is told
            likely.setdefault(PARAMS.tokenizer.decode([token]), pytest.approx(row[token], abs=1e-4))
        assert top == likely
    assert told["text_offset"] == list(range(8))


def test_stop_strings_and_the_end_token(client):
    body = {"temperature": 1, "seed": 2, "max_tokens": 12, "response_format": letters(12)}
    text = post(client, **body)["choices"][0]["text"]
    for stop in (text[4:6], [text[4:6], "~~~~"]):
        answer = post(client, **body, stop=stop)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[4:6])], "stop")
        assert answer["usage"]["completion_tokens"] == text.index(text[4:6]) + 2
    ended = post(client, logit_bias={"256": 100})
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert (ended["choices"][0]["text"], ended["usage"]["completion_tokens"]) == ("", 1)


def test_without_a_number_the_answer_has_16_tokens(client):
    answer = post(client, max_tokens=None, logit_bias={"256": -100})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_tokens": 65}, "max_tokens must be at most 64 after a prompt of 20 tokens, got 65"),
        ({"prompt": [5] * 321}, "the prompt must have at most 320 tokens, got 321"),
    ],
)
def test_what_exceeds_a_row_is_refused_with_both_numbers(client, change, told):
    answer = client.post("/v1/completions", json={"model": NAME, "prompt": TEXT} | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["code"]) == (400, told, "context_length_exceeded")


def test_fields_that_change_nothing_are_ignored_and_unknown_ones_are_named(client):
    ignored = {
        "user": "a",
        "safety_identifier": "a",
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "store": False,
    }
    assert post(client, temperature=0, **ignored)["choices"] == post(client, temperature=0)["choices"]
    answer = client.post("/v1/completions", json={"model": NAME, "prompt": TEXT, "use_beam_search": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search")


def test_tokenize_and_detokenize(client):
    tokens = client.post("/tokenize", json={"model": NAME, "prompt": TEXT}).json()
    assert tokens == {"tokens": IDS, "count": len(IDS), "max_model_len": 384}
    assert client.post("/detokenize", json={"tokens": IDS}).json() == {"prompt": TEXT}
    named = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", "\u0120", "b"]
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.post("/tokenize", json={"model": NAME, "messages": messages}).json()["tokens"]
    assert chat == PARAMS.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for bad in (257, -1):
        assert client.post("/detokenize", json={"tokens": [bad]}).status_code == 400
