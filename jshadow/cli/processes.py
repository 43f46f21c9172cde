"""Several devices and several processes: the mesh of --mesh, how processes join, and who of them prints."""

import collections
import contextlib
import dataclasses
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jshadow.cli.fields import option
from jshadow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jshadow.engine.processes import Processes

# Options that may differ between processes. Of files, the contents are compared instead of the paths.
OWN = {"command_line", "coordinator", "process", "join_timeout", "json", "compile_cache", "settings"}
OWN |= {"model", "prompt_file", "fitted", "data", "files", "load_state", "save_state", "out", "place"}
OWN |= {"disk_folder", "prompt", "source"}


@dataclasses.dataclass(kw_only=True)
class MeshOptions:
    """A mesh of devices."""

    title: ClassVar[str] = "several devices"
    mesh: str | None = option(
        "axes of a mesh of all devices: tp=N splits heads, data=N rows, as in tp=4,data=2", metavar="AXIS=N,..."
    )
    left: str = option("split or everywhere: ShadowKV's left rows, which serve all heads", "split")


@dataclasses.dataclass(kw_only=True)
class ProcessOptions:
    """Processes that run a command together."""

    title: ClassVar[str] = "several processes"
    coordinator: str | None = option("where process 0 runs, and a free port there", metavar="HOST:PORT")
    processes: int | None = option("how many processes run the command together", metavar="N")
    process: int | None = option("the number of this process, from 0", metavar="I")
    join_timeout: float = option("how long to wait for the others", 300.0, metavar="SECONDS")


def placed(args: Any) -> dict[str, Any]:
    """Return the arguments of `load` that --mesh and --left give. Call it after the processes have joined.

    Raises:
        ConfigError: as `parse_mesh` and `mesh_of`.
    """
    if getattr(args, "mesh", None) is None:
        return {}
    return {"mesh": mesh_of(parse_mesh(args.mesh)), "left": args.left}


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of the axes "data" and "tp" of a text such as "tp=4,data=2". An axis left out has size 1.

    Raises:
        ConfigError: an axis has another name, comes twice, or has a size that is not a positive integer.
    """
    from jshadow.models.partition import AXES, GONE

    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            gone = GONE * (name == "sp")
            raise ConfigError(
                f"mesh must have axes among {', '.join(AXES)}, such as tp=4, got {part!r} in {text!r:.80}{gone}"
            )
        if name in sizes:
            raise ConfigError(f"mesh must name each axis once, got {name} twice in {text!r:.80}")
        if not (size.isascii() and size.isdecimal() and 1 <= int(size) < 2**31):
            raise ConfigError(f"mesh must have a size of at least 1 for {name}, got {size!r} in {text!r:.80}")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


def mesh_of(sizes: dict[str, int]) -> "Mesh":
    """Return a mesh of the first devices of one process, or of all devices of several, with the axes of AXES.

    The devices of a process lie beside each other. So `tp` stays within a process if a process has enough devices, and
    `data` goes across processes.

    Args:
        sizes: the size of each axis, as `parse_mesh` returns them.

    Raises:
        ConfigError: there are fewer devices; several processes have more of them, or different numbers; or `tp` neither
            divides the number of devices of a process nor is a multiple of it.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jshadow.models.partition import AXES

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    held = collections.Counter(device.process_index for device in devices)
    needed = math.prod(sizes.values())
    if len(held) == 1:
        devices = devices[:needed]
    local = len(devices) if len(held) == 1 else held[jax.process_index()]
    if needed != len(devices):
        product = " * ".join(f"{name}={size}" for name, size in sizes.items())
        fewer = "fewer than it needs" if len(devices) < needed else "and it must have all of them"
        raise ConfigError(
            f"mesh must have as many devices as there are, got {product} = {needed}; there are {len(devices)}, {fewer} "
            f"(processes: {len(held)}, devices of each: {local})"
        )
    if len(set(held.values())) > 1:
        raise ConfigError(f"devices must be as many in each process, got {[held[one] for one in sorted(held)]}")
    if local % sizes["tp"] and sizes["tp"] % local:
        raise ConfigError(f"tp must divide the {local} devices of a process or be a multiple of it, got {sizes['tp']}")
    return Mesh(np.array(devices).reshape([sizes[name] for name in AXES]), AXES)


@contextlib.contextmanager
def joined(args: Any) -> Iterator["Processes"]:
    """Join the other processes that the options name, and leave them at the end. Call it before JAX has a backend.

    In the block, only process 0 prints and writes. The others print errors alone. Their --plot is None, and without
    --mesh their --save-state is None. With --mesh, each process saves its part. Their --out is a temporary copy of it:
    so they continue the same evaluation. With --mesh and without these options, JAX may find the processes in the
    environment.

    Raises:
        ConfigError: an option is malformed, or one of three is missing.
        DistributedError: as `jshadow.engine.processes.join`.
    """
    from jshadow.engine import processes as engine

    search = getattr(args, "mesh", None) is not None
    if search:
        parse_mesh(args.mesh)
    if args.coordinator is None and args.processes is None and args.process is None and not search:
        yield engine.Processes(1, 0)
        return
    options = engine.ProcessOptions(args.coordinator, args.processes, args.process, args.join_timeout, search)
    with engine.join(options) as processes, _output_of(processes), tempfile.TemporaryDirectory() as folder:
        if not processes.first:
            args.plot = None
            if not search:  # on a mesh, each process saves its part
                args.save_state = None
            if getattr(args, "out", None) is not None:
                args.out = _copy_of(args.out, folder)
        yield processes


def _copy_of(out: str, folder: str) -> str:
    """Copy a directory, if it is there, into a folder, and return the place of the copy."""
    target = Path(folder) / "out"
    if Path(out).is_dir():
        shutil.copytree(out, target)
    return str(target)


@contextlib.contextmanager
def _output_of(processes: "Processes") -> Iterator[None]:
    """Send what this process prints to its standard output if it is the first, and else nowhere."""
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


def check_same(args: Any, params: Any, files: Mapping[str, Any]) -> None:
    """Compare the weights, the options and the files of all processes. With one process, do nothing.

    The options of the parsed command are compared, except those of `OWN`. `files` has a path, several paths, bytes
    (such as a prompt) or None by the name of an option. The finished samples in --out are compared too.

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
            facts[name] = sha256("".join(sha256(_read(path, name)) for path in paths).encode())
    agree(facts)


def _read(path: str | Path, option: str) -> bytes:
    """Return the bytes of a file. Raises CheckpointError, which names the option, if it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise CheckpointError(f"{option} must be a file that can be read, got {path}: {error}") from error
