"""Commands that two real processes run together: one prints, and both say what differs. Also the option --mesh."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from several_processes import ended, no_survivors, start_all  # noqa: F401

from jshadow.cli.main import parser
from jshadow.cli.processes import OWN, joined, mesh_of, parse_mesh
from jshadow.engine import agree, processes
from jshadow.errors import ConfigError

LENGTH = ("--max-new-tokens", "3", "--dtype", "float32")
SHORT = (*LENGTH, "--policy", "quest", "--set", "budget=32")


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    """A file that two processes of a test read."""
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("a document " * 12)
    return path


def run(count, model, *options, each=None, flags=""):
    """Run `jshadow generate` in several processes of one device each, with the suite's compiled programs."""
    arguments = ["-m", "jshadow", "generate", model, *SHORT, "--json", *options]
    return start_all(count, arguments, each, XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + flags)


@pytest.fixture
def one_process_says(answer, tiny_model, prompt):
    """Checks the answer of several processes."""

    def check(out):
        expected = answer("generate", tiny_model, *SHORT, "--prompt-file", prompt)["results"]
        assert [one["tokens"] for one in json.loads(out)["results"]] == [one["tokens"] for one in expected]

    return check


@pytest.mark.slow
@pytest.mark.process
def test_only_process_0_prints_and_writes(tiny_model, prompt, tmp_path, one_process_says):
    """Its answer is that of one process. What gloo prints is not in the JSON object."""
    saved = {number: ("--save-state", tmp_path / f"state{number}") for number in range(2)}
    first, second = map(ended, run(2, tiny_model, "--prompt-file", prompt, each=saved))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert second[1:] == ("", "")
    assert os.listdir(tmp_path) == ["state0"]
    one_process_says(first[1])


@pytest.mark.slow
@pytest.mark.process
def test_a_mesh_over_two_processes_answers_as_one_device(tiny_model, prompt, tmp_path, one_process_says, answer):
    """Each process saves its part of the state, and one device continues it."""
    state = tmp_path / "state"
    flags = " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    options = ("--prompt-file", prompt, "--mesh", "tp=2", "--save-state", state, "--fetch", "device_put")
    first, second = map(ended, run(2, tiny_model, *options, flags=flags))
    assert (first[0], second[0]) == (0, 0), (first, second)
    one_process_says(first[1])
    again = ("--load-state", state, "--prompt", "more")
    assert len(answer("generate", tiny_model, *again, *LENGTH)["results"][0]["tokens"]) == 3


@pytest.mark.slow
@pytest.mark.process
def test_a_missing_process_is_named(tiny_model, prompt):
    """Within --join-timeout, and without an answer."""
    three = run(3, tiny_model, "--prompt-file", prompt, "--join-timeout", "1")
    three[1].kill()
    three[2].kill()
    (status, out, err), *_ = map(ended, three)
    assert (status, out) == (2, "")
    assert "DistributedError: process 1 and 2 of 3 did not join within join_timeout, 1 s" in err


GENERATE = ["generate", "MODEL", *SHORT, "--prompt-file", "PROMPT"]
ADD = ["library", "add", "OUT", "PROMPT", "--model", "MODEL", "--policy", "full"]
EVAL = ["eval", "MODEL", "--tasks", "agreement", "--lengths", "64", "--out", "OUT"]


@pytest.fixture
def refused_here(refused, tiny_model, prompt, tmp_path):
    """Checks that a command is refused, and that it writes nothing."""

    def check(told, *words):
        names = {"MODEL": tiny_model, "PROMPT": prompt, "OUT": tmp_path / "out"}
        err = refused(told, *(names.get(word, word) for word in words))
        assert not list(tmp_path.rglob("*.safetensors"))
        assert "eval" not in words or not (tmp_path / "out").exists()
        return err

    return check


