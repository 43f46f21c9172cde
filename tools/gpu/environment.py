"""The environment variables that must be set before JAX is imported, and a description of the machine.

The module does not import JAX, except in `machine` and `bus_and_clocks`.
"""

import datetime
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.runner import NotHere
from jshadow.cache.system_memory import POOL_VARIABLE, available_memory

GIB = 2**30
HOST_MARGIN = 20 * GIB  # host memory that is left for the program itself, the compiler and the page tables
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "jax-gpu"
ENOUGH = 100 * GIB  # with this much available memory, growth is not probed
PROBES, PROBE_SECONDS = 8, 15
QUERY = (
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks.current.sm",
    "clocks.max.sm",
    "clocks.current.memory",
    "clocks.max.memory",
    "power.limit",
)
# The program touches pages up to a limit. While little memory is left, it waits for more. If memory runs out, the
# system kills it first.
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
    """Return the bytes that a program can still allocate, or 0 if it is unknown."""
    return available_memory() or 0


def grown_bytes(limit: int = ENOUGH, seconds: float = PROBE_SECONDS) -> int:
    """Return MemAvailable after short processes have touched `limit` bytes. Some machines grow only when used."""
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
    """Set XLA's pool of pinned memory, its share of device memory, and the folder of compiled programs.

    Variables that are already set are kept.

    Args:
        host_gib: size of the pool in GiB. None means the available memory minus HOST_MARGIN.
        probe: whether to test if the machine's memory grows when little is available.
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
        os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)  # a second name, and JAX accepts only one of the two
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))


def pool() -> int:
    """Return the bytes of the pool that `prepare` set."""
    return int(os.environ[POOL_VARIABLE]) * GIB


def answer(*command: str) -> str:
    """Return the first line that a command prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def machine(pool: int) -> dict[str, Any]:
    """Describe device, driver, versions, date, commit and the environment variables of XLA and JAX."""
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


def bus_and_clocks(copied: int) -> dict[str, Any]:
    """Return what nvidia-smi reports of the bus and the clocks, while `copied` bytes are copied to the device.

    An idle GPU lowers its clocks and the generation of its bus, so they are read while it works.

    Raises:
        NotHere: there is no nvidia-smi.
    """
    if not shutil.which("nvidia-smi"):
        raise NotHere("there is no nvidia-smi")
    import jax
    import numpy as np

    data = np.zeros(copied, np.uint8)
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    end = time.monotonic() + 20
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None and time.monotonic() < end:
            jax.block_until_ready(jax.device_put(data)).delete()
        process.kill()
        assert process.stdout is not None
        lines = process.stdout.read().strip().splitlines() or [""]
    values = [value.strip() for value in lines[0].split(",")]
    if len(values) != len(QUERY):
        return {"error": f"nvidia-smi: {lines[0]}"}
    return dict(zip(QUERY, values, strict=True))
