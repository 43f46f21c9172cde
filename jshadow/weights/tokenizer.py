"""Texts as token ids and back, at any place of a sequence. It works the same way for every kind of tokenizer.

A tokenizer of SentencePiece (Llama 2, Mistral 7B, Phi-3) puts a blank before a text, and takes the first blank away
when it decodes. This is right for a whole sequence alone. A text that continues another one is encoded and decoded
behind a short text, whose tokens are then taken off. So nothing is added or lost at the border."""

import codecs
import functools
import io
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def mended(text: str) -> str:
    """Return a text without halves of surrogate pairs. Two halves of one pair become their character.

    Each other half becomes U+FFFD. Such halves come from PDF files, from JSON, and from bytes of the command line that
    are not UTF-8. No tokenizer takes them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_text(path: Path) -> str:
    r"""Return the text of a file in UTF-8, or in UTF-16 if it begins with the mark of that. Lines end with "\n".

    The mark of byte order is not part of the text. The file is read once, so it may be a pipe.

    Raises:
        OSError: the file cannot be read.
        UnicodeError: it is not such text.
    """
    data = path.read_bytes()
    with io.TextIOWrapper(io.BytesIO(data), encoding="utf-16" if data.startswith(_UTF16) else "utf-8-sig") as lines:
        return lines.read()


# Roles of messages, which templates put into marks.
_ROLES = ("system", "user", "assistant", "tool", "observation", "developer", "model", "human", "bot", "ipython")
# A text that goes before another one. The first one whose tokens do not merge with those of the text is used.
_BEHIND = ("\n", ".", "x", "\N{SECTION SIGN}")
_BYTE = "<0x[0-9A-F]{2}>"  # the name of a token that is one byte. Bytes that follow each other are decoded together


def encode(tokenizer: Any, text: str, *, begins: bool = False) -> list[int]:
    """Return the token ids of a text without special tokens around it, and without a warning about long texts.

    Args:
        text: the text. Halves of surrogate pairs in it are mended.
        begins: whether the text begins a sequence. If not, it continues one.
    """
    text = mended(text)
    for one in () if begins else _behind(tokenizer):
        found = _ids(tokenizer, one.text + text)
        if found[: len(one.ids)] == one.ids:
            return found[len(one.ids) :]
    return _ids(tokenizer, text)


def encode_plain(tokenizer: Any, text: str, *, begins: bool = False) -> list[int]:
    """Encode a text of a user. The texts of marks in it are plain text. `begins` is as in `encode`."""
    return encode_parts(tokenizer, split_specials(tokenizer, text), begins=begins)


def encode_parts(tokenizer: Any, parts: Sequence[str], *, begins: bool = True) -> list[int]:
    """Return the token ids of the parts of one text, which are encoded one by one.

    Args:
        parts: the parts, in order.
        begins: as in `encode`, for the first part.
    """
    ids = encode(tokenizer, parts[0], begins=begins)
    for part in parts[1:]:
        ids += encode(tokenizer, part)
    return ids


def split_specials(tokenizer: Any, text: str) -> list[str]:
    """Split a text inside each mark, behind its first character. The parts, encoded one by one, have no mark in them.

    A document or a message that has the text of a mark in it, such as "<|im_end|>", must not control the model. So its
    ids are those of plain text. The marks are the special tokens, and the added tokens that the chat template writes.
    """
    marks = _marks(tokenizer, str(getattr(tokenizer, "chat_template", None)))
    if marks is None:
        return [text]
    parts, begin = [], 0
    while found := marks.search(text, begin):
        parts.append(text[begin : found.start() + 1])
        begin = found.start() + 1
    return [*parts, text[begin:]]


def placeholder() -> str:
    """Return a text that stands for another one in a chat template. No text of a user has it, and no case changes it.

    It is at random, and its first character is nowhere else in it. So it is found where it was put, whatever is
    before and behind it.
    """
    return f"\N{SECTION SIGN}\N{PILCROW SIGN}{secrets.randbelow(10**20):020}\N{PILCROW SIGN}"


def decode(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of token ids that continue a sequence. The first blank is kept.

    Args:
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
    for text in _BEHIND:
        ids = encode(tokenizer, text, begins=True)
        names = tokenizer.convert_ids_to_tokens(ids)
        decodes = _text(tokenizer, ids) == text and not any(re.fullmatch(_BYTE, name) for name in names)
        found.append(_Before(text, ids, decodes))
    return tuple(found)


@functools.lru_cache(maxsize=32)
def _marks(tokenizer: Any, template: str) -> re.Pattern[str] | None:
    """Return a pattern of the texts that control the model, or None if there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    written = (token.content for token in added.values() if _writes(template, token.content))
    names = {name for name in (*special_tokens(tokenizer), *written) if len(name) > 1}
    return re.compile("|".join(map(re.escape, sorted(names)))) if names else None


def _writes(template: str, name: str) -> bool:
    """Return whether a chat template has the text of an added token, or what is around the name of a role in it.

    Blanks are text, though some tokenizers have added tokens for them.
    """
    whole = bool(name.strip()) and name in template
    around = (name.split(role) for role in _ROLES if role in name)
    return whole or any(all(part.strip() and part in template for part in parts) for parts in around)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _text(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))
