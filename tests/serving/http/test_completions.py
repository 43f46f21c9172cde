"""/v1/completions, /tokenize and /detokenize on the tiny model, against `generate` and plain NumPy."""

import dataclasses

import numpy as np
import pytest
from server_cases import (
    COMPLETION,
    END,
    NAME,
    PARAMS,
    client_of,
    events_of,
    log_softmax,
    logits_along,
    offline,
    posted,
    tiny_service,
)
from tokenizers_by_kind import sentencepiece

TEXT = "Where is the harbor?"
# Text that repeats has chunks with equal scores, and rounding would choose among them.
LONG = "".join(map(chr, np.random.default_rng(1).integers(32, 127, 110)))
IDS = PARAMS.tokenizer.encode(TEXT)


def post(client, **body):
    return posted(client, COMPLETION, **{"prompt": TEXT, "max_tokens": 8} | body)


def texts_of(client, **body):
    return [choice["text"] for choice in post(client, max_tokens=12, **body)["choices"]]


def letters(count):
    """The form of an answer of letters, each of which is a token of the tiny model."""
    return {"type": "regex", "regex": f"[a-z]{{{count}}}"}


@pytest.mark.parametrize("text", [TEXT, LONG], ids=["short", "long"])
def test_a_greedy_answer_is_that_of_generate(client, text):
    ids = PARAMS.tokenizer.encode(text)
    want = offline(ids, 12)
    counts = {"prompt_tokens": len(ids), "completion_tokens": len(want.tokens)}
    total = {"total_tokens": len(ids) + len(want.tokens), "prompt_tokens_details": {"cached_tokens": 0}}
    for prompt in (text, ids, [text], [ids]):
        answer = post(client, prompt=prompt, max_tokens=12, temperature=0)
        [choice] = answer["choices"]
        finish = "stop" if want.tokens[-1] == END else "length"
        assert (choice["text"], choice["finish_reason"]) == (want.text, finish)
        assert answer["usage"] == counts | total
        assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", NAME, "cmpl-")


def test_several_prompts_with_several_choices(client):
    prompts = ["Hello", "Good day", TEXT]
    answer = post(client, prompt=prompts, n=2, seed=5, temperature=0)
    want = [offline(PARAMS.tokenizer.encode(text), 8) for text in prompts]
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in want for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    new = 2 * sum(len(one.tokens) for one in want)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (sum(map(len, prompts)), new)