@pytest.mark.parametrize(
    ("command", "field"),
    [
        *((GENERATE, field) for field in ("weights", "config", "tokenizer", "jax", "prompt", "seed", "set", "policy")),
        *((GENERATE, field) for field in ("fetch", "dtype")),
        *((ADD, field) for field in ("files", "stored keys", "capacity")),
        *((EVAL, field) for field in ("out", "data", "tasks")),  # finished samples too: process 0 would not run them
    ],
)
def test_what_must_be_the_same_in_all_processes(command, field, refused_here, monkeypatch):
    """The command believes in a second process, which has another fact."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    other = {field: "other"}
    monkeypatch.setattr(agree, "exchange", lambda name, value, seconds: [value, json.dumps(json.loads(value) | other)])
    err = refused_here(f"DistributedError: {field} must be the same in all processes: process 0 has ", *command)
    assert err.rstrip().endswith("process 1 has 'other'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "ConfigError: coordinator must be given with processes"),
        (["--coordinator", "here", "--processes", "2", "--process", "0"], "ConfigError: coordinator must be HOST:PORT"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "process must be from 0 to 1, got 2"),
    ],
)
@pytest.mark.parametrize("command", [GENERATE, ADD], ids=["generate", "add"])
def test_bad_options(command, options, message, refused_here):
    refused_here(message, *command, *options)


def test_other_processes_print_and_write_nothing(monkeypatch, tmp_path, capfd):
    """They work on a copy of --out, so that they also find the samples that are finished."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "samples.jsonl").write_text("{}")
    monkeypatch.setattr(processes, "join", lambda options: processes.Processes(2, options.process))
    for number in range(2):
        args = argparse.Namespace(coordinator="a:1", processes=2, process=number, join_timeout=1.0)
        args.out, args.save_state = str(out), "state"
        with joined(args) as found:
            assert found.index == number
            print("a line")
            print("a note", file=sys.stderr)
            os.write(1, b"from gloo\n")
            if number:
                assert args.out != str(out)
                assert args.save_state is None
                (Path(args.out) / "more").write_text((Path(args.out) / "samples.jsonl").read_text())
        print(f"end {number}", flush=True)
    assert capfd.readouterr() == ("a line\nend 0\nend 1\n", "a note\n")
    assert os.listdir(out) == ["samples.jsonl"]


def test_what_may_differ_between_processes_is_an_option():
    every, left = {"run", "command_line"}, [parser()]
    while left:
        for action in left.pop()._actions:
            every.add(action.dest)
            left += action.choices.values() if isinstance(action, argparse._SubParsersAction) else []
    assert every > OWN


def test_without_options_a_process_is_alone():
    with joined(argparse.Namespace(coordinator=None, processes=None, process=None)) as found:
        assert (found.count, found.index) == (1, 0)


# The option --mesh


def test_axes_that_are_left_out_have_size_1():
    assert parse_mesh("tp=4, data=2") == {"data": 2, "tp": 4}
    assert list(parse_mesh("data=3")) == ["data", "tp"]


AXES = "mesh must have axes among data, tp, such as tp=4, got "
SIZE = "mesh must have a size of at least 1 for "
BAD_TEXTS = {"": f"{AXES}''", "pp=2": f"{AXES}'pp=2'", "tp=2,": f"{AXES}''", "tp": f"{SIZE}tp, got ''"}
BAD_TEXTS |= {"tp=2,tp=2": "mesh must name each axis once, got tp twice", "tp=0": f"{SIZE}tp, got '0'"}
BAD_TEXTS |= {f"data={size}": f"{SIZE}data, got '{size}'" for size in ("-1", "2.0", "²")}
BAD_TEXTS |= {"tp=4,sp=2": f"{AXES}'sp=2' in 'tp=4,sp=2'; sp, which split the tokens of a prompt, is gone"}


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS.items())
def test_bad_texts(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_mesh(text)
    assert str(caught.value).startswith(message)


def test_the_mesh_has_all_devices():
    sizes = {"data": 1, "tp": jax.device_count()}
    mesh = mesh_of(sizes)
    assert mesh.axis_names == ("data", "tp")
    assert dict(mesh.shape) == sizes
    with pytest.raises(ConfigError, match=r"mesh must have as many devices as there are, got data=2 \* tp="):
        mesh_of(sizes | {"data": 2})


@pytest.mark.parametrize(
    ("held", "sizes", "message"),
    [
        ([4, 2], {"data": 2, "tp": 3}, r"devices must be as many in each process, got \[4, 2\]"),
        ([2, 2, 2], {"data": 2, "tp": 3}, r"tp must divide the 2 devices of a process .* got 3"),
        ([4, 4], {"data": 1, "tp": 4}, r"= 4; there are 8, and it must have all of them \(processes: 2"),
    ],
)
def test_meshes_of_several_processes(held, sizes, message, monkeypatch):
    places = [(process, number) for process, count in enumerate(held) for number in range(count)]
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(process_index=p, id=number) for p, number in places])
    with pytest.raises(ConfigError, match=message):
        mesh_of(sizes)
