"""The description of this machine that stands beside every measured figure."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("jshadow", "jax", "jaxlib", "flax", "numpy", "transformers")


def machine() -> dict[str, str]:
    """Describe the hardware and the package versions. The result has no host name, user name or path."""
    import jax

    device = jax.devices()[0]
    facts = {"device": device.device_kind, "platform": device.platform, "devices": str(len(jax.devices()))}
    return facts | system() | {name: found or "not installed as a package" for name, found in versions().items()}


def system() -> dict[str, str]:
    """Return the processor, the operating system and the version of Python. JAX is not imported."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores",
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return the version of each package, or None if it is not installed as a package. Nothing is imported."""
    found = dict[str, str | None]()
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
