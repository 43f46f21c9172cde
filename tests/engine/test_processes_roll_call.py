"""The roll call over real sockets, in threads: who is missing, who comes twice, and who is told of a lost peer."""

import concurrent.futures
import contextlib
import socket
import threading

import pytest
from several_processes import free_port

from jshadow.engine.mesh import member, roll_call
from jshadow.engine.mesh.member import Membership
from jshadow.engine.mesh.roll_call import Hub, numbers
from jshadow.errors import DistributedError

HOST, LONG = "127.0.0.1", 30.0


class Roll:
    """A hub, and the results of processes that join it in threads."""

    def __init__(self, processes, timeout=LONG):
        self.port, self.processes = free_port(), processes
        self.hub = Hub(f"{HOST}:{self.port}", processes, timeout)
        self.pool = concurrent.futures.ThreadPoolExecutor(8)
        self.futures = []

    def join(self, process, processes=None, timeout=LONG):
        """The future of a membership."""
        count = processes or self.processes
        self.futures.append(self.pool.submit(Membership, HOST, self.port, process, count, timeout))
        return self.futures[-1]

    def all(self):
        """The memberships of all processes."""
        return [future.result() for future in [self.join(number) for number in range(self.processes)]]

    def hello(self, line):
        """A connection on which a line was sent."""
        connection = socket.create_connection((HOST, self.port))
        connection.sendall(line)
        return connection

    def end(self):
        """Close all connections. A roll call that still waits ends, because a process has another number of them."""
        with contextlib.suppress(OSError):
            self.hello(b'{"jshadow": 1, "process": 0, "processes": 0}\n').close()
        for future in self.futures:
            if future.exception() is None:
                with contextlib.suppress(OSError):
                    future.result().connection.shutdown(socket.SHUT_RDWR)


class Ends:
    """The reasons for which a process of the test would have ended, and the rolls of the test."""

    def __init__(self):
        self.reasons, self.event, self.rolls = [], threading.Event(), []

    def noted(self, why):
        """What `end_process` does in the test."""
        self.reasons.append(why)
        self.event.set()

    def roll(self, *arguments, **named):
        """A new roll, which ends with the test."""
        self.rolls.append(Roll(*arguments, **named))
        return self.rolls[-1]


