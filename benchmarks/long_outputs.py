"""Measure how methods diverge from full attention over a long output: `python benchmarks/long_outputs.py MODEL`.

Two runs follow a prompt of Python's documentation:

- The next tokens of the documentation are fed. For each quarter of them, the KL divergence and the top-1 agreement with
  full attention are measured.
- With `--greedy N`, each method generates N tokens freely. Two figures are measured: the number of tokens before the
  first one that full attention does not generate, and the share of 4-grams that occurred before in the same output.

All figures are means over samples with their standard errors. A line of JSON is printed for each method, and then a
table. Device bytes are those of the state of one request. The bytes of a new token are counted in bfloat16 over all
layers, without what does not grow with the output.
"""

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jshadow
from jshadow.engine.report import measured_bytes
from jshadow.evaluation import metrics
from jshadow.evaluation.tasks import documentation
from jshadow.policies import Policy, parse_policy, split_policy

QUARTERS = 4
PIECE = 256  # number of tokens whose logits exist at once
GRAM = 4  # tokens in a group whose repetition is counted
METHODS = (
    "full",
    "shadowkv:rank=32:budget=256",
    "shadowkv_plus:rank=32:budget=256:later_keys=projected",
    "shadowkv_plus:rank=32:budget=256",
)


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1024, help="number of tokens that are fed")
    parser.add_argument("--greedy", type=int, default=0, help="number of tokens that are generated freely")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--policies", default=",".join(METHODS), help="NAME:key=value:..., separated by commas")
    args = parser.parse_args()
    params = jshadow.load(args.model, dtype="float32")
    labels = ["full", *(text for text in args.policies.split(",") if text != "full")]
    policies = [parse_policy(*split_policy(label)) for label in labels]
    tokens = np.array([text_of(params.tokenizer, sample, args.prompt + args.output) for sample in range(args.samples)])
    prompts, lengths = tokens[:, : args.prompt], [args.prompt] * args.samples
    capacity = args.prompt + max(args.output, args.greedy + 1)
    exact: dict[str, Any] = {}
    rows = []
    for label, policy in zip(labels, policies, strict=True):
        # Each policy has a prefill of its own, because InfLLM attends to a prompt in its own way.
        first, state = jshadow.prefill(params, prompts, lengths, policy, capacity=capacity, fetch="device_put")
        row: dict[str, Any] = {"policy": label, "samples": args.samples, "device": measured_bytes(state)["device"]}
        row["device"] //= args.samples
        row["bytes_of_new_token"] = bytes_of_new_token(params.config, policy)
        if args.greedy:
            free = generated(params, first, state.fork(), args.greedy)
            row |= free_figures(exact.setdefault("free", free), free)
        row["quarters"] = fed_figures(params, tokens[:, args.prompt :], state, exact)
        rows.append(row)
        print(json.dumps(row), flush=True)
    for line in table(rows):
        print(line)


def text_of(tokenizer: Any, sample: int, count: int) -> list[int]:
    """Return the first `count` tokens of a sample of the documentation."""
    return list(itertools.islice(documentation(tokenizer, random.Random(sample)), count))


def bytes_of_new_token(config: Any, policy: Policy) -> int:
    """Return the device bytes that a new token adds in all layers, in bfloat16 with offloaded rows.

    The halves of two states that change are compared. The other half serves the prompt.
    """
    capacities, prompt = (2048, 3072), 1024
    live = []
    for capacity in capacities:
        state = jshadow.abstract_state(config, policy, batch=1, capacity=capacity, prompt=prompt, fetch="device_put")
        leaves = jax.tree.leaves([layer.live for layer in state.layers])
        live.append(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
    return round((live[1] - live[0]) / (capacities[1] - capacities[0]))


def generated(params: Any, logits: Any, state: Any, count: int) -> np.ndarray:
    """Return greedy tokens after a prompt, int32 [B, count]. No token ends a row. This consumes the state."""
    first = np.argmax(np.asarray(logits), axis=-1).astype(np.int32)
    later, _ = jshadow.decode_steps(params, first, state, count)
    return np.concatenate([first[:, None], np.asarray(later)], axis=1)[:, :count]


def free_figures(exact: np.ndarray, free: np.ndarray) -> dict[str, Any]:
    """Return where outputs [B, n] first differ from those of full attention, and their repetition in percent."""
    equal = [int(np.argmax(np.append(mine != theirs, True))) for mine, theirs in zip(free, exact, strict=True)]
    repeated = [repetition(row.tolist()) for row in free]
    figures: dict[str, Any] = {}
    for name, values in (("equal_tokens", equal), ("repeated", repeated)):
        figures[name], figures[f"{name}_stderr"] = metrics.mean_stderr([float(value) for value in values])
    return figures


def repetition(tokens: Sequence[int]) -> float:
    """Return the percentage of groups of GRAM tokens that occurred before."""
    groups = [tuple(tokens[place : place + GRAM]) for place in range(len(tokens) - GRAM + 1)]
    return 100 * (1 - len(set(groups)) / len(groups))


def fed_figures(params: Any, forced: np.ndarray, state: Any, exact: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the divergence in each quarter of the fed tokens [B, n]. The first call must be for full attention."""
    kl, top1 = [], []
    for start in range(0, forced.shape[1], PIECE):
        piece = forced[:, start : start + PIECE]
        logits, state = jshadow.extend(params, piece, [piece.shape[1]] * len(piece), state, logits="all")
        mine = np.asarray(logits)
        full = exact.setdefault(f"logits {start}", mine)
        kl.append([metrics.kl(*pair) for pair in zip(full, mine, strict=True)])
        top1.append([metrics.top1(*pair) for pair in zip(full, mine, strict=True)])
    quarters = []
    cuts = [np.array_split(np.concatenate(x, axis=1), QUARTERS, axis=1) for x in (kl, top1)]
    for divergence, agreement in zip(*cuts, strict=True):
        means = metrics.mean_stderr(divergence.mean(axis=1).tolist())
        shares = metrics.mean_stderr((100 * agreement.mean(axis=1)).tolist())
        quarters.append(dict(zip(("kl", "kl_stderr", "top1", "top1_stderr"), (*means, *shares), strict=True)))
    return quarters


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table. Standard errors are in brackets."""
    names = ["policy", *(f"KL of quarter {part}" for part in range(1, QUARTERS + 1)), "top-1 of quarter 4"]
    free = "equal_tokens" in rows[0]
    names += ["equal tokens", "repeated 4-grams"] if free else []
    lines = [[*names, "device bytes", "bytes of a new token"], ["---"] * (len(names) + 2)]
    for row in rows:
        last = row["quarters"][-1]
        cells = [f"`{row['policy']}`", *(f"{q['kl']:.4f} ({q['kl_stderr'] or 0:.4f})" for q in row["quarters"])]
        cells.append(f"{last['top1']:.1f} % ({last['top1_stderr'] or 0:.1f})")
        if free:
            cells.append(f"{row['equal_tokens']:.0f} ({row['equal_tokens_stderr'] or 0:.0f})")
            cells.append(f"{row['repeated']:.1f} % ({row['repeated_stderr'] or 0:.1f})")
        lines.append([*cells, f"{row['device']:,}", f"{row['bytes_of_new_token']:,}"])
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    main()
