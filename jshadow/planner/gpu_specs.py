"""The published figures of the GPUs that the planner knows, and the rate at which a host gathers rows."""

import dataclasses
import math

from jshadow.errors import ConfigError, check_one_of
from jshadow.planner.limits import MemoryLimits

GIB = 2**30
XLA_SHARE = 0.75  # of a GPU's memory, which XLA takes when it starts
# Memory that the CUDA context, the loaded programs and the libraries' own workspaces take before any array exists.
CONTEXT_RESERVE = GIB // 2
_CUSTOM = "custom GPU"
# Bytes per second at which XLA gathers random rows on the host. XLA divides a gather among few threads: the square root
# of the number of cores, rounded up. On two cores of an AMD EPYC server (2026-11-24, jax 0.10.2), two threads
# gathered 10 GB/s in rows of 2,048 bytes, and 14 GB/s in rows of 528 bytes. The figure is for four threads, which XLA
# takes on 16 cores, and rows of 2,048 bytes.
HOST_GATHER = 20e9


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Published figures of one GPU.

    Attributes:
        name: its name on the command line.
        memory_bytes: the total that the driver reports to a program, which is less than the nominal size.
        hbm_bytes_per_second: bandwidth of device memory, also if it is GDDR.
        pcie_bytes_per_second: nominal bandwidth from the host, one way. A copy of scattered rows reaches only a part
            of it.
        flops: dense bfloat16 operations per second, with float32 sums.
        nvlink_bytes_per_second: bandwidth to the other GPUs of its host, one way. Without NVLink, it is that of PCIe.
        gather_bytes_per_second: rate at which the host gathers rows of one GPU for "device_put".
        host_limit: bytes of host memory that all requests together may take in one process. None: no limit.
    """

    name: str
    memory_bytes: int
    hbm_bytes_per_second: float
    pcie_bytes_per_second: float
    flops: float
    nvlink_bytes_per_second: float
    gather_bytes_per_second: float = HOST_GATHER
    host_limit: int | None = None

    @property
    def limits(self) -> MemoryLimits:
        """Its memory and that of its host."""
        return MemoryLimits(self.memory_bytes, self.host_limit, CONTEXT_RESERVE)


# PCIe x16, one way: half of the nominal 64 and 128 GB/s for both ways, minus the overhead of the 128b/130b code.
PCIE4, PCIE5 = 31.5e9, 63e9
# Bandwidths and operations are those of NVIDIA's data sheets and architecture white papers. If a sheet prints only
# operations with sparsity, the dense ones are half of them. The A100s are the SXM versions, and "h100" is H100 SXM.
# NVLink is half of the bandwidth that the sheets print, which is that of both ways: 600 GB/s (A100), 900 GB/s (H100 and
# H200) and 1,800 GB/s (B200). GPUs on PCIe cards count without it, as bridges join only two of them.
# Memory is the total that programs print on these GPUs, rounded down. It differs by about 0.1 GiB between drivers.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", int(39.3 * GIB), 1.555e12, PCIE4, 312e12, 300e9),
        Gpu("a100-80gb", int(79.1 * GIB), 2.039e12, PCIE4, 312e12, 300e9),
        Gpu("h100", int(79.1 * GIB), 3.35e12, PCIE5, 989.5e12, 450e9),
        Gpu("h100-pcie", int(79.1 * GIB), 2.0e12, PCIE5, 756.5e12, PCIE5),
        Gpu("h100-nvl", int(93.0 * GIB), 3.9e12, PCIE5, 835.5e12, PCIE5),
        Gpu("h200", int(139.8 * GIB), 4.8e12, PCIE5, 989.5e12, 450e9),
        Gpu("b200", int(178.3 * GIB), 7.7e12, PCIE5, 2250e12, 900e9),
        Gpu("l4", int(21.9 * GIB), 300e9, PCIE4, 121e12, PCIE4),
        Gpu("l40s", int(44.3 * GIB), 864e9, PCIE4, 362e12, PCIE4),
        Gpu("a10g", int(21.9 * GIB), 600e9, PCIE4, 70e12, PCIE4),
        Gpu("rtx-3090", int(23.5 * GIB), 936e9, PCIE4, 71e12, PCIE4),
        Gpu("rtx-4090", int(23.5 * GIB), 1.008e12, PCIE4, 165.2e12, PCIE4),
        Gpu("rtx-5090", int(31.3 * GIB), 1.792e12, PCIE5, 209.5e12, PCIE5),
        Gpu("rtx-6000-ada", int(47.3 * GIB), 960e9, PCIE4, 364.2e12, PCIE4),
    )
}
DEFAULT_GPUS = ("a100-80gb", "h100", "h200")


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name. Raises ConfigError if it is unknown. The message lists the known names."""
    check_one_of("gpu", name, list(GPUS))
    return GPUS[name]


def gpu_of_device(kind: str) -> Gpu | None:
    """Return the known GPU that JAX reports as `kind`, such as "NVIDIA H100 80GB HBM3", or None.

    Each word of the GPU's name must be a word of `kind`. If several names fit, the one with the most words is chosen.
    """
    words = set(kind.lower().replace("-", " ").split())
    known = [gpu for name, gpu in GPUS.items() if set(name.split("-")) <= words]
    return max(known, key=lambda gpu: len(gpu.name.split("-")), default=None)


def custom_gpu(
    base: Gpu | None,
    *,
    gib: float | None,
    bandwidth: float | None,
    link: float | None,
    tflops: float | None,
    nvlink: float | None = None,
) -> Gpu:
    """Return a GPU with the given figures.

    Args:
        base: the GPU from which figures that are None are taken. If it is None, all figures but nvlink must be given.
        gib: memory in GiB.
        bandwidth: bandwidth of device memory in GB/s (10^9 bytes per second).
        link: bandwidth from the host, one way, in GB/s.
        tflops: dense bfloat16 operations in 10^12 per second.
        nvlink: bandwidth to the other GPUs of its host, one way, in GB/s. Without a base, None stands for `link`.

    Raises:
        ConfigError: a figure is missing, not above 0, or not finite.
    """
    given = {"gpu-gib": gib, "bandwidth": bandwidth, "link": link, "tflops": tflops, "nvlink": nvlink}
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"--{name} must be above 0 and finite, got {value}")
    missing = [f"--{name}" for name, value in given.items() if value is None and name != "nvlink"]
    if base is None and missing:
        raise ConfigError(f"a GPU without --gpu needs all its figures, got none for {', '.join(missing)}")
    if base is None:
        base, nvlink = Gpu(_CUSTOM, 0, 0.0, 0.0, 0.0, 0.0), nvlink or link
    changes = {
        "memory_bytes": None if gib is None else int(gib * GIB),
        "hbm_bytes_per_second": None if bandwidth is None else bandwidth * 1e9,
        "pcie_bytes_per_second": None if link is None else link * 1e9,
        "flops": None if tflops is None else tflops * 1e12,
        "nvlink_bytes_per_second": None if nvlink is None else nvlink * 1e9,
    }
    changed = {name: value for name, value in changes.items() if value is not None}
    name = base.name if not changed or base.name == _CUSTOM else f"{base.name}, changed"
    return dataclasses.replace(base, name=name, **changed)  # type: ignore[arg-type]
