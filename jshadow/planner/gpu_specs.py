"""The published figures of the GPUs that the planner knows. Nothing here was measured by this project."""

import dataclasses

from jshadow.errors import ConfigError

GIB = 2**30
# Memory that the CUDA context, the loaded programs and the libraries' own workspaces take before any array exists.
CONTEXT_RESERVE = GIB // 2


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Published figures of one GPU.

    Attributes:
        name: as on the command line.
        memory_bytes: as the driver reports it to a program, which is less than what the name says.
        hbm_bytes_per_second: device memory.
        pcie_bytes_per_second: from the host, one way, nominal; a copy of scattered rows reaches a part of it.
        flops: dense bfloat16 operations a second.
    """

    name: str
    memory_bytes: int
    hbm_bytes_per_second: float
    pcie_bytes_per_second: float
    flops: float


# Bandwidths and operations: NVIDIA's data sheets "A100 Tensor Core GPU" (80GB SXM), "H100 Tensor Core GPU" (SXM) and
# "H200 Tensor Core GPU" (SXM); the latter two print operations with sparsity, twice the dense ones. PCIe: x16 of
# generation 4 (A100) and 5, the data sheets' 64 and 128 GB/s both ways less 128b/130b coding, halved. Memory: the total
# that programs print on these GPUs (79.1, 79.1 and 139.8 GiB); some A100 show 0.1 GiB more.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80gb", int(79.1 * GIB), 2.039e12, 31.5e9, 312e12),
        Gpu("h100", int(79.1 * GIB), 3.35e12, 63e9, 989.5e12),
        Gpu("h200", int(139.8 * GIB), 4.8e12, 63e9, 989.5e12),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name. Raises ConfigError naming those that are known."""
    if name not in GPUS:
        raise ConfigError(f"gpu must be one of {list(GPUS)}, got {name!r}")
    return GPUS[name]
