"""Two real processes of two CPU devices each: they join, agree, sum, and end when one of them is gone."""

import json
import os
import signal

import pytest
from several_processes import SUPPORT, ended, free_port, no_survivors, start, start_all  # noqa: F401

FAILING = """
import sys
from jshadow.engine.mesh.processes import ProcessOptions, join
with join(ProcessOptions(f"127.0.0.1:{sys.argv[1]}", 3, int(sys.argv[2]))) as processes:
    import jax
    assert jax.device_count() == 6
    if processes.index == int(sys.argv[3]):
        raise ValueError("a lone problem")
    print("joined", flush=True)
    sys.stdin.read()  # it waits as in a collective
"""


@pytest.fixture(scope="module")
def pair():
    """What each process found, and what each printed after process 1 was killed between two sums."""
    processes = start_all(2, [SUPPORT / "joined_checks.py"])
    found = []
    for process in processes:
        lines = []
        while not lines or not lines[-1].startswith("{"):
            lines.append(process.stderr.readline())
            assert lines[-1], (lines, process.wait())
        found.append(json.loads(lines[-1]))
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    processes[1].kill()
    return found, [ended(process) for process in processes]


def test_a_program_runs_after_all_have_compiled_it(pair):
    """The exchange comes before the first call of the compiled program, and only once."""
    for found in pair[0]:
        assert found["first run"] == ["compiled 0", 6.0, 6.0]


def test_tp_lies_within_a_process(pair):
    for found in pair[0]:
        assert found["axes"] == {"data": 1, "sp": 2, "tp": 2}
        assert found["hosts of tp"] == [[0, 0], [1, 1]]
        assert found["here"] == 2
        assert "got data=1 * sp=1 * tp=8 = 8; there are 4, fewer than it needs" in found["too large"]
        assert "processes: 2, devices of each: 2" in found["too large"]


def test_each_process_names_the_field_that_differs(pair):
    expected = "DistributedError: seed must be the same in all processes: process 0 has '0', process 1 has '1'"
    assert [found["seed"] for found in pair[0]] == [expected] * 2
    for found in pair[0]:
        other = 1 - found["index"]
        assert f"process {other} has 'step {other}', this one has 'step {found['index']}'" in found["program"]


def test_one_that_does_not_come_is_named(pair):
    for found in pair[0]:
        index = found["index"]
        assert found["late"].startswith(
            f"DistributedError: only {index} must be reached by all 2 processes within 0.2 s"
        )
        assert f"process {1 - index} did not come" in found["late"]
        assert found["again"].startswith("DistributedError: join must be called once")


def test_weights_are_compared_where_they_are_the_same_slices(pair):
    """Weights that a process has as a whole have one digest, however its devices split them."""
    names = [found["weights"].pop("names") for found in pair[0]]
    assert all(len(one) == 2 and one[0] == "weights" for one in names)
    assert names[0] != names[1]  # they hold other slices of the array that is split over processes
    for found in pair[0]:
        assert found["weights"]["same"]
        assert found["weights"]["other"].startswith("DistributedError: weights must be the same in all processes")


def test_the_other_ends_when_one_is_killed(pair):
    """Also in the middle of a sum, with a typed error. What gloo writes to standard output is not seen."""
    (status, out, err), (killed, silent, _) = pair[1]
    assert killed == -signal.SIGKILL
    assert status == 2
    assert "jshadow: DistributedError: process 1 of 2 is gone" in err
    assert out == "only process 0 prints this\n"
    assert silent == ""


@pytest.mark.parametrize("failing", [0, 2])
def test_the_others_end_when_one_fails(failing):
    """And they tell its error. The one that fails ends as without others."""
    port = free_port()
    processes = [start(["-c", FAILING, port, number, failing]) for number in range(3)]
    for number, process in enumerate(processes):
        status, _, err = ended_later(process)
        if number == failing:
            assert status == 1
            assert err.rstrip().endswith("ValueError: a lone problem")
        else:
            assert status == 2
            why = f"process {failing} of 3 failed: ValueError: a lone problem. This is process {number}"
            assert f"jshadow: DistributedError: {why}" in err


def test_the_others_end_when_process_0_is_killed():
    port = free_port()
    processes = [start(["-c", FAILING, port, number, -1]) for number in range(3)]
    for process in processes:
        assert process.stdout.readline() == "joined\n"
    os.kill(processes[0].pid, signal.SIGKILL)
    for number, process in enumerate(processes):
        status, _, err = ended_later(process)
        assert status != 0
        # JAX may end the process before jshadow does.
        assert number == 0 or "process 0 of 3 is gone" in err or "JAX distributed service detected fatal errors" in err


def ended_later(process):
    """As `ended`, without closing the standard input before the end."""
    stdin, process.stdin = process.stdin, None
    try:
        return ended(process)
    finally:
        stdin.close()
