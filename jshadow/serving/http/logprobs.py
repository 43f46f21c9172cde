"""Log-probabilities of tokens in OpenAI's two forms."""

import functools
import re
from typing import Any

from jshadow.engine.text import UNFINISHED, TextStream
from jshadow.serving import Piece
from jshadow.weights.tokenizer import decode


def chat_logprobs(tokenizer: Any, pieces: list[Piece]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    return {"content": [_entry(tokenizer, piece) for piece in pieces], "refusal": None}


def _entry(tokenizer: Any, piece: Piece) -> dict[str, Any]:
    assert piece.logprobs is not None
    top = [_named(tokenizer, token, value) for token, value in piece.logprobs.top]
    return _named(tokenizer, piece.token, piece.logprobs.chosen) | {"top_logprobs": top}


def _named(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = decode(tokenizer, [token], special=True)
    return {"token": text, "logprob": value, "bytes": list(bytes_of(tokenizer, token, text))}


def bytes_of(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token whose text is `text`. A part of a character has bytes, but no text."""
    if UNFINISHED not in text:
        return text.encode()
    name = tokenizer.convert_ids_to_tokens(token)
    if code := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes([int(code[1], 16)])
    table = byte_symbols()
    return bytes(table[symbol] for symbol in name) if all(symbol in table for symbol in name) else text.encode()


@functools.cache
def byte_symbols() -> dict[str, int]:
    """Return the byte that each symbol of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves. The others follow, in order, from U+0100 on.
    (Radford et al., GPT-2, 2019, section 2.2)
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenTexts:
    """The texts of the tokens of one answer, in order. Joined, they are the text of the answer.

    A part of a character has no text. The last part has that of the whole character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stream = TextStream(tokenizer)  # its text has no special tokens, as that of the answer

    def push(self, token: int) -> tuple[str, int]:
        """Return the text of the next token, and where it begins in the text of the answer. A special one is named."""
        offset = len(self.stream.text)
        text = self.stream.push(token)
        if not text and not decode(self.tokenizer, [token]):
            text = decode(self.tokenizer, [token], special=True)
        return text, offset


def completion_logprobs(pieces: list[Piece], texts: TokenTexts) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a completion.

    Args:
        pieces: the next tokens of the answer.
        texts: the texts of the answer's tokens. Those of the pieces are taken from it.
    """
    tokens, offsets, tops = [], [], []
    for piece in pieces:
        text, offset = texts.push(piece.token)
        tokens.append(text)
        offsets.append(offset)
    held = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    for one in held:
        top: dict[str, float] = {}
        for token, value in one.top:  # of tokens with one text, the likeliest stays
            top.setdefault(decode(texts.tokenizer, [token], special=True), value)
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [one.chosen for one in held],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
