"""Turning prompts into token ids, and token ids into text piece by piece. This needs only the tokenizer."""

import bisect
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from jshadow.engine.types import Chat, OnePrompt, Prompt
from jshadow.errors import ConfigError, PromptError
from jshadow.weights.templates import rendered
from jshadow.weights.tokenizer import (
    decode,
    encode_parts,
    encode_plain,
    mended,
    opening,
    placeholder,
    special_tokens,
    split_specials,
)
from jshadow.weights.tokenizer import encode as encode_text

UNFINISHED = "\ufffd"  # the decoded text of bytes that do not form a whole character yet


def _is_token_ids(prompt: object) -> TypeGuard[list[int] | tuple[int, ...] | np.ndarray]:
    """Whether prompt is one sequence of token ids."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(x, int | np.integer) for x in prompt)


def _is_chat(prompt: object) -> TypeGuard[Chat]:
    """Whether prompt is one chat: a list of messages."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(x, dict) for x in prompt)


def split_prompts(prompt: Prompt) -> tuple[list[OnePrompt], bool]:
    """Return the prompts of a call, and whether the call passed one prompt and not a list."""
    if isinstance(prompt, str) or _is_token_ids(prompt) or _is_chat(prompt):
        return [prompt], True
    if isinstance(prompt, list | tuple) and prompt:
        return cast("list[OnePrompt]", list(prompt)), False
    raise PromptError(f"prompt must be text, a chat, token ids, or a non-empty list of those, got {prompt!r:.80}")


def encode(
    tokenizer: Any,
    prompt: OnePrompt,
    vocab_size: int,
    *,
    after: int | None = None,
    plain: bool = False,
    special: bool = True,
) -> list[int]:
    """Return the token ids of one prompt.

    Args:
        tokenizer: a tokenizer of transformers, or None.
        prompt: text, a chat or token ids.
        vocab_size: all ids must be below it.
        after: the last token of the sequence that the prompt continues. Text then gets no special tokens, and a chat
            is the next turn of a conversation. None: the prompt begins a sequence. Text that has the first token of
            such a sequence in it, as a rendered chat has, does not get another one.
        plain: whether the texts of special tokens in a text are plain text, as they are in the messages of a chat.
        special: whether a text that begins a sequence gets the special tokens around it.

    Raises:
        PromptError: the prompt is empty, it is text but there is no tokenizer, it is a chat but there is no chat
            template, or an id is out of range.
    """
    if isinstance(prompt, str) or _is_chat(prompt):
        if tokenizer is None:
            raise PromptError("prompt must be token ids, because the checkpoint has no tokenizer; got text")
        if isinstance(prompt, str):
            ids = _text_ids(tokenizer, prompt, begins=after is None, plain=plain, special=special)
        else:
            ids = _encode_chat(tokenizer, prompt, after)
    elif _is_token_ids(prompt):
        if truths := [token for token in prompt if isinstance(token, bool)]:
            raise PromptError(f"prompt token ids must be integers, got {truths[0]}")
        ids = [int(token) for token in prompt]
    else:
        raise PromptError(f"prompt must be text, a chat or token ids, got {prompt!r:.80}")
    if not ids:
        raise PromptError(f"prompt must have at least 1 token, got {prompt!r:.80}")
    bad = [token for token in ids if not 0 <= token < vocab_size]
    if bad:
        raise PromptError(f"prompt token ids must lie in [0, vocab_size={vocab_size}), got {bad[0]}")
    return ids


def _text_ids(tokenizer: Any, text: str, *, begins: bool, plain: bool, special: bool) -> list[int]:
    """Return the token ids of a text. The arguments are those of `encode`."""
    if plain:
        return (opening(tokenizer) if begins and special else []) + encode_plain(tokenizer, text, begins=begins)
    if not begins or not special:
        return encode_text(tokenizer, text, begins=begins)
    ids, begin = list(tokenizer.encode(mended(text), add_special_tokens=True)), opening(tokenizer)
    return ids[1:] if begin and ids[:2] == begin * 2 else ids


