"""`jshadow doctor`: what it says of a machine whose parts are whole, missing or broken."""

import json
import os
import sys
import tomllib

import pytest
from conftest import REPO

from jshadow.cache.system_memory import GIB, POOL_VARIABLE
from jshadow.cli import doctor
from jshadow.cli.main import main
from jshadow.cli.probe import kernel_calls, tried

CPU = {"backend": "cpu", "devices": [], "kernels": {}, "why": "no GPU", "said": []}
H100 = {
    "kind": "NVIDIA H100",
    "runtime": "cuda 13",
    "bytes_for_xla": 60 * GIB,
    "bytes_in_use": 0,
    "memories": ["device"],
}
GPU = CPU | {"backend": "gpu", "devices": [H100], "kernels": {"chunk_scores": "serves"}, "cudnn_attention": True}
CARD = [{"name": "NVIDIA H100", "bytes": 80 * GIB, "driver": "580"}]
PLUGIN = {"jax-cuda12-plugin": "0.12.0"}
VERSIONS = {"jshadow": "0.1.0", "jax": "0.12.0", "jaxlib": "0.12.0"}


@pytest.fixture
def machine(monkeypatch, tmp_path, capsys):
    """Runs `jshadow doctor` on a machine made up of parts. Gives the exit status and what it prints."""
    real = doctor.unfit

    def run(*words, jax=CPU, gpus=None, packages=(), unfit=None, **variables):
        have = dict.fromkeys([*doctor.PACKAGES, *doctor._GPU_PACKAGES]) | VERSIONS | dict(packages)
        monkeypatch.setattr(doctor, "probe", lambda seconds: dict(jax))
        monkeypatch.setattr(doctor, "driver_gpus", lambda: gpus)
        monkeypatch.setattr(doctor, "versions", lambda names: {name: have.get(name) for name in names})
        monkeypatch.setattr(
            doctor, "unfit", lambda name: (unfit or {}).get(name, []) if unfit != "real" else real(name)
        )
        for name in [name for name in os.environ if name.startswith(doctor._VARIABLES)]:
            monkeypatch.delenv(name)
        folders = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"), "HF_HOME": str(tmp_path)}
        for name, value in (folders | variables).items():
            monkeypatch.setenv(name, value)
        return main(["doctor", *words]), capsys.readouterr().out

    return run


def test_a_whole_machine_has_no_fault(machine):
    for parts in ({}, {"jax": GPU, "gpus": CARD, "packages": PLUGIN}):
        status, out = machine(**parts)
        assert (status, out.splitlines()[-1]) == (0, "no faults"), out
    assert "kernels that serve this device: chunk_scores" in out
    assert "device of JAX: NVIDIA H100 (cuda 13), 60.0 GiB for XLA" in out
    status, out = machine("--json", jax=GPU, gpus=CARD, packages=PLUGIN)
    told = json.loads(out)
    assert (status, told["faults"], told["gpus"], told["jax"]["kernels"]) == (0, [], CARD, GPU["kernels"])


