"""What the operating system and the environment say about the memory of this machine. JAX is not imported."""

import os
from pathlib import Path

GIB = 2**30
POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PREALLOCATE_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # of control groups of version 2 and 1
_NO_LIMIT = 2**60  # version 1 writes a number near 2**63 for no limit


def available_memory() -> int | None:
    """Return the bytes that a program can still allocate, or None if the system does not report them."""
    return _memory("MemAvailable", "SC_AVPHYS_PAGES")


def total_memory() -> int | None:
    """Return the bytes of this machine's memory, or None if the system does not report them."""
    return _memory("MemTotal", "SC_PHYS_PAGES")


def _memory(name: str, pages: str) -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(name)]
        return found[0] if found else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def group_limit(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes that the control group of this process may take, as in a container, or None without a limit.

    Args:
        groups: the folder in which the system shows its groups.
        own: the file with the groups of this process.
    """
    found = []
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds and "memory" not in kinds.split(","):
            continue
        top = groups / "memory" if kinds else groups
        place = top / path.strip("/")
        for folder in (place, *place.parents[: len(place.parts) - len(top.parts)]):
            found += [limit for name in _LIMIT_FILES if (limit := _number_in(folder / name)) is not None]
    return min(found, default=None)


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def locked_limit() -> int | None:
    """Return the bytes that this process may lock in memory (`ulimit -l`), or None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def pool_gib() -> int:
    """Return the maximum size of XLA's pool of pinned memory in GiB, from the environment variables.

    The defaults are those of XLA: 16 if the pool is preallocated, else 64.
    """
    preallocated = os.environ.get(PREALLOCATE_VARIABLE, "").strip().lower() in ("1", "true")
    try:
        return int(os.environ.get(POOL_VARIABLE, ""))
    except ValueError:
        return 16 if preallocated else 64
