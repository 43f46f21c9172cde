"""The options of joining: what is malformed or missing, and what JAX finds in the environment."""

import socket

import jax
import pytest

from jshadow.engine.mesh import agree
from jshadow.engine.mesh.processes import Place, ProcessOptions, found, join
from jshadow.engine.mesh.wire import bind_address, listen, split_address
from jshadow.errors import ConfigError, DistributedError

PLACE = "10.0.0.1:7000"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


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
        (("10.0.0.1:0", 2, 0), r"coordinator must be HOST:PORT"),
        (("10.0.0.1:65536", 2, 0), r"coordinator must be HOST:PORT"),
        ((":7000", 2, 0), r"coordinator must be HOST:PORT"),
        (("::1:7000", 2, 0), r"coordinator must be HOST:PORT"),
        (("http://a:7000", 2, 0), r"coordinator must be HOST:PORT"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        ProcessOptions(*options)


def test_addresses():
    assert split_address("[::1]:7000", "coordinator") == ("::1", 7000)
    assert split_address("worker-0.jobs:65535", "coordinator") == ("worker-0.jobs", 65535)


def test_a_local_run_cannot_be_reached_from_outside():
    assert bind_address("localhost", 7) == "127.0.0.1:7"
    assert bind_address("127.0.0.1", 7) == "127.0.0.1:7"
    assert bind_address("::1", 7) == "[::1]:7"
    everywhere = "[::]:7" if socket.has_dualstack_ipv6() else "0.0.0.0:7"
    assert [bind_address(host, 7) for host in ("10.0.0.1", "node3")] == [everywhere] * 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with listen(bind_address("node3", port)), socket.create_connection(("127.0.0.1", port)):
        pass


def test_one_process_starts_nothing(bare):
    for options in (
        ProcessOptions(),
        ProcessOptions(search=True),
        ProcessOptions(PLACE, 1, 0),
        ProcessOptions(processes=1),
    ):
        with join(options) as alone:
            assert (alone.count, alone.index, alone.first) == (1, 0, True)
    assert not jax.distributed.is_initialized()


def test_jax_finds_slurm(bare):
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


def test_jax_finds_open_mpi(bare):
    for name, value in OPEN_MPI.items():
        bare.setenv(name, value)
    bare.setenv("JAX_COORDINATOR_PORT", "7001")
    place = found(ProcessOptions(search=True))
    assert place == Place("10.96.0.1:7001", 4, 3, [1])


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


def test_alone_everything_agrees():
    agree.agree({"seed": "1"})
    agree.compiled_everywhere("step")
    assert agree.exchange("name", "value", 1.0) == ["value"]
    assert int(agree.run_together(jax.jit(lambda x, n: x * n, static_argnums=1), 3, 2)) == 6
    assert not agree.seen
    assert agree.processes_here() == 1
