"""Uploaded files: their names and their text."""

import base64
import dataclasses
import logging
import unicodedata

from jshadow.errors import CheckpointError, ConfigError
from jshadow.library.library import read_document
from jshadow.library.pdf import Begun
from jshadow.serving.http.errors import ApiError
from jshadow.weights.convert.files import private_folder

_LOG = logging.getLogger(__name__)
_MOST_NAME = 200
_HIDDEN = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # they would change the order in which a name is shown


@dataclasses.dataclass(frozen=True)
class Upload:
    """A file that a client sent.

    Attributes:
        name: its name without folders. It is never used as a path.
        data: its bytes.
    """

    name: str
    data: bytes


def plain_name(name: str | None) -> str:
    """Return the last part of a name, for display. Raises ApiError if nothing is left, or it is too long."""
    last = (name or "").replace("\\", "/").rpartition("/")[2].strip()
    if not last or last in (".", "..") or len(last) > _MOST_NAME or not _HIDDEN.isdisjoint(last) or _has_controls(last):
        message = f"filename must have 1 to {_MOST_NAME} printable characters, got {name!r:.80}"
        raise ApiError(400, message, code="invalid_file", param="filename")
    return last


def _has_controls(name: str) -> bool:
    """Return whether a name has control characters, ends of lines or halves of surrogate pairs."""
    return any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name)


def text_of(upload: Upload, begun: Begun | None = None) -> str:
    """Return the text of a .txt, .md or .pdf file. Another ending counts as text.

    The bytes are written to a temporary file whose name does not depend on that of the upload, except its ending.
    `begun` is called with the process that reads a PDF.

    Raises:
        CheckpointError: the file has no text that can be read.
        ApiError: the system cannot keep or read the file, such as on a full disk.
    """
    name, data = upload.name, upload.data
    kind = ".pdf" if name.lower().endswith(".pdf") or data.startswith(b"%PDF-") else ".txt"
    try:
        with private_folder("jshadow-upload") as folder:
            path = folder / f"upload{kind}"
            path.write_bytes(data)
            try:
                return read_document(path, begun)
            except (CheckpointError, ConfigError) as error:
                if isinstance(error.__cause__, OSError):
                    raise not_kept(name, error.__cause__) from error
                raise type(error)(str(error).replace(str(path), f"the file {name!r:.80}")) from error
    except OSError as error:
        raise not_kept(name, error) from error


def not_kept(name: str, why: object) -> ApiError:
    """Return the error of a file for which the server has no room. The path of an OSError is only in the log."""
    _LOG.warning("the file %.80r cannot be kept: %s", name, why)
    why = why.strerror if isinstance(why, OSError) else why
    return ApiError(503, f"the file {name!r:.80} cannot be kept: {why}", code="storage_full", param="file")


def decoded(data: str) -> bytes:
    """Return the bytes of a file from base64, with or without the beginning of a data URL. Raises ApiError."""
    try:
        return base64.b64decode(data.partition(";base64,")[2] or data, validate=True)
    except ValueError as error:
        message = f"file_data must be base64: {error}"
        raise ApiError(400, message, code="invalid_file", param="file_data") from error
