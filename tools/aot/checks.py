"""The programs of `make aot`, what each is checked for, and the calls that its processes share out."""

import functools
import time
from collections.abc import Iterator

from aot import programs
from aot.compiler import Program, compile_for
from aot.compression import Work, compressions
from aot.cycles import cycle_tasks, target_faults
from aot.machine_code import MOST_LOCAL, tools_folder
from aot.pools import pool_tasks
from aot.prefill_kernel import KernelTable, kernel_table
from aot.product_kernel import ProductTable, product_tables
from aot.programs import ReadLayer, Task
from aot.shared import copies_of, shared_tasks
from aot.step_table import Setting, StepTable, step_table
from aot.targets import HOST_MEMORY, TARGETS
from jshadow.planner.bytes import full_bytes
from jshadow.policies import ShadowKV

MOST_TEMPORARIES = 2**24  # maximum temporary bytes of a program that moves a row
PACKED, PACKED_BATCH = "Llama-3.1-8B, shadowkv packed small", 50  # the setting of the paper has half this batch
# Operations that may have the prompt's values as their result, because they copy nothing.
HARMLESS = {"parameter", "tuple", "get-tuple-element", "bitcast", "custom-call", "custom-call-start"}


def biggest_copy(program: Program) -> int:
    """Return the bytes of the largest array that a copy operation copies."""
    return max((i.result_bytes for i in program.everything() if i.operation in ("copy", "copy-start")), default=0)


def overlaps(program: Program) -> tuple[int, int]:
    """Count the host fetches, and those of them that overlap with rebuilding the keys of their layer."""
    began, total, good, rebuilt = False, 0, 0, False
    for one in program.entry():
        if one.operation == "custom-call-start" and "HostExecute" in one.line:
            began, rebuilt, total = True, False, total + 1
        elif began and "rebuild" in one.line and one.operation in ("custom-call", "fusion"):
            rebuilt = rebuilt or "reconstruct_keys" in one.line or "dot" in one.name
        elif one.operation == "custom-call-done" and "host-call" in one.name:
            good, began = good + (began and rebuilt), False
    return total, good


def used(program: Program) -> int:
    """Return the device bytes of a running program: arguments, temporaries, and results that reuse no argument."""
    memory = program.memory
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + max(0, fresh)


def read_faults(read: ReadLayer, program: Program) -> Iterator[str]:
    """Yield one line for each check that the program of a layer of a prefill fails."""
    everything = program.everything()
    attentions = sum(i.operation == "custom-call" and "__cudnn$fmha" in i.line for i in everything)
    loops = sum(i.operation == "while" for i in everything)
    if (attentions, loops) != (read.attentions, 0):
        yield f"{attentions} calls of cuDNN's attention and {loops} loops, not {read.attentions} and none"
    products = sum(i.result_numbers for i in everything if i.operation == "dot")
    if products != read.products:
        yield f"matrix products with {products:,} results, not {read.products:,}"
    memory = program.memory
    temporaries = memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    if temporaries > read.temporaries:
        yield f"temporaries {temporaries:,} exceed prefill_peak's {read.temporaries:,}"


