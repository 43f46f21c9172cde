"""The cache of compiled programs: where it is, that a second run compiles nothing, and what happens if it is full."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jshadow.cli import compile_cache
from jshadow.cli.main import parser

# A command in a process of its own, which then prints how many programs JAX compiled, and found in its cache.
# JAX is imported by the command, after the cache is set up.
COUNTED = """
import resource, sys
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from jshadow.cli import generate
from jshadow.cli.main import main
seen, run = [], generate.run_generate

def counted(args):
    import jax
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
    return run(args)

generate.run_generate = counted
status = main(sys.argv[1:])
print("COUNTS", status, seen.count("cache_misses"), seen.count("cache_hits"))
"""


def counts(model, folder, limit=0):
    """Exit status, cache misses and hits of a short answer, and stderr, with the user's cache folder at `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    arguments = ["generate", model, "--prompt", "a", "--policy", "full", "--max-new-tokens", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED.format(limit=limit), *arguments],
        capture_output=True,
        text=True,
        env=environment | {"XDG_CACHE_HOME": str(folder)},
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("COUNTS")] or [done.stderr]
    return [int(word) for word in line.split()[1:]], done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_a_second_answer_compiles_nothing(tiny_model, tmp_path):
    (status, misses, _), _ = counts(tiny_model, tmp_path)
    assert status == 0
    assert misses > 0
    assert (tmp_path / "jshadow" / "xla").is_dir()
    (status, misses, hits), _ = counts(tiny_model, tmp_path)
    assert (status, misses) == (0, 0)
    assert hits > 0


@pytest.mark.slow
@pytest.mark.process
def test_a_full_disk_is_one_line(tiny_model, tmp_path):
    (status, *_), err = counts(tiny_model, tmp_path, limit=500)
    assert status == 0
    [line] = [line for line in err.splitlines() if "compiled programs are not kept" in line]
    assert "File too large" in line
    assert "Warning" not in err


@pytest.fixture
def variables(monkeypatch):
    """No variable of the cache is set, and those that are set by a test are gone after it."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", *compile_cache.KEEP_ALL):
        monkeypatch.setenv(name, "x")  # so that it is restored
        monkeypatch.delenv(name)
    return monkeypatch


def set_up(*options):
    with compile_cache.compile_cache(parser().parse_args(["generate", "model", *options])):
        return os.environ.get("JAX_COMPILATION_CACHE_DIR"), os.environ.get("JAX_ENABLE_COMPILATION_CACHE")


def test_folders(variables, tmp_path, capsys):
    variables.setenv("XDG_CACHE_HOME", "relative")
    assert compile_cache.default_folder() == Path.home() / ".cache" / "jshadow" / "xla"
    variables.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "given"))
    assert set_up() == (str(tmp_path / "given"), None)
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_is_one_line(variables, capsys):
    variables.setenv("XDG_CACHE_HOME", "/dev/null")
    assert set_up() == (None, "false")
    [line] = capsys.readouterr().err.splitlines()
    assert "/dev/null" in line


def test_the_cache_can_be_left_out(variables, tmp_path, capsys):
    variables.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert set_up("--no-compile-cache") == (None, "false")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_other_warnings_are_shown(capsys):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *others, **named: shown.append(str(message))
        with compile_cache.one_warning():
            for _ in range(2):
                warnings.warn(
                    "Error writing persistent compilation cache entry for 'jit_f': OSError: full", stacklevel=1
                )
            warnings.warn("Error reading persistent compilation cache entry for 'jit_f': OSError: gone", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert shown == ["something else"]
    assert capsys.readouterr().err == "jshadow: compiled programs are not kept on disk: OSError: full\n"
