"""Records what the library computes, and compares two records: a change of structure must leave them equal.

    python tools/behaviour.py record before.npz       # in a checkout of the commit before
    python tools/behaviour.py record after.npz        # in the changed tree
    python tools/behaviour.py compare before.npz after.npz

A record has, on a tiny random model: logits, counters and bytes of every method in several settings and fetch modes, on
one device and on a mesh; speculation; plans of the command line; and answers of a server. It takes some minutes on two
cores. `compare` exits with status 1 if anything differs by more than 1e-6.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_concurrency_optimized_scheduler=false"
os.environ["XLA_FLAGS"] = FLAGS
sys.path.insert(0, os.getcwd())

import jax  # noqa: E402
import numpy as np  # noqa: E402

import jshadow  # noqa: E402

CONFIG = jshadow.ModelConfig(
    model_type="llama",
    vocab_size=257,
    num_layers=3,
    model_dim=32,
    ffn_dim=48,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context=512,
)
LENGTHS = (61, 27, 5)
CAPACITY = 96
RNG = np.random.default_rng(7)
PROMPT = RNG.integers(0, 256, (3, 61), dtype=np.int32)
STEPS = RNG.integers(0, 256, (3, 6), dtype=np.int32)
TURN = RNG.integers(0, 256, (3, 7), dtype=np.int32)
MODES = ("resident", "device_put", "zero_copy")
MESHES = (("tp", "split"), ("tp", "everywhere"), ("data", "split"))
FEW = ("full", "quest", "h2o", "snapkv", "shadowkv rank", "shadowkv packed small", "shadowkv_plus")
PLANS = """llama-3.1-8b --context 122880
llama-3.1-8b --context 122880 --gpu h200 --policy full
llama-3.1-8b --context 32768 --gpu h100 --policy quest
llama-3.1-8b --context 32768 --gpu h100 --policy snapkv
llama-3.1-8b --context 32768 --gpu h100 --policy omnikv
llama-3.1-8b --context 32768 --gpu h100 --policy quantized --set dtype=fp8
llama-3.1-8b --context 65536 --gpu l40s --fetch zero_copy
llama-3.1-8b --context 65536 --gpu l40s --batch 2 --host-gib 64
llama-3-70b-1m --tp 8 --context 200000
llama-3-70b-1m --tp 8 --left everywhere --context 200000
llama-3.1-8b --tp 2 --left everywhere --context 122880
llama-3.1-8b --context 30000 --gpu h100 --group-rows 4
llama-3.1-8b --context 30000 --gpu h100 --shared 2
llama-3.1-8b --context 30000 --gpu h100 --speculate 4 --acceptance 0.7
llama-3.1-8b --lengths 2048,8192 --policy kivi
llama-3.1-8b --lengths 4096 --policy shadowkv_plus""".splitlines()
CHAT = [{"role": "user", "content": "Tell me about ships."}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "The sea is calm", "max_tokens": 8}),
    ("completions", {"prompt": "The sea is calm", "max_tokens": 8, "logprobs": 3, "echo": True}),
    ("completions", {"prompt": ["a", "bc"], "max_tokens": 4, "n": 2, "temperature": 1.0, "seed": 3}),
    ("completions", {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 3}),
    ("completions", {"prompt": "x", "max_tokens": 6, "logit_bias": {"65": 100}, "stop": ["AAA"]}),
    ("completions", {"prompt": "x", "max_tokens": 0}),
    ("completions", {"prompt": "x" * 5000, "max_tokens": 4}),
    ("chat/completions", {"messages": CHAT, "max_tokens": 8}),
    ("chat/completions", {"messages": CHAT, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {"messages": CHAT, "max_tokens": 8, "response_format": {"type": "json_object"}}),
    ("chat/completions", {"messages": [], "max_tokens": 8}),
    ("chat/completions", {"messages": CHAT, "temperature": 3.0}),
]


def settings() -> dict[str, Any]:
    """Every registered method in the small settings of its laws, and the presets of ShadowKV, by name."""
    from jshadow.policies.registry import LAW_SETTINGS, POLICIES

    jshadow.Full()  # the methods are registered when the first one is asked for
    small = {"chunk_size": 4, "outlier_chunks": 2, "local_chunks": 2, "budget": 16}
    made: dict[str, Any] = {name: POLICIES[name](**LAW_SETTINGS[name].small) for name in sorted(POLICIES)}
    made |= {f"quantized {dtype}": jshadow.Quantized(dtype) for dtype in ("int8", "int4")}
    made["shadowkv paper"] = jshadow.ShadowKV.paper()
    made["shadowkv reference"] = jshadow.ShadowKV.reference()
    made["shadowkv packed"] = dataclasses.replace(jshadow.ShadowKV.packed(), **small)
    made["shadowkv packed small"] = dataclasses.replace(jshadow.ShadowKV.packed(small=True), **small)
    made["shadowkv rank"] = jshadow.ShadowKV(rank=12, **small)
    made["dense_first"] = jshadow.DenseFirst(jshadow.SpeCache(bits=1, group=8, residual=8, fetched=6), layers=1)
    made["pyramid"] = jshadow.Pyramid(jshadow.Quest(budget=12, unit=4, dense_layers=0), steepness=4.0)
    return made


def params(mesh: Any = None, left: str = "split") -> Any:
    """The tiny model with random weights, on one device or on a mesh."""
    from jshadow.weights.params import init_params

    whole = init_params(CONFIG, seed=0, dtype="float32")
    if mesh is None:
        return whole
    with tempfile.TemporaryDirectory() as folder:
        jshadow.save(whole, f"{folder}/model")
        return jshadow.load(f"{folder}/model", "float32", mesh=mesh, left=left)


def run(model: Any, policy: Any, fetch: str) -> dict[str, Any]:
    """The logits of a ragged prompt, of six steps and of a turn, with the counters and the bytes of the state."""
    rows = np.asarray(LENGTHS, np.int32)
    first, state = jshadow.prefill(model, PROMPT, rows, policy, capacity=CAPACITY, fetch=fetch, prefill_chunk=32)
    found = {"prompt": np.asarray(first)}
    for i in range(STEPS.shape[1]):
        out, state = jshadow.decode_step(model, STEPS[:, i], state)
        found[f"step {i}"] = np.asarray(out)
    out, state = jshadow.extend(model, TURN, np.asarray([7, 3, 1], np.int32), state)
    found["turn"] = np.asarray(out)
    found["lengths"] = np.asarray(state.lengths)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.counters):
        found[f"counters{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    found["bytes"] = np.array(sorted((str(leaf.dtype), leaf.nbytes) for leaf in jax.tree.leaves(state)), dtype="U32")
    return found


def states() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every setting in two fetch modes, and on three meshes where the method allows it."""
    one = params()
    made = settings()
    for place, (name, policy) in enumerate(made.items()):
        for fetch in ("resident", MODES[1 + place % 2]):
            yield f"{name} / {fetch}", attempt(run, one, policy, fetch)
    for axis, left in MESHES:
        sizes = {"data": 1, "tp": 1} | {axis: 3 if axis == "data" else 2}
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[: sizes["data"] * sizes["tp"]])
        model = params(mesh, left)
        for name in made if (axis, left) == ("tp", "split") else FEW:
            yield f"{name} / {axis} {left}", attempt(run, model, made[name], "device_put")


