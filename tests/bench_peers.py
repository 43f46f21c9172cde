"""The same prompt through transformers and jshadow, on this machine's CPU: `python tests/bench_peers.py MODEL`.

Not collected by pytest. Each system runs in a process of its own, in turn, `--runs` times after one warm-up inside the
process; medians and spread are printed. Greedy, one request, the prompt of `jshadow.evaluation.tasks needle_docs`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

SYSTEMS = ("transformers", "jshadow full", "jshadow shadowkv resident", "jshadow shadowkv device_put")


def run_transformers(args: argparse.Namespace, ids: list[int]) -> dict[str, float]:
    """transformers with its dynamic cache, float32, eager steps."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()

    def once() -> dict[str, float]:
        with torch.no_grad():
            start = time.perf_counter()
            out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            prefill, start = time.perf_counter() - start, time.perf_counter()
            for _ in range(args.steps):
                out = model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            decode = time.perf_counter() - start
        size = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        return {"prefill_seconds": prefill, "decode_tokens_per_second": args.steps / decode, "device_bytes": size}

    once()
    return once()


def run_jshadow(args: argparse.Namespace, ids: list[int], policy: str, fetch: str) -> dict[str, float]:
    """jshadow, float32; compilation is in the warm-up, and the report leaves it out anyway."""
    import jshadow

    params = jshadow.load(args.model, dtype="float32")
    chosen = jshadow.Full() if policy == "full" else jshadow.ShadowKV(rank=32, budget=256)

    def once() -> dict[str, float]:
        capacity = len(ids) + args.steps + 1
        out = jshadow.generate(params, ids, chosen, max_new_tokens=args.steps + 1, fetch=fetch, capacity=capacity)
        names = ("prefill_seconds", "decode_tokens_per_second", "device_bytes", "host_bytes", "generated_tokens")
        return {name: getattr(out.report, name) for name in names}

    once()
    return once()


def prompt_ids(args: argparse.Namespace) -> list[int]:
    """Documentation of Python itself, exactly args.tokens of it."""
    from pydoc_data import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(args.model, "tokenizer.json"))
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return tokenizer.encode(text[100_000 : 100_000 + 8 * args.tokens]).ids[: args.tokens]


def main() -> None:
    """Run the systems in turn and print a table, or one system as JSON (`--system`, used by itself)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.system:
        kind, *rest = args.system.split()
        ids = prompt_ids(args)
        made = (
            run_transformers(args, ids)
            if kind == "transformers"
            else run_jshadow(args, ids, rest[0], rest[-1] if len(rest) > 1 else "resident")
        )
        print(json.dumps(made))
        return
    figures: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for _ in range(args.runs):
        for system in SYSTEMS:
            command = [sys.executable, __file__, args.model, "--tokens", str(args.tokens), "--steps", str(args.steps)]
            done = subprocess.run([*command, "--system", system], capture_output=True, text=True, check=True)
            figures[system].append(json.loads(done.stdout.splitlines()[-1]))
    if args.json:
        print(json.dumps(figures))
        return
    for system, rows in figures.items():
        line = []
        for name in ("prefill_seconds", "decode_tokens_per_second", "device_bytes"):
            values = [row[name] for row in rows]
            line.append(f"{name} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"{system}: " + ", ".join(line))


if __name__ == "__main__":
    main()
