"""Chats and forms without a model: their token ids, and answers at random among the tokens that may follow."""

import dataclasses
import functools

import numpy as np
from serving_cases import END, PARAMS

from jshadow.serving.http.forms import form_of
from jshadow.serving.http.grammar import Grammars
from jshadow.serving.http.prompts import chat_ids
from jshadow.serving.http.schemas import ChatRequest
from jshadow.serving.requests import allowed_words

HI = [{"role": "user", "content": "Hi"}]
DEEP = {"type": "object", "properties": {"depth": {"type": "integer", "minimum": 3, "maximum": 40}}}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": DEEP | {"required": ["depth"]}}},
    {"type": "function", "function": {"name": "wait-a-bit"}},
]


def params_of(tokenizer, size=None, end=END):
    config = dataclasses.replace(PARAMS.config, vocab_size=size or len(tokenizer), eos_ids=(end,))
    return dataclasses.replace(PARAMS, config=config, tokenizer=tokenizer)


@functools.lru_cache(maxsize=4)
def grammars_of(tokenizer, size, end):
    return Grammars(params_of(tokenizer, size, end))


def drawn(tokenizer, grammar, seed=0, size=None, end=END, most=400):
    """Tokens at random, up to the end token."""
    grammars = grammars_of(tokenizer, size, end)
    size = grammars.params.config.vocab_size
    matcher, tokens, rng = grammars.matcher(grammar), [], np.random.default_rng(seed)
    while tokens[-1:] != [end] and len(tokens) < most:
        words = allowed_words(matcher, tokens, size)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        tokens.append(int(rng.choice(np.flatnonzero(bits))))
    return tokens


def form(tokenizer, template="", **body):
    return form_of(ChatRequest.model_validate({"model": "tiny", "messages": HI} | body), tokenizer, template)


TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
FOUND = {"place": "Kiel", "deep": {"ü": [1, None, "a\nb"]}}
IDS = "call_0123456789abcdef", "b12345678"


def turns(arguments):
    """A system text, a question, reasoning with two calls, their answers, and the next question."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "find", "arguments": arguments(given)}}
        for name, given in zip(IDS, (FOUND, {}), strict=True)
    ]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": IDS[0], "content": "On the left."},
        {"role": "tool", "tool_call_id": IDS[1], "content": "{}"},
        {"role": "assistant", "content": "On the left.", "reasoning_content": "Easy."},
        {"role": "user", "content": "And now?"},
    ]


def ids_of(tokenizer, messages, tools=None, check=lambda text: None, files=None, **switches):
    """The ids of the messages of a body, as the routes make them."""
    body = ChatRequest.model_validate({"model": "tiny", "messages": messages, "chat_template_kwargs": switches or None})
    return chat_ids(tokenizer, body.messages, files, tools, check, body.chat_template_kwargs)
