"""What a compiled step launches on a GPU, in order, with the instructions and bytes of each launch.

XLA dumps the sequence of its thunks: kernels, copies, library calls, and command buffers (CUDA graphs) that hold them.
A kernel's bytes follow from its HLO instruction, and those of this project's kernels from their `pl.CostEstimate`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from aot.compiler import SHAPE, Instruction, Program, instructions, shape_bytes
from aot.machine_code import MachineCode, machine_code
from aot.targets import Target

THUNK = re.compile(r"( *)(\d+): (k\w+)\s+\[[^\]]*\] (.*)")
GRID = re.compile(r"(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")
READS_PART = ("gather", "dynamic-slice", "slice")  # operations that read only as much of an array as they return
ISSUES = 4  # instructions that a multiprocessor issues in a cycle, one for each of its schedulers


class Launch(NamedTuple):
    """One launch of a step.

    Attributes:
        name: name of the kernel or of the HLO instruction, without the number at its end.
        kind: XLA's kind of thunk, such as "kCustomKernel", "kCopy" or "kGemm".
        captured: whether it is in a command buffer.
        blocks: number of blocks of the grid; 0 if it is not a kernel.
        threads: threads of a block.
        shared: bytes of shared memory of a block.
        code: the machine code, or None if it is not a kernel.
        ours: whether it is a kernel of pallas_kernels.
        bytes: bytes of device memory that it reads and writes.
        host_bytes: bytes of host memory that it reads.
    """

    name: str
    kind: str
    captured: bool
    blocks: int = 0
    threads: int = 0
    shared: int = 0
    code: MachineCode | None = None
    ours: bool = False
    bytes: int = 0
    host_bytes: int = 0

    def blocks_per_core(self, target: Target) -> int:
        """Return how many blocks of the kernel run on a multiprocessor at once."""
        assert self.code is not None
        shared = self.shared + self.code.shared
        by_shared = target.shared_core // (shared + 1024) if shared else 32
        return min(self.code.blocks_by_registers(self.threads), by_shared, 2048 // max(32, self.threads), 32)

    def issue_seconds(self, target: Target) -> float:
        """Return the issue floor: the seconds that it takes to issue all instructions, if no warp ever waits."""
        if self.code is None or self.is_product:
            return 0.0
        warps = self.blocks * -(-self.threads // 32)
        return warps * self.code.instructions / (target.cores * ISSUES * target.clock * 1e9)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product of XLA. Its code is not counted: autotuning on a GPU chooses another."""
        return self.name.startswith("gemm_fusion") or self.kind in ("kGemm", "kCublasLtMatmul")


def launches_of(program: Program, architecture: str, tools: str) -> list[Launch]:
    """Return the launches of a program that was compiled with its thunks.

    Args:
        program: from `compile_for`.
        architecture: such as "sm_90a".
        tools: see `machine_code`.
    """
    modules = {found[1]: text for text in program.modules if (found := re.search(r"\.entry (\w+)", text))}
    notes = thunk_names(program.thunk_metadata)
    entry = {one.name: one for one in program.entry()}
    inside, costs = computations(program.text), kernel_costs(program.jaxpr)
    launches, buffer_indent = [], -1
    for row in program.thunks.splitlines():
        thunk = THUNK.match(row)
        if thunk is None:
            continue
        indent, number, kind, rest = len(thunk[1]), int(thunk[2]), thunk[3], thunk[4]
        if kind == "kCommandBuffer":
            buffer_indent = indent
            continue
        captured = 0 <= buffer_indent < indent
        if kind == "kSequential" or (kind == "kCopy" and notes.get(number) is None):
            continue
        instruction = entry.get(notes.get(number, ""))
        device, host = traffic(instruction, entry, inside, costs) if instruction else (0, 0)
        grid = GRID.match(rest)
        if grid is None:
            name = (instruction.name if instruction else rest.strip()) or kind
            launches.append(Launch(without_number(name), kind, captured, bytes=device, host_bytes=host))
            continue
        if grid[1] not in modules:
            raise LookupError(f"XLA wrote no assembly for the kernel {grid[1]!r}, only for {sorted(modules)}")
        code = machine_code(modules[grid[1]], architecture, tools)
        blocks, threads = (math.prod(int(grid[place]) for place in places) for places in ((2, 3, 4), (5, 6, 7)))
        ours = instruction is not None and "pallas_call" in instruction.line
        launches.append(
            Launch(without_number(grid[1]), kind, captured, blocks, threads, int(grid[8]), code, ours, device, host)
        )
    return launches


