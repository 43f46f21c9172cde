"""Several processes that run one model together, by `jax.distributed`.

    with join(ProcessOptions("10.0.0.1:7000", processes=2, process=0)) as processes:
        ...

All processes meet first, so that each error is typed and names the process (`roll_call`). Then JAX starts.
"""

import atexit
import ctypes
import dataclasses
import math
import os
import re
import time
from typing import Any

from jshadow.cache.host_memory import Sharing
from jshadow.engine.mesh.agree import processes_here
from jshadow.engine.mesh.member import Membership
from jshadow.engine.mesh.roll_call import REPORT_SECONDS, Hub
from jshadow.engine.mesh.wire import bind_address, split_address
from jshadow.errors import ConfigError, DistributedError

JOIN_SECONDS = 300.0
LEAST_CONNECT_SECONDS = 20  # for JAX, after all have met
HEARTBEAT_SECONDS = 30  # JAX ends a process by an abort if a peer does not run for so long, though it is connected
SHUTDOWN_SECONDS = 10
HUB_SECONDS = REPORT_SECONDS + 5  # until the others have read the last messages of process 0


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Which process this is, and where the others meet.

    Attributes:
        coordinator: "HOST:PORT" of process 0. Its port must be free.
        processes: the number of all processes. 1 alone: one process, whatever the environment says.
        process: the number of this one, from 0.
        join_timeout: how many seconds to wait for the others.
        search: whether JAX may find the first three in the environment (Slurm, Open MPI, Kubernetes) if none is given.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    join_timeout: float = JOIN_SECONDS
    search: bool = False

    def __post_init__(self) -> None:
        names = ("coordinator", "processes", "process")
        absent = [name for name in names if getattr(self, name) is None]
        if 0 < len(absent) < 3 and not (self.processes == 1 and len(absent) == 2):
            raise ConfigError(
                f"{absent[0]} must be given with {' and '.join(name for name in names if name not in absent)}, or none "
                "of the three, got None"
            )
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes must be at least 1, got {self.processes}")
        if self.process is not None and not 0 <= self.process < (self.processes or 1):
            raise ConfigError(f"process must be from 0 to {(self.processes or 1) - 1}, got {self.process}")
        if not (math.isfinite(self.join_timeout) and self.join_timeout > 0):
            raise ConfigError(f"join_timeout must be seconds above 0, got {self.join_timeout!r}")
        if self.coordinator is not None:
            split_address(self.coordinator, "coordinator")


class Processes:
    """The processes of a run, as one of them sees them. As a context manager it leaves the run at the end.

    If the block raises an error, the other processes end with it. An error of gloo or NCCL becomes a DistributedError.

    Attributes:
        count: how many there are.
        index: the number of this one.
    """

    def __init__(self, count: int, index: int, membership: Membership | None = None, hub: Hub | None = None) -> None:
        """Take the connections that `join` has made. Without them, the process is alone."""
        self.count, self.index = count, index
        self._membership, self._hub = membership, hub

    @property
    def first(self) -> bool:
        """Whether this process prints and writes the results."""
        return self.index == 0

    def leave(self) -> None:
        """Wait until all processes have done their work, and end JAX's part. If a peer is lost, this process ends."""
        if self._membership is None:
            return
        membership, self._membership = self._membership, None
        membership.leave()
        if self._hub is not None:
            self._hub.thread.join(HUB_SECONDS)
        import jax

        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends with an error. They end too, with an error that has its text in it.

        Args:
            error: why.
        """
        if self._membership is None:
            return
        membership, self._membership = self._membership, None
        membership.fail(f"{type(error).__name__}: {error}")
        forget_jax()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.leave()
            return
        typed = collective_error(error)
        self.fail(typed or error)
        if typed is not None:
            raise typed from error


def join(options: ProcessOptions) -> Processes:
    """Meet the other processes and start `jax.distributed`. With one process, do nothing.

    On a CPU, collectives go over gloo; on GPUs, over NCCL. Later, a thread watches the other processes. When one of
    them is gone, it prints a DistributedError on stderr and ends this process with status 2, also in the middle of a
    collective.

    Args:
        options: which process this is.

    Returns:
        The processes. Leave them at the end (`with join(...) as processes`).

    Raises:
        DistributedError: JAX has started a backend already; process 0 cannot be reached, or its port cannot be opened;
            a process did not come in time, came twice, or has another number of processes.
    """
    import jax
    from jax._src import xla_bridge

    place = found(options)
    if place is None:
        return Processes(1, 0)
    if jax.distributed.is_initialized() or xla_bridge.backends_are_initialized():
        raise DistributedError(
            "join must be called once, and before JAX starts a backend (before any array, and before jax.devices), got "
            "a call after that"
        )
    host, port = split_address(place.coordinator, "coordinator")
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or bind_address(host, port)
    end = time.monotonic() + options.join_timeout
    hub = Hub(bind, place.processes, options.join_timeout) if place.process == 0 else None
    try:
        membership = Membership(host, port, place.process, place.processes, options.join_timeout)
    except DistributedError:
        if hub is not None:
            hub.thread.join(HUB_SECONDS)  # the others learn why
        raise
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(LEAST_CONNECT_SECONDS, int(end - time.monotonic())),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=bind,
    )
    Sharing.processes = processes_here()
    return Processes(place.processes, place.process, membership, hub)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process among all: the options, with `devices`, the numbers of its local devices or None."""

    coordinator: str
    processes: int
    process: int
    devices: list[int] | None = None


def found(options: ProcessOptions) -> Place | None:
    """Return the place that the options or the environment give, or None for a process that is alone.

    Raises:
        DistributedError: JAX knows the environment, but it does not find the processes in it.
    """
    if options.coordinator is not None:
        assert options.processes is not None
        assert options.process is not None
        return Place(options.coordinator, options.processes, options.process) if options.processes > 1 else None
    if options.processes is not None or not options.search:
        return None
    from jax._src.clusters import ClusterEnv

    values: tuple[Any, ...]
    try:
        values = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, int(options.join_timeout)
        )
    except Exception as error:
        raise DistributedError(
            "coordinator, processes and process must be given, because JAX could not find them in this cluster: "
            f"{error}"
        ) from error
    address, processes, process, devices = values
    if address is None or processes is None or process is None or processes == 1:
        return None
    return Place(address, processes, process, None if devices is None else list(devices))


def collective_error(error: BaseException) -> DistributedError | None:
    """Return the typed error for an error of gloo or NCCL, such as a peer that does not answer, or None for another."""
    text = str(error)
    if type(error).__name__ != "JaxRuntimeError" or not re.search("gloo|nccl", text, flags=re.IGNORECASE):
        return None
    return DistributedError(f"processes must all answer in a collective, got {' '.join(text.split())[:500]}")


def forget_jax() -> None:
    """Keep JAX from waiting for its peers when this process ends, and from aborting because they are gone."""
    from jax._src import api, distributed

    atexit.unregister(api.clean_up)
    for kept in (distributed.global_state.client, distributed.global_state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # its destructor would do both
