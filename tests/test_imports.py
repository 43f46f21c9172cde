"""The structure as the design has it: imports go one way, and heavy packages stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "jshadow"
KERNELS = ROOT.parent / "pallas_kernels"

# A module may import from its own level only where it is listed so, and from any level below.
LEVELS = [
    ["errors"],
    ["rope_config", "gpus"],
    ["config"],
    [
        "rope",
        "attention",
        "state",
        "chunking",
        "sampling",
        "text",
        "progress",
        "digest",
        "roofline",
        "quantize",
        "packing",
    ],
    ["lowrank", "landmarks"],
    ["key_codecs"],
    ["landmark_levels"],
    ["models"],
    ["offload"],
    ["host_memory", "prefill_attention"],
    ["policies", "sparse_prefill"],
    ["checks", "planning", "step", "convert"],
    ["params", "prefill", "state_record", "capacity_plan", "pattern_search"],
    ["decode", "verify", "saved"],
    ["fitted"],
    ["report"],
    ["run"],
    ["generate"],
    ["evaluation"],
    ["analysis", "bench"],
    ["cli_generate", "cli_plan", "cli_bench", "cli_fit", "cli_patterns", "cli_eval"],
    ["cli_policies"],
    ["cli"],
    ["__init__", "__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
SAME_LEVEL = {("lowrank", "rope"), ("landmarks", "lowrank"), ("report", "decode")}
ONLY_IN = {"safetensors": {"convert"}, "orbax": {"convert"}, "gguf": {"convert"}, "huggingface_hub": {"convert"},
           "torch": {"bench"}, "matplotlib": {"evaluation"}, "pyarrow": {"evaluation"}, "lm_eval": {"evaluation"},
           "transformers": {"convert", "params", "bench"}, "triton": set(), "jax_triton": set(),
           "optax": {"policies"},
           "pallas_kernels": {"policies", "rope", "lowrank", "landmarks", "landmark_levels", "attention", "offload",
                              "key_codecs"}}  # fmt: skip
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
    assert room in LEVEL, f"{room} has no level"
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "jshadow" and rest:
            other = rest[0]
            if other in LEVEL and other != room:
                down = LEVEL[other] < LEVEL[room] or (room, other) in SAME_LEVEL
                assert down, f"{path} imports {name}"
        assert room in ONLY_IN.get(top, {room}), f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_know_jax_and_numpy_alone(path):
    """And the standard library; triton in one file, which is imported when it is used."""
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    names = imports(path)
    if path.name == "triton_kernel.py":
        allowed.add("triton")
    else:
        assert not any(name.startswith("pallas_kernels.fetch_reconstruct.triton_kernel") for name in names)
    assert {name.split(".")[0] for name in names} <= allowed


def test_models_know_no_policy():
    for path in MODULES:
        if room_of(path) == "models":
            assert not any(name.startswith("jshadow.policies") for name in imports(path))


def test_the_package_imports_without_torch_or_transformers():
    """And without optax, which only a training needs."""
    code = "import sys, jshadow; print([m for m in ('torch', 'transformers', 'gguf', 'optax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
