"""One model over the devices of two processes on this machine: the results of one device."""

import json

import pytest
from several_processes import SUPPORT, ended, start_all
from several_processes import no_survivors as no_survivors

ORACLE = SUPPORT.parent / "laws" / "oracle"
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_enable_concurrency_optimized_scheduler=false"
COMPILE_SECONDS = 540  # under the limit of a test
CASES = ["shadowkv:sp=2,tp=2:device_put", "packed:tp=4:device_put", "shadowkv_plus:data=2,tp=2:zero_copy"]


@pytest.mark.slow
def test_two_processes_give_the_results_of_one_device():
    """Heads in a process and chunks between the processes, and heads or rows over all devices."""
    path = ":".join(map(str, (SUPPORT.parents[1], SUPPORT, SUPPORT.parent, ORACLE)))
    running = start_all(2, [SUPPORT / "joined_model.py", *CASES], XLA_FLAGS=FLAGS, PYTHONPATH=path)
    results = [ended(process, COMPILE_SECONDS) for process in running]
    assert [status for status, _, _ in results] == [0, 0], results[0][2][-3000:] + results[1][2][-3000:]
    told = json.loads(next(line for line in results[0][1].splitlines() if line.startswith("{")))
    assert list(told) == CASES
    assert max(max(differences) for differences in told.values()) < 1e-4
