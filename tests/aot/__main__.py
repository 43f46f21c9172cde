"""`make aot`: compiles decode steps and kernels for an A100 and an H200 on a machine that has neither, and checks them.

Prints one row for each program, and the checks that fail. Then it prints, for some decode steps, the kernels of a layer
with their instructions and bytes, and a predicted time of the step. It also predicts the attention of a sparse prefill.
The exit status is 1 if any check fails.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler's plugin has no GPU for JAX
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# If llvm-symbolizer is installed, LLVM runs it for every kernel. That takes ten times as long as the compilation.
os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")

from aot import programs
from aot.compiler import Program, compile_for
from aot.compression import TOKENS, Work, compressions
from aot.machine_code import tools_folder
from aot.pools import pool_tasks
from aot.prefill_kernel import KernelTable, kernel_table
from aot.programs import ReadLayer, Task
from aot.shared import copies_of, shared_tasks
from aot.step_limits import faults_of
from aot.step_table import SETTINGS, StepTable, step_table
from aot.targets import HOST_MEMORY, TARGETS
from jshadow.planner.bytes import full_bytes
from jshadow.planner.prefill_operations import layer_operations
from jshadow.policies import ShadowKV

FIRST = next(iter(TARGETS))
MOST_TEMPORARIES = 2**24  # maximum temporary bytes of a program that moves a row
MOST_LOCAL = 256  # maximum bytes of spilled registers of a thread
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
    reused = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    if task.reused is not None and reused != task.reused:
        yield f"results reuse {reused:,} bytes of the arguments, not {task.reused:,}"
    if task.reused is not None and memory.temp_size_in_bytes + memory.host_temp_size_in_bytes > MOST_TEMPORARIES:
        yield f"temporaries {memory.temp_size_in_bytes:,} and {memory.host_temp_size_in_bytes:,} on the host"
    if task.read is not None:
        yield from read_faults(task.read, program)
    if task.prompt is not None:
        yield from copies_of(task.prompt, program)
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


def all_tasks(gpu: str, full_batch: int) -> Iterator[Task]:
    """Yield all programs, and the large batch that packed codes make possible."""
    yield from programs.tasks(gpu, full_batch)
    yield from pool_tasks(gpu)
    yield from shared_tasks(gpu)
    small = ShadowKV.packed(small=True)
    yield programs.step_task(PACKED, gpu, programs.LLAMA, small, PACKED_BATCH, 122_880, "device_put")


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


def print_table(table: StepTable) -> None:
    """Print the launches of a layer and the predicted step."""
    told = table.report()
    print(
        f"\n{told['setting']}, {told['batch']} x {told['capacity']:,}, {told['fetch']}, {told['gpu']}: a layer has "
        f"{told['kernels']} kernels, {told['copies']} copies and {told['sorts']} sorts. Its issue floor is "
        f"{told['issue_floor_ms']:.3f} ms, and its bytes take {told['bytes_ms']:.3f} ms.\n"
        f"Predicted step: {told['step_ms']:.1f} ms ({told['tokens_per_second']:.0f} tokens/s); bytes alone: "
        f"{told['step_bytes_ms']:.1f} ms. {told['command_buffers']} command buffer(s), {told['outside_buffers']} "
        "launches outside."
    )
    heads = ("blocks", "threads", "registers", "blocks/SM", "instructions", "issue us", "bytes us", "host MB")
    print(f"  {'kernel':32}" + "".join(f"{head:>13}" for head in heads))
    for one in sorted(told["launches"], key=lambda one: -max(one["bytes_us"], 2 * one["issue_floor_us"])):
        cells = (
            *(str(one[key]) for key in ("grid", "threads", "registers", "blocks_per_core", "instructions")),
            f"{one['issue_floor_us']:.1f}{'+' if one['unknown_loops'] else ''}",
            f"{one['bytes_us']:.1f}",
            f"{one['host_bytes'] / 1e6:.1f}",
        )
        print(f"  {one['name']:32}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


def print_prefill(table: KernelTable) -> None:
    """Print the kernel of sparse prefill, and its predicted time."""
    told = table.report()
    print(
        f"\nsparse_prefill, 1 x {told['tokens']:,}, {table.gpu}: {told['registers']} registers, "
        f"{told['spilled']} bytes spilled, {told['blocks_per_core']} blocks/SM. "
        f"The lists have {told['share']:.1%} of the tiles.\n"
        f"Predicted attention of a layer: {told['ms']:.1f} ms ({told['products_ms']:.1f} ms of products, "
        f"{told['read_ms']:.1f} ms of reads), dense: {told['dense_ms']:.1f} ms.",
        flush=True,
    )


def print_work(name: str, gpu: str, work: Work) -> None:
    """Print the work of the compression of a prompt in one layer."""
    share = work.operations / layer_operations(programs.LLAMA, None, TOKENS)
    print(
        f"compression, {name}, {gpu}: {share:.2%} of the layer's operations, {work.bytes / 1e9:.1f} GB, "
        f"predicted {1e3 * work.seconds:.2f} ms, {work.temporary_bytes / 1e6:.0f} MB of temporaries",
        flush=True,
    )


def main() -> int:
    """Compile and check all programs, or those that --only names. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="aot", description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--gpu", choices=TARGETS, action="append", help="this one alone (default: all)")
    parser.add_argument("--few", action="store_true", help="single layers for the first GPU, tables for the second")
    parser.add_argument("--steps", action="store_true", help="only the tables of kernels, not the programs before them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = []
    head = ("device GB", "temp MB", "host GB", "host temp MB", "copy MB", "overlap", "PTX", "seconds")
    if not args.json:
        print(f"{'program':52}{'gpu':>10}" + "".join(f"{name:>13}" for name in head))
    for gpu in args.gpu or TARGETS:
        most = full_batch(gpu)
        if gpu == "a100-80gb":
            assert most == 4, f"full attention fits {most} x 122,880 on an A100-80GB, the paper says 4"
        for task in () if args.steps else all_tasks(gpu, most):
            if args.only not in task.name or (args.few and (gpu != FIRST or task.name.startswith("Llama"))):
                continue
            start = time.perf_counter()
            program = compile_for(gpu, task.function, *task.arguments, donate=task.donate)
            made = row(task, program, time.perf_counter() - start, list(faults(task, program)))
            rows.append(made)
            if not args.json:
                cells = (
                    f"{made['device_arguments'] / 1e9:.2f}",
                    f"{made['temporaries'] / 1e6:.1f}",
                    f"{made['host_arguments'] / 1e9:.2f}",
                    f"{made['host_temporaries'] / 1e6:.2f}",
                    f"{made['biggest_copy'] / 1e6:.2f}",
                    made["overlap"],
                    ",".join(made["ptx"]),
                    str(made["compile_seconds"]),
                )
                print(f"{task.name:52}{gpu:>10}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
                for fault in made["faults"]:
                    print(f"  DOES NOT HOLD: {fault}", flush=True)
    tables = []
    for gpu in args.gpu or TARGETS:
        for setting in SETTINGS[gpu]:
            if args.only in setting.name and not (args.few and gpu == FIRST):
                tables.append(step_table(setting, gpu, tools_folder()))
                if not args.json:
                    print_table(tables[-1])
    prefills, works = [], []
    limits = list(faults_of(tables))
    for gpu in args.gpu or TARGETS:
        if args.steps or (args.few and gpu == FIRST):
            continue
        if args.only in "sparse_prefill":
            prefills.append(kernel_table(gpu, tools_folder()))
            limits += prefills[-1].faults()
            if not args.json:
                print_prefill(prefills[-1])
        if args.only in "compression":
            for name, work, wrong in compressions(gpu):
                works.append({"name": name, "gpu": gpu, "operations": work.operations, "seconds": work.seconds})
                limits += [f"compression, {name} on {gpu}: {fault}" for fault in wrong]
                if not args.json:
                    print_work(name, gpu, work)
    failed = [made for made in rows if made["faults"]]
    if args.json:
        told = {"steps": [table.report() for table in tables], "prefills": [table.report() for table in prefills]}
        told["compressions"] = works
        print(json.dumps({"programs": rows, **told, "faults": limits}))
        return bool(failed or limits)
    for fault in limits:
        print(f"  DOES NOT HOLD: {fault}", flush=True)
    what = f"{len(rows)} programs and {len(tables)} tables"
    print(f"{what}, all asserts hold" if not (failed or limits) else f"{what}, with asserts that do not hold")
    return bool(failed or limits)


if __name__ == "__main__":
    sys.exit(main())
