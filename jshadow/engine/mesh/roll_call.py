"""Process 0 calls the roll: it waits until all processes have come, and tells them later if one of them is gone.

The coordination service of JAX ends a process by an abort if a peer is missing or dies, and it does not say which one.
So all processes meet here first. Each keeps a TCP connection to process 0. When a process dies, the kernel closes its
connection, and process 0 tells the others.
"""

import contextlib
import dataclasses
import selectors
import socket
import threading
import time
from typing import Any

from jshadow.engine.mesh.wire import PROTOCOL, Lines, keep_alive, listen, send
from jshadow.errors import DistributedError

REPORT_SECONDS = 20.0  # how long process 0 waits for the others to end, after an error


@dataclasses.dataclass
class Member:
    """A connection of the hub.

    Attributes:
        connection: the socket.
        peer: the address of the other side.
        lines: the messages that arrive on it.
        process: the number of its process, or None before its first message.
        done: whether the process has said that it ends.
    """

    connection: socket.socket
    peer: str
    lines: Lines = dataclasses.field(default_factory=Lines)
    process: int | None = None
    done: bool = False


class Hub:
    """The side of process 0: a thread that listens until all have come, and then watches their connections."""

    def __init__(self, address: str, processes: int, timeout: float) -> None:
        """Open the port and start the thread.

        Args:
            address: "HOST:PORT" to listen at.
            processes: the number of all processes.
            timeout: seconds until those that are missing are named.

        Raises:
            DistributedError: the port cannot be opened.
        """
        self.processes, self.timeout = processes, timeout
        self.members: dict[socket.socket, Member] = {}
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

    def _run(self) -> None:
        try:
            if self._call_the_roll():
                self._watch()
        finally:
            for connection in [self.door, *self.members]:
                connection.close()
            self.selector.close()

    def _call_the_roll(self) -> bool:
        """Return whether all processes have come. If not, all that have come know why."""
        end = time.monotonic() + self.timeout
        problem = None
        while problem is None and len(self._here()) < self.processes:
            left = end - time.monotonic()
            if left <= 0:
                problem = self._missing()
                break
            for key, _ in self.selector.select(left):
                if key.fileobj is self.door:
                    self._open()
                else:
                    problem = problem or self._greet(self.members[key.fileobj])  # type: ignore[index]
        self.selector.unregister(self.door)
        self.door.close()  # JAX opens the same port
        for member in [one for one in self.members.values() if problem is None and one.process is None]:
            self._close(member)
        self._tell_all({"go": True} if problem is None else {"refused": problem})
        if problem is not None:
            self._linger(0)
        return problem is None

    def _here(self) -> list[int]:
        return sorted(one.process for one in self.members.values() if one.process is not None)

    def _missing(self) -> str:
        return not_come(self._absent(), self.processes, self.timeout)

    def _absent(self) -> list[int]:
        return [number for number in range(self.processes) if number not in self._here()]

    def _open(self) -> None:
        with contextlib.suppress(OSError):  # the other side is gone already
            connection, peer = self.door.accept()
            keep_alive(connection)
            self.members[connection] = Member(connection, str(peer[0]))
            self.selector.register(connection, selectors.EVENT_READ)

    def _close(self, member: Member) -> None:
        self.selector.unregister(member.connection)
        del self.members[member.connection]
        member.connection.close()

    def _greet(self, member: Member) -> str | None:
        """Read the first message of a connection. Return what is wrong with it, or None."""
        messages = received(member)
        if messages is None or (messages and messages[0].get("jshadow") != PROTOCOL):
            self._close(member)  # a program that is not jshadow, or a process that has ended; it may come again
            return None
        if not messages:
            return None
        number, count = messages[0].get("process"), messages[0].get("processes")
        if type(number) is not int or count != self.processes or not 0 <= number < self.processes:
            member.process = -1
            return (
                f"processes must be the same in all processes: process {number} at {member.peer} has {count}, process "
                f"0 has {self.processes}"
            )
        twin = next((one.peer for one in self.members.values() if one.process == number), None)
        member.process = number
        if twin is not None:
            return f"process must differ between processes: {number} joined twice, from {twin} and {member.peer}"
        self._tell_all({"absent": self._absent()})
        return None

    def _watch(self) -> None:
        """Wait until all have said that they end. If one fails or is gone, end the run."""
        while not all(member.done for member in self.members.values()):
            ready = [self.members[key.fileobj] for key, _ in self.selector.select()]  # type: ignore[index]
            arrived = [(member, received(member)) for member in ready]
            for member in [one for one, messages in arrived if messages is None]:
                self._close(member)
                if not member.done:
                    self._end_run(gone(member.process, self.processes), None)
                    return
            for member, messages in arrived:
                for message in messages or []:
                    if "failed" in message:
                        why = f"process {member.process} of {self.processes} failed: {message['failed']}"
                        self._end_run(why, member)
                        return
                    member.done |= bool(message.get("done"))
        self._tell_all({"bye": True})
        self._linger(0)

    def _end_run(self, why: str, failed: Member | None) -> None:
        """Tell all why the run ends. Process 0 is the last, because JAX aborts the others when process 0 ends.

        Args:
            why: the reason.
            failed: the process that has failed, which knows the reason, or None.
        """
        others = [member for member in self.members.values() if member.process != 0]
        first = [member for member in self.members.values() if member.process == 0]
        for member in [*others, *first]:
            if member in first:
                self._linger(len(first))
            send(member.connection, {"noted": True} if member is failed else {"lost": why})
        self._linger(0)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in self.members.values():
            send(member.connection, message)

    def _linger(self, most: int) -> None:
        """Wait until at most so many connections are open, for a short time."""
        end = time.monotonic() + REPORT_SECONDS
        while len(self.members) > most and (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if received(member := self.members[key.fileobj]) is None:  # type: ignore[index]
                    self._close(member)


def received(member: Member) -> list[dict[str, Any]] | None:
    """Return the messages that have arrived, or None if the connection has ended or has other bytes on it."""
    try:
        content = member.connection.recv(4096)
        return member.lines.take(content) if content else None
    except (OSError, ValueError):
        return None


def not_come(absent: list[int], processes: int, timeout: float) -> str:
    """Return the sentence that names the processes that did not join.

    Args:
        absent: their numbers.
        processes: the number of all processes.
        timeout: how many seconds the others have waited.
    """
    return f"process {numbers(absent)} of {processes} did not join within join_timeout, {timeout:g} s"


def gone(process: int | None, processes: int) -> str:
    """Return the sentence that says which process has ended without a word."""
    return f"process {process} of {processes} is gone: killed, crashed, or its host cannot be reached"


def numbers(values: list[int]) -> str:
    """Return process numbers in words: "1", "1 and 2", "1, 2 and 5"."""
    *most, last = list(map(str, values)) or ["none"]
    return f"{', '.join(most)} and {last}" if most else last