BROKEN = {
    "a GPU and JAX for the CPU": ({"gpus": CARD}, "no CUDA plugin", "jshadow[cuda13]"),
    "a GPU with an old driver": ({"gpus": [CARD[0] | {"driver": "535.10"}]}, "no CUDA plugin", "jshadow[cuda12]"),
    "a plugin without a driver": (
        {"packages": PLUGIN, "jax": CPU | {"no_cuda": "cuInit failed"}},
        "cuInit failed",
        "nvidia-smi",
    ),
    "a plugin that does not start": (
        {"gpus": CARD, "packages": PLUGIN, "jax": CPU | {"no_cuda": "cuDNN is old"}},
        "cuDNN is old",
        "jshadow[cuda12]",
    ),
    "a plugin of another version": (
        {"gpus": CARD, "packages": {"jax-cuda12-plugin": "0.11.1"}, "jax": GPU},
        "jax-cuda12-plugin is 0.11.1, and jax is 0.12.0",
        "jshadow[cuda12]",
    ),
    "a JAX that hangs": (
        {"jax": {"stage": "finding devices", "error": "no end after 180 s", "said": ["loading"]}},
        "finding devices failed: no end after 180 s",
        "JAX_PLATFORMS=cpu",
    ),
    "a full GPU": (
        {"jax": GPU | {"stage": "multiplying two matrices", "error": "JaxRuntimeError: RESOURCE_EXHAUSTED: no room"}},
        "RESOURCE_EXHAUSTED",
        "nvidia-smi",
    ),
    "a kernel that is wrong": (
        {"jax": GPU | {"kernels": {"chunk_scores": "differs from the reference by 3"}}},
        "the kernel chunk_scores differs from the reference by 3",
        "report",
    ),
    "a backend that is asked for and missing": (
        {"jax": {"stage": "finding devices", "error": "AssertionError: ", "said": []}, "JAX_PLATFORMS": "cuda"},
        "finding devices failed",
        "unset the variable JAX_PLATFORMS",
    ),
    "a dependency that is old": ({"unfit": {None: ["flax>=0.12.9 (0.8)"]}}, "flax>=0.12.9 (0.8)", "--upgrade jshadow"),
    "an extra that is old": ({"unfit": {"gguf": ["gguf>=0.19 (0.1)"]}}, "the extra gguf needs", "jshadow[gguf]"),
    "a cache that cannot be written": ({"HF_HOME": "/proc/none"}, "/proc/none/hub cannot be written", "HF_HOME"),
    "a pool larger than the host": ({POOL_VARIABLE: "900000"}, f"{POOL_VARIABLE} is 900000", "set it to"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_one_fault_with_what_to_do(machine, case):
    parts, what, do = BROKEN[case]
    status, out = machine(**parts)
    [fault] = [line for line in out.splitlines() if line.startswith("FAULT: ")]
    [advice] = [line for line in out.splitlines() if line.startswith("    what to do: ")]
    assert (status, out.splitlines()[-1]) == (1, "1 fault")
    assert what in fault
    assert do in advice


def test_what_was_asked_for_or_left_out_is_no_fault(machine):
    """JAX on the CPU of a machine with a GPU, and extras that are not installed."""
    assert machine(gpus=CARD, packages=PLUGIN, JAX_PLATFORMS="cpu")[0] == 0
    lacking = {"gguf": ["gguf>=0.19 (missing)"], "serve": ["fastapi (missing)"]}
    status, out = machine(unfit=lacking)
    assert status == 0
    assert "extra missing: gguf (GGUF files: loading and conversion)" in out
    assert "to install these: pip install 'jshadow[gguf,serve]'" in out
    assert "cuda12" not in next(line for line in out.splitlines() if "to install" in line)


def test_the_text_has_no_home_and_no_secret(machine, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    out = machine(HF_HUB_CACHE="/home/someone/models", HF_HUB_TOKEN="hf_secret")[1]
    assert "HF_HUB_CACHE=~/models" in out
    assert "someone" not in out
    assert "hf_secret" not in out


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("time.sleep(60)", "no end after 0.5 s"),
        ("os.kill(os.getpid(), 11)", "signal 11: nothing"),
        ("sys.exit('libcuda is broken')", "exit status 1: libcuda is broken"),
    ],
)
def test_a_jax_that_hangs_or_crashes_ends_the_probe_at_its_stage(code, error):
    """What the stages before it have found is kept."""
    lines = [{"stage": "importing jax", "found": {"jax": "0.12"}}, {"stage": "finding devices"}]
    said = "" if "libcuda" in code else "print('nothing', file=sys.stderr, flush=True);"
    program = (
        f"import os, sys, time; {''.join(f'print({json.dumps(line)!r}, flush=True);' for line in lines)} {said} {code}"
    )
    found = doctor.probe(0.5 if "sleep" in code else 30, [sys.executable, "-c", program])
    assert (found["jax"], found["stage"]) == ("0.12", "finding devices")
    assert found["error"].endswith(error)


def test_what_an_extra_lacks_comes_from_the_package_s_own_metadata(monkeypatch):
    needed = ["flax>=99", "numpy>=1", "nonesuch>=1; extra == 'gguf'", "jax[cuda12]>=0.1; extra == 'cuda12'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: needed)
    [flax] = doctor.unfit(None)
    assert flax.startswith("flax>=99 (0.")
    assert doctor.unfit("gguf") == ["nonesuch>=1 (missing)"]
    assert doctor.unfit("serve") == []
    assert doctor.unfit("cuda12") == ["jax-cuda12-plugin (missing)"]


def test_every_extra_is_explained_and_the_docs_say_the_same():
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"docs", "dev"}
    page = (REPO / "docs" / "getting_started.md").read_text()
    for name, text in doctor.EXTRAS.items():
        assert f"| `{name}` | {text} |" in page, name


@pytest.mark.slow
def test_the_kernels_that_are_tried_agree_with_their_references():
    """And a wrong or a broken one is noticed."""
    calls = kernel_calls()
    assert {tried(call, "interpret") for call in calls.values()} == {"serves"}
    call = calls["chunk_scores"]
    assert tried(lambda how: call("xla") * (how == "xla"), "interpret").startswith("differs from the reference by")
    assert tried(lambda how: call("nonesuch"), "interpret").startswith("fails: ValueError: implementation must be")


@pytest.mark.slow
@pytest.mark.process
def test_a_plugin_of_jax_that_is_broken_is_reported(tmp_path, monkeypatch):
    """JAX itself goes on with the CPU."""
    folder = tmp_path / "jax_plugins" / "broken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import os\ndef initialize():\n    os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.probe(120.0)
    assert (found["stage"], found["error"][:37]) == ("finding devices", "the process ended with exit status 3:")
    (folder / "__init__.py").write_text("def initialize():\n    raise OSError('libcuda is broken')\n")
    found = doctor.probe(120.0)
    assert found["backend"] == "cpu"
    assert "error" not in found