def _encode_chat(tokenizer: Any, messages: list[dict], after: int | None = None) -> list[int]:
    """Return the token ids of a chat, formatted by the tokenizer's chat template, with the generation prompt.

    The texts of special tokens in the messages are plain text. Only those of the template control the model.
    """
    mark, plain = placeholder(), []
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise PromptError(f"prompt messages must have a text role and content, got {message!r:.80}")
        plain.append(message | {"content": mark.join(split_specials(tokenizer, message["content"]))})
    answer = placeholder()
    before = [] if after is None else [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    text = rendered(tokenizer, [*before, *plain])
    if after is not None:
        # Only the text after the answer continues the chat. The text before it repeats the beginning of a chat.
        _, separator, text = text.partition(answer)
        if not separator:
            raise PromptError("prompt continues a chat, but the template leaves earlier answers out; give text instead")
    parts = text.split(mark)
    if len(parts) != 1 + sum(message["content"].count(mark) for message in plain):
        raise PromptError("prompt has special tokens in a message, and the template leaves out or repeats messages")
    ids = encode_parts(tokenizer, parts, begins=after is None)
    return ids[1:] if ids[:1] == [after] else ids


def split_stops(stop: Any, tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop strings and the stop token ids of a `stop=` argument: a string, an id, or a sequence of these.

    A string that is a special token becomes its id, because decoded text has no special tokens.

    Raises:
        ConfigError: the argument has another type, a string is empty or contains a special token and other text, or
            there are strings but no tokenizer.
    """
    items = [] if stop is None else list(stop) if np.iterable(stop) and not isinstance(stop, str) else [stop]
    texts = [item for item in items if isinstance(item, str)]
    ids = [int(item) for item in items if isinstance(item, int | np.integer) and not isinstance(item, bool)]
    if len(texts) + len(ids) != len(items) or "" in texts:
        raise ConfigError(f"stop must be non-empty strings or token ids, got {stop!r}")
    if texts and tokenizer is None:
        raise ConfigError(f"stop must be token ids, because the checkpoint has no tokenizer; got {stop!r}")
    specials = special_tokens(tokenizer) if texts else {}
    for text in texts:
        inside = [token for token in specials if token in text]
        if inside and text not in specials:
            raise ConfigError(f"stop must not have the special token {inside[0]!r} beside other text, got {text!r}")
    ids += [specials[text] for text in texts if text in specials]
    return tuple(text for text in texts if text not in specials), tuple(ids)


class TextStream:
    """The text of one row while its tokens arrive. It has only whole characters, and ends before a stop string.

    Attributes:
        tokens: all tokens of the row.
        text: the text so far that no later token can change.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.tokens: list[int] = []
        self.decoded, self.text, self.stopped = "", "", False
        self._ends: list[int] = []  # where the text of each decoded token ends in `decoded`
        self._begin = self._done = 0  # tokens[_begin:_done] are decoded again, as the context of later tokens

    def push(self, token: int) -> str:
        """Add one token. Return the text that became final."""
        self.tokens.append(token)
        if self.tokenizer is None or self.stopped:
            return ""
        before = self._decode(self._begin, self._done)
        after = self._decode(self._begin, len(self.tokens))
        if after.endswith(UNFINISHED) or len(after) <= len(before):
            return ""
        begin = self._done
        self._add(after[len(before) :])
        self._begin = begin
        return self._release(final=False)

    def finish(self) -> str:
        """End the row. Return the text that was held back."""
        if self.tokenizer is None or self.stopped:
            return ""
        before = self._decode(self._begin, self._done)
        self._add(self._decode(self._begin, len(self.tokens))[len(before) :])
        self._begin = self._done
        return self._release(final=True)

    @property
    def held_back(self) -> bool:
        """Whether the newest tokens may be the beginning of a stop string. It is False if there are no stop strings."""
        waiting = len(self._ends) < len(self.tokens) or len(self.text) < len(self.decoded)
        return bool(self.stops) and waiting and not self.stopped

    def kept(self) -> int:
        """Return the number of tokens before the one in which the stop string begins; all if none was found."""
        return self.released() if self.stopped else len(self.tokens)

    def released(self) -> int:
        """Return the number of tokens before the one in which the text that is held back begins."""
        return bisect.bisect_right(self._ends, len(self.text))

    def _add(self, text: str) -> None:
        """Add the text of the tokens that were not yet decoded."""
        self.decoded += text
        self._ends += [len(self.decoded)] * (len(self.tokens) - len(self._ends))
        self._done = len(self.tokens)

    def _decode(self, begin: int, end: int) -> str:
        return decode(self.tokenizer, self.tokens[begin:end])

    def _release(self, *, final: bool) -> str:
        """Move decoded text to `text`, except an end that may become a stop string. Return the moved text."""
        # No stop string begins before this place: the text that could begin one is held back.
        begin = len(self.text)
        hits = [at for stop in self.stops if (at := self.decoded.find(stop, begin)) >= 0]
        if hits:
            self.decoded, self.stopped = self.decoded[: min(hits)], True
            end = len(self.decoded)
        else:
            tail = self.decoded[begin:]
            pending = 0 if final else max((overlap(tail, stop) for stop in self.stops), default=0)
            end = len(self.decoded) - pending
        new = self.decoded[len(self.text) : end]
        self.text += new
        return new


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`, but not all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
