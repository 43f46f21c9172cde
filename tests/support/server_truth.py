"""What a server over the tiny model should answer: by `generate`, and step by step in plain NumPy."""

import json

import numpy as np
import row_oracle
from serving_cases import CLASSES, END, PARAMS, SHADOW
from transformers.convert_slow_tokenizer import bytes_to_unicode

import jshadow
from jshadow.engine.rows.settings import RowSettings
from jshadow.serving.classes import effective_policy

BYTES = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
BYTE_OF = [BYTES[symbol] for symbol in PARAMS.tokenizer.convert_ids_to_tokens(range(END))]


def capacity_of(prompt, new):
    return next(one.capacity for one in CLASSES if one.prompt >= prompt and one.room >= new)


def offline(ids, new, stop=None):
    """The greedy answer of `generate` at the capacity of the server's class."""
    return jshadow.generate(PARAMS, ids, SHADOW, max_new_tokens=new, stop=stop, capacity=capacity_of(len(ids), new))


def logits_along(ids, tokens, new):
    """The logits for each of the tokens that follow a prompt, float32 [len(tokens), V].

    The prompt is padded to one of two lengths, so that all tests share compiled programs.
    """
    capacity = capacity_of(len(ids), new)
    policy, _ = effective_policy(PARAMS.config, SHADOW, capacity)
    padded = np.pad([ids], ((0, 0), (0, (CLASSES[0].prompt if len(ids) <= CLASSES[0].prompt else 128) - len(ids))))
    logits, state = jshadow.prefill(PARAMS, padded, np.asarray([len(ids)]), policy, capacity=capacity)
    rows = [np.asarray(logits)[0]]
    for token in tokens[:-1]:
        logits, state = jshadow.decode_step(PARAMS, np.asarray([token]), state)
        rows.append(np.asarray(logits)[0])
    return np.stack(rows)


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def assert_drawn(ids, tokens, new, settings: RowSettings):
    """The tokens are those that the settings draw from the model's logits."""
    for step, logits in enumerate(logits_along(ids, tokens, new)):
        scores = row_oracle.change(settings, logits, list(ids), list(tokens[:step]))
        token, close = row_oracle.draw(settings, scores, step)
        assert close or token == tokens[step], step
        if close:
            return


def token_of(entry):
    """The token id of an entry of `logprobs`. A token of the tiny model is a byte, or the end."""
    return BYTE_OF.index(entry["bytes"][0]) if len(entry["bytes"]) == 1 else END


def chat_tokens(choice):
    return [token_of(entry) for entry in choice["logprobs"]["content"]]


def events_of(client, path, body):
    """The events of a stream, and whether it ended with "[DONE]"."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
