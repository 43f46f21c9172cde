"""The option `--mesh`: sizes of its axes, such as `tp=4,data=2`, and the mesh that they make of all devices."""

import argparse
import collections
import math
from typing import TYPE_CHECKING, Any

from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

MESH_HELP = "axes of a mesh of all devices: tp=N splits heads, data=N rows, as in tp=4,data=2"


def add_mesh_options(add: argparse._ActionsContainer) -> None:
    """Add --mesh and --left."""
    add.add_argument("--mesh", metavar="AXIS=N,...", help=MESH_HELP)
    add.add_argument(
        "--left",
        default="split",
        help="split or everywhere: ShadowKV's left rows, which serve all heads (default: %(default)s)",
    )


def placed(args: argparse.Namespace) -> dict[str, Any]:
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
