"""How the command line starts: without JAX for help, quietly after a closed pipe, plainly without a backend."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import demo_text
import pytest
from conftest import REPO

import jshadow
from jshadow.cli.fit import LEARNERS
from jshadow.policies import POLICIES
from jshadow.policies.capabilities import Learns

STARTS = """
import sys
from jshadow.cli import main
commands = "generate chat convert policies laws plan fit eval bench calibrate doctor".split()
for arguments in (["--help"], ["--version"], ["--print-completion", "bash"], ["--print-completion", "zsh"],
                  *([name, "--help"] for name in commands)):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code in (0, None), arguments
print("heavy:", [name for name in ("jax", "numpy", "transformers", "rich") if name in sys.modules])
"""


def python(*words, out=subprocess.PIPE, **variables):
    command, environment = [sys.executable, *words], os.environ | variables
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.process  # quick, because JAX is not imported
def test_help_and_completion_import_nothing_heavy():
    done = python("-c", STARTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
    completion = ("#compdef jshadow", "complete -o bashdefault -F _shtab_jshadow jshadow", "--prompt-file")
    assert all(told in done.stdout for told in ("usage: jshadow chat", *completion))


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


def test_learners_are_the_policies_that_learn():
    assert list(LEARNERS) == [name for name, policy in POLICIES.items() if issubclass(policy, Learns)]


@pytest.mark.slow
@pytest.mark.process
def test_modules_stand_beside_the_function_and_the_command_and_a_closed_pipe_ends_quietly():
    code = "import jshadow.generate, jshadow, types; assert isinstance(jshadow.generate, types.FunctionType)"
    assert python("-c", code).returncode == 0
    done = python("-m", "jshadow", "fit", "--help")
    assert done.returncode == 0
    assert all(told in done.stdout for told in ("usage: jshadow fit", "--text FILE"))
    read, write = os.pipe()
    os.close(read)
    done = python("-m", "jshadow", "policies", "--json", out=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.process
def test_a_missing_backend_is_one_line(tiny_model):
    words = ["generate", tiny_model, "--prompt", "a", "--policy", "full"]
    done = python("-m", "jshadow", *words, JAX_PLATFORMS="cuda")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "pip install 'jshadow[cuda12]'" in line


SHA256 = "c6a8133802031075e3dfa0f8d090ef611c974cd616f93350855afec35bef348f"


def test_the_text_is_fixed_and_has_one_fact_and_the_demo_asks_for_its_number(capsys):
    text = demo_text.document()
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert text.count(demo_text.FACT) == text.count(demo_text.NUMBER) == 1
    assert 0.4 < text.index(demo_text.FACT) / len(text) < 0.6
    assert demo_text.main([]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    assert demo_text.main(["--question"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == demo_text.QUESTION
    makefile = (REPO / "Makefile").read_text()
    recipe = makefile[makefile.index("\ndemo:") : makefile.index("\nsetup:")]
    assert re.search(r"--expect (\d+)", recipe)[1] == demo_text.NUMBER
    assert len(re.findall(r'^\t@echo "  \$\(BIN\)/jshadow', recipe, re.MULTILINE)) == 3  # what comes next
