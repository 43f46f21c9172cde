"""Compare questions on a stored document with joint prefills: `python benchmarks/stored_questions.py MODEL`.

Both ways feed the same token ids. "joint" is one prefill of the document and the question, in which the question
attends to all tokens of the document. "stored" is a prefill of the document alone, which is then extended by the
question. So the question attends to the tokens that the policy selects, and the policy compresses the document without
seeing the question. The answers are greedy. KL, in nats, is the divergence from full attention's next-token
distributions. Full attention's greedy answer is fed to every method, and KL is the mean over its tokens.
"""

import argparse
import collections
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

import jshadow
from jshadow.evaluation.metrics import kl, mean_stderr
from jshadow.evaluation.scorers import score
from jshadow.evaluation.tasks import make
from jshadow.weights.templates import frame

TASKS = ("needle_noise", "needle_docs")
POLICIES = {
    "full": jshadow.Full(),
    "shadowkv": jshadow.ShadowKV(rank=32, budget=256, outlier_chunks=48),
    "packed": dataclasses.replace(jshadow.ShadowKV.packed(), budget=256),
    "snapkv": jshadow.SnapKV(max_capacity_prompt=512),
}
SPARE = 64  # tokens of the capacity beyond the prompt


def starts(params: Any, ids: Sequence[int], cut: int, capacity: int) -> list[tuple[np.ndarray, Any]]:
    """Return (logits of the last token [V], state) of each policy. Only the first `cut` tokens are prefilled."""
    pairs = jshadow.prefill_many(params, [ids[:cut]], [cut], list(POLICIES.values()), capacity=capacity)
    if rest := ids[cut:]:
        padded = np.zeros((1, SPARE), np.int32)
        padded[0, : len(rest)] = rest
        pairs = [jshadow.extend(params, padded, [len(rest)], state) for _, state in pairs]
    return [(np.asarray(logits[0]), state) for logits, state in pairs]


def answer(params: Any, first: np.ndarray, state: Any, count: int) -> list[int]:
    """Return `count` tokens of a greedy answer. The state stays usable."""
    token = int(first.argmax())
    rest, _ = jshadow.decode_steps(params, np.array([token], np.int32), state.fork(), count - 1)
    return [token, *np.asarray(rest)[0].tolist()]


def forced(params: Any, first: np.ndarray, state: Any, tokens: list[int]) -> np.ndarray:
    """Return the logits [n, V] that predict each of the n tokens, of which the earlier ones are fed."""
    logits, _ = jshadow.extend(params, [tokens[:-1]], [len(tokens) - 1], state.fork(), logits="all")
    return np.concatenate([first[None], np.asarray(logits)[0]])


def measure(params: Any, task: str, length: int, depth: float, seed: int) -> dict[str, dict[str, float]]:
    """Ask one question in both ways with each policy. Return the score and the mean KL of each."""
    case = make(task, params.tokenizer, length, depth, seed)
    sample, ids = case.samples[0], list(case.prompt)
    tail = list(frame(params.tokenizer, sample.question, sample.answer_prefix)[1])
    assert ids[-len(tail) :] == tail, "the prompt must end with the question"
    results: dict[str, dict[str, float]] = {}
    reference: np.ndarray | None = None
    tokens: list[int] = []
    for way, cut in (("joint", len(ids)), ("stored", len(ids) - len(tail))):
        for name, (first, state) in zip(POLICIES, starts(params, ids, cut, length + SPARE), strict=True):
            own = answer(params, first, state, sample.max_new_tokens)
            if reference is None:
                tokens, reference = own, forced(params, first, state, own)
            text = params.tokenizer.decode(own)
            results[f"{name}, {way}"] = {
                "score": score(sample.scorer, sample.answers, text),
                "kl": float(kl(reference, forced(params, first, state, tokens)).mean()),
            }
    return results


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="2048,4096", help="tokens of document and question, comma list")
    parser.add_argument("--samples", type=int, default=20, help="documents of each task and length")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    params = jshadow.load(args.model, dtype="float32")
    for length in map(int, args.lengths.split(",")):
        for task in TASKS:
            rows: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
            for index in range(args.samples):
                for name, row in measure(params, task, length, (index + 0.5) / args.samples, index).items():
                    rows[name].append(row)
            for name, results in rows.items():
                mean, error = mean_stderr([row["kl"] for row in results])
                found = sum(row["score"] for row in results)
                figures = {"task": task, "length": length, "way": name, "found": found, "kl": mean, "error": error}
                if args.json:
                    print(json.dumps(figures), flush=True)
                else:
                    spread = f" ({error:.4f})" if error is not None else ""
                    print(f"{task} {length} {name}: {found:g} of {args.samples}, KL {mean:.4f}{spread}", flush=True)


if __name__ == "__main__":
    main()
