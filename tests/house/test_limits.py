"""Limits that keep the code readable: short files, short argument lists, the formatter's layout."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for folder in ("jshadow", "pallas_kernels") for path in (ROOT / folder).rglob("*.py"))
MOST_LINES, MOST_PARAMETERS = 300, 7
# Public functions whose settings are keywords, and one traceable core whose signature programs outside rely on.
KEYWORD_FACES = {"generate", "stream", "prefill", "prefill_many", "prefill_peak", "generate_steps"}
modules = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


@modules
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@modules
def test_the_formatter_s_layout_stands(path):
    text = path.read_text()
    assert "fmt: skip" not in text
    assert "fmt: off" not in text


@modules
def test_no_function_takes_many_arguments(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name not in KEYWORD_FACES:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            assert len(names) <= MOST_PARAMETERS, f"{node.name} takes {len(names)} arguments"
