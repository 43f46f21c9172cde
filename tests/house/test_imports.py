"""The structure as the design has it: imports go one way, and heavy packages stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "jshadow"
KERNELS = ROOT.parent / "pallas_kernels"

# The rooms from the bottom up. A module imports from its own room and from the rooms before it, never from a later one.
ROOMS = (
    "errors",
    "ops",
    "models",
    "cache",
    "policies",
    "weights",
    "planner",
    "engine",
    "generate",
    "evaluation",
    "library",
    "serving",
    "cli",
    "__init__",
    "__main__",
)
MOST_ENTRIES = 16
# Packages that only some places may import.
ONLY_IN = {
    "safetensors": ("weights/convert",),
    "orbax": ("weights/convert",),
    "gguf": ("weights/convert",),
    "huggingface_hub": ("weights/convert",),
    "torch": ("evaluation/speed",),
    "matplotlib": ("evaluation/plots",),
    "pyarrow": ("evaluation",),
    "lm_eval": ("evaluation",),
    "obstore": ("library/remote.py",),
    "pypdf": ("library/pdf_worker.py",),
    "fastapi": ("serving/http", "cli/serve.py"),
    "starlette": ("serving/http",),
    "pydantic": ("serving/http",),
    "uvicorn": ("serving/http", "cli/serve.py"),
    "prometheus_client": ("serving/http", "cli/serve.py"),
    "llguidance": ("serving/http", "cli/serve.py"),
    "transformers": ("weights", "evaluation/speed"),
    "triton": (),
    "jax_triton": (),
    "optax": ("policies/less",),
    "pallas_kernels": ("ops", "cache/offload.py", "cache/rows.py", "cache/mesh_rows.py", "policies/shadowkv"),
}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    """The first part of a module's place: a file or a folder of jshadow."""
    return path.parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_go_down(path):
    room = room_of(path)
    assert room in ROOMS, f"{room} is no room"
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "jshadow" and rest and rest[0] in ROOMS:
            assert ROOMS.index(rest[0]) <= ROOMS.index(room), f"{path} imports {name}"
        if top in ONLY_IN:
            assert str(path).startswith(ONLY_IN[top]), f"{path} imports {name}"


def test_the_engine_knows_no_http():
    for path in MODULES:
        if room_of(path) == "serving" and path.parts[1] != "http":
            assert not any(name.startswith("jshadow.serving.http") for name in imports(path)), path


def test_few_entries():
    entries = [entry.name for entry in ROOT.iterdir() if entry.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_know_jax_and_numpy_alone(path):
    """And the standard library."""
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imports(path)} <= allowed


def test_models_know_no_policy():
    for path in MODULES:
        if room_of(path) == "models":
            assert not any(name.startswith("jshadow.policies") for name in imports(path))


@pytest.mark.slow
@pytest.mark.process
def test_the_package_imports_without_torch_or_transformers():
    """And without optax, which only a training needs."""
    code = "import sys, jshadow; print([m for m in ('torch', 'transformers', 'gguf', 'optax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
