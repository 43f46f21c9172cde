"""Texts as token ids and back, at any place of a sequence. It works the same way for every kind of tokenizer.

A tokenizer of SentencePiece (Llama 2, Mistral 7B, Phi-3) puts a blank before a text, and takes the first blank away
when it decodes. This is right for a whole sequence alone. A text that continues another one is encoded and decoded
behind a short text, whose tokens are then taken off. So nothing is added or lost at the border.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jshadow.errors import PromptError
from jshadow.weights.texts import mended

MARK = "\N{SECTION SIGN}\N{PILCROW SIGN}\N{SECTION SIGN}"  # a placeholder for a text in a chat template
# A text that goes before another one. The first one whose tokens do not merge with those of the text is used.
BEHIND = ("\n", ".", "x", "\N{SECTION SIGN}")
BYTE = "<0x[0-9A-F]{2}>"  # the name of a token that is one byte. Bytes that follow each other are decoded together


def encode(tokenizer: Any, text: str, *, begins: bool = False) -> list[int]:
    """Return the token ids of a text without special tokens around it, and without a warning about long texts.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text. Halves of surrogate pairs in it are mended.
        begins: whether the text begins a sequence. If not, it continues one.
    """

    def ids_of(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False, verbose=False))

    return ids_of(mended(text)) if begins else _continuing(tokenizer, ids_of, mended(text))


def encode_plain(tokenizer: Any, text: str, *, begins: bool = False) -> list[int]:
    """Encode a text of a user. The texts of special tokens in it are plain text. `begins` is as in `encode`."""
    return encode_parts(tokenizer, *split_specials(tokenizer, text), begins=begins)


def encode_parts(
    tokenizer: Any, parts: Sequence[str], between: Sequence[Sequence[int]], *, begins: bool = True
) -> list[int]:
    """Return the token ids of the parts of one text.

    Args:
        tokenizer: a tokenizer of transformers.
        parts: the N parts, in order.
        between: the token ids between each two parts, N - 1 lists.
        begins: as in `encode`, for the first part.
    """
    ids = encode(tokenizer, parts[0], begins=begins)
    for middle, part in zip(between, parts[1:], strict=True):
        ids += [*middle, *encode(tokenizer, part)]
    return ids


def split_specials(tokenizer: Any, text: str) -> tuple[list[str], list[list[int]]]:
    """Split a text at the texts of special tokens. Return the parts, and the token ids between each two of them.

    A document or a message that has the text of a special token in it, such as "<|im_end|>", must not control the
    model. So the ids are those of plain text.
    """
    if not any(token in text for token in _special_names(tokenizer)):
        return [text], []
    plain = _plain_specials(tokenizer)
    pattern = "|".join(re.escape(token) for token in sorted(plain, key=len, reverse=True))
    return re.split(pattern, text), [plain[found] for found in re.findall(pattern, text)]


def marked(tokenizer: Any, text: str, name: str) -> tuple[str, list[list[int]]]:
    """Put a mark for the text of each special token in a text, for a chat template.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text of a message.
        name: what the text is, in the error.

    Returns:
        The text with marks, and the token ids for each of them.

    Raises:
        PromptError: the text has a mark in it.
    """
    if MARK in text:
        raise PromptError(f"{name} must not have the text {MARK!r} in it, got {text!r:.80}")
    parts, between = split_specials(tokenizer, text)
    return MARK.join(parts), between


def decode(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of token ids that continue a sequence. The first blank is kept.

    Args:
        tokenizer: a tokenizer of transformers.
        ids: the token ids.
        special: whether the texts of special tokens are part of the text.
    """
    before = next((one for one in _behind(tokenizer) if one.decodes), None)
    if before is None:
        return _text(tokenizer, ids, special=special)
    return _text(tokenizer, [*before.ids, *ids], special=special).removeprefix(before.text)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return a mapping from the text of each special token to its id. Decoded text leaves these tokens out."""
    named = zip(getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ()), strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return dict(named) | {token.content: index for index, token in added.items() if token.special}


def opening(tokenizer: Any) -> list[int]:
    """Return the BOS token in a list if the tokenizer puts it before a plain text, or an empty list."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [token for token in tokenizer.encode("", add_special_tokens=True)[:1] if token == bos]


class _Before(NamedTuple):
    """A text that goes before another one, its token ids, and whether other ids can be decoded behind these."""

    text: str
    ids: list[int]
    decodes: bool = True


@functools.lru_cache(maxsize=8)
def _behind(tokenizer: Any) -> tuple[_Before, ...]:
    """Return what a text can be encoded and decoded behind. It is empty if a text has the same ids at every place."""
    words = [(word, encode(tokenizer, word, begins=True)) for word in ("x", " x")]
    if all(_text(tokenizer, ids * 2) == word * 2 for word, ids in words):
        return ()
    found = []
    for text in BEHIND:
        ids = encode(tokenizer, text, begins=True)
        names = tokenizer.convert_ids_to_tokens(ids)
        decodes = _text(tokenizer, ids) == text and not any(re.fullmatch(BYTE, name) for name in names)
        found.append(_Before(text, ids, decodes))
    return tuple(found)


@functools.lru_cache(maxsize=8)
def _special_names(tokenizer: Any) -> tuple[str, ...]:
    return tuple(special_tokens(tokenizer))


@functools.lru_cache(maxsize=8)
def _plain_specials(tokenizer: Any) -> dict[str, list[int]]:
    """The token ids of each special token's text as plain text that continues another one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend = type(backend).from_str(backend.to_str())  # other threads encode with `tokenizer` meanwhile
        backend.encode_special_tokens = True

    def ids_of(text: str) -> list[int]:
        if backend is not None:
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    return {name: _continuing(tokenizer, ids_of, name) for name in _special_names(tokenizer)}


def _continuing(tokenizer: Any, ids_of: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the token ids of a text that continues another one. `ids_of` returns those of a text alone."""
    for one in _behind(tokenizer):
        found = ids_of(one.text + text)
        if found[: len(one.ids)] == one.ids:
            return found[len(one.ids) :]
    return ids_of(text)


def _text(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))
