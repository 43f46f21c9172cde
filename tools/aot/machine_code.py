"""Registers and instructions of CUDA kernels, counted on the machine code that NVIDIA's ptxas makes of their PTX.

The tools are the wheels nvidia-cuda-nvcc (ptxas) and nvidia-cuda-nvdisasm, which need neither a GPU nor a driver.
"""

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TOOLS = Path("nvidia/cu13/bin")  # where the wheels put the tools
REGISTERS = 65_536  # of a multiprocessor
UNITS = 8  # registers are given to the threads of a warp in units of this many
MOST_LOCAL = 256  # maximum bytes of spilled registers of a thread


class MachineCode(NamedTuple):
    """The machine code of one kernel.

    Attributes:
        registers: registers of a thread.
        shared: bytes of shared memory of a block that the kernel declares itself.
        instructions: instructions that a warp issues. Each loop counts as often as it runs.
        unknown_loops: number of loops whose number of runs could not be read from the code. They count once.
        spilled: bytes of registers that a thread stores in local memory.
        byte_loads: instructions in loops that load single bytes from device memory into registers.
        copies: instructions that copy from device memory to shared memory while the kernel goes on (cp.async).
        fences: instructions that wait until writes to memory are done (MEMBAR).
    """

    registers: int
    shared: int
    instructions: int
    unknown_loops: int
    spilled: int = 0
    byte_loads: int = 0
    copies: int = 0
    fences: int = 0

    def blocks_by_registers(self, threads: int) -> int:
        """Return how many blocks of `threads` threads the registers of a multiprocessor hold."""
        return REGISTERS // (-(-self.registers // UNITS) * UNITS * -(-threads // 32) * 32)


class Line(NamedTuple):
    """One instruction: its address, its text without the guard, and the label that stands before it, if any."""

    address: int
    text: str
    labels: tuple[str, ...]


class Loop(NamedTuple):
    """A loop by the indices of its first and last instruction, and how often it runs; None if that is not known."""

    first: int
    last: int
    runs: int | None


def tools_folder() -> str:
    """Return the folder of ptxas and nvdisasm. Raises FileNotFoundError if the wheels are not installed."""
    for root in sys.path:
        if (Path(root) / TOOLS / "ptxas").exists() and (Path(root) / TOOLS / "nvdisasm").exists():
            return str(Path(root) / TOOLS)
    raise FileNotFoundError(
        "ptxas and nvdisasm are missing; `make aot` installs nvidia-cuda-nvcc and nvidia-cuda-nvdisasm"
    )


@functools.cache
def machine_code(ptx: str, architecture: str, tools: str) -> MachineCode:
    """Assemble a PTX module with one kernel and count its instructions.

    Args:
        ptx: the module.
        architecture: such as "sm_90a".
        tools: the folder in which ptxas and nvdisasm lie.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [f"{tools}/ptxas", "-v", "--gpu-name", architecture, str(source), "-o", str(binary)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listing = subprocess.run([f"{tools}/nvdisasm", str(binary)], capture_output=True, text=True, check=True).stdout
    lines = lines_of(listing)
    found = loops_of(lines)
    counts = [1] * len(lines)
    for loop in found:
        for index in range(loop.first, loop.last + 1):
            counts[index] *= loop.runs or 1
    registers, shared, spilled = (
        int(match[1]) if (match := re.search(pattern, report)) else 0
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes spill stores")
    )
    unknown = sum(loop.runs is None for loop in found)
    return MachineCode(registers, shared, sum(counts), unknown, spilled, *memory_instructions(lines, found))


def lines_of(listing: str) -> list[Line]:
    """Return the instructions of a disassembly, without padding."""
    lines, labels = [], []
    for row in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", row):
            labels.append(label[1])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,6})\*/\s+((?:@!?U?P\w+\s+)?[A-Z][^;]*);", row):
            if not found[2].startswith("NOP"):
                lines.append(Line(int(found[1], 16), re.sub(r"^@!?U?P\w+\s+", "", found[2]).strip(), tuple(labels)))
            labels = []
    return lines


def memory_instructions(lines: list[Line], loops: list[Loop]) -> tuple[int, int, int]:
    """Return how many instructions are loads of bytes in loops, asynchronous copies, and fences, as in MachineCode."""
    names = [line.text.split()[0] for line in lines]
    inside = {index for loop in loops for index in range(loop.first, loop.last + 1)}
    loads = sum(re.match(r"LDG\b.*\.[US]8\b", names[index]) is not None for index in inside)
    return loads, sum(name.startswith("LDGSTS") for name in names), sum(name.startswith("MEMBAR") for name in names)


def loops_of(lines: list[Line]) -> list[Loop]:
    """Return the loops: backward branches, but not the branch to itself that ends each kernel."""
    at = {label: index for index, line in enumerate(lines) for label in line.labels}
    loops = []
    for index, line in enumerate(lines):
        branch = re.match(r"BRA\S*\s.*`\((\.L_x_\d+)\)", line.text)
        if branch and at.get(branch[1], index) < index:
            first = at[branch[1]]
            loops.append(Loop(first, index, runs_of(lines, first, index)))
    return loops


def runs_of(lines: list[Line], first: int, last: int) -> int | None:
    """Return how often the loop first .. last runs, if it counts a register by a constant up to a constant."""
    body = [line.text for line in lines[first : last + 1]]
    steps = {}
    for text in body:
        counted = re.match(r"U?(?:IADD3|VIADD|IADD)\s+(U?R\d+),(?:\s*!?U?PT,|\s*U?P\d,)*\s*\1,\s*(-?0x[0-9a-f]+)", text)
        if counted:
            steps[counted[1]] = int(counted[2], 16)
    for text in reversed(body):
        compared = re.match(r"U?ISETP\.(\w+)\S*\s+U?P\w,\s*U?PT,\s*(U?R\d+)\S*,\s*(-?0x[0-9a-f]+)", text)
        if compared and compared[2] in steps:
            step, start = steps[compared[2]], start_of(lines, first, compared[2])
            runs, rest = divmod(int(compared[3], 16) - start, step)
            if rest == 0 and runs > 0 and compared[1] in ("NE", "LT", "GE"):
                return runs
    # A loop that runs twice counts with one bit, which is cleared in its first run.
    flag = re.compile(r"PLOP3\.LUT (P\d), PT, (P\d), PT, PT, 0x80, 0x0")
    for copied in filter(None, map(flag.match, body)):
        if f"PLOP3.LUT {copied[2]}, PT, PT, PT, PT, 0x8, 0x0" in body:
            return 2
    return None


def start_of(lines: list[Line], first: int, register: str) -> int:
    """Return the constant that a register holds before instruction `first`; 0 if none is found."""
    number = re.escape(register)
    for line in reversed(lines[:first]):
        if constant := re.match(
            rf"(?:U?MOV|IMAD\.MOV\.U32)\s+{number},(?:\s*RZ,\s*RZ,)?\s*(0x[0-9a-f]+|U?RZ)", line.text
        ):
            return 0 if constant[1].endswith("RZ") else int(constant[1], 16)
        if re.match(rf"\S+\s+{number}\b", line.text):
            return 0
    return 0
