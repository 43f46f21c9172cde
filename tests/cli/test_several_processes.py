"""Commands that two real processes run together: one prints, and both say what differs. Also the option --mesh."""

import argparse
import json
import os
import sys
from pathlib import Path

import jax
import pytest
from several_processes import ended, no_survivors, start_all  # noqa: F401

from jshadow.cli.main import main
from jshadow.cli.mesh import mesh_of, parse_mesh
from jshadow.cli.processes import joined
from jshadow.engine.mesh import agree, processes
from jshadow.errors import ConfigError

SHORT = ("--max-new-tokens", "3", "--dtype", "float32", "--policy", "quest", "--set", "budget=32", "--json")


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    """A file that two processes of a test read."""
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("a document " * 12)
    return path


def run(count, model, *options, each=None):
    """Run `jshadow generate` in several processes of one device each, with the suite's compiled programs."""
    arguments = ["-m", "jshadow", "generate", model, *SHORT, *options]
    return start_all(count, arguments, each, XLA_FLAGS=os.environ.get("XLA_FLAGS", ""))


@pytest.mark.slow
@pytest.mark.process
def test_only_process_0_prints_and_writes(tiny_model, prompt, tmp_path, capsys):
    """Its answer is that of one process. What gloo prints is not in the JSON object."""
    state = tmp_path / "state"
    saved = {number: ("--save-state", f"{state}{number}") for number in range(2)}
    first, second = map(ended, run(2, tiny_model, "--prompt-file", prompt, each=saved))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert second[1:] == ("", "")
    assert os.listdir(tmp_path) == ["state0"]
    assert main(["generate", tiny_model, *SHORT, "--prompt-file", str(prompt)]) == 0
    expected = json.loads(capsys.readouterr().out)["results"]
    assert [one["tokens"] for one in json.loads(first[1])["results"]] == [one["tokens"] for one in expected]


