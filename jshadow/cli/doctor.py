"""`jshadow doctor`: what this machine has, what of it works, and what to do about the rest."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jshadow.cache.system_memory import (
    GIB,
    POOL_VARIABLE,
    available_memory,
    group_limit,
    locked_limit,
    pool_gib,
    total_memory,
)
from jshadow.cli.compile_cache import cache_folder, check_writable
from jshadow.cli.fields import Command, option
from jshadow.evaluation.machine import PACKAGES, system, versions

# What each extra of pyproject.toml is for. `docs` and `dev` are for those who change jshadow.
EXTRAS = {
    "cuda12": "NVIDIA GPUs, CUDA 12",
    "cuda13": "NVIDIA GPUs, CUDA 13",
    "gguf": "GGUF files: loading and conversion",
    "serve": "`jshadow serve`: an HTTP server with a page",
    "traces": "traces of `jshadow serve` for OpenTelemetry",
    "store": "a library of documents in an object store",
    "pdf": "PDF documents of a library",
    "replicas": "several servers behind a router (`examples/replicas`)",
    "workers": "several machines that read documents (`examples/many_workers`)",
    "eval": "lm-evaluation-harness, and a Bible as a long text",
    "ruler": "NVIDIA's own RULER, for `jshadow eval --suite ruler`",
    "agents": "recorded sessions of coding agents, for `jshadow eval --tasks agreement_agents`",
    "plots": "matplotlib, for the pictures of `benchmarks/report.py`",
    "torch": "torch, which `benchmarks/bench.py` times beside jshadow",
}
_CUDA = ("cuda12", "cuda13")
_GPU_PACKAGES = [f"jax-{cuda}-{part}" for cuda in _CUDA for part in ("plugin", "pjrt")] + ["jax-triton"]
_VARIABLES = ("JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_")
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_WALK_SECONDS = 5.0  # a cache on a slow disk is counted for so long
_DRIVER_SECONDS = 20.0
_CUDA13_DRIVER = 580  # the first branch of the Linux driver that runs CUDA 13

Fault = tuple[str, str]  # what does not work, and what to do


@dataclasses.dataclass(kw_only=True)
class Doctor(Command):
    """Look at this machine: versions, devices, memory, kernels, caches and extras.

    Paste the text into a bug report: it has no host name, and ~ stands for your home folder. JAX runs in a process of
    its own, so that a broken one is reported too. The exit status is 1 if something that should work does not.
    """

    timeout: float = option("seconds that JAX may take", 180.0, metavar="SECONDS")

    def run(self) -> int:
        """Return 1 if there is a fault, else 0."""
        found = examine(self.timeout)
        print(json.dumps(found) if self.json else "\n".join(_lines_of(found)))
        return 1 if found["faults"] else 0


def examine(seconds: float) -> dict[str, Any]:
    """Return what this machine has, as JSON can hold it. JAX is given so many seconds."""
    found: dict[str, Any] = {
        "versions": versions((*PACKAGES, *_GPU_PACKAGES)),
        "system": system(),
        "variables": _variables(),
        "gpus": driver_gpus(),
        "memory": {
            "total": total_memory(),
            "available": available_memory(),
            "group_limit": group_limit(),
            "locked_limit": locked_limit(),
            "pinned_pool": pool_gib() * GIB,
        },
        "caches": {name: _cache(folder) for name, folder in _folders()},
        "needed": unfit(None),
        "extras": {name: unfit(name) for name in EXTRAS},
        "jax": probe(seconds),
    }
    faults = [fault for look in (_package_faults, _jax_faults, _gpu_faults, _other_faults) for fault in look(found)]
    return found | {"faults": [{"what": what, "do": do} for what, do in faults]}


def _variables() -> dict[str, str]:
    """Return the environment variables that JAX, XLA and the Hugging Face Hub read, except secrets."""
    ours = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return {name: _short(value) for name, value in ours.items() if not any(word in name for word in _SECRETS)}


def _short(path: object) -> str:
    """Return a text in which ~ stands for the home folder."""
    return str(path).replace(os.path.expanduser("~"), "~") if os.path.expanduser("~") not in ("/", "~") else str(path)


def driver_gpus() -> list[dict[str, Any]] | None:
    """Return the GPUs that the NVIDIA driver shows, or None if there is no driver, or it does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        return [{"name": row[0], "bytes": int(row[1]) * 2**20, "driver": row[2]} for row in rows]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def unfit(extra: str | None) -> list[str] | None:
    """Return the packages of an extra that are missing or have the wrong version, each with what it should be.

    Args:
        extra: its name. None: what jshadow itself needs.

    Returns:
        None if jshadow is not installed as a package, so that nothing tells what it needs.
    """
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in importlib.metadata.requires("jshadow") or ()]
    except importlib.metadata.PackageNotFoundError:
        return None
    names = {"extra": extra or ""}
    if extra is None:
        needed = [one for one in needed if one.marker is None or "extra" not in str(one.marker)]
    else:
        needed = [one for one in needed if one.marker is not None and "extra" in str(one.marker)]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate(names)]
    wrong = []
    for one in needed:
        if one.name == "jax" and extra in _CUDA:  # `jax[cuda12]` brings the plugin, and jax is installed anyway
            one = Requirement(f"jax-{extra}-plugin")
        have = versions([one.name])[one.name]
        if one.name != "jshadow" and (have is None or not one.specifier.contains(have, prereleases=True)):
            wrong.append(f"{one.name}{one.specifier} ({have or 'missing'})")
    return wrong


