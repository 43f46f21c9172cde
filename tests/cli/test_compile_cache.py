"""The cache of compiled programs: where it is, that a second run compiles nothing, and what happens if it is full."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jshadow.cli import compile_cache
from jshadow.cli.fields import command_of
from jshadow.cli.main import parser

# A command in a process of its own, which then prints how many programs JAX compiled, and found in its cache.
# JAX is imported by the command, after the cache is set up.
COUNTED = """
import resource, sys
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from jshadow.cli import generate
from jshadow.cli.main import main
seen, run = [], generate.Generate.run

def counted(args):
    import jax
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
    return run(args)

generate.Generate.run = counted
status = main(sys.argv[1:])
print("COUNTS", status, seen.count("cache_misses"), seen.count("cache_hits"))
"""


def counts(model, folder, limit=0):
    """Exit status, cache misses and hits of a short answer, and stderr, with the user's cache folder at `folder`."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS", "JAX_ENABLE"))
    }
    arguments = ["generate", model, "--prompt", "a", "--policy", "full", "--max-new-tokens", "2", "--json"]
    command = [sys.executable, "-c", COUNTED.format(limit=limit), *arguments]
    environment |= {"XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("COUNTS")] or [done.stderr]
    return [int(word) for word in line.split()[1:]], done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_a_second_answer_compiles_nothing(tiny_model, tmp_path):
    (status, misses, _), _ = counts(tiny_model, tmp_path)
    assert status == 0 < misses
    assert (tmp_path / "jshadow" / "xla").is_dir()
    (status, misses, hits), _ = counts(tiny_model, tmp_path)
    assert status == misses == 0 < hits


@pytest.mark.slow
@pytest.mark.process
def test_a_full_disk_is_one_line(tiny_model, tmp_path):
    (status, *_), err = counts(tiny_model, tmp_path, limit=500)
    assert status == 0
    [line] = [line for line in err.splitlines() if "compiled programs are not kept" in line]
    assert "File too large" in line
    assert "Warning" not in err


GIVEN, LEFT_OUT = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"


@pytest.fixture
def set_up(monkeypatch):
    """Sets the cache up with variables and options, and gives its folder and whether it is on, as variables say it."""
    for name in (GIVEN, LEFT_OUT, *compile_cache.KEEP_ALL):
        monkeypatch.setenv(name, "x")  # so that it is restored
        monkeypatch.delenv(name)

    def run(*options, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with compile_cache.compile_cache(command_of(parser().parse_args(["generate", "model", *options]))):
            return os.environ.get(GIVEN), os.environ.get(LEFT_OUT)

    return run


def test_a_folder_is_given_or_the_user_s_or_cannot_be_written_or_is_left_out(set_up, tmp_path, capsys):
    assert set_up("--no-compile-cache", XDG_CACHE_HOME=str(tmp_path)) == (None, "false")
    assert list(tmp_path.iterdir()) == []
    os.environ.pop(LEFT_OUT)
    given = str(tmp_path / "given")
    assert set_up(XDG_CACHE_HOME="relative", **{GIVEN: given}) == (given, None)
    assert compile_cache.default_folder() == Path.home() / ".cache" / "jshadow" / "xla"
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert capsys.readouterr().err == ""
    os.environ.pop(GIVEN)
    assert set_up(XDG_CACHE_HOME="/dev/null") == (None, "false")
    [line] = capsys.readouterr().err.splitlines()
    assert "/dev/null" in line


def test_other_warnings_are_shown(capsys):
    shown = []
    entry = "persistent compilation cache entry for 'jit_f': OSError"
    told = [f"Error writing {entry}: full"] * 2 + [f"Error reading {entry}: gone", "something else"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *others, **named: shown.append(str(message))
        with compile_cache.one_warning():
            for text in told:
                warnings.warn(text, stacklevel=1)
    assert shown == ["something else"]
    assert capsys.readouterr().err == "jshadow: compiled programs are not kept on disk: OSError: full\n"
