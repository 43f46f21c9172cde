"""Files that a command reads and writes, checked before the model is loaded."""

import os
from pathlib import Path

from jshadow.errors import CheckpointError, PromptError
from jshadow.weights import tokenizer


def read_text(path: str, option: str) -> str:
    """Return the text of a file.

    Args:
        path: a file in UTF-8, or in UTF-16 with its mark of byte order; `~` is the home folder.
        option: the name of the file in error messages, such as "--text".

    Raises:
        PromptError: the file cannot be read, is not UTF-8 text, or has no text in it.
    """
    try:
        text = tokenizer.read_text(Path(path).expanduser())
    except (OSError, UnicodeError) as error:
        raise PromptError(f"{option} must be readable UTF-8 text: {error}") from error
    if "\0" in text:
        raise PromptError(f"{option} must be readable UTF-8 text, got a binary file: {path}")
    if not text.strip():
        raise PromptError(f"{option} must have text in it, got {text!r:.20}")
    return text


def check_writable(path: str | os.PathLike[str], option: str) -> None:
    """Raise CheckpointError if a file cannot be written at this path. A missing folder is not an error.

    Args:
        path: the file to be written; `~` is the home folder.
        option: the name of the file in error messages, such as "--out".
    """
    target = Path(path).expanduser()
    try:
        existing = next(folder for folder in target.absolute().parents if folder.exists())
        usable = not target.is_dir() and existing.is_dir() and os.access(existing, os.W_OK)
    except OSError:  # a name that is too long, or a folder that may not be read
        usable = False
    if not usable:
        raise CheckpointError(
            f"file {target} cannot be written: {option} must be a file in a directory that can be written to"
        )
