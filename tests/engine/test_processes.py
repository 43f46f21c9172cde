"""Processes that join: the options, the roll call in threads, and real processes that agree and end together."""

import concurrent.futures
import contextlib
import signal
import socket
import threading
from types import SimpleNamespace

import jax
import pytest
from several_processes import SUPPORT, ended, free_port, no_survivors, reported, start, start_all  # noqa: F401

from jshadow.engine import agree, processes
from jshadow.engine.agree import numbers
from jshadow.engine.processes import (
    Hub,
    Membership,
    Place,
    ProcessOptions,
    bind_address,
    found,
    join,
    listen,
    split_address,
)
from jshadow.errors import ConfigError, DistributedError

# The options

PLACE = "10.0.0.1:7000"
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "node[003-004]", "SLURM_NTASKS": "8"}
SLURM |= {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
OPEN_MPI |= {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture
def bare(monkeypatch):
    """An environment in which JAX finds nothing."""
    for name in (*SLURM, *OPEN_MPI, "KUBERNETES_SERVICE_HOST", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((PLACE, None, 0), r"processes must be given with coordinator and process, .* got None"),
        ((None, 2, 0), r"coordinator must be given with processes and process"),
        ((PLACE, 2, None), r"process must be given with coordinator and processes"),
        ((None, 2, None), r"coordinator must be given with processes, or"),
        ((PLACE, 0, 0), r"processes must be at least 1, got 0"),
        ((PLACE, 2, 2), r"process must be from 0 to 1, got 2"),
        ((PLACE, 2, -1), r"process must be from 0 to 1, got -1"),
        ((PLACE, 2, 0, 0.0), r"join_timeout must be seconds above 0, got 0.0"),
        ((PLACE, 2, 0, float("nan")), r"join_timeout must be seconds above 0, got nan"),
        (("10.0.0.1", 2, 0), r"coordinator must be HOST:PORT with a port from 1 to 65535, got '10.0.0.1'"),
        *(
            ((place, 2, 0), r"coordinator must be HOST:PORT")
            for place in ("10.0.0.1:0", "10.0.0.1:65536", ":7000", "::1:7000", "http://a:7000")
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        ProcessOptions(*options)


def test_addresses():
    """A local run cannot be reached from outside."""
    assert split_address("[::1]:7000", "coordinator") == ("::1", 7000)
    assert split_address("worker-0.jobs:65535", "coordinator") == ("worker-0.jobs", 65535)
    everywhere = "[::]:7" if socket.has_dualstack_ipv6() else "0.0.0.0:7"
    hosts = {"localhost": "127.0.0.1:7", "127.0.0.1": "127.0.0.1:7", "::1": "[::1]:7"}
    hosts |= {"10.0.0.1": everywhere, "node3": everywhere}
    assert {host: bind_address(host, 7) for host in hosts} == hosts
    port = free_port()
    with listen(bind_address("node3", port)), socket.create_connection(("127.0.0.1", port)):
        pass


def test_one_process_starts_nothing(bare):
    for options in ({}, {"search": True}, {"coordinator": PLACE, "processes": 1, "process": 0}, {"processes": 1}):
        with join(ProcessOptions(**options)) as alone:
            assert (alone.count, alone.index, alone.first) == (1, 0, True)
    assert not jax.distributed.is_initialized()
    agree.agree({"seed": "1"})
    agree.compiled_everywhere("step")
    assert agree.exchange("name", "value", 1.0) == ["value"]
    assert agree.run_together(jax.jit(lambda x, n: x * n, static_argnums=1), 3, 2) == 6
    assert not agree.seen
    assert agree.processes_here() == 1


def test_jax_finds_slurm_and_open_mpi(bare):
    for name, value in SLURM.items():
        bare.setenv(name, value)
    assert found(ProcessOptions(search=True)) == Place("node003:62055", 8, 5, [1])
    assert found(ProcessOptions()) is None, "only where it is asked for"
    assert found(ProcessOptions(processes=1, search=True)) is None
    assert found(ProcessOptions(PLACE, 2, 1, search=True)) == Place(PLACE, 2, 1), "options come first"
    bare.setenv("SLURM_NTASKS", "1")
    assert found(ProcessOptions(search=True)) is None
    bare.setenv("SLURM_NTASKS", "many")
    with pytest.raises(DistributedError, match=r"coordinator, processes and process must be given, .* 'many'"):
        found(ProcessOptions(search=True))
    for name in SLURM:
        bare.delenv(name)
    for name, value in (OPEN_MPI | {"JAX_COORDINATOR_PORT": "7001"}).items():
        bare.setenv(name, value)
    assert found(ProcessOptions(search=True)) == Place("10.96.0.1:7001", 4, 3, [1])


def test_join_comes_before_the_first_array():
    jax.devices()
    with pytest.raises(DistributedError, match="join must be called once, and before JAX starts a backend"):
        join(ProcessOptions("127.0.0.1:1", 2, 1, 0.1))


def test_errors_of_collectives_are_typed():
    """And others stay as they are."""
    message = "processes must all answer in a collective, got UNKNOWN: Gloo context failed"
    with pytest.raises(DistributedError, match=message), join(ProcessOptions()):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo context\n failed")
    for other in (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), ValueError("gloo")):
        with pytest.raises(type(other)) as caught, join(ProcessOptions()):
            raise other
        assert caught.value is other


# The roll call over real sockets, in threads

HOST, LONG = "127.0.0.1", 30.0


class Roll:
    """A hub, and the results of processes that join it in threads."""

    def __init__(self, processes, timeout=LONG):
        self.port, self.processes = free_port(), processes
        self.hub = Hub(f"{HOST}:{self.port}", processes, timeout)
        self.pool, self.futures = concurrent.futures.ThreadPoolExecutor(8), []

    def join(self, process, processes=None, timeout=LONG):
        count = processes or self.processes
        self.futures.append(self.pool.submit(Membership, HOST, self.port, process, count, timeout))
        return self.futures[-1]

    def all(self):
        return [future.result() for future in [self.join(number) for number in range(self.processes)]]

    def hello(self, line):
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


@pytest.fixture
def ends(monkeypatch):
    """The reasons for which a process of the test would have ended, and a function that makes rolls."""
    rolls, noted = [], SimpleNamespace(reasons=[], event=threading.Event())

    def roll(*arguments, **named):
        rolls.append(Roll(*arguments, **named))
        return rolls[-1]

    noted.roll = roll
    monkeypatch.setattr(processes, "end_process", lambda why: noted.reasons.append(why) or noted.event.set())
    for name, seconds in (("GRACE", 0.5), ("RETRY", 0.02), ("REPORT", 0.5)):
        monkeypatch.setattr(processes, f"_{name}_SECONDS", seconds)
    yield noted
    for one in rolls:
        one.end()
    for thread in threading.enumerate():
        if thread.name.startswith("jshadow-"):
            thread.join(LONG)
            assert not thread.is_alive()


def refusal(future):
    with pytest.raises(DistributedError) as caught:
        future.result()
    return str(caught.value)


def test_all_come_and_leave(ends):
    """No one leaves before all are done."""
    roll = ends.roll(3)
    members = roll.all()
    first = roll.pool.submit(members[0].leave)
    with pytest.raises(concurrent.futures.TimeoutError):
        first.result(0.1)
    list(roll.pool.map(Membership.leave, members[1:]))
    first.result(LONG)
    roll.hub.thread.join(LONG)
    assert not roll.hub.thread.is_alive()
    with socket.create_server((HOST, roll.port)):  # the port is free, for JAX
        pass
    assert ends.reasons == []


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


def test_two_that_disagree_end_the_roll_call(ends):
    """A number that comes twice, or another number of processes. All that came learn of it."""
    roll, other = ends.roll(3), ends.roll(2)
    twice = f"process must differ between processes: 1 joined twice, from {HOST} and {HOST}"
    assert [refusal(future) for future in [roll.join(number) for number in (0, 1, 1)]] == [twice] * 3
    more = f"processes must be the same in all processes: process 1 at {HOST} has 3, process 0 has 2"
    later = other.join(1, processes=3)
    with pytest.raises(concurrent.futures.TimeoutError):  # process 0 hears of it too, though it connects last
        later.result(0.2)
    assert [refusal(future) for future in [other.join(0), later]] == [more] * 2


def test_a_process_that_died_may_come_again(ends):
    roll = ends.roll(2)
    roll.hello(b'{"jshadow": 1, "process": 1, "processes": 2}\n').close()
    assert [one.process for one in roll.all()] == [0, 1]


DEEP = b'{"a":' + b"[" * 60_000 + b"\n"
STRANGE = (b"GET / HTTP/1.1\r\n", b"{}\n", b"[1]\n", b"\xff\n", b"{" * 70_000, DEEP, b'{"jshadow": 2}\n')


def test_strange_programs_are_sent_away(ends):
    """They do not disturb the processes that join. One is of another version, and two send long lines."""
    roll = ends.roll(2)
    with contextlib.ExitStack() as strangers:
        for line in STRANGE:
            stranger = strangers.enter_context(roll.hello(line))
            stranger.settimeout(LONG)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b"", line[:20]
        assert [one.process for one in roll.all()] == [0, 1]


def test_a_place_that_cannot_be_reached_or_used(ends):
    port = free_port()
    with pytest.raises(DistributedError, match=rf"coordinator must be .* 127.0.0.1:{port} could not be reached"):
        Membership(HOST, port, 1, 2, 0.1)
    with pytest.raises(DistributedError, match=r"invalid:7 could not be reached within join_timeout, 0.1 s"):
        Membership("no-such-host.invalid", 7, 1, 2, 0.1)
    with socket.create_server((HOST, port)):
        told = f"coordinator must have a port .* got {HOST}:{port}: .*in use"
        with pytest.raises(DistributedError, match=told):
            Hub(f"{HOST}:{port}", 2, LONG)


@contextlib.contextmanager
def process_0(answer):
    """A process that joins a process 0 which gives one answer, and is gone."""
    with socket.create_server((HOST, 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(Membership, HOST, server.getsockname()[1], 1, 2, LONG)
        with server.accept()[0] as connection:
            connection.sendall(answer)
            yield future, connection


@pytest.mark.parametrize("answer", [b"\0\0\x12\4\0", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_process_0_that_does_not_answer(answer, ends):
    """For example JAX's service of a run that has begun: this process joins twice, or too late."""
    with process_0(answer) as (future, connection):
        if not answer:
            connection.close()
            assert "process 0 ended before all had joined" in refusal(future)
        else:
            assert "process 1 joined twice or too late, or another program has the port" in refusal(future)


GONE = "is gone: killed, crashed, or its host cannot be reached. This is process"


def test_process_0_that_is_gone(ends):
    with process_0(b'{"absent": []}\n{"go": true}\n') as (future, _):
        future.result()
    assert ends.event.wait(LONG)
    assert ends.reasons == [f"process 0 of 2 {GONE} 1"]


def test_peers_learn_of_a_process_that_is_gone(ends):
    """Process 0 learns of it last."""
    roll = ends.roll(3)
    gone = roll.hello(b'{"jshadow": 1, "process": 2, "processes": 3}\n')
    members = [future.result() for future in (roll.join(0), roll.join(1))]
    gone.close()
    assert ends.event.wait(LONG)
    assert ends.reasons == [f"process 2 of 3 {GONE} 1"]
    members[1].connection.shutdown(socket.SHUT_RDWR)  # process 1 has ended
    roll.hub.thread.join(LONG)
    assert any(reason.endswith("This is process 0") for reason in ends.reasons)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_other_learns_of_a_process_that_fails(ends, failing):
    """The one that fails is not ended: its own error is the one that counts, also if process 0 is gone by then."""
    roll = ends.roll(2)
    members = roll.all()
    members[failing].fail("ValueError: one")
    assert ends.event.wait(LONG)
    assert ends.reasons == [f"process {failing} of 2 failed: ValueError: one. This is process {1 - failing}"]
    members[0].connection.shutdown(socket.SHUT_RDWR)
    roll.hub.thread.join(LONG)
    assert len(ends.reasons) <= 2
    assert not any(reason.endswith(f"This is process {failing}") for reason in ends.reasons)


def test_numbers_in_words():
    assert [numbers(values) for values in ([], [1], [1, 2], [0, 3, 5])] == ["none", "1", "1 and 2", "0, 3 and 5"]


# Real processes of two CPU devices each


def real_processes(test):
    return pytest.mark.slow(pytest.mark.process(test))


@real_processes
def test_two_processes_agree_until_one_is_killed():
    processes = start_all(2, [SUPPORT / "joined_checks.py"])
    seen = [reported(process) for process in processes]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    processes[1].kill()  # in the middle of a sum
    (status, out, err), (killed, silent, _) = (ended(process) for process in processes)
    assert (killed, status) == (-signal.SIGKILL, 2)
    assert "jshadow: DistributedError: process 1 of 2 is gone" in err
    # what gloo writes to standard output is not seen
    assert (out, silent) == ("only process 0 prints this\n", "")
    names = [one["weights"].pop("names") for one in seen]
    assert all(len(one) == 2 and one[0] == "weights" for one in names)
    assert names[0] != names[1], "they hold other slices of the array that is split over processes"
    for index, one in enumerate(seen):
        # a program runs after all have compiled it: the exchange comes before its first call, and only once
        assert (one["index"], one["first run"]) == (index, ["compiled 0", 6.0, 6.0])
        assert (one["axes"], one["hosts of tp"]) == ({"data": 2, "tp": 2}, [[0, 0], [1, 1]])
        assert one["here"] == 2
        assert "got data=1 * tp=8 = 8; there are 4, fewer than it needs" in one["too large"]
        assert "processes: 2, devices of each: 2" in one["too large"]
        differs = "DistributedError: seed must be the same in all processes: process 0 has '0', process 1 has '1'"
        assert one["seed"] == differs
        assert f"process {1 - index} has 'step {1 - index}', this one has 'step {index}'" in one["program"]
        late = f"DistributedError: only {index} must be reached by all 2 processes within 0.2 s"
        assert one["late"].startswith(late)
        assert f"process {1 - index} did not come" in one["late"]
        assert one["again"].startswith("DistributedError: join must be called once")
        # weights that a process has as a whole have one digest, however its devices split them
        assert one["weights"]["same"]
        assert one["weights"]["other"].startswith("DistributedError: weights must be the same in all processes")


FAILING = """
import sys
from jshadow.engine.processes import ProcessOptions, join
with join(ProcessOptions(f"127.0.0.1:{sys.argv[1]}", 3, int(sys.argv[2]))) as processes:
    import jax
    assert jax.device_count() == 6
    print("joined", flush=True)
    if processes.index == int(sys.argv[3]):
        raise ValueError("a lone problem")
    sys.stdin.read()  # it waits as in a collective
"""


@real_processes
@pytest.mark.parametrize("failing", [0, 2, None])
def test_the_others_end_when_one_fails_or_process_0_is_killed(failing):
    """They tell its error. The one that fails ends as without others."""
    port, alone = free_port(), failing is None
    processes = [start(["-c", FAILING, port, number, -1 if alone else failing]) for number in range(3)]
    for process in processes if alone else ():
        assert process.stdout.readline() == "joined\n"
    if alone:
        processes[0].kill()
    for number, process in enumerate(processes):
        stdin, process.stdin = process.stdin, None  # it is open until the end
        status, _, err = ended(process)
        stdin.close()
        if alone:  # JAX may end the process before jshadow does
            assert status != 0
            words = ("process 0 of 3 is gone", "JAX distributed service detected fatal errors")
            assert number == 0 or any(text in err for text in words)
        elif number == failing:
            assert status == 1
            assert err.rstrip().endswith("ValueError: a lone problem")
        else:
            assert status == 2
            why = f"process {failing} of 3 failed: ValueError: a lone problem. This is process {number}"
            assert f"jshadow: DistributedError: {why}" in err
