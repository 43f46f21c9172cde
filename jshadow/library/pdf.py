"""Reads PDF files in a process of their own, because a small file can take hours or all memory to parse."""

import dataclasses
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jshadow.errors import CheckpointError, ConfigError
from jshadow.library import pdf_worker
from jshadow.weights.tokenizer import mended

Begun = Callable[["subprocess.Popen[bytes]"], None]


@dataclasses.dataclass(frozen=True)
class PdfLimits:
    """The limits of the reading of one PDF file."""

    seconds: int = 60  # of the CPU; the reading also stops after three times as many seconds of wall time
    memory: int = 2**31  # bytes of address space
    pages: int = 5000
    characters: int = 2**25


_LIMITS = PdfLimits()


def read_pdf(path: Path, limits: PdfLimits = _LIMITS, begun: Begun | None = None) -> str:
    """Return the text of a PDF file, with an empty line between pages.

    `begun` is called with the process that reads. Whoever kills it ends the reading with a CheckpointError. That is
    also raised if the file cannot be read, is encrypted or damaged, or exceeds the limits. Raises ConfigError without
    the package pypdf.
    """
    if importlib.util.find_spec("pypdf") is None:
        raise ConfigError(f"{path} needs the package pypdf: pip install 'jshadow[pdf]'")
    numbers = map(str, dataclasses.astuple(limits))
    command = [sys.executable, "-P", pdf_worker.__file__, str(path), *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            if begun is not None:
                begun(process)
            out, err = process.communicate(timeout=3 * limits.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise CheckpointError(f"{path} must be read within {3 * limits.seconds} seconds, it is not") from None
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return mended(out.decode("utf-8", "surrogatepass"))  # some files have halves of surrogate pairs
    lines = err.decode("utf-8", "replace").strip().splitlines()
    if process.returncode == pdf_worker.REFUSED:
        raise CheckpointError(f"{path} {lines[-1]}")
    if process.returncode == -signal.SIGXCPU or process.returncode == -signal.SIGKILL:
        raise CheckpointError(f"{path} must be read within {limits.seconds} CPU seconds, the reading was stopped")
    why = lines[-1] if lines else f"exit status {process.returncode}"
    raise CheckpointError(f"{path} must be a PDF file, got one that ends its reader: {why}")