def without_number(name: str) -> str:
    """Return a name without the number that XLA puts at its end."""
    return re.sub(r"([._]+\d+)+$", "", name)


def thunk_names(metadata: str) -> dict[int, str]:
    """Return the HLO instruction of each thunk, by the thunk's number, from XLA's dump of thunk metadata."""
    found = {}
    for block in metadata.split("thunk_metadata {")[1:]:
        name, number = re.search(r'profile_annotation: "([^"]*)"', block), re.search(r"thunk_id: (\d+)", block)
        if name and number:
            found[int(number[1])] = name[1]
    return found


def computations(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each computation of a module, by the computation's name."""
    found = {}
    for block in re.split(r"\n(?=%|ENTRY )", text):
        name = re.match(r"(?:ENTRY )?%?([\w.-]+)", block)
        if name:
            found[name[1]] = instructions(block)
    return found


def operands_of(instruction: Instruction) -> list[str]:
    """Return the names of an instruction's operands."""
    start = instruction.line.index(f"{instruction.operation}(") + len(instruction.operation) + 1
    depth, end = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(instruction.line[end], 0)
        end += 1
    return re.findall(r"%([\w.-]+)", instruction.line[start : end - 1])


def all_bytes(result: str) -> int:
    """Return the bytes of all arrays in a result type."""
    return sum(shape_bytes(match) for match in SHAPE.finditer(result))


def traffic(
    instruction: Instruction,
    entry: Mapping[str, Instruction],
    inside: Mapping[str, list[Instruction]],
    costs: Mapping[Any, tuple[int, int]],
) -> tuple[int, int]:
    """Return the bytes of device memory and of host memory that an instruction moves.

    An operand that a fusion only slices or gathers from counts as much as is taken from it. A result that is an updated
    operand counts as much as is written.
    """
    shapes = tuple(entry[name].result.split("{")[0] for name in operands_of(instruction) if name in entry)
    if "pallas_call" in instruction.line and (known := costs.get(shapes)):
        return known
    operands = [entry[name] for name in operands_of(instruction) if name in entry]
    called = re.search(r"calls=%([\w.-]+)", instruction.line)
    if instruction.operation != "fusion" or called is None:
        return sum(all_bytes(one.result) for one in operands) + all_bytes(instruction.result), 0
    body = inside[called[1]]
    users: dict[str, list[Instruction]] = {}
    for one in body:
        for name in operands_of(one):
            users.setdefault(name, []).append(one)
    total = all_bytes(instruction.result)
    for one in body:
        if one.operation != "parameter":
            continue
        whole, uses = all_bytes(one.result), through_bitcasts(one.name, users)
        if uses and all(use.operation in READS_PART for use in uses):
            total += min(whole, sum(all_bytes(use.result) for use in uses))
        elif uses and all(use.operation in ("dynamic-update-slice", "scatter") for use in uses):
            written = sum(written_bytes(use, body) for use in uses)
            total += written - whole + written  # the result is this operand, changed in place
        else:
            total += whole
    return max(total, 0), 0


def through_bitcasts(name: str, users: Mapping[str, list[Instruction]]) -> list[Instruction]:
    """Return the instructions that use a value, also through bitcasts."""
    found = []
    for use in users.get(name, ()):
        found += through_bitcasts(use.name, users) if use.operation == "bitcast" else [use]
    return found


def written_bytes(update: Instruction, body: Iterable[Instruction]) -> int:
    """Return the bytes of the part that a dynamic-update-slice or a scatter writes."""
    by_name = {one.name: one for one in body}
    part = operands_of(update)[1 if update.operation == "dynamic-update-slice" else -1]
    return all_bytes(by_name[part].result)


# The costs of this project's kernels


def kernel_costs(jaxpr: Any) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return the device and host bytes of each Pallas kernel in a jaxpr, by the HLO types of its operands."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            cost = equation.params["cost_estimate"]
            shapes = tuple(hlo_type(variable.aval) for variable in equation.invars)
            found[shapes] = (cost.bytes_accessed, cost.remote_bytes_transferred) if cost else (0, 0)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= kernel_costs(inner)
    return found


def hlo_type(aval: Any) -> str:
    """Return the HLO type of an abstract array, without its layout."""
    names = {"bool": "pred", "bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "int8": "s8"}
    names |= {"uint8": "u8", "uint32": "u32", "uint16": "u16", "int16": "s16"}
    return f"{names[aval.dtype.name]}[{','.join(map(str, aval.shape))}]"
