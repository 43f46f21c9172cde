"""Options of the commands that several processes run together, and who of them prints."""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.mesh import parse_mesh
from jshadow.errors import CheckpointError

if TYPE_CHECKING:
    from jshadow.engine.processes import Processes

JOIN_SECONDS = 300.0
# Options that may differ between processes. Of files, the contents are compared instead of the paths.
OWN = {"run", "command", "action", "command_line", "coordinator", "process", "join_timeout", "json", "compile_cache"}
OWN |= {"model", "prompt_file", "fitted", "data", "files", "load_state", "save_state", "out", "plot", "place"}
OWN |= {"disk_folder", "prompt", "source"}


def add_process_options(add: argparse.ArgumentParser) -> None:
    """Add --coordinator, --processes, --process and --join-timeout as a group."""
    group = add.add_argument_group("several processes")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 runs, and a free port there")
    group.add_argument("--processes", type=int, metavar="N", help="how many processes run the command together")
    group.add_argument("--process", type=int, metavar="I", help="the number of this process, from 0")
    group.add_argument(
        "--join-timeout",
        type=float,
        default=JOIN_SECONDS,
        metavar="SECONDS",
        help="how long to wait for the others (default: %(default)g)",
    )


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator["Processes"]:
    """Join the other processes that the options name, and leave them at the end. Call it before JAX has a backend.

    In the block, only process 0 prints and writes. The others print errors alone. Their --plot is None, and without
    --mesh their --save-state is None. With --mesh, each process saves its part. Their --out is a temporary copy of it:
    so they continue the same evaluation. With --mesh and without these options, JAX may find the processes in the
    environment.

    Raises:
        ConfigError: an option is malformed, or one of three is missing.
        DistributedError: as `jshadow.engine.processes.join`.
    """
    from jshadow.engine.processes import Processes, ProcessOptions, join

    search = getattr(args, "mesh", None) is not None
    if search:
        parse_mesh(args.mesh)
    if args.coordinator is None and args.processes is None and args.process is None and not search:
        yield Processes(1, 0)
        return
    options = ProcessOptions(args.coordinator, args.processes, args.process, args.join_timeout, search)
    with join(options) as processes, output_of(processes), tempfile.TemporaryDirectory() as folder:
        if not processes.first:
            args.plot = None
            if not search:  # on a mesh, each process saves its part
                args.save_state = None
            if getattr(args, "out", None) is not None:
                args.out = copy_of(args.out, folder)
        yield processes


def copy_of(out: str, folder: str) -> str:
    """Copy a directory into a folder if it is there, and return the place of the copy."""
    target = Path(folder) / "out"
    if Path(out).is_dir():
        shutil.copytree(out, target)
    return str(target)


@contextlib.contextmanager
def output_of(processes: "Processes") -> Iterator[None]:
    """Send what this process prints to its standard output if it is the first, and else nowhere.

    With several processes, gloo writes lines to file descriptor 1. They go nowhere too, so that --json prints JSON.
    """
    if processes.count == 1:
        yield
        return
    sys.stdout.flush()
    before, streams = os.dup(1), (sys.stdout, sys.stderr)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        if processes.first:
            sys.stdout = os.fdopen(os.dup(before), "w", encoding=streams[0].encoding, errors=streams[0].errors)
        else:
            sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            printed, (sys.stdout, sys.stderr) = sys.stdout, streams
            os.dup2(before, 1)
            os.close(before)
            if processes.first:
                printed.close()


def check_same(args: argparse.Namespace, params: Any, files: Mapping[str, Any]) -> None:
    """Compare the weights, the options and the files of all processes. With one process, do nothing.

    If there is an --out, the finished samples in it are compared too.

    Args:
        args: the parsed command. Its options must be the same, except those of `OWN`.
        params: the loaded model.
        files: by the name of an option, a path, several paths, bytes (such as a prompt), or None.

    Raises:
        DistributedError: something differs. Each process raises it.
        CheckpointError: a file cannot be read.
    """
    import jax

    if not jax.distributed.is_initialized():
        return
    from jshadow.engine.agree import agree, run_facts
    from jshadow.weights.digest import sha256

    options = {name: value for name, value in vars(args).items() if name not in OWN}
    facts = run_facts(params, None, **options)
    out = getattr(args, "out", None)
    finished = [] if out is None else sorted(Path(out).rglob("*.jsonl"))
    for name, content in (dict(files) | {"out": finished}).items():
        if isinstance(content, bytes):
            facts[name] = sha256(content)
        elif content is not None:
            paths = [content] if isinstance(content, str | Path) else content
            facts[name] = sha256("".join(sha256(read(path, name)) for path in paths).encode())
    agree(facts)


def read(path: str | Path, option: str) -> bytes:
    """Return the bytes of a file. Raises CheckpointError, which names the option, if it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise CheckpointError(f"{option} must be a file that can be read, got {path}: {error}") from error
