"""The structure as the design has it: imports go one way, files and argument lists are short, types are known."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest
from conftest import REPO
from numpy.typing import ArrayLike
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jshadow

LIBRARY = ("jshadow", "pallas_kernels")
EVERYWHERE = (*LIBRARY, "tests", "tools", "benchmarks", "examples", "notebooks", "checkpoints", "docs")
TEXTS = {path.relative_to(REPO): path.read_text() for folder in EVERYWHERE for path in (REPO / folder).rglob("*.py")}
TREES = {path: ast.parse(text) for path, text in TEXTS.items() if path.parts[0] in LIBRARY}
MOST_LINES, MOST_PARAMETERS, MOST_ENTRIES = 800, 7, 16
# Public functions whose settings are keywords, and one traceable core whose signature programs outside rely on.
KEYWORD_FACES = {"generate", "stream", "prefill", "prefill_many", "prefill_peak", "generate_steps", "abstract_state"}
KEYWORD_FACES |= {"session_plan", "extend", "decode_steps"}
# The rooms from the bottom up. A module imports from its own room and from the rooms before it.
ROOMS = ["errors", "ops", "models", "cache", "policies", "weights", "planner", "engine", "generate", "evaluation"]
ROOMS += ["library", "serving", "cli", "__init__", "__main__"]
# Packages that only some places may import.
ONLY_IN = {
    "safetensors orbax gguf huggingface_hub": ("weights/convert",),
    "torch matplotlib": (),  # scripts of benchmarks/ have them
    "pyarrow lm_eval": ("evaluation",),
    "obstore": ("library/remote.py",),
    "pypdf": ("library/pdf_worker.py",),
    "starlette pydantic": ("serving/http",),
    "fastapi uvicorn prometheus_client llguidance": ("serving/http", "cli/serve.py"),
    "transformers": ("weights",),
    "triton jax_triton": (),
    "optax": ("policies/less",),
    "pallas_kernels": (
        *("ops", "cache/offload.py", "cache/recurrence.py", "cache/rows.py"),
        *("policies/shadowkv", "cli/probe.py"),
    ),
}
ONLY_IN = {name: places for names, places in ONLY_IN.items() for name in names.split()}


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def may_import(path: Path, name: str) -> bool:
    """Whether the rules allow a module an import. The kernels know JAX, NumPy and the standard library alone."""
    top, *rest = name.split(".")
    if path.parts[0] == "pallas_kernels":
        return top in {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    place = path.relative_to("jshadow")
    room = place.parts[0].removesuffix(".py")
    if top != "jshadow":
        return top not in ONLY_IN or str(place).startswith(ONLY_IN[top])
    if room == "serving" and place.parts[1] != "http" and name.startswith("jshadow.serving.http"):
        return False  # the engine knows no HTTP
    return not rest or rest[0] not in ROOMS or ROOMS.index(rest[0]) <= ROOMS.index(room)


def test_imports_go_down_and_heavy_packages_stay_where_they_belong():
    assert {path.parts[1].removesuffix(".py") for path in TREES if path.parts[0] == "jshadow"} == {*ROOMS}
    assert not [f"{path} imports {name}" for path in TREES for name in imports(path) if not may_import(path, name)]
    for path, name in (
        ("jshadow/models/config.py", "jshadow.policies.Full"),
        ("jshadow/engine/step.py", "torch"),
        ("jshadow/serving/engine.py", "jshadow.serving.http.app"),
        ("pallas_kernels/attention.py", "jshadow.ops"),
    ):
        assert not may_import(Path(path), name), "what goes up would be found"


def module_of(path: Path) -> str:
    """The dotted name of a module."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def needed(path: Path) -> set[str]:
    """Modules that a module imports when it runs, also inside its functions."""
    for_types = {
        child
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import) and node not in for_types:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in for_types:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & MODULES - {module_of(path)}


