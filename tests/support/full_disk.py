"""A disk that is full, for this process."""

import contextlib
import resource


@contextlib.contextmanager
def file_size_limit(limit: int):
    """The kernel refuses to write beyond `limit` bytes of any file, as a full disk does (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
