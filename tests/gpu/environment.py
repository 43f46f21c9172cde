"""What must be set before JAX is imported, and what the machine is. This module imports no JAX."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

GIB = 2**30
HOST_MARGIN = 12 * GIB  # of what the system has available: for the program itself, the compiler and the page tables
POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def available_bytes() -> int:
    """MemAvailable; 0 where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def prepare(out: Path, host_gib: float | None) -> int:
    """Set XLA's pool of pinned memory, its share of the device, and where compiled programs are kept.

    Args:
        out: folder of the results.
        host_gib: size of the pool; None: what is available less a margin. Some virtual machines are given their memory
            only as they use it, and show less at the start than they have.

    Returns:
        Bytes of the pool. A variable that is set already stays.
    """
    given = available_bytes() - HOST_MARGIN if host_gib is None else round(host_gib * GIB)
    os.environ.setdefault(POOL_VARIABLE, str(max(1, given // GIB)))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((out / "cache").resolve()))
    return int(os.environ[POOL_VARIABLE]) * GIB


def answer(*command: str) -> str:
    """First line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def machine(pool: int) -> dict[str, Any]:
    """Device, driver, versions, date and commit."""
    import jax
    import jaxlib
    from jax.extend import backend

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": device.device_kind, "platform": device.platform, "cuda": backend.get_backend().platform_version,
        "driver": driver, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "python": platform.python_version(), "cores": os.cpu_count(), "device_bytes": stats.get("bytes_limit"),
        "available_host_bytes": available_bytes(), "pool_bytes": pool,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": answer("git", "rev-parse", "--short", "HEAD"),
    }  # fmt: skip
