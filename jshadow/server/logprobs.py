"""Log-probabilities of tokens in OpenAI's two forms."""

from typing import Any

from jshadow.serving import Piece


def chat_logprobs(tokenizer: Any, pieces: list[Piece]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    return {"content": [_entry(tokenizer, piece) for piece in pieces], "refusal": None}


def _entry(tokenizer: Any, piece: Piece) -> dict[str, Any]:
    assert piece.logprobs is not None
    top = [_named(tokenizer, token, value) for token, value in piece.logprobs.top]
    return _named(tokenizer, piece.token, piece.logprobs.chosen) | {"top_logprobs": top}


def _named(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def completion_logprobs(tokenizer: Any, pieces: list[Piece], offset: int) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a completion. `offset` is the length of the text before the pieces."""
    tokens, offsets = [tokenizer.decode([piece.token]) for piece in pieces], []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    held = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return {
        "tokens": tokens,
        "token_logprobs": [one.chosen for one in held],
        "top_logprobs": [{tokenizer.decode([token]): value for token, value in one.top} for one in held],
        "text_offset": offsets,
    }