MODULES = {module_of(path) for path in TREES}
NEEDED = {module_of(path): needed(path) for path in TREES}


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Modules that reach themselves. What imports nothing of the graph, or what nothing imports, is taken away."""
    left = set(graph)
    while ends := {one for one in left if not graph[one] & left or not any(one in graph[other] for other in left)}:
        left -= ends
    return left


def test_no_modules_of_a_room_import_each_other_in_a_circle():
    for room in {name.split(".")[1] for name in MODULES if name.count(".") > 1}:
        inside = {name for name in MODULES if name.split(".")[1:2] == [room]}
        assert not in_circles({name: NEEDED[name] & inside for name in inside})
    chain = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert in_circles(chain) == set()
    assert in_circles(chain | {"c": {"b"}, "d": {"a"}}) == {"b", "c"}


@pytest.mark.slow
@pytest.mark.process
def test_the_package_imports_without_torch_or_transformers():
    """And without optax, which only a training needs."""
    code = "import sys, jshadow; print([m for m in ('torch', 'transformers', 'gguf', 'optax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_are_short_and_the_formatter_s_layout_stands():
    assert len(TEXTS) > len(TREES) > 100
    assert not {path: text.count("\n") for path, text in TEXTS.items() if text.count("\n") > MOST_LINES}
    marks = ["fmt: " + word for word in ("skip", "off")]
    assert not [path for path, text in TEXTS.items() if any(mark in text for mark in marks)]
    entries = [entry.name for entry in (REPO / "jshadow").iterdir() if entry.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_no_function_takes_many_arguments():
    wide = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name not in KEYWORD_FACES:
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
                if len(names) > MOST_PARAMETERS:
                    wide.append(f"{path}: {node.name} takes {len(names)} arguments")
    assert not wide


FUNCTIONS = {name: value for name in jshadow.__all__ if inspect.isfunction(value := getattr(jshadow, name))}
FACE = {"generate", "stream", "load", "save", "prefill", "prefill_many", "extend", "decode_step", "decode_steps"}
FACE |= {"save_state", "load_state", "save_fitted", "load_fitted"}
ALLOWED = set(typing.get_args(ArrayLike))  # numpy's own alias has Any inside


def mentions_any(hint: object) -> bool:
    """Whether a type is Any, or has Any among its parts; an annotation that is missing counts too."""
    if hint is typing.Any or hint is inspect.Parameter.empty:
        return True
    if isinstance(hint, list):  # the parameters of a Callable
        return any(map(mentions_any, hint))
    if hint in ALLOWED:
        return False
    if isinstance(hint, type) and typing.is_typeddict(hint):
        return any(map(mentions_any, typing.get_type_hints(hint).values()))
    return typing.get_origin(hint) is not typing.Literal and any(map(mentions_any, typing.get_args(hint)))


def test_no_public_function_has_any_in_its_types():
    assert FUNCTIONS.keys() >= FACE
    wrong = []
    for name, function in FUNCTIONS.items():
        for one in (function, *typing.get_overloads(function)):
            hints = typing.get_type_hints(one)
            parts = [*inspect.signature(one).parameters, "return"]
            wrong += [f"{name}: {part}" for part in parts if mentions_any(hints.get(part, typing.Any))]
    assert not wrong
    assert not mentions_any(list[int] | ArrayLike)
    for hint in (typing.Any, list[typing.Any], dict[str, int | list[typing.Any]], typing.Any | None):
        assert mentions_any(hint)


def test_constraints_have_one_exact_version_of_every_dependency():
    """Also of those of the extras, except the packages of a GPU and exact versions."""
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line and line[0] not in "#-"]
    pins = [Requirement(line) for line in lines]
    for pin in pins:
        assert [one.operator for one in pin.specifier] == ["=="], pin
        assert pin.marker is None, pin
    names = {canonicalize_name(pin.name) for pin in pins}
    assert len(pins) == len(names)
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if not name.startswith("cuda")}
    needed = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    ranges = [one for one in map(Requirement, needed) if not str(one.specifier).startswith("==")]
    wanted = {canonicalize_name(one.name) for one in ranges} - {"jshadow"}
    assert {"jax", "flax", "numpy", "fastapi"} <= wanted <= names


def test_tests_that_would_begin_too_late_are_left_out_and_told():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/house/test_schedulers.py"]
    done = subprocess.run(command, cwd=REPO, env=os.environ | {"TESTS_END": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    count = re.search(r"(\d+) of (\d+) tests were left out, because TESTS_END is over", done.stdout)
    assert count
    assert count[1] == count[2] != "0"