def probe(seconds: float, command: Sequence[str] = (sys.executable, "-m", "jshadow.cli.probe")) -> dict[str, Any]:
    """Run the stages of `jshadow.cli.probe` in a process of its own, and return what they have found together.

    The result has `stage` and `error` if a stage failed, did not end in time or killed the process.
    """
    # What a server or a notebook has left of the GPU is enough.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"} | os.environ
    folders = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # a pipe could stay open for ever
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
        ended = _wait(child, seconds)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    found: dict[str, Any] = {"stage": "starting Python"}
    for line in texts[0].splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            found |= {"stage": told["stage"]} | told.get("found", {})
    said = [line for line in texts[1].splitlines() if line.strip()]
    if not ended:
        found["error"] = f"no end after {seconds:g} s"
    elif child.returncode and "error" not in found:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        found["error"] = f"the process ended with {how}: {_short(said[-1])[:300] if said else 'it said nothing'}"
    if "error" not in found:
        del found["stage"]
    return found | {"said": [_short(line)[:300] for line in said[-5:]]}


def _wait(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Return whether the process ended in time. If not, it is killed. A driver may keep it, so that is not awaited."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
        return False
    return True


def _folders() -> Iterator[tuple[str, str]]:
    """Yield the names and folders of the caches. A bucket is no folder, and is left out."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    yield "compiled programs", cache_folder()
    yield "models of the hub", os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")


def _cache(folder: str) -> dict[str, Any]:
    """Return the facts of a cache folder: its bytes, the bytes that are free, and why it cannot be written."""
    if "://" in folder:
        return {"folder": folder, "bytes": None, "free": None, "problem": None}
    path = Path(folder).expanduser()
    there = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    problem, size, end = None, 0, time.monotonic() + _WALK_SECONDS
    try:
        check_writable(there)
    except OSError as error:
        problem = error.strerror or str(error)
    for place, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
        if time.monotonic() > end:
            break
    free = shutil.disk_usage(there).free
    return {"folder": _short(path), "bytes": size, "free": free, "problem": problem}


def _package_faults(found: dict[str, Any]) -> Iterator[Fault]:
    if found["needed"] is None:
        yield "jshadow is not installed as a package", "run pip install . in its folder"
    elif found["needed"]:
        yield f"jshadow needs {', '.join(found['needed'])}", "run pip install --upgrade jshadow (or . in its folder)"
    for name, wrong in found["extras"].items():
        if wrong and any("(missing)" not in one for one in wrong) and name not in _CUDA:
            yield f"the extra {name} needs {', '.join(wrong)}", f"run pip install --upgrade 'jshadow[{name}]'"
    jax, plugins = found["versions"]["jax"], [name for name in _GPU_PACKAGES[:4] if found["versions"][name]]
    for name in plugins:
        if (have := found["versions"][name]) != jax and name.endswith("plugin"):
            yield f"{name} is {have}, and jax is {jax}", "install both again: " + _pip([name.split("-")[1]])


def _jax_faults(found: dict[str, Any]) -> Iterator[Fault]:
    jax, asked = found["jax"], os.environ.get("JAX_PLATFORMS", "")
    if "error" not in jax:
        return
    advice = "run the command again with JAX_PLATFORMS=cpu to see whether the GPU is the cause"
    if asked and jax["stage"] == "finding devices":
        advice = backend_advice(asked)
    elif jax["stage"] == "starting Python":
        advice = "check that this Python can import jshadow"
    elif jax["stage"] == "importing jax":
        advice = "run pip install --upgrade --force-reinstall jax jaxlib, then pip check"
    elif "RESOURCE_EXHAUSTED" in jax["error"]:
        advice = "end the other programs on the GPU (nvidia-smi lists them), or wait for them"
    yield f"{jax['stage']} failed: {jax['error']}", advice


def backend_advice(asked: str) -> str:
    """Return what to do if the backends that JAX_PLATFORMS names do not start."""
    if {"cuda", "gpu"} & {part.strip() for part in asked.split(",")}:
        return f"install it with {_pip(['cuda12'])} (or 'jshadow[cuda13]'), or unset the variable JAX_PLATFORMS"
    return "set the variable JAX_PLATFORMS to a backend that is installed, or unset it"


def _gpu_faults(found: dict[str, Any]) -> Iterator[Fault]:
    jax, gpus = found["jax"], found["gpus"]
    plugins = [name for name in _GPU_PACKAGES if name.endswith("plugin") and found["versions"][name]]
    asked = os.environ.get("JAX_PLATFORMS", "")
    if jax.get("backend") == "cpu" and "cpu" not in asked.split(","):
        if gpus and not plugins:
            what = f"JAX does not use the {gpus[0]['name']}: no CUDA plugin is installed"
            yield what, f"run {_pip(['cuda13' if _version(gpus[0]['driver']) >= _CUDA13_DRIVER else 'cuda12'])}"
        elif plugins:
            why = jax.get("no_cuda", "no reason is known")
            do = "update the driver, or install the plugin again: " + _pip([plugins[0].split("-")[1]])
            if not gpus:
                do = "check the driver with nvidia-smi (in a container: pass the GPU on), or uninstall " + plugins[0]
            yield f"JAX finds no GPU with {plugins[0]}: {why[:300]}", do
    for name, result in jax.get("kernels", {}).items():
        if result != "serves":
            yield f"the kernel {name} {result}", "report this text; --fetch device_put uses no kernel to fetch"


def _other_faults(found: dict[str, Any]) -> Iterator[Fault]:
    memory = found["memory"]
    for name, cache in found["caches"].items():
        if cache["problem"]:
            variable = "JAX_COMPILATION_CACHE_DIR" if name == "compiled programs" else "HF_HOME"
            yield f"{cache['folder']} cannot be written: {cache['problem']}", f"set {variable} to another folder"
    pool, limits = memory["pinned_pool"], [memory["total"], memory["group_limit"]]
    least = min(filter(None, limits), default=pool)
    if POOL_VARIABLE in os.environ and pool > least:
        what = f"{POOL_VARIABLE} is {pool / GIB:.0f}, and the host has {_gib(least)}"
        yield what, f"set it to {int(0.8 * least / GIB)}"


def _version(driver: str) -> int:
    """Return the branch of a driver such as "580.159.04", or 0 if it has none."""
    first = driver.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _pip(extras: Sequence[str]) -> str:
    return f"pip install 'jshadow[{','.join(extras)}]'"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:,.1f} GiB"


def _lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the text. None is wider than the terminal of a bug report, if the parts are short."""
    have = {name: version for name, version in found["versions"].items() if version}
    yield "jshadow doctor"
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in have.items())
    facts = found["system"]
    yield f"system: {facts['system']} {facts['machine']}, Python {facts['python']}, {facts['processor']}"
    for part in (_device_lines, _memory_lines, _extra_lines):
        yield from part(found)
    for name, value in found["variables"].items():
        yield f"variable: {name}={value}"
    for line in found["jax"]["said"] if found["faults"] else ():
        yield f"JAX said: {line}"
    for fault in found["faults"]:
        yield f"FAULT: {fault['what']}"
        yield f"    what to do: {fault['do']}"
    count = len(found["faults"])
    yield f"{count} {'fault' if count == 1 else 'faults'}" if count else "no faults"


