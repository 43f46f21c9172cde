"""How the command line starts: without JAX for help, quietly after a closed pipe, plainly without a backend."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jshadow
from jshadow.cli.fit import LEARNERS
from jshadow.policies import POLICIES
from jshadow.policies.capabilities import Learns

HEAVY = ("jax", "numpy", "transformers", "rich")
STARTS = """
import sys
from jshadow.cli import main
commands = "generate chat convert policies laws plan fit eval bench calibrate prefill-patterns".split()
for arguments in (["--help"], ["--version"], ["--print-completion", "bash"], ["--print-completion", "zsh"],
                  *([name, "--help"] for name in commands)):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code in (0, None), arguments
print("heavy:", [name for name in {heavy} if name in sys.modules])
"""


def run(code, **variables):
    environment = os.environ | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.process  # quick, because JAX is not imported
def test_help_and_completion_import_nothing_heavy():
    done = run(STARTS.replace("{heavy}", repr(HEAVY)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "usage: jshadow chat" in done.stdout
    assert "#compdef jshadow" in done.stdout
    assert "complete -o bashdefault -F _shtab_jshadow jshadow" in done.stdout
    assert "--prompt-file" in done.stdout


def test_the_face_and_its_types_agree():
    """The names that are imported when they are used are those that a type checker sees."""
    tree = ast.parse(Path(jshadow.__file__).read_text())
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [
        (node.module.removeprefix("jshadow").removeprefix("."), alias.name)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    modules = {("", "errors"), ("", "policies"), ("engine", "decode")}
    assert set(seen) - modules == {(module, name) for module, names in jshadow.FACE.items() for name in names}
    assert {name for _, name in seen} == set(jshadow.__all__) <= set(dir(jshadow))
    assert all(getattr(jshadow, name) is not None for name in jshadow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        _ = jshadow.magic


@pytest.mark.slow
@pytest.mark.process
def test_generate_stays_a_function_beside_its_module():
    code = "import jshadow.generate, jshadow, types; assert isinstance(jshadow.generate, types.FunctionType)"
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_learners_are_the_policies_that_learn():
    assert list(LEARNERS) == [name for name, policy in POLICIES.items() if issubclass(policy, Learns)]


@pytest.mark.slow
@pytest.mark.process
def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "jshadow", "fit", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "usage: jshadow fit" in done.stdout
    assert "--text FILE" in done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_a_closed_pipe_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jshadow", "policies", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.process
def test_a_missing_backend_is_one_line(tiny_model):
    command = [sys.executable, "-m", "jshadow", "generate", tiny_model, "--prompt", "a", "--policy", "full"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cuda"})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "pip install 'jshadow[cuda12]'" in line