def test_a_stream_is_the_whole_answer(client):
    body = {"prompt": [TEXT, "Hello"], "max_tokens": 8, "n": 2, "seed": 3, "logprobs": 2}
    whole = post(client, **body)
    *events, last = events_of(client, COMPLETION, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None for event in events)
    assert len({event["id"] for event in (*events, last)}) == 1
    parts = [event["choices"][0] for event in events]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * 8 + [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [value for part in own[:-1] for value in part["logprobs"][name]] == values


def test_a_seed_draws_the_same_tokens_and_each_choice_others(client):
    texts = texts_of(client, n=4, seed=7)
    assert texts_of(client, n=4, seed=7) == texts
    assert len(set(texts)) == 4
    # Choice number c draws with the seed + c.
    assert [texts_of(client, seed=7 + c) for c in range(4)] == [[text] for text in texts]
    assert texts_of(client, seed=8, temperature=1.0) == texts[1:2]  # OpenAI's default
    assert len({texts_of(client)[0] for _ in range(3)}) == 3


def test_log_probabilities_are_those_of_the_model(client):
    """Neither the penalty nor the form changes them."""
    [choice] = post(client, logprobs=3, frequency_penalty=1.5, response_format=letters(8))["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    tokens = client.post("/tokenize", json={"prompt": choice["text"]}).json()["tokens"]
    want = log_softmax(logits_along(IDS, tokens, 8))
    np.testing.assert_allclose(told["token_logprobs"], want[range(8), tokens], atol=1e-4)
    for row, top in zip(want, told["top_logprobs"], strict=True):
        likely = {}
        for token in np.argsort(-row)[:3]:  # bytes that are no characters have one text, and the likeliest is told
            likely.setdefault(PARAMS.tokenizer.decode([token]), pytest.approx(row[token], abs=1e-4))
        assert top == likely
    assert told["text_offset"] == list(range(8))


def test_the_special_tokens_of_a_prompt(client):
    """The text of the end token is the end token, or seven bytes of plain text."""
    for split, count in ((False, 3), (True, 2 + len("<|end|>")), (None, 3)):
        answer = posted(client, "/v1/completions", prompt="a<|end|>b", split_special_tokens=split, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == count
    for add in (True, False, None):
        answer = posted(client, "/v1/completions", prompt="ab", add_special_tokens=add, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 2
    messages = [{"role": "user", "content": "Hi"}]
    posted(client, "/v1/chat/completions", messages=messages, add_special_tokens=False, max_tokens=1)


@pytest.mark.parametrize("blank", ["prepend", "first", "never"])
def test_an_answer_of_a_sentencepiece_model_continues_its_prompt(blank):
    """With its first blank. Its tokens and their offsets are the text, also in a stream."""
    tokenizer = sentencepiece(blank, None, size=253)
    [begins] = tokenizer.convert_tokens_to_ids(["\u2581the"])
    without_text = {*tokenizer.added_tokens_decoder, *range(len(tokenizer), END + 1)}  # marks, and the end
    with tiny_service(params=dataclasses.replace(PARAMS, tokenizer=tokenizer)) as service, client_of(service) as client:
        for seed, bias in enumerate(({str(begins): 100}, {}, {})):
            body = {
                "prompt": "the sea is",
                "seed": seed,
                "logprobs": 2,
                "logit_bias": dict.fromkeys(map(str, without_text), -100) | bias,
            }
            answer = post(client, **body)
            [choice] = answer["choices"]
            text, told = choice["text"], choice["logprobs"]
            assert text == " the" * 8 if bias else len(text) > 8
            assert "".join(told["tokens"]) == text
            ends = [*told["text_offset"][1:], len(text)]
            assert [text[begin:end] for begin, end in zip(told["text_offset"], ends, strict=True)] == told["tokens"]
            ids = tokenizer.encode(body["prompt"])
            assert answer["usage"]["prompt_tokens"] == len(ids)
            if bias:
                assert tokenizer.decode([*ids, *[begins] * 8], skip_special_tokens=True) == body["prompt"] + text
            events = [event["choices"][0] for event in events_of(client, COMPLETION, max_tokens=8, **body)]
            assert "".join(event["text"] for event in events) == text
            held = [event["logprobs"] for event in events if event["logprobs"]]
            for name in ("tokens", "text_offset"):
                assert [value for one in held for value in one[name]] == told[name]


def test_stop_strings_the_end_token_and_the_number_of_tokens(client):
    body = {"temperature": 1, "seed": 2, "max_tokens": 12, "response_format": letters(12)}
    text = post(client, **body)["choices"][0]["text"]
    end = text.index(text[4:6])
    for change, told in (
        (body | {"stop": text[4:6]}, (text[:end], "stop", end + 2)),
        (body | {"stop": [text[4:6], "~~~~"]}, (text[:end], "stop", end + 2)),
        ({"logit_bias": {"256": 100}}, ("", "stop", 1)),
    ):
        answer = post(client, **change)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == told
    answer = post(client, max_tokens=None, logit_bias={"256": -100})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


def test_tokenize_and_detokenize(client):
    assert posted(client, "/tokenize", prompt=TEXT) == {"tokens": IDS, "count": len(IDS), "max_model_len": 384}
    assert client.post("/detokenize", json={"tokens": IDS}).json() == {"prompt": TEXT}
    named = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", "\u0120", "b"]
    messages = [{"role": "user", "content": "Hi"}]
    chat = posted(client, "/tokenize", messages=messages)["tokens"]
    assert chat == PARAMS.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
