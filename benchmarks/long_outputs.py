"""Measure the divergence from full attention over a long output: `python benchmarks/long_outputs.py MODEL`.

After a prompt, Python's documentation is fed token by token. For each quarter of this output, the KL divergence and the
top-1 agreement with full attention are printed as means over samples with their standard errors. The bytes of keys and
values are printed too.
"""

import argparse
import itertools
import json
import random

import jax
import numpy as np

import jshadow
from jshadow.engine.report import measured_bytes
from jshadow.evaluation import metrics
from jshadow.evaluation.tasks import documentation
from jshadow.policies import POLICIES, parse_policy

QUARTERS = 4
NAMES = ("shadowkv", "shadowkv_plus")


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--set", action="append", default=["rank=32", "budget=256"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    params = jshadow.load(args.model, dtype="float32")
    chosen = {"full": POLICIES["full"]()}
    for label in NAMES:
        name, *settings = label.split(":")
        chosen[label] = parse_policy(name, [*args.set, *settings])
    records: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {label: [] for label in chosen}
    sizes: dict[str, dict[str, int]] = {}
    for sample in range(args.samples):
        text = list(itertools.islice(documentation(params.tokenizer, random.Random(sample)), args.prompt + args.output))
        prompt, forced = np.array([text[: args.prompt]]), np.array([text[args.prompt :]])
        prefilled = jshadow.prefill_many(
            params,
            prompt,
            [args.prompt],
            list(chosen.values()),
            capacity=args.prompt + args.output,
            fetch="device_put",
        )
        exact = None
        for label, (_, state) in zip(chosen, prefilled, strict=True):
            sizes[label] = measured_bytes(state)
            logits, _ = jshadow.extend(params, forced, [args.output], state, logits="all")
            logits = np.asarray(jax.block_until_ready(logits))[0]
            exact = logits if exact is None else exact
            records[label].append((metrics.kl(exact, logits), metrics.top1(exact, logits)))
    rows = []
    for label, pairs in records.items():
        quarters = []
        for part in range(QUARTERS):
            cut = slice(part * args.output // QUARTERS, (part + 1) * args.output // QUARTERS)
            kl = metrics.mean_stderr([float(np.mean(pair[0][cut])) for pair in pairs])
            top1 = metrics.mean_stderr([float(np.mean(pair[1][cut])) * 100 for pair in pairs])
            quarters.append({"kl": kl[0], "kl_stderr": kl[1], "top1": top1[0], "top1_stderr": top1[1]})
        rows.append({"policy": label, **sizes[label], "quarters": quarters})
    if args.json:
        print(json.dumps({"results": rows}))
        return
    for row in rows:
        print(f"{row['policy']}: device {row['device']:,} bytes, host {row['host']:,}")
        for part, quarter in enumerate(row["quarters"], start=1):
            print(
                f"  quarter {part}: KL {quarter['kl']:.4f} ({quarter['kl_stderr'] or 0:.4f}), "
                f"top-1 {quarter['top1']:.1f} % ({quarter['top1_stderr'] or 0:.1f})"
            )


if __name__ == "__main__":
    main()