@pytest.fixture
def ends(monkeypatch):
    """The waiting times are short."""
    noted = Ends()
    monkeypatch.setattr(member, "end_process", noted.noted)
    monkeypatch.setattr(member, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(member, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(roll_call, "REPORT_SECONDS", 0.5)
    yield noted
    for roll in noted.rolls:
        roll.end()
    for thread in threading.enumerate():
        if thread.name.startswith("jshadow-"):
            thread.join(LONG)
            assert not thread.is_alive()


def refusal(future):
    """The text of the error of a process that could not join."""
    with pytest.raises(DistributedError) as caught:
        future.result()
    return str(caught.value)


def test_all_come_and_leave(ends):
    roll = ends.roll(3)
    members = roll.all()
    list(roll.pool.map(Membership.leave, members))
    roll.hub.thread.join(LONG)
    assert not roll.hub.thread.is_alive()
    with socket.create_server((HOST, roll.port)):  # the port is free, for JAX
        pass
    assert ends.reasons == []


def test_no_one_leaves_before_all_are_done(ends):
    roll = ends.roll(2)
    members = roll.all()
    first = roll.pool.submit(members[0].leave)
    with pytest.raises(concurrent.futures.TimeoutError):
        first.result(0.1)
    members[1].leave()
    first.result(LONG)


def test_the_missing_are_named(ends):
    """By process 0 to all that came, and by a process itself if process 0 began to wait later."""
    roll = ends.roll(5, timeout=1.5)
    futures = [roll.join(number, timeout=LONG) for number in (0, 3)]
    for future in futures:
        assert refusal(future) == "process 1, 2 and 4 of 5 did not join within join_timeout, 1.5 s"
    roll = ends.roll(3)
    with roll.hello(b'{"jshadow": 1, "process": 0, "processes": 3}\n') as first:
        assert first.recv(100) == b'{"absent": [1, 2]}\n'
        assert refusal(roll.join(1, timeout=0.1)) == "process 2 of 3 did not join within join_timeout, 0.1 s"


def test_a_number_that_comes_twice(ends):
    """All that came learn of it."""
    roll = ends.roll(3)
    futures = [roll.join(0), roll.join(1), roll.join(1)]
    for future in futures:
        expected = f"process must differ between processes: 1 joined twice, from {HOST} and {HOST}"
        assert refusal(future) == expected


def test_a_process_that_died_may_come_again(ends):
    roll = ends.roll(2)
    roll.hello(b'{"jshadow": 1, "process": 1, "processes": 2}\n').close()
    assert [one.process for one in roll.all()] == [0, 1]


def test_another_number_of_processes(ends):
    roll = ends.roll(2)
    futures = [roll.join(0), roll.join(1, processes=3)]
    expected = f"processes must be the same in all processes: process 1 at {HOST} has 3, process 0 has 2"
    assert [refusal(future) for future in futures] == [expected] * 2


STRANGE = {
    "http": b"GET / HTTP/1.1\r\n",
    "empty": b"{}\n",
    "list": b"[1]\n",
    "another version": b'{"jshadow": 2}\n',
    "no text": b"\xff\n",
    "long": b"{" * 70_000,
}


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE.keys())
def test_strange_programs_are_sent_away(line, ends):
    """They do not disturb the processes that join."""
    roll = ends.roll(2)
    with roll.hello(line) as stranger:
        stranger.settimeout(LONG)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
        assert [one.process for one in roll.all()] == [0, 1]


def test_process_0_that_is_not_there(ends):
    port = free_port()
    with pytest.raises(DistributedError, match=rf"coordinator must be .* 127.0.0.1:{port} could not be reached"):
        Membership(HOST, port, 1, 2, 0.1)
    with pytest.raises(DistributedError, match=r"invalid:7 could not be reached within join_timeout, 0.1 s"):
        Membership("no-such-host.invalid", 7, 1, 2, 0.1)


@pytest.mark.parametrize("answer", [b"\0\0\x12\4\0", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_has_the_port_of_process_0(answer, ends):
    """For example JAX's service of a run that has begun: this process joins twice, or too late."""
    with socket.create_server((HOST, 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(Membership, HOST, server.getsockname()[1], 1, 2, LONG)
        connection = server.accept()[0]
        connection.sendall(answer)
        assert "process 1 joined twice or too late, or another program has the port" in refusal(future)
        connection.close()


def test_process_0_that_ends_before_all_came(ends):
    with socket.create_server((HOST, 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(Membership, HOST, server.getsockname()[1], 1, 2, LONG)
        server.accept()[0].close()
        assert "process 0 ended before all had joined" in refusal(future)


def test_a_port_that_another_program_has(ends):
    with socket.create_server((HOST, 0)) as server:
        place = f"{HOST}:{server.getsockname()[1]}"
        with pytest.raises(DistributedError, match=f"coordinator must have a port .* got {place}: .*in use"):
            Hub(place, 2, LONG)


def test_peers_learn_of_a_process_that_is_gone(ends):
    """Process 0 learns of it last."""
    roll = ends.roll(3)
    gone = roll.hello(b'{"jshadow": 1, "process": 2, "processes": 3}\n')
    members = [future.result() for future in (roll.join(0), roll.join(1))]
    gone.close()
    assert ends.event.wait(LONG)
    assert ends.reasons == [
        "process 2 of 3 is gone: killed, crashed, or its host cannot be reached. This is process 1",
    ]
    members[1].connection.shutdown(socket.SHUT_RDWR)  # process 1 has ended
    roll.hub.thread.join(LONG)
    assert any(reason.endswith("This is process 0") for reason in ends.reasons)


def test_peers_learn_of_a_process_that_fails(ends):
    roll = ends.roll(2)
    members = roll.all()
    members[1].fail("CapacityError: too long")
    assert ends.event.wait(LONG)
    assert ends.reasons == ["process 1 of 2 failed: CapacityError: too long. This is process 0"]


def test_a_process_that_fails_is_not_ended_by_others(ends):
    """Its own error is the one that counts, also if process 0 is gone by then."""
    roll = ends.roll(2)
    members = roll.all()
    members[0].fail("ValueError: one")
    assert ends.reasons == ["process 0 of 2 failed: ValueError: one. This is process 1"]
    members[0].connection.shutdown(socket.SHUT_RDWR)
    roll.hub.thread.join(LONG)
    assert len(ends.reasons) <= 2
    assert not any(reason.endswith("This is process 0") for reason in ends.reasons)


def test_process_0_that_is_gone(ends):
    with socket.create_server((HOST, 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(Membership, HOST, server.getsockname()[1], 1, 2, LONG)
        connection = server.accept()[0]
        connection.sendall(b'{"absent": []}\n{"go": true}\n')
        future.result()
        connection.close()
    assert ends.event.wait(LONG)
    assert ends.reasons == ["process 0 of 2 is gone: killed, crashed, or its host cannot be reached. This is process 1"]


def test_numbers_in_words():
    assert [numbers(values) for values in ([], [1], [1, 2], [0, 3, 5])] == ["none", "1", "1 and 2", "0, 3 and 5"]
