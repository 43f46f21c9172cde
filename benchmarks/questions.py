"""Compare ten questions on forks of one state with ten separate requests: `python benchmarks/questions.py MODEL`.

All questions are about the same document. Both ways feed the same token ids to the same compiled programs. They
alternate `--runs` times, after one run that warms up. The bytes are those of all live arrays except the weights, when
the states of all ten answers are still kept.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from typing import Any

import jax
import numpy as np

import jshadow
from jshadow.evaluation.tasks import documentation
from jshadow.weights.templates import frame

QUESTIONS = (
    "What is this text about?",
    "Which language does it describe?",
    "Name one statement that it mentions.",
    "What is an expression?",
    "What does a class do?",
    "What is said about names?",
    "What is an exception?",
    "How are modules imported?",
    "What is a comprehension?",
    "Which operators are there?",
)


def live_bytes() -> dict[str, int]:
    """Return the bytes of all live arrays by memory kind."""
    gc.collect()
    sizes = {"device": 0, "pinned_host": 0}
    for leaf in jax.live_arrays():
        sizes[leaf.sharding.memory_kind or "device"] += leaf.nbytes
    return sizes


def prompts(params: Any, tokens: int) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of the document with the start of the chat, and those of each question."""
    framed = [frame(params.tokenizer, question, "") for question in QUESTIONS]
    before = framed[0][0]
    text = list(itertools.islice(documentation(params.tokenizer, random.Random(0)), tokens - len(before)))
    return before + text, [after for _, after in framed]


def ask(params: Any, state: Any, question: list[int], steps: int) -> tuple[list[int], Any]:
    """Extend a state by a question and answer it greedily, with one program for the turn and one for all steps."""
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(question)] = question
    logits, state = jshadow.extend(params, padded, [len(question)], state)
    first = np.asarray(logits.argmax(-1), np.int32)
    rest, state = jshadow.decode_steps(params, first, state, steps - 1)
    return [int(first[0]), *np.asarray(rest)[0].tolist()], state


def run(params: Any, args: argparse.Namespace, policy: Any, *, forks: bool) -> dict[str, Any]:
    """Answer all ten questions in one of the two ways. Returns the seconds, the added bytes and the answers."""
    document, questions = prompts(params, args.tokens)
    capacity = args.tokens + 32 + args.steps + 32
    before, start, answers, states = live_bytes(), time.perf_counter(), [], []
    shared = None
    for question in questions:
        if not forks or shared is None:
            _, shared = jshadow.prefill(
                params, [document], [len(document)], policy, capacity=capacity, fetch=args.fetch
            )
        tokens, state = ask(params, shared.fork() if forks else shared, question, args.steps)
        answers.append(tokens)
        states.append(state)
    jax.block_until_ready(states)
    seconds = time.perf_counter() - start
    after = live_bytes()
    return {"seconds": seconds, "answers": answers, **{name: after[name] - before[name] for name in after}}


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fetch", default="device_put")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    params = jshadow.load(args.model, dtype="float32")
    policy = jshadow.ShadowKV(rank=32, budget=256)
    rows_of_way: dict[str, list[dict[str, Any]]] = {"forks": [], "separate": []}
    for index in range(args.runs + 1):
        for way, rows in rows_of_way.items():
            row = run(params, args, policy, forks=way == "forks")
            if index:  # the first pass compiles
                rows.append(row)
    same = all(row["answers"] == rows_of_way["forks"][0]["answers"] for rows in rows_of_way.values() for row in rows)
    figures = {
        way: {
            "seconds": [row["seconds"] for row in rows],
            "device_bytes": rows[0]["device"],
            "host_bytes": rows[0]["pinned_host"],
        }
        for way, rows in rows_of_way.items()
    }
    if args.json:
        print(json.dumps({"same_answers": same, **figures}))
        return
    print(f"the ten answers are the same both ways: {same}")
    for way, row in figures.items():
        seconds = row["seconds"]
        print(
            f"{way}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), device bytes "
            f"{row['device_bytes']:,}, host bytes {row['host_bytes']:,}"
        )


if __name__ == "__main__":
    main()
