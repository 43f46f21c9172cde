"""The sources of documents: token ids, texts, and text, Markdown or PDF files."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jshadow.engine.checks import check_ids
from jshadow.errors import CheckpointError, PromptError
from jshadow.library.pdf import Begun, read_pdf
from jshadow.ops.parts import deal, parse_part
from jshadow.weights.convert.files import readable
from jshadow.weights.params import Params
from jshadow.weights.templates import document_ids
from jshadow.weights.texts import mended, read_text

TEXTS, PDF = (".txt", ".md"), ".pdf"
Source = str | os.PathLike[str] | list[int] | tuple[int, ...] | np.ndarray


def paths_of_part(paths: Sequence[Path], part: str | None) -> list[Path]:
    """Return the documents that one of several processes reads, in the given order.

    Each file is in exactly one part if all processes get the same list. The files are sorted by name, and then dealt by
    their bytes (see `deal`). So neither their order matters, nor the folder in which a machine has them.

    Args:
        paths: all files.
        part: which part, such as "2/3". None means all files. With more parts than files, some parts are empty.

    Raises:
        ConfigError: `part` is not I/N with I from 1 to N.
        CheckpointError: a file is missing.
    """
    if part is None:
        return [*paths]
    ordered, sizes = sorted(set(paths), key=lambda path: (path.name, str(path))), []
    for path in ordered:
        with readable(path):
            sizes.append(path.stat().st_size)
    chosen = {ordered[place] for place in deal(sizes, parse_part(part))}
    return [path for path in paths if path in chosen]


def ids_of(source: Source, params: Params) -> tuple[np.ndarray, str]:
    """Return the token ids of a source, int32 [n], and a title.

    Args:
        source: token ids, a text, or the path of a .txt, .md or .pdf file. A text is placed where a document comes in
            the first message of a chat, if the tokenizer has a chat template.
        params: the model.

    Raises:
        PromptError: there are no tokens, an id is out of range, a text has no tokenizer, or a text is the name of a
            file.
        CheckpointError: a file is missing, of another kind, not UTF-8 text, or an encrypted, damaged or empty PDF.
        ConfigError: the package for PDF files is not installed.
    """
    if isinstance(source, str | os.PathLike):
        if params.tokenizer is None:
            raise PromptError(f"source must be token ids, because the checkpoint has no tokenizer; got {source!r:.80}")
        if isinstance(source, str):
            text, title = source, ""
        else:
            text, title = read_document(Path(source)), mended(Path(source).name)
        if "\n" not in text and text.lower().endswith((*TEXTS, PDF)):
            raise PromptError(f"source must be a pathlib.Path to be read as a file, got the text {text!r:.80}")
        return text_ids(text, params), title
    if not len(source):
        raise PromptError("source must have at least 1 token, got none")
    return check_ids(params.config, np.asarray(source), (None,), "source"), ""


def text_ids(text: str, params: Params) -> np.ndarray:
    """Return the token ids of a text as a document, int32 [n]. Texts of special tokens in it are plain text.

    Raises:
        PromptError: there is no text in it, or the chat template allows no document.
    """
    if not text.strip():
        raise PromptError(f"source must have text in it, got {text!r:.20}")
    return check_ids(params.config, document_ids(params.tokenizer, text), (None,), "source")


def read_document(path: Path, begun: Begun | None = None) -> str:
    """Return the text of a file. Raises CheckpointError or ConfigError as `ids_of` does. `begun`: as in `read_pdf`."""
    path = path.expanduser()
    kind = path.suffix.lower()
    if kind not in (*TEXTS, PDF):
        raise CheckpointError(f"{path} must be a .txt, .md or .pdf file, got {path.suffix or 'no ending'!r}")
    try:
        text = read_pdf(path, begun=begun) if kind == PDF else read_text(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except UnicodeError as error:
        raise CheckpointError(f"{path} must be UTF-8 text, got other bytes: {error}") from error
    if not text.strip():
        raise CheckpointError(f"{path} must have text in it, got none")
    return text
