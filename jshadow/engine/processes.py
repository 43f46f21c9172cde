"""Several processes that run one model together, by `jax.distributed`.

    with join(ProcessOptions("10.0.0.1:7000", processes=2, process=0)) as processes:
        ...

The coordination service of JAX ends a process by an abort if a peer is missing or dies, and it does not say which one.
So all processes meet first. Process 0 calls the roll: it waits until all have come, and names those that are missing or
there twice. Each process keeps a TCP connection to process 0, on which both send JSON objects, one a line. When a
process dies, the kernel closes its connection, and process 0 tells the others. Then JAX starts.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import ipaddress
import json
import math
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jshadow.cache.host_memory import Sharing
from jshadow.engine.agree import numbers, processes_here
from jshadow.errors import ConfigError, DistributedError

_JOIN_SECONDS = 300.0
_LEAST_CONNECT_SECONDS = 20  # for JAX, after all have met
_HEARTBEAT_SECONDS = 30  # JAX ends a process by an abort if a peer does not run for so long, though it is connected
_SHUTDOWN_SECONDS = 10
_REPORT_SECONDS = 20.0  # how long process 0 waits for the others to end, after an error
_HUB_SECONDS = 5  # more, until the others have read the last messages of process 0
_RETRY_SECONDS = 0.2
_GRACE_SECONDS = 3.0  # process 0 may have begun to wait later than this process
_NOTED_SECONDS = 3  # more than REPORT_SECONDS: how long a process that fails waits until its peers know
_FLUSH_SECONDS = 1.0
_LOST_STATUS = 2  # exit status of a process that has lost a peer: that of every typed error
_MOST_BYTES = 65_536  # of one message
_PROTOCOL = 1
# If a host has lost its power or its network, its peers know it after 10 + 4 * 4 = 26 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 4}


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Which process this is, and where the others meet."""

    coordinator: str | None = None  # "HOST:PORT" of process 0, whose port must be free
    processes: int | None = None  # the number of all; 1 alone: one process, whatever the environment says
    process: int | None = None  # the number of this one, from 0
    join_timeout: float = _JOIN_SECONDS  # how long to wait for the others
    search: bool = False  # whether JAX may find the first three in the environment (Slurm, Open MPI, Kubernetes)

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
    """The count of the processes of a run, and the index of this one. As a context manager it leaves the run.

    If its block raises an error, the other processes end with it. An error of gloo or NCCL becomes a DistributedError.
    """

    def __init__(
        self, count: int, index: int, membership: "Membership | None" = None, hub: "Hub | None" = None
    ) -> None:
        self.count, self.index = count, index
        self._membership, self._hub = membership, hub

    @property
    def first(self) -> bool:
        """Whether this process prints and writes the results."""
        return self.index == 0

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        membership, self._membership = self._membership, None
        typed = None if error is None else _collective_error(error)
        if membership is not None and error is not None:
            told = typed or error
            membership.fail(f"{type(told).__name__}: {told}")
            _forget_jax()
        elif membership is not None:
            membership.leave()
            if self._hub is not None:
                self._hub.wait()
            import jax

            jax.distributed.shutdown()
        if typed is not None:
            raise typed from error


def join(options: ProcessOptions) -> Processes:
    """Meet the other processes and start `jax.distributed`. With one process, do nothing.

    On a CPU, collectives go over gloo; on GPUs, over NCCL. Later, a thread watches the other processes. When one of
    them is gone, it prints a DistributedError on stderr and ends this process with status 2, also in the middle of a
    collective. Leave the processes at the end (`with join(...) as processes`).

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
            hub.wait()  # the others learn why
        raise
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(_LEAST_CONNECT_SECONDS, int(end - time.monotonic())),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=bind,
    )
    Sharing.processes = processes_here()
    return Processes(place.processes, place.process, membership, hub)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process among all, and the numbers of its local devices or None."""

    coordinator: str
    processes: int
    process: int
    devices: list[int] | None = None


def found(options: ProcessOptions) -> Place | None:
    """Return the place that the options or the environment give, or None for a process that is alone."""
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


