"""Descriptions of GPUs for the compiler. The numbers come from NVIDIA's data sheets and CUDA's device queries."""

from typing import NamedTuple


class Target(NamedTuple):
    """One GPU.

    Attributes:
        name: name that the driver reports.
        capability: CUDA compute capability (major, minor), and whether architecture-specific instructions are used.
        memory: bytes of device memory.
        bandwidth: bandwidth of device memory in bytes per second.
        cores: number of streaming multiprocessors.
        fpus: number of float32 units of a multiprocessor.
        clock: clock rate in GHz.
        l2: bytes of the second-level cache.
        shared_core: bytes of shared memory of a multiprocessor.
        shared_block: maximum bytes of shared memory of a block.
        products: multiplications and additions a second of the tensor cores on dense bfloat16 numbers.
    """

    name: str
    capability: tuple[int, int, bool]
    memory: int
    bandwidth: int
    cores: int
    fpus: int
    clock: float
    l2: int
    shared_core: int
    shared_block: int
    products: float

    @property
    def architecture(self) -> str:
        """Name of the architecture in PTX."""
        major, minor, specific = self.capability
        return f"sm_{major}{minor}{'a' if specific else ''}"

    def text(self) -> str:
        """Return the description of the GPU for XLA, a protocol buffer in text format."""
        major, minor, specific = self.capability
        features = "feature_extension: ACCELERATED_FEATURES" if specific else "feature_extension: NONE"
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_core,
            "shared_memory_per_block_optin": self.shared_block,
            "threads_per_core_limit": 2048,
            "core_count": self.cores,
            "fpus_per_core": self.fpus,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "device_address_bits": 64,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock,
            "device_memory_size": int(self.memory * ALLOCATED / ASSUMED),
        }
        lines = [f"  {key}: {value}" for key, value in numbers.items()]
        versions = [f'  {key}_version: "{value}"' for key, value in VERSIONS.items()]
        capability = f"  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}"
        body = "\n".join([*lines, capability, *versions, f'  name: "{self.name}"', "  ecc_enabled: true"])
        dnn = dict(zip(("major", "minor", "patch"), VERSIONS["dnn"].split("."), strict=True))
        told = " ".join(f"{key}: {value}" for key, value in dnn.items())
        return (
            f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\ndnn_version_info {{ {told} }}\n'
            f'device_description_str: "{self.name}"\n'
        )


# In a running process, XLA's scheduler uses the memory of the allocator (XLA_PYTHON_CLIENT_MEM_FRACTION, ALLOCATED
# here). Without an allocator it assumes the share ASSUMED of the device memory. Near that limit it saves memory and
# overlaps nothing. So the description has a device memory that makes both equal.
ALLOCATED, ASSUMED = 0.97, 0.8
HOST_MEMORY = 128 * 2**30  # host memory of a machine that the packed programs must fit into
CUDA = "13.0.0"
VERSIONS = {"driver": CUDA, "runtime": CUDA, "compile_time_toolkit": CUDA, "dnn": "9.10.0"}
TARGETS = {
    "a100-80gb": Target(
        "NVIDIA A100-SXM4-80GB",
        (8, 0, False),
        85_100_068_864,
        2_039_040_000_000,
        108,
        64,
        1.41,
        40 * 2**20,
        164 * 1024,
        163 * 1024,
        312e12,
    ),
    "h200": Target(
        "NVIDIA H200 141GB HBM3e",
        (9, 0, True),
        151_397_597_184,
        4_800_000_000_000,
        132,
        128,
        1.98,
        50 * 2**20,
        228 * 1024,
        227 * 1024,
        989e12,
    ),
}
