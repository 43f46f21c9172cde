"""Texts from outside: files in the encodings that they come in, and strings that no encoding can express."""

import codecs
import io
from pathlib import Path

UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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
    with io.TextIOWrapper(io.BytesIO(data), encoding="utf-16" if data.startswith(UTF16) else "utf-8-sig") as lines:
        return lines.read()
