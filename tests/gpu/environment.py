"""What must be set before JAX is imported, and what the machine is. This module imports no JAX."""

import datetime
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

GIB = 2**30
HOST_MARGIN = 20 * GIB  # of what the system has available: for the program itself, the compiler and the page tables
POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "jax-gpu"
ENOUGH = 100 * GIB  # available at the start: more is not needed
PROBES, PROBE_SECONDS = 8, 15
# Touches pages up to a limit, waits while nearly nothing is left (more may come), and is killed before all others.
PROBE = """
import mmap, sys, time
from gpu.environment import GIB, available_bytes
limit, end, step = int(sys.argv[1]), time.monotonic() + float(sys.argv[2]), 2**26
try:
    open("/proc/self/oom_score_adj", "w").write("1000")
except OSError:
    pass
pages, block, done = mmap.mmap(-1, limit), b"x" * step, 0
while done + step <= limit and time.monotonic() < end:
    if available_bytes() < 3 * GIB:
        time.sleep(0.1)
        continue
    pages[done:done + step] = block
    done += step
"""


def available_bytes() -> int:
    """MemAvailable; 0 where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def grown_bytes(limit: int = ENOUGH, seconds: float = PROBE_SECONDS) -> int:
    """MemAvailable after short-lived processes touched `limit` bytes: some machines grow only by use."""
    command = [sys.executable, "-c", PROBE, str(limit // PROBES), str(seconds)]
    probes = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) for _ in range(PROBES)
    ]
    for probe in probes:
        try:
            probe.wait(seconds + 5)
        except subprocess.TimeoutExpired:
            probe.kill()
            probe.wait()
    return available_bytes()


def prepare(host_gib: float | None, probe: bool) -> None:
    """Set XLA's pool of pinned memory, its share of the device, and where compiled programs are kept.

    A variable that is set already stays.

    Args:
        host_gib: size of the pool; None: what is available less a margin.
        probe: where that is little, find out whether the machine's memory grows.
    """
    if POOL_VARIABLE not in os.environ:
        if host_gib is None:
            found = available_bytes()
            if probe and 0 < found < ENOUGH and shutil.which("nvidia-smi"):
                found = max(found, grown_bytes())
            host_gib = (found - HOST_MARGIN) / GIB
        os.environ[POOL_VARIABLE] = str(max(1, int(host_gib)))
    if FRACTION not in os.environ:
        os.environ[FRACTION] = "0.95"
        os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)  # its other name: JAX takes only one of them
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))


def pool() -> int:
    """Bytes of the pool that `prepare` set."""
    return int(os.environ[POOL_VARIABLE]) * GIB


def answer(*command: str) -> str:
    """First line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def machine(pool: int) -> dict[str, Any]:
    """Device, driver, versions, date, commit and the variables that XLA and JAX read."""
    import jax
    import jaxlib
    from jax.extend import backend

    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(("XLA_", "JAX_", "TF_"))}
    return variables | {
        "device": device.device_kind,
        "platform": device.platform,
        "cuda": backend.get_backend().platform_version,
        "driver": driver,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device_bytes": stats.get("bytes_limit"),
        "available_host_bytes": available_bytes(),
        "pool_bytes": pool,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": answer("git", "rev-parse", "--short", "HEAD"),
    }