def attempt(call: Any, *args: Any) -> dict[str, Any]:
    """What a call returns, or the error's text if the library refuses it."""
    try:
        found: dict[str, Any] = call(*args)
    except jshadow.errors.JshadowError as error:
        return {"refused": np.array(f"{type(error).__name__}: {error}")}
    finally:
        jax.clear_caches()  # the programs of all settings would take more mappings of memory than a process may have
    return found


def plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON of plans of the command line."""
    from jshadow.cli import main

    for line in PLANS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main(["plan", *line.split(), "--json"])
        yield f"plan {line}", {"out": np.array(f"{status}\n{out.getvalue()}")}


def answers() -> Iterator[tuple[str, dict[str, Any]]]:
    """What a server of the tiny model answers."""
    with tempfile.TemporaryDirectory() as folder:
        model = params()
        jshadow.save(model, f"{folder}/model")
        tokenizer(f"{folder}/model")
        port = 20000 + os.getpid() % 20000
        command = [
            sys.executable,
            "-m",
            "jshadow",
            "serve",
            f"{folder}/model",
            "--port",
            str(port),
            "--max-context",
            "128",
        ]
        command += ["--room", "32", "--slots", "2", "--dtype", "float32", "--policy", "shadowkv", "--set", "budget=16"]
        command += ["--set", "rank=12", "--library", f"{folder}/library", "--name", "tiny"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                base = f"http://127.0.0.1:{port}"
                while ask(f"{base}/ready")[0] != 200:
                    assert process.poll() is None, "the server ended"
                    time.sleep(0.5)
                for place, (path, body) in enumerate(REQUESTS):
                    status, answer = ask(f"{base}/v1/{path}", {"model": "tiny", "seed": 1, **body})
                    yield f"server {place} {path}", {"out": np.array(f"{status}\n{answer}")}
            finally:
                process.terminate()


def tokenizer(folder: str) -> None:
    """Write a tokenizer whose tokens are bytes, with an end token and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    wrapped.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    wrapped.save_pretrained(folder)


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """The status and the JSON of an answer, without what differs from run to run. Status 0: nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    except OSError:
        return 0, ""
    found = json.loads(text)
    for name in ("id", "created", "system_fingerprint"):
        found.pop(name, None)
    return status, json.dumps(found, sort_keys=True)


def record(target: Path) -> None:
    """Write a record, part by part."""
    found: dict[str, Any] = {}
    for part in (plans, answers, states):
        for name, values in part():
            found |= {f"{name}: {key}": value for key, value in values.items()}
            print(name, *([str(values["refused"])] if "refused" in values else []), flush=True)
        np.savez_compressed(target, **found)
    print(f"{len(found)} values in {target}")


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records, and return 1 if anything does."""
    old, new = np.load(before), np.load(after)
    names = {side: set(record.files) for side, record in (("before", old), ("after", new))}
    for side, other in (("before", "after"), ("after", "before")):
        for name in sorted(names[side] - names[other]):
            print(f"only {side}: {name}")
    differ = exact = 0
    for name in sorted(names["before"] & names["after"]):
        a, b = old[name], new[name]
        if a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            exact += 1
        elif a.dtype.kind == "f" and a.shape == b.shape and np.allclose(a, b, rtol=0, atol=1e-6, equal_nan=True):
            print(f"within 1e-6: {name}: {np.nanmax(np.abs(a - b)):.1e}")
        else:
            differ += 1
            print(f"DIFFERS: {name}\n  before: {str(a)[:2000]}\n  after:  {str(b)[:2000]}")
    print(f"{exact} values are equal, {differ} differ")
    return int(bool(differ or names["before"] != names["after"]))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="write a record of this checkout")
    one.add_argument("target", type=Path)
    two = commands.add_parser("compare", help="compare two records")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args.before, args.after)
    record(args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