@pytest.mark.slow
@pytest.mark.process
def test_a_mesh_over_two_processes_answers_as_one_device(tiny_model, prompt, tmp_path, capsys):
    """Each process saves its part of the state, and one device continues it."""
    state = tmp_path / "state"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    options = ("--prompt-file", prompt, "--mesh", "sp=2", "--save-state", state, "--fetch", "device_put")
    running = start_all(2, ["-m", "jshadow", "generate", tiny_model, *SHORT, *options], XLA_FLAGS=flags)
    first, second = map(ended, running)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert main(["generate", tiny_model, *SHORT, "--prompt-file", str(prompt)]) == 0
    expected = json.loads(capsys.readouterr().out)["results"]
    assert [one["tokens"] for one in json.loads(first[1])["results"]] == [one["tokens"] for one in expected]
    again = ("--load-state", str(state), "--prompt", "more", "--max-new-tokens", "2", "--dtype", "float32", "--json")
    assert main(["generate", tiny_model, *again]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"][0]["tokens"]) == 2


@pytest.fixture
def twin(monkeypatch):
    """A function that lets the command believe in a second process, which has other facts."""

    def with_facts(**others):
        def exchange(name, value, seconds):
            return [value, json.dumps(json.loads(value) | others)]

        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(agree, "exchange", exchange)

    return with_facts


@pytest.mark.parametrize(
    "field", ["weights", "config", "tokenizer", "jax", "prompt", "seed", "set", "policy", "fetch", "dtype"]
)
def test_what_must_be_the_same_in_all_processes(field, tiny_model, prompt, twin, capsys):
    twin(**{field: "other"})
    arguments = ["generate", tiny_model, *SHORT, "--prompt-file", str(prompt)]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert f"DistributedError: {field} must be the same in all processes: process 0 has " in err
    assert err.rstrip().endswith("process 1 has 'other'")


@pytest.mark.parametrize("field", ["files", "stored keys", "capacity"])
def test_what_must_be_the_same_to_add_documents(field, tiny_model, prompt, twin, tmp_path, capsys):
    twin(**{field: "other"})
    library = str(tmp_path / "library")
    assert main(["library", "add", library, str(prompt), "--model", tiny_model, "--policy", "full"]) == 2
    assert f"DistributedError: {field} must be the same in all processes" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("field", ["out", "data", "tasks"])
def test_what_must_be_the_same_to_evaluate(field, tiny_model, twin, tmp_path, capsys):
    """Finished samples too: process 0 would not run them again."""
    twin(**{field: "other"})
    arguments = ["eval", tiny_model, "--tasks", "agreement", "--lengths", "64", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert f"DistributedError: {field} must be the same in all processes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_processes_print_and_write_nothing(monkeypatch, tmp_path, capfd):
    """They work on a copy of --out, so that they also find the samples that are finished."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "samples.jsonl").write_text("{}")
    monkeypatch.setattr(processes, "join", lambda options: processes.Processes(2, options.process))
    for number in range(2):
        args = argparse.Namespace(coordinator="a:1", processes=2, process=number, join_timeout=1.0)
        args.out, args.plot, args.save_state = str(out), "plot.svg", "state"
        with joined(args) as found:
            assert found.index == number
            print("a line")
            print("a note", file=sys.stderr)
            os.write(1, b"from gloo\n")
            if number:
                assert args.out != str(out)
                assert (args.plot, args.save_state) == (None, None)
                (Path(args.out) / "more").write_text((Path(args.out) / "samples.jsonl").read_text())
        print(f"end {number}", flush=True)
    assert capfd.readouterr() == ("a line\nend 0\nend 1\n", "a note\n")
    assert os.listdir(out) == ["samples.jsonl"]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "2"], "ConfigError: coordinator must be given with processes"),
        (["--coordinator", "here", "--processes", "2", "--process", "0"], "ConfigError: coordinator must be HOST:PORT"),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process", "2"],
            "process must be from 0 to 1, got 2",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "library add"])
def test_bad_options(command, options, message, tiny_model, prompt, tmp_path, capsys):
    own = [tiny_model, "--prompt-file", str(prompt)]
    if command == "library add":
        own = [str(tmp_path / "library"), str(prompt), "--model", tiny_model]
    assert main([*command.split(), *own, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "library").exists()


# The option --mesh


def test_axes_that_are_left_out_have_size_1():
    assert parse_mesh("tp=4, sp=2") == {"data": 1, "sp": 2, "tp": 4}
    assert list(parse_mesh("data=3")) == ["data", "sp", "tp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh must have axes among data, sp, tp, such as tp=4, got ''"),
        ("pp=2", "mesh must have axes among data, sp, tp, such as tp=4, got 'pp=2'"),
        ("tp=2,", "mesh must have axes among data, sp, tp, such as tp=4, got ''"),
        ("tp=2,tp=2", "mesh must name each axis once, got tp twice"),
        ("tp", "mesh must have a size of at least 1 for tp, got ''"),
        ("tp=0", "mesh must have a size of at least 1 for tp, got '0'"),
        ("sp=-1", "mesh must have a size of at least 1 for sp, got '-1'"),
        ("sp=2.0", "mesh must have a size of at least 1 for sp, got '2.0'"),
        ("sp=²", "mesh must have a size of at least 1 for sp, got '²'"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_mesh(text)
    assert str(caught.value).startswith(message)


def test_the_mesh_has_all_devices():
    sizes = {"data": 1, "sp": 1, "tp": jax.device_count()}
    mesh = mesh_of(sizes)
    assert mesh.axis_names == ("data", "sp", "tp")
    assert dict(mesh.shape) == sizes
    with pytest.raises(ConfigError, match=r"mesh must have as many devices as there are, got data=2 \* sp=1"):
        mesh_of(sizes | {"data": 2})


class Device:
    """A device of another process."""

    def __init__(self, process_index, number):
        self.process_index, self.id = process_index, number


@pytest.mark.parametrize(
    ("held", "sizes", "message"),
    [
        ([4, 2], {"data": 1, "sp": 2, "tp": 3}, r"devices must be as many in each process, got \[4, 2\]"),
        ([2, 2, 2], {"data": 1, "sp": 2, "tp": 3}, r"tp must divide the 2 devices of a process .* got 3"),
        ([4, 4], {"data": 1, "sp": 1, "tp": 4}, r"= 4; there are 8, and it must have all of them \(processes: 2"),
    ],
)
def test_meshes_of_several_processes(held, sizes, message, monkeypatch):
    devices = [Device(process, number) for process, count in enumerate(held) for number in range(count)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ConfigError, match=message):
        mesh_of(sizes)
