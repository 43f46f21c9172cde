"""`make aot`: compiles decode steps and kernels for an A100 and an H200 on a machine that has neither, and checks them.

Prints one row for each program, and the checks that fail. Then it prints, for some decode steps, the kernels of a layer
with their instructions and bytes, and a predicted time of the step. It also predicts the attention of a sparse prefill.
The exit status is 1 if any check fails.
"""

import argparse
import itertools
import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compiler's plugin has no GPU for JAX
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # for aot.meshes
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# If llvm-symbolizer is installed, LLVM runs it for every kernel. That takes ten times as long as the compilation.
os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")

from aot.checks import prefill_of, products_of, row_of, table_of, tasks_of, works_of
from aot.machine_code import tools_folder
from aot.meshes import SETTINGS as MESHES
from aot.meshes import mesh_row
from aot.printing import print_prefill, print_product, print_row, print_table, print_work
from aot.step_limits import faults_of
from aot.step_table import SETTINGS
from aot.targets import TARGETS
from aot.workers import spread

FIRST = next(iter(TARGETS))


def main() -> int:
    """Compile and check all programs, or those that --only names. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="aot", description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--gpu", choices=TARGETS, action="append", help="this one alone (default: all)")
    parser.add_argument("--few", action="store_true", help="single layers for the first GPU, tables for the second")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once (default: 1)")
    parser.add_argument("--steps", action="store_true", help="only the tables of kernels, not the programs before them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    gpus = args.gpu or list(TARGETS)
    tabled = [gpu for gpu in gpus if not (args.few and gpu == FIRST)]
    places = [
        (gpu, place)
        for gpu in gpus
        for place, task in enumerate(tasks_of(gpu))
        if args.only in task.name and not (args.few and (gpu != FIRST or task.name.startswith("Llama")))
    ]
    settings = [(one, gpu, tools_folder()) for gpu in tabled for one in SETTINGS[gpu] if args.only in one.name]
    meshes = [(gpu, name) for gpu in tabled for name, _ in MESHES if args.only in f"step of tp 2, {name}"]
    readers = [] if args.steps else tabled
    head = ("device GB", "temp MB", "host GB", "host temp MB", "copy MB", "overlap", "PTX", "seconds")
    if not args.json:
        print(f"{'program':52}{'gpu':>10}" + "".join(f"{name:>13}" for name in head), flush=True)
    rows, tables, prefills, works = [], [], [], []
    with spread(args.jobs) as calls:
        compiled = calls(row_of, [] if args.steps else places)
        spread_out = calls(mesh_row, [] if args.steps else meshes)
        steps = calls(table_of, settings)
        kernels = calls(prefill_of, readers if args.only in "sparse_prefill" else [])
        products = calls(products_of, readers if args.only in "tile_products" else [])
        compressed = calls(works_of, readers if args.only in "compression" else [])
        for made in itertools.chain(compiled, spread_out):
            rows.append(made)
            if not args.json:
                print_row(made)
        for table in steps:
            tables.append(table)
            if not args.json:
                print_table(table)
        limits = list(faults_of(tables))
        for kernel in kernels:
            prefills.append(kernel)
            limits += kernel.faults()
            if not args.json:
                print_prefill(kernel)
        for product in itertools.chain(*products):
            prefills.append(product)
            limits += product.faults()
            if not args.json:
                print_product(product)
        for gpu, found in zip(readers, compressed, strict=False):
            for name, work, wrong in found:
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
