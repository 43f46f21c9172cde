"""Compiles a jitted function for a GPU that this machine does not have, and reads XLA's program.

The devices of a topology have no memory kinds. So the function is lowered for the platform "cuda" with the shardings of
one CPU device, which has pinned host memory too. XLA's CUDA compiler then compiles the module. This needs the wheel
jax-cuda12-pjrt (jax 0.10) or jax-cuda13-pjrt (jax 0.11 and later), two private calls of JAX, and a private module of
JAX, from which the GPU's properties are read. Only this folder uses such parts of JAX.
"""

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax._src.pallas.triton import gpu_info
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax
from kernel_lowering import device_named

from aot.targets import TARGETS, VERSIONS
from jshadow.cache.records import HostArray
from jshadow.engine.step import COMPILER_OPTIONS

SIZES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
SHAPE = re.compile(r"\b(" + "|".join(SIZES) + r")\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line of HLO text.

    Attributes:
        name: name of the instruction.
        operation: its operation.
        result: type of its result.
        line: the whole line.
    """

    name: str
    operation: str
    result: str
    line: str

    @property
    def result_bytes(self) -> int:
        """Number of bytes of the largest array in the result."""
        return max((shape_bytes(match) for match in SHAPE.finditer(self.result)), default=0)

    @property
    def result_numbers(self) -> int:
        """How many numbers the largest array in the result has."""
        return max((shape_numbers(match) for match in SHAPE.finditer(self.result)), default=0)


def shape_bytes(match: re.Match) -> int:
    """Return the bytes of an array type such as bf16[8,128]."""
    return SIZES[match[1]] * shape_numbers(match)


def shape_numbers(match: re.Match) -> int:
    """Return how many numbers an array type such as bf16[8,128] has."""
    return int(np.prod([int(n) for n in match[2].split(",") if n], dtype=np.int64))


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        text: the optimized and scheduled module.
        memory: XLA's statistics: bytes of arguments, outputs, temporaries and aliases, on the device and on the host.
        modules: the assembly (PTX) of the kernels, one text for each module.
        thunks: what the program does when it runs, in order; XLA's dump.
        thunk_metadata: the HLO instruction of each thunk; XLA's dump.
        jaxpr: what was compiled, as JAX traced it.
    """

    text: str
    memory: Any
    modules: tuple[str, ...]
    thunks: str
    thunk_metadata: str
    jaxpr: Any

    @property
    def ptx(self) -> str:
        """The assembly of all kernels."""
        return "\n".join(self.modules)

    def entry(self) -> list[Instruction]:
        """Return the instructions of the entry computation in the order of the schedule."""
        return instructions(self.text[self.text.index("\nENTRY") :])

    def everything(self) -> list[Instruction]:
        """Return the instructions of all computations, including fused ones."""
        return instructions(self.text)

    def local_bytes(self) -> int:
        """Return the bytes of the largest array that a kernel keeps in local memory, which holds spilled registers."""
        return max((int(size) for size in re.findall(r"\.local\s.*?\[(\d+)\]", self.ptx)), default=0)

    def architectures(self) -> set[str]:
        """Return the target architectures of the assembly."""
        return set(re.findall(r"^\.target\s+(\w+)", self.ptx, re.MULTILINE))


def instructions(text: str) -> list[Instruction]:
    """Parse the lines of HLO text that define an instruction."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line)
        if match is None:
            continue
        result, rest = split_type(match[2])
        operation = re.match(r"\s*([\w-]+)\(", rest)
        if operation:
            found.append(Instruction(match[1], operation[1], result, line))
    return found


def split_type(text: str) -> tuple[str, str]:
    """Split the text of an instruction into its result type and the rest. The type of a tuple contains spaces."""
    if not text.startswith("("):
        return tuple(text.split(" ", 1))  # type: ignore[return-value]
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""


@functools.cache
def one_device() -> Mesh:
    """Return a mesh of the first CPU device, which has device and pinned host memory."""
    return Mesh(np.array(jax.devices("cpu")[:1]), ("x",))


def place(tree: Any, memory: str = "device") -> Any:
    """Return a tree of ShapeDtypeStructs with memory kinds. A HostArray keeps its own memory kind."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, HostArray):
            return HostArray(place(leaf.array, leaf.memory), leaf.memory)
        sharding = NamedSharding(one_device(), PartitionSpec(), memory_kind=memory)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, HostArray))


@contextlib.contextmanager
def with_cudnn(capability: tuple[int, ...]) -> Iterator[None]:
    """Return a context in which JAX takes cuDNN to be installed, and the GPU to have this compute capability."""

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    major, minor, patch = number(VERSIONS["dnn"])
    with (
        mock.patch.object(cudnn_attention, "check_cudnn_version", return_value=10_000 * major + 100 * minor + patch),
        mock.patch.object(cudnn_attention, "check_compute_capability", lambda least: capability >= number(least)),
        mock.patch.object(cudnn_attention, "is_cuda_compute_capability_equal", lambda one: capability == number(one)),
    ):
        yield


def compile_for(gpu: str, function: Callable, *args: Any, donate: tuple[int, ...] = (), devices: int = 1) -> Program:
    """Compile function(*args) for one of TARGETS. The args are trees from `place`, or sharded over several devices."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[gpu].text(), topology=f"1x1x{devices}"
    )
    jitted = jax.jit(function, donate_argnums=donate, keep_unused=True)
    with device_named(TARGETS[gpu].name), with_cudnn(TARGETS[gpu].capability[:2]), contextlib.ExitStack() as patches:
        if devices > 1:  # a shard_map over several devices names none, so Pallas would find no GPU in it
            known = gpu_info.get_gpu_info()
            patches.enter_context(mock.patch.object(gpu_info, "get_gpu_info", return_value=known))
        traced = jitted.trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as dump:
        options = _jax.CompileOptions()
        options.num_replicas, options.num_partitions = 1, devices
        if devices > 1:
            build = options.executable_build_options
            build.use_spmd_partitioning = build.use_shardy_partitioner = True
            build.num_replicas, build.num_partitions = 1, devices
            build.device_assignment = _jax.DeviceAssignment.create(np.arange(devices).reshape(1, devices))
        # The last option makes XLA write the assembly of kernels. The XLA of jax 0.10 does so without it.
        dumps = [("xla_dump_to", dump), ("xla_dump_hlo_as_text", True), ("xla_dump_emitter_re", ".*")]
        options.env_option_overrides = [*dumps, *COMPILER_OPTIONS.items()]
        listed = _jax.DeviceList(tuple(topology.devices))
        client = topology.devices[0].client
        compiled = client.compile(lowered._lowering.stablehlo(), listed, options)
        modules = tuple(path.read_text() for path in sorted(Path(dump).rglob("*.ptx")))
        thunks, unchanged, metadata = (
            "".join(path.read_text() for path in Path(dump).rglob(f"*{name}.txt"))
            for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence", "thunk_metadata")
        )
        thunks = thunks or unchanged  # the first is missing if no pass changed the sequence
    text = "\n".join(module.to_string() for module in compiled.hlo_modules())
    return Program(text, compiled.get_compiled_memory_stats(), modules, thunks, metadata, traced.jaxpr)
