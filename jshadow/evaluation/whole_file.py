"""Writing a file completely or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jshadow.errors import ConfigError


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` when the block ends. If it fails, the file is removed.

    Raises:
        ConfigError: the file cannot be written. The message begins with `what`.
    """
    target = Path(path)
    part = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"{what} must be a file that can be written, got {str(path)!r}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