def _device_lines(found: dict[str, Any]) -> Iterator[str]:
    jax = found["jax"]
    for gpu in found["gpus"] or ():
        yield f"GPU of the driver: {gpu['name']}, {_gib(gpu['bytes'])}, driver {gpu['driver']}"
    if found["gpus"] is None:
        yield "GPU of the driver: none (nvidia-smi is missing or does not answer)"
    for device in jax.get("devices", ()):
        most = device["bytes_for_xla"]
        more = f", {_gib(most)} for XLA, {_gib(device['bytes_in_use'])} in use" if most else ""
        yield f"device of JAX: {device['kind']} ({device['runtime']}){more}, memories {', '.join(device['memories'])}"
    if "kernels" in jax:
        served = [name for name, result in jax["kernels"].items() if result == "serves"]
        yield f"kernels that serve this device: {', '.join(served) or 'none: ' + jax.get('why', 'all failed')}"
    if "cudnn_attention" in jax:
        yield f"cuDNN's attention reads prompts: {'yes' if jax['cudnn_attention'] else 'no'}"


def _memory_lines(found: dict[str, Any]) -> Iterator[str]:
    memory = found["memory"]
    group = "none" if memory["group_limit"] is None else _gib(memory["group_limit"])
    locked = "none" if memory["locked_limit"] is None else f"{memory['locked_limit']:,} bytes"
    yield f"host memory: {_gib(memory['total'])}, {_gib(memory['available'])} available, limit of the container {group}"
    pool = _gib(memory["pinned_pool"])
    yield f"pinned host memory on a GPU: at most {pool} ({POOL_VARIABLE}); ulimit -l is {locked}"
    for name, cache in found["caches"].items():
        if cache["free"] is not None:
            size, free = _gib(cache["bytes"]), _gib(cache["free"])
            yield f"cache of {name}: {cache['folder']}, {size}, {free} free on this disk"


def _extra_lines(found: dict[str, Any]) -> Iterator[str]:
    lacking = {name: wrong for name, wrong in found["extras"].items() if wrong or wrong is None}
    yield f"extras installed: {', '.join(name for name in EXTRAS if name not in lacking) or 'none'}"
    other = [name for name in _CUDA if name not in lacking]
    missing = [name for name in lacking if not (name in _CUDA and (other or not found["gpus"]))]
    for name in missing:
        yield f"extra missing: {name} ({EXTRAS[name]})"
    if missing:
        yield f"to install these: {_pip(missing)}"
