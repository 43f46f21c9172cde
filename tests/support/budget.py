"""What each room of the suite costs: compiled programs, CPU seconds and tests. A run above its limit fails.

Most of a test's time is spent to build programs: JAX traces a function, and XLA compiles it. So the limit is one of
programs, which are the same number on every machine. A program that comes from the cache on disk counts too, because
it was traced and loaded.

TESTS_LIMIT=N is the most programs of a run. TESTS_COSTS=FILE appends one line of JSON for each test to a file. A test
that would begin after TESTS_END=T, in seconds since 1970, is left out, and the number of these is told.
"""

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
SECONDS = {
    COMPILED: "compiling",
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
}
SPENT = pytest.StashKey[tuple[dict[str, Any], int, float, dict[str, float]]]()
DEAREST = 10  # tests that are named when a run is above its limit


class Counted:
    """The programs that this process built, and the seconds that building them took."""

    programs = 0
    seconds: ClassVar[defaultdict[str, float]] = defaultdict(float)
    listens = False

    @classmethod
    def note(cls, event: str, seconds: float, **_: Any) -> None:
        """Count one event of `jax.monitoring`."""
        if event in SECONDS:
            cls.seconds[SECONDS[event]] += seconds
        cls.programs += event == COMPILED

    @classmethod
    def listen(cls) -> None:
        """Count from now on."""
        if not cls.listens:
            import jax.monitoring  # not before the environment is set

            jax.monitoring.register_event_duration_secs_listener(cls.note)
            cls.listens = True


OVER = "left out, because TESTS_END is over"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leave out a test that would begin too late."""
    if time.time() > float(os.environ.get("TESTS_END") or "inf"):
        pytest.skip(OVER)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Note at each test what it cost, its fixtures included."""
    Counted.listen()
    before, start, building = Counted.programs, time.process_time(), dict(Counted.seconds)
    spent: dict[str, Any] = {}
    item.user_properties.append(("cost", spent))
    item.stash[SPENT] = (spent, before, start, building)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> None:
    """Fill in the cost before the last report of a test is made."""
    if call.when == "teardown":
        spent, before, start, building = item.stash[SPENT]
        spent |= {"programs": Counted.programs - before, "cpu": round(time.process_time() - start, 3)}
        spent |= {name: round(total - building.get(name, 0), 3) for name, total in Counted.seconds.items()}


class Costs:
    """The costs of all tests, in the process that prints them."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the cost of a test, and whether it failed."""
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            cost = next(value for name, value in report.user_properties if name == "cost")
            self.tests[report.nodeid] = cost
            if path := os.environ.get("TESTS_COSTS"):
                with Path(path).open("a") as file:
                    file.write(
                        json.dumps({"test": report.nodeid, "failed": report.nodeid in self.failed} | cost) + "\n"
                    )

    @property
    def programs(self) -> int:
        """All programs of the run."""
        return sum(cost["programs"] for cost in self.tests.values())

    def rooms(self) -> list[str]:
        """The lines of a table, a room a line."""
        sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for nodeid, cost in self.tests.items():
            parts = Path(nodeid.split("::")[0]).parts
            room = "/".join(parts[:2]) if parts[0] == "tools" else parts[1] if len(parts) > 2 else parts[0]
            for key in (room, "all"):
                sums[key].update(cost | {"tests": 1})
        head = ("tests", "programs", "cpu", *SECONDS.values())
        lines = [f"{'room':12}" + "".join(f"{name:>11}" for name in head)]
        for room, total in sorted(sums.items(), key=lambda pair: pair[1]["cpu"]):
            lines.append(f"{room:12}" + "".join(f"{total[name]:11.0f}" for name in head))
        return lines

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table, and the dearest tests if the run is above its limit."""
        if not self.tests:
            return
        for line in self.rooms():
            terminalreporter.write_line(line)
        if late := sum(OVER in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())):
            terminalreporter.write_line(f"{late} of {len(self.tests)} tests were {OVER}", red=True)
        if (limit := limit_of_run()) and self.programs > limit:
            terminalreporter.write_line(f"{self.programs} programs were compiled, and the limit is {limit}:", red=True)
            for name, cost in sorted(self.tests.items(), key=lambda pair: -pair[1]["programs"])[:DEAREST]:
                terminalreporter.write_line(f"  {cost['programs']:5} programs, {cost['cpu']:6.1f} s: {name}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run above its limit."""
        if (limit := limit_of_run()) and self.programs > limit:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def limit_of_run() -> int:
    """The most programs that this run may compile. 0: no limit."""
    return int(os.environ.get("TESTS_LIMIT") or 0)


def pytest_configure(config: pytest.Config) -> None:
    """Print in the process that collects the reports, and not in a worker of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(), "costs of tests")
