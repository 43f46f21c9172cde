"""How the suite runs: on the CPU, with shared compiled programs, and with a count of the law cases at its end."""

import ctypes
import fcntl
import gc
import itertools
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

REPO = Path(__file__).resolve().parent.parent
CACHE = REPO / ".cache"  # git-ignored
CHECKPOINT = REPO / "checkpoints" / "smollm2-135m-instruct"
MOST_MAPPINGS = 30_000
MOST_PAGES = 3 * 2**30 // os.sysconf("SC_PAGE_SIZE")  # of a worker's memory; two of them share a machine
COUNT_EACH = 5  # mappings are counted after every fifth test
tests_run, mappings = itertools.count(), [0]
kept_pages = [0]  # what a worker held when its programs were dropped last
# Tests of laws record these numbers with `record_property`. Their sums are printed at the end of a run.
COUNTS = ("law_cases", "sets_compared", "near_ties", "random_cases", "mismatches")

# Before anything imports jax. A second run, and a second xdist worker, find compiled programs on disk. Without the
# caches of XLA itself, whose keys contain the folder, the files serve any checkout.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def without_a_cache(folder: str) -> str:
    """Return why programs cannot be kept in a folder, or ""."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"compiled programs are not kept, because {folder} cannot be written: {error.strerror}"


if NO_CACHE := without_a_cache(os.environ["JAX_COMPILATION_CACHE_DIR"]):
    del os.environ["JAX_COMPILATION_CACHE_DIR"]


# Tracing makes many small objects. With Python's own thresholds, a tenth of the suite's time is garbage collection.
gc.set_threshold(100_000, 50, 1000)

settings.register_profile("jshadow", deadline=None, derandomize=True)
settings.load_profile("jshadow")


# Tiny models compile two to four times as fast with these; a real model would run too slowly. Programs that run in
# several threads at once can hang with them: a test with such threads runs them in a process without XLA_FLAGS.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def pytest_configure(config: pytest.Config) -> None:
    """Let XLA compile fast, unless a real model is to run."""
    if "not real" in config.option.markexpr:
        os.environ.setdefault("XLA_FLAGS", FAST_COMPILE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all cases of a policy (`--dist loadgroup`), and all other tests of a room.

    They share programs, prefilled states and servers. The rooms come first, because their groups are larger.
    """
    from cases import POLICY_CASES

    def policy_of(item: pytest.Item) -> str:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")  # type: ignore[attr-defined]
        return name if isinstance(name, str) and name in POLICY_CASES else ""

    items.sort(key=policy_of)  # stable
    for item in items:
        room = item.path.relative_to(REPO).parts[1]
        item.add_marker(pytest.mark.xdist_group(policy_of(item) or room))


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how many laws were checked on cases, and what the oracle found. Works under xdist: reports arrive here."""
    if NO_CACHE:
        terminalreporter.write_line(NO_CACHE)
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, ())]
    recorded = [(report, *pair) for report in reports for pair in report.user_properties if pair[0] in COUNTS]
    if not recorded:
        return
    found: Counter[str] = Counter()
    for _, name, value in recorded:
        found[name] += value
    tests = {report.nodeid: report.failed for report, *_ in recorded}
    for line in (
        f"{found['law_cases']} checks of laws, {len(tests)} tests of laws and oracles, {sum(tests.values())} failed",
        f"{found['sets_compared']} selected sets compared, {found['near_ties']} near ties (gap under 1e-5)",
        f"{found['random_cases']} random rows, {found['mismatches']} mismatches",
    ):
        terminalreporter.write_line(f"laws: {line}")


@pytest.fixture(autouse=True)
def few_programs():
    """Drop compiled programs before a worker runs out of memory, or of memory mappings.

    XLA's CPU backend maps some pieces of memory for each program, a process may have 65,530 of them by default, and the
    program too many is a segmentation fault.
    """
    yield
    import jax  # not before the environment above is set

    maps, sizes = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return
    pages = int(sizes.read_text().split()[1])
    if next(tests_run) % COUNT_EACH == 0:  # counting takes milliseconds
        mappings[0] = maps.read_bytes().count(b"\n")
    if mappings[0] > MOST_MAPPINGS or pages > max(MOST_PAGES, kept_pages[0] + MOST_PAGES // 3):
        mappings[0] = 0
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc keeps what programs have freed: without this, four fifths of it
        kept_pages[0] = int(sizes.read_text().split()[1])


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted SmolLM2 checkpoint; fetched once, whichever xdist worker comes first."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (CHECKPOINT / "config.json").exists():
            subprocess.run([sys.executable, "checkpoints/fetch_smollm2.py"], cwd=REPO, check=True)
    return CHECKPOINT
