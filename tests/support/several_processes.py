"""Several real processes on this machine, each with two CPU devices, and their output."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent
STARTED = []
END_SECONDS = 120  # a process that has not ended by then hangs, unless a test says that it compiles for longer
DEVICES = "--xla_force_host_platform_device_count=2"


def free_port():
    """A port that no program has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(arguments, **variables):
    """Start Python with these arguments. Its output can be read as text."""
    STARTED[:] = [process for process in STARTED if process.poll() is None]
    path = ":".join(map(str, (SUPPORT.parents[1], SUPPORT.parent / "references")))
    environment = os.environ | {"XLA_FLAGS": DEVICES, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | variables,
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def no_survivors():
    """End the processes that a failed test leaves. A file that imports this has it for each of its tests."""
    yield
    for process in STARTED:
        process.kill()
        process.communicate()
    STARTED.clear()


def start_all(count, arguments, each=None, **variables):
    """Start processes that join each other.

    Args:
        count: how many.
        arguments: the arguments of each before the options of joining.
        each: more arguments by the number of a process.
        **variables: variables of their environment.
    """
    joining = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", count, "--process"]
    return [
        start([*arguments, *(each or {}).get(number, ()), *joining, number], **variables) for number in range(count)
    ]


def ended(process, seconds=END_SECONDS):
    """Wait for the end of a process. Return its status, its standard output and its standard error."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the process hangs: {out[-2000:]} {err[-2000:]}") from None
    return process.returncode, out, err


def reported(process):
    """The next JSON object that a process prints on its standard error."""
    lines = []
    while not lines or not lines[-1].startswith("{"):
        lines.append(process.stderr.readline())
        assert lines[-1], (lines, process.wait())
    return json.loads(lines[-1])
