"""The process that reads a PDF file: `python -P pdf_worker.py PATH SECONDS BYTES PAGES CHARACTERS`.

It limits its own CPU seconds and memory before it parses. It imports nothing of jshadow, so that it starts quickly.
The text goes to stdout, and a refusal to stderr as one line. Then the exit status is REFUSED.
"""

import resource
import sys
from typing import Any

REFUSED = 3


class Refusal(Exception):
    """Why a file has no text for us."""


def text_of(file: Any, pages: int, characters: int) -> str:
    """Return the text of an open PDF file, with an empty line between pages. Raises Refusal."""
    import pypdf

    try:
        reader: Any = pypdf.PdfReader(file)
        if reader.is_encrypted:
            raise Refusal("must not be encrypted, got an encrypted PDF")
        if (count := len(reader.pages)) > pages:
            raise Refusal(f"must have at most {pages} pages, got {count}")
        texts, length = [], 0
        for page in reader.pages:
            texts.append(page.extract_text())
            length += len(texts[-1])
            if length > characters:
                raise Refusal(f"must have at most {characters} characters, got more after {len(texts)} pages")
        return "\n\n".join(texts)
    except (Refusal, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged PDF raises errors of many unrelated types
        raise Refusal(f"must be a PDF file, got one that does not parse: {error}") from error


def _main(path: str, seconds: int, memory: int, pages: int, characters: int) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        with open(path, "rb") as file:
            text = text_of(file, pages, characters)
    except Refusal as refusal:
        refused = " ".join(str(refusal).split())
    except MemoryError:
        refused = f"must be readable with {memory} bytes of memory, got a PDF that needs more"
    except OSError as error:
        refused = f"cannot be read: {error}"
    else:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
        return 0
    print(refused, file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    path, *limits = sys.argv[1:]
    sys.exit(_main(path, *map(int, limits)))
