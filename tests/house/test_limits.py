"""Limits that keep the code readable: short files, short argument lists, the formatter's layout."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("jshadow", "pallas_kernels")
EVERYWHERE = (*LIBRARY, "tests", "tools", "benchmarks", "examples", "notebooks", "checkpoints", "docs")
MOST_LINES, MOST_PARAMETERS = 800, 7
# Public functions whose settings are keywords, and one traceable core whose signature programs outside rely on.
KEYWORD_FACES = {"generate", "stream", "prefill", "prefill_many", "prefill_peak", "generate_steps", "abstract_state"}


def texts(folders: tuple[str, ...]) -> dict[str, str]:
    """The Python files of some folders, by their place in the repository."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert paths
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def test_no_file_is_long():
    lines = {place: text.count("\n") for place, text in texts(EVERYWHERE).items()}
    assert not {place: count for place, count in lines.items() if count > MOST_LINES}


def test_the_formatter_s_layout_stands():
    marks = ["fmt: " + word for word in ("skip", "off")]
    assert not [place for place, text in texts(EVERYWHERE).items() if any(mark in text for mark in marks)]


def test_no_function_takes_many_arguments():
    wide = []
    for place, text in texts(LIBRARY).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name not in KEYWORD_FACES:
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
                if len(names) > MOST_PARAMETERS:
                    wide.append(f"{place}: {node.name} takes {len(names)} arguments")
    assert not wide
