"""What `make aot` prints for one program, table or kernel."""

from aot import programs
from aot.compression import TOKENS, Work
from aot.prefill_kernel import KernelTable
from aot.product_kernel import ProductTable
from aot.step_table import StepTable
from jshadow.planner.prefill_time import layer_operations


def print_row(made: dict) -> None:
    """Print a row of the table of programs, and the checks that the program fails."""
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
    print(f"{made['program']:52}{made['gpu']:>10}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
    for fault in made["faults"]:
        print(f"  DOES NOT HOLD: {fault}", flush=True)


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


def print_product(table: ProductTable) -> None:
    """Print a kernel of tile products, and its predicted time."""
    told = table.report()
    print(
        f"tile_products, {table.name}, {table.gpu}: {told['registers']} registers, "
        f"{told['blocks_per_core']} blocks/SM, predicted {told['us']:.1f} us ({told['issue_us']:.1f} us of issuing, "
        f"{told['products_us']:.1f} us of products, {told['read_us']:.1f} us of reads), "
        f"{told['rate']:.0%} of the hardware's rate",
        flush=True,
    )


def print_work(name: str, gpu: str, work: Work) -> None:
    """Print the work of the compression of a prompt in one layer."""
    share = work.operations / layer_operations(programs.LLAMA, None, TOKENS)
    print(
        f"compression, {name}, {gpu}: {share:.2%} of the layer's operations, {work.kernels} kernels, {work.calls} "
        f"library calls, {work.bytes / 1e9:.1f} GB, "
        f"predicted {1e3 * work.seconds:.2f} ms, {work.temporary_bytes / 1e6:.0f} MB of temporaries",
        flush=True,
    )