def _collective_error(error: BaseException) -> DistributedError | None:
    """Return the typed error for an error of gloo or NCCL, such as a peer that does not answer, or None for another."""
    text = str(error)
    if type(error).__name__ != "JaxRuntimeError" or not re.search("gloo|nccl", text, flags=re.IGNORECASE):
        return None
    return DistributedError(f"processes must all answer in a collective, got {' '.join(text.split())[:500]}")


def _forget_jax() -> None:
    """Keep JAX from waiting for its peers when this process ends, and from aborting because they are gone."""
    from jax._src import api, distributed

    atexit.unregister(api.clean_up)
    for kept in (distributed.global_state.client, distributed.global_state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # its destructor would do both


# Process 0


@dataclasses.dataclass(eq=False)
class _Peer:
    """A connection of process 0 to a process, whose number may not be known yet."""

    connection: socket.socket
    address: str
    lines: "_Lines"
    process: int | None = None
    done: bool = False

    def received(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the connection has ended or has other bytes on it."""
        try:
            content = self.connection.recv(4096)
            return self.lines.take(content) if content else None
        except (OSError, ValueError):
            return None


class Hub:
    """The side of process 0: a thread that listens until all have come, and then watches their connections."""

    def __init__(self, address: str, processes: int, timeout: float) -> None:
        """Listen at "HOST:PORT", and name those that are missing after `timeout` seconds."""
        self.processes, self.timeout = processes, timeout
        self.peers: dict[socket.socket, _Peer] = {}
        try:
            self.door = listen(address)
        except OSError as error:
            raise DistributedError(
                f"coordinator must have a port that is free on the host of process 0, got {address}: {error}. Another "
                "program may have it, or process 0 joined twice"
            ) from error
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.door, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="jshadow-roll-call", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait until the others have read the last messages."""
        self.thread.join(_REPORT_SECONDS + _HUB_SECONDS)

    def _run(self) -> None:
        try:
            if self._call_the_roll():
                self._watch()
        finally:
            for connection in [self.door, *self.peers]:
                connection.close()
            self.selector.close()

    def _ready(self, seconds: float | None = None) -> list[_Peer]:
        """Let in who is at the door, and return the connections on which something has arrived."""
        found = [key.fileobj for key, _ in self.selector.select(seconds)]
        if self.door in found:
            with contextlib.suppress(OSError):  # the other side is gone already
                connection, address = self.door.accept()
                _keep_alive(connection)
                self.peers[connection] = _Peer(connection, str(address[0]), _Lines())
                self.selector.register(connection, selectors.EVENT_READ)
        return [self.peers[one] for one in found if one is not self.door]  # type: ignore[index]

    def _call_the_roll(self) -> bool:
        """Return whether all processes have come. If not, all that have come know why, and process 0 is one of them."""
        end, problem = time.monotonic() + self.timeout, None
        while (absent := self._absent()) and (problem is None or 0 in absent):
            left = end - time.monotonic()
            if left <= 0:
                problem = problem or _not_come(absent, self.processes, self.timeout)
                break
            found = [self._greet(peer) for peer in self._ready(left)]
            problem = problem or next((one for one in found if one is not None), None)
        self.selector.unregister(self.door)
        self.door.close()  # JAX opens the same port
        for peer in [one for one in self.peers.values() if problem is None and one.process is None]:
            self._close(peer)
        self._tell_all({"go": True} if problem is None else {"refused": problem})
        if problem is not None:
            self._linger(0)
        return problem is None

    def _absent(self) -> list[int]:
        here = {peer.process for peer in self.peers.values()}
        return [number for number in range(self.processes) if number not in here]

    def _close(self, peer: _Peer) -> None:
        self.selector.unregister(peer.connection)
        del self.peers[peer.connection]
        peer.connection.close()

    def _greet(self, peer: _Peer) -> str | None:
        """Read the first message of a connection. Return what is wrong with it, or None."""
        messages = peer.received()
        if messages is None or (messages and messages[0].get("jshadow") != _PROTOCOL):
            self._close(peer)  # a program that is not jshadow, or a process that has ended; it may come again
            return None
        if not messages:
            return None
        number, count = messages[0].get("process"), messages[0].get("processes")
        if type(number) is not int or count != self.processes or not 0 <= number < self.processes:
            peer.process = number if type(number) is int else -1
            return (
                f"processes must be the same in all processes: process {number} at {peer.address} has {count}, process "
                f"0 has {self.processes}"
            )
        twin = next((one.address for one in self.peers.values() if one.process == number), None)
        peer.process = number
        if twin is not None:
            return f"process must differ between processes: {number} joined twice, from {twin} and {peer.address}"
        self._tell_all({"absent": self._absent()})
        return None

    def _watch(self) -> None:
        """Wait until all have said that they end. If one fails or is gone, end the run."""
        while not all(peer.done for peer in self.peers.values()):
            arrived = [(peer, peer.received()) for peer in self._ready()]
            for peer in [one for one, messages in arrived if messages is None]:
                self._close(peer)
                if not peer.done:
                    self._end_run(_gone(peer.process, self.processes), None)
                    return
            for peer, messages in arrived:
                for message in messages or []:
                    if "failed" in message:
                        why = f"process {peer.process} of {self.processes} failed: {message['failed']}"
                        self._end_run(why, peer)
                        return
                    peer.done |= bool(message.get("done"))
        self._tell_all({"bye": True})
        self._linger(0)

    def _end_run(self, why: str, failed: _Peer | None) -> None:
        """Tell all but the one that failed why the run ends, process 0 last, because JAX aborts the others then."""
        for peer in sorted(self.peers.values(), key=lambda one: one.process == 0):
            if peer.process == 0:
                self._linger(1)
            _send(peer.connection, {"noted": True} if peer is failed else {"lost": why})
        self._linger(0)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self.peers.values():
            _send(peer.connection, message)

    def _linger(self, most: int) -> None:
        """Wait until at most so many connections are open, for a short time."""
        end = time.monotonic() + _REPORT_SECONDS
        while len(self.peers) > most and (left := end - time.monotonic()) > 0:
            for peer in self._ready(left):
                if peer.received() is None:
                    self._close(peer)


# Every process


class Membership:
    """The connection of a process to process 0. Process 0 has one too.

    A thread reads from it. When a peer is gone, the thread prints a DistributedError on stderr and ends this process
    with status 2: the main thread may wait in a collective for a peer that never answers, and nothing can wake it.
    """

    def __init__(self, host: str, port: int, process: int, processes: int, timeout: float) -> None:
        """Connect to process 0, and wait until all processes have come, both for `timeout` seconds at most."""
        self.place, self.process, self.processes = _join_address(host, port), process, processes
        self.timeout, self.end = timeout, time.monotonic() + timeout
        self.noted, self.goodbye = threading.Event(), threading.Event()
        self.connection, self.lines = self._connect(host, port), _Lines()
        try:
            self._wait_for_all()
        except BaseException:
            self.connection.close()
            raise
        threading.Thread(target=self._watch, name="jshadow-peers", daemon=True).start()

    def _connect(self, host: str, port: int) -> socket.socket:
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=max(self.end - time.monotonic(), 1))
            except OSError as error:  # also a name that is not known: it may be soon
                if time.monotonic() + _RETRY_SECONDS > self.end:
                    raise DistributedError(
                        f"coordinator must be the address of process 0, which has to run, but {self.place} could not "
                        f"be reached within join_timeout, {self.timeout:g} s: {error}"
                    ) from error
                time.sleep(_RETRY_SECONDS)
                continue
            _keep_alive(connection)
            _send(connection, {"jshadow": _PROTOCOL, "process": self.process, "processes": self.processes})
            return connection

    def _wait_for_all(self) -> None:
        """Return when all processes have come. Raise DistributedError with the reason if they do not."""
        absent: list[int] = []
        try:
            for message in self._messages(self.end + _GRACE_SECONDS):
                absent = message.get("absent", absent)
                if "refused" in message:
                    raise DistributedError(message["refused"])
                if "go" in message:
                    return
        except TimeoutError as error:
            raise DistributedError(_not_come(absent, self.processes, self.timeout)) from error
        except ValueError as error:
            raise DistributedError(
                f"coordinator {self.place} does not answer as process 0 does before a run begins: process "
                f"{self.process} joined twice or too late, or another program has the port"
            ) from error
        raise DistributedError(
            f"coordinator {self.place} closed the connection: process 0 ended before all had joined, or process "
            f"{self.process} joined too late"
        )

    def _messages(self, end: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the messages of process 0 until the connection ends, or until the time `end` of `time.monotonic`."""
        while True:
            self.connection.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
            try:
                content = self.connection.recv(4096)
            except TimeoutError:
                raise
            except OSError:
                return
            if not content:
                return
            yield from self.lines.take(content)

    def _watch(self) -> None:
        with contextlib.closing(self.connection), contextlib.suppress(ValueError):
            for message in self._messages():
                if "lost" in message:
                    self._end(message["lost"])
                if "noted" in message:
                    self.noted.set()
                if "bye" in message:
                    self.goodbye.set()
                    return
        self._end(_gone(0, self.processes))

    def _end(self, why: str) -> None:
        """End this process, unless it has failed itself and is about to end."""
        if not self.noted.is_set():
            end_process(f"{why}. This is process {self.process}")

    def leave(self) -> None:
        """Say that this process has done its work, and wait until all have. A peer that is lost ends this process."""
        _send(self.connection, {"done": True})
        self.goodbye.wait()

    def fail(self, why: str) -> None:
        """Tell the others why this one ends with an error. The connection stays open, so process 0 ends after it."""
        _send(self.connection, {"failed": why[:2000]})
        self.noted.wait(_REPORT_SECONDS + _NOTED_SECONDS)
        self.noted.set()


def end_process(why: str) -> None:
    """Print a DistributedError on stderr and end this process with status 2, whatever its other threads do."""
    os.write(2, f"jshadow: DistributedError: {why}\n".encode())
    flusher = threading.Thread(target=sys.stdout.flush, daemon=True)  # it may wait for a thread that never goes on
    flusher.start()
    flusher.join(_FLUSH_SECONDS)
    os._exit(_LOST_STATUS)


def _not_come(absent: list[int], processes: int, timeout: float) -> str:
    return f"process {numbers(absent)} of {processes} did not join within join_timeout, {timeout:g} s"


def _gone(process: int | None, processes: int) -> str:
    return f"process {process} of {processes} is gone: killed, crashed, or its host cannot be reached"


# Addresses and messages


def split_address(address: str, field: str) -> tuple[str, int]:
    """Return the host and the port of "HOST:PORT". An IPv6 address stands in brackets. `field` names it in an error."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if found is None or not 1 <= int(found[2]) <= 65_535:
        raise ConfigError(f"{field} must be HOST:PORT with a port from 1 to 65535, got {address!r:.80}")
    return found[1].strip("[]"), int(found[2])


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_address(host: str, port: int) -> str:
    """Return where process 0 listens: on the loopback interface if the host is there, else on all interfaces."""
    name = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:  # a name
        loopback = False
    return _join_address(name if loopback else "::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at "HOST:PORT". Raises OSError if the port cannot be opened."""
    host, port = split_address(address, "bind address")
    if host == "::":
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other host is silent. It needs no thread of Python."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not all systems have all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. If the other side is gone, nothing happens: whoever reads from it finds out."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


class _Lines:
    """The messages that arrive on a connection."""

    def __init__(self) -> None:
        self.rest = b""

    def take(self, content: bytes) -> list[dict[str, Any]]:
        """Return the messages that end in these bytes."""
        *lines, self.rest = (self.rest + content).split(b"\n")
        if len(self.rest) > _MOST_BYTES or self.rest[:1] not in (b"", b"{"):
            raise ValueError(f"a message begins with {self.rest[:8]!r}, or has more than {_MOST_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is not a JSON object")
        return messages
