"""The limits that the tables of decode steps must keep: on kernels, launches and ratios to full attention.

All limits hold for steps of several rows. A step of one row has a limit on its launches only, because it is so short
that the time of its bytes says little.
"""

from collections.abc import Iterable, Iterator

from aot.step_table import StepTable

KERNELS = {
    "full": 14,
    "paper": 18,
    "paper, pool of 2": 18,
    "packed": 20,
    "packed small": 18,
    "packed small, one row": 18,
    "hybrid": 15,
}
# Predicted tokens a second, divided by those of full attention in its largest batch.
RATIOS = {"h200": {"paper": 2.5, "paper, pool of 2": 4.0, "packed": 5.0, "packed small": 10.0}}
FENCES = 27  # instructions of a kernel that rebuilds keys that wait until writes to memory are done
# Kernels with one program for each row and KV head. They take the time of their rounds, not that of their bytes.
IN_ROUNDS = {"level_groups"}
ISSUE = {"packed small": 0.28}  # the largest issue floor of a layer in milliseconds, on an H200


def faults_of(tables: Iterable[StepTable]) -> Iterator[str]:
    """Yield one line for each limit that a table exceeds."""
    tables = list(tables)
    full = {table.gpu: table for table in tables if table.setting.name == "full"}
    for table in tables:
        told = table.report()
        start = f"{table.setting.name} on {table.gpu}: "
        yield from (start + fault for fault in launch_faults(table, told))
        yield from (start + fault for fault in rebuild_faults(table))
        if table.setting.batch > 1:
            yield from (start + fault for fault in kernel_faults(table, told))
        least = RATIOS.get(table.gpu, {}).get(table.setting.name)
        if least is not None and table.gpu in full:
            ratio = told["tokens_per_second"] / full[table.gpu].report()["tokens_per_second"]
            if ratio < least:
                yield f"{start}predicted {ratio:.2f} times full attention's speed, expected at least {least}"


def launch_faults(table: StepTable, told: dict) -> Iterator[str]:
    """Yield the faults in the launches of a step, whose report is `told`."""
    name = table.setting.name
    if told["kernels"] > KERNELS[name]:
        yield f"{told['kernels']} kernels a layer, of at most {KERNELS[name]}"
    if told["sorts"] or told["copies"]:
        yield f"{told['sorts']} sorts and {told['copies']} copies a layer"
    if (told["command_buffers"], told["outside_buffers"]) != (1, 0):
        yield f"{told['command_buffers']} command buffers, and {told['outside_buffers']} launches outside"
    if table.gpu == "h200" and told["issue_floor_ms"] > ISSUE.get(name, float("inf")):
        yield f"an issue floor of {told['issue_floor_ms']:.3f} ms a layer, of at most {ISSUE[name]}"


def rebuild_faults(table: StepTable) -> Iterator[str]:
    """Yield the faults of the kernels of a layer that rebuild keys."""
    for one in table.layer:
        if one.code is None or not one.name.startswith(("fetch_reconstruct", "reconstruct_keys")):
            continue
        if one.code.byte_loads or not one.code.copies:
            yield f"{one.name} has {one.code.byte_loads} loads of bytes in loops and {one.code.copies} copies"
        if one.code.spilled or one.code.fences > FENCES:
            yield f"{one.name} spills {one.code.spilled} bytes and has {one.code.fences} fences, of at most {FENCES}"
        if one.blocks < table.target.cores:
            yield f"{one.name} has {one.blocks} programs for {table.target.cores} multiprocessors"


def kernel_faults(table: StepTable, told: dict) -> Iterator[str]:
    """Yield the faults of this project's kernels in a layer."""
    for one, row in zip(table.layer, told["launches"], strict=True):
        if not one.ours or one.name in IN_ROUNDS:
            continue
        if row["blocks_per_core"] < 2:
            yield f"{one.name} has {row['registers']} registers: {row['blocks_per_core']} block on a multiprocessor"
        moved = max(row["bytes_us"], 1e6 * table.fetched(one))
        if row["issue_floor_us"] > moved:
            yield f"{one.name} issues for {row['issue_floor_us']:.1f} us, and its bytes take {moved:.1f} us"