def faults(task: Task, program: Program) -> Iterator[str]:
    """Yield one line for each check that a program fails."""
    memory, target = program.memory, TARGETS[task.gpu]
    if used(program) > target.memory:
        yield f"needs {used(program):,} bytes of {target.memory:,}"
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    if task.name.startswith(PACKED) and host > HOST_MEMORY:
        yield f"needs {host:,} host bytes of {HOST_MEMORY:,}"
    compiled = program.architectures()
    if target.architecture not in compiled and (compiled or task.read is None or not task.read.attentions):
        yield f"PTX for {sorted(compiled)}, not {target.architecture}"
    if program.local_bytes() > MOST_LOCAL:
        yield f"a kernel keeps {program.local_bytes()} bytes a thread in local memory"
    if task.kernel and "__gpu$xla.gpu.triton" not in program.text:
        yield "no kernel of ours in it"
    if task.without_loops and any(i.operation == "while" for i in program.everything()):
        yield "a loop, in place of kernels over all tiles"
    reused = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    if task.reused is not None and reused != task.reused:
        yield f"results reuse {reused:,} bytes of the arguments, not {task.reused:,}"
    moves_a_row = task.reused is not None and task.state is None
    if moves_a_row and memory.temp_size_in_bytes + memory.host_temp_size_in_bytes > MOST_TEMPORARIES:
        yield f"temporaries {memory.temp_size_in_bytes:,} and {memory.host_temp_size_in_bytes:,} on the host"
    if task.read is not None:
        yield from read_faults(task.read, program)
    if task.prompt is not None:
        yield from copies_of(task.prompt, program)
    if task.target is not None:
        yield from target_faults(task.target, program)
    if task.state is not None:
        device, host = programs.planned(task)
        counters = sum(programs.size(part) for part in (task.state.lengths, task.state.last, task.state.counters))
        real = memory.argument_size_in_bytes - task.other - counters
        for name, mine, planner in (("device", real, device), ("host", memory.host_argument_size_in_bytes, host)):
            if abs(mine - planner) > 0.01 * planner:
                yield f"state takes {mine:,} {name} bytes, the planner says {planner:,}"
        for shape in {leaf.host.prompt.array.shape for leaf in task.state.layers if leaf.host.prompt is not None}:
            text = "[" + ",".join(map(str, shape)) + "]"
            bad = {i.operation for i in program.everything() if text in i.result} - HARMLESS
            if bad:
                yield f"values of the whole prompt {text} are the result of {sorted(bad)}"
    if task.fetches:
        total, good = overlaps(program)
        if (total, good) != (task.fetches, task.fetches):
            yield f"{total} host fetches, {good} of them around the rebuilding, of {task.fetches}"
    if task.resident is not None and biggest_copy(program) >= task.resident // 2:
        yield f"a copy of {biggest_copy(program):,} bytes: the rows that stay are not left in place"
    if task.resident is not None and memory.temp_size_in_bytes > 1.2 * task.resident:
        yield f"temporaries {memory.temp_size_in_bytes:,} exceed 1.2 x the selected rows {task.resident:,}"


@functools.cache
def tasks_of(gpu: str) -> tuple[Task, ...]:
    """Return all programs of a GPU, and the large batch that packed codes make possible."""
    most = full_batch(gpu)
    if gpu == "a100-80gb":
        assert most == 4, f"full attention fits {most} x 122,880 on an A100-80GB, the paper says 4"
    small = ShadowKV.packed(small=True)
    large = programs.step_task(PACKED, gpu, programs.LLAMA, small, PACKED_BATCH, 122_880, "device_put")
    return (*programs.tasks(gpu, most), *pool_tasks(gpu), *shared_tasks(gpu), *cycle_tasks(gpu), large)


def full_batch(gpu: str) -> int:
    """Return the largest batch of full attention at 122,880 tokens that leaves 1 GiB free besides weights and cache."""
    free = TARGETS[gpu].memory - programs.size(programs.weights_of(programs.LLAMA)) - 2**30
    return free // full_bytes(programs.LLAMA, 122_880, 2)


def row(task: Task, program: Program, seconds: float, wrong: list[str]) -> dict:
    """Return one row of the table."""
    memory = program.memory
    total, good = overlaps(program)
    return {
        "program": task.name,
        "gpu": task.gpu,
        "device_arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "host_arguments": memory.host_argument_size_in_bytes,
        "host_temporaries": memory.host_temp_size_in_bytes,
        "biggest_copy": biggest_copy(program),
        "overlap": f"{good}/{total}" if total else "-",
        "ptx": sorted(program.architectures()),
        "compile_seconds": round(seconds, 1),
        "faults": wrong,
    }


def row_of(place: tuple[str, int]) -> dict:
    """Compile one of `tasks_of`, given by its GPU and its place, and return its row."""
    gpu, index = place
    task = tasks_of(gpu)[index]
    start = time.perf_counter()
    program = compile_for(gpu, task.function, *task.arguments, donate=task.donate)
    return row(task, program, time.perf_counter() - start, list(faults(task, program)))


def table_of(arguments: tuple[Setting, str, str]) -> StepTable:
    """Return the table of a step, given by the arguments of `step_table`."""
    return step_table(*arguments)


def prefill_of(gpu: str) -> KernelTable:
    """Return the table of the kernel of sparse prefill."""
    return kernel_table(gpu, tools_folder())


def products_of(gpu: str) -> list[ProductTable]:
    """Return the tables of the kernel of tile products."""
    return product_tables(gpu, tools_folder())


def works_of(gpu: str) -> list[tuple[str, Work, list[str]]]:
    """Return the work of each compression, and the limits that it exceeds."""
    return list(compressions(gpu))
