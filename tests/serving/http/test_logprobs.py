"""The texts, bytes and offsets of tokens in `logprobs`, for all kinds of tokenizers. No model is needed."""

import pytest
from tokenizers_by_kind import SENTENCEPIECE, TOKENIZERS

from jshadow.serving import Piece
from jshadow.serving.http.answers import TokenTexts, chat_logprobs, completion_logprobs
from jshadow.serving.requests import Logprobs
from jshadow.weights.tokenizer import encode

KINDS = SENTENCEPIECE | TOKENIZERS
TEXTS = [
    " today",
    "the sea is calm",
    "  two\n\nlines ",
    "\U0001f469\u200d\U0001f467 \u05e9\u05c1 e\u0301",
    "\ufffd?",
    "x\x00",
]


def pieces_of(ids):
    return [Piece("", token, Logprobs(-1.0, ((token, -1.0), (ids[0], -2.0)))) for token in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_offsets_of_a_completion_are_its_text(kind, text):
    """Also where tokens are parts of a character, and where the answer begins with a blank."""
    tokenizer = KINDS[kind]
    pieces = pieces_of(encode(tokenizer, text))
    told = completion_logprobs(pieces, TokenTexts(tokenizer))
    assert "".join(told["tokens"]) == text
    ends = [*told["text_offset"][1:], len(text)]
    assert [text[begin:end] for begin, end in zip(told["text_offset"], ends, strict=True)] == told["tokens"]
    texts, streamed = TokenTexts(tokenizer), [[], []]
    for piece in pieces:
        part = completion_logprobs([piece], texts)
        streamed[0] += part["tokens"]
        streamed[1] += part["text_offset"]
    assert streamed == [told["tokens"], told["text_offset"]]
    assert all(len(top) in (1, 2) for top in told["top_logprobs"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_of_a_chat_are_its_text(kind, text):
    content = chat_logprobs(KINDS[kind], pieces_of(encode(KINDS[kind], text)))["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    assert all(entry["token"] == entry["top_logprobs"][0]["token"] for entry in content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_is_named_and_moves_no_offset(kind):
    tokenizer = KINDS[kind]
    [end] = tokenizer.encode(tokenizer.eos_token, add_special_tokens=False)
    told = completion_logprobs(pieces_of([*encode(tokenizer, " a"), end, end]), TokenTexts(tokenizer))
    assert told["tokens"][-2:] == [tokenizer.eos_token] * 2
    assert told["text_offset"][-2:] == [2, 2]
