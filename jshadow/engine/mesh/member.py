"""The side of each process in the roll call: it joins, learns of lost peers, and says how it ends."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jshadow.engine.mesh.roll_call import REPORT_SECONDS, gone, not_come
from jshadow.engine.mesh.wire import PROTOCOL, Lines, join_address, keep_alive, send
from jshadow.errors import DistributedError

RETRY_SECONDS = 0.2
GRACE_SECONDS = 3.0  # process 0 may have begun to wait later than this process
NOTED_SECONDS = REPORT_SECONDS + 3  # how long a process that fails waits until its peers know
FLUSH_SECONDS = 1.0
LOST_STATUS = 2  # exit status of a process that has lost a peer: that of every typed error


class Membership:
    """The connection of a process to process 0. Process 0 has one too.

    A thread reads from it. When a peer is gone, the thread prints a DistributedError on stderr and ends this process
    with status 2: the main thread may wait in a collective for a peer that never answers, and nothing can wake it.
    """

    def __init__(self, host: str, port: int, process: int, processes: int, timeout: float) -> None:
        """Join: connect to process 0, and wait until all processes have come.

        Args:
            host: the host of process 0.
            port: its port.
            process: the number of this process.
            processes: the number of all processes.
            timeout: how many seconds to wait at most, for the connection and for the others together.

        Raises:
            DistributedError: process 0 cannot be reached, or it says that a process is missing, is there twice, or has
                another number of processes.
        """
        self.place, self.process, self.processes = join_address(host, port), process, processes
        self.timeout, self.end = timeout, time.monotonic() + timeout
        self.lines = Lines()
        self.noted, self.goodbye = threading.Event(), threading.Event()
        self.connection = self._connect(host, port)
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
                if time.monotonic() + RETRY_SECONDS > self.end:
                    raise DistributedError(
                        f"coordinator must be the address of process 0, which has to run, but {self.place} could not "
                        f"be reached within join_timeout, {self.timeout:g} s: {error}"
                    ) from error
                time.sleep(RETRY_SECONDS)
                continue
            keep_alive(connection)
            send(connection, {"jshadow": PROTOCOL, "process": self.process, "processes": self.processes})
            return connection

    def _wait_for_all(self) -> None:
        """Return when all processes have come. Raise DistributedError with the reason if they do not."""
        absent: list[int] = []
        try:
            for message in self._messages(self.end + GRACE_SECONDS):
                absent = message.get("absent", absent)
                if "refused" in message:
                    raise DistributedError(message["refused"])
                if "go" in message:
                    return
        except TimeoutError as error:
            raise DistributedError(not_come(absent, self.processes, self.timeout)) from error
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
        """Yield the messages of process 0 until the connection ends.

        Args:
            end: the time of `time.monotonic` until which to wait. None: without a limit.

        Raises:
            TimeoutError: the time is over.
            ValueError: there are other bytes on the connection.
        """
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
        try:
            self._read_on()
        finally:
            self.connection.close()

    def _read_on(self) -> None:
        with contextlib.suppress(ValueError):
            for message in self._messages():
                if "lost" in message:
                    self._end(message["lost"])
                if "noted" in message:
                    self.noted.set()
                if "bye" in message:
                    self.goodbye.set()
                    return
        if not self.noted.is_set():
            self._end(gone(0, self.processes))

    def _end(self, why: str) -> None:
        """End this process, unless it has failed itself and is about to end."""
        if self.noted.is_set():
            return
        end_process(f"{why}. This is process {self.process}")

    def leave(self) -> None:
        """Say that this process has done its work, and wait until all have. A peer that is lost ends this process."""
        send(self.connection, {"done": True})
        self.goodbye.wait()

    def fail(self, why: str) -> None:
        """Tell the other processes that this one ends with an error, so that they end too.

        The connection stays open until the process ends. So process 0 ends after it.

        Args:
            why: the error in one line.
        """
        send(self.connection, {"failed": why[:2000]})
        self.noted.wait(NOTED_SECONDS)
        self.noted.set()


def end_process(why: str) -> None:
    """Print a DistributedError on stderr and end this process with status 2, whatever its other threads do."""
    os.write(2, f"jshadow: DistributedError: {why}\n".encode())
    flusher = threading.Thread(target=sys.stdout.flush, daemon=True)  # it may wait for a thread that never goes on
    flusher.start()
    flusher.join(FLUSH_SECONDS)
    os._exit(LOST_STATUS)
