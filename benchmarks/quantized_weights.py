"""Compare quantized projections with bfloat16: `python benchmarks/quantized_weights.py MODEL [--json]`.

The logits of a text (Python's documentation) are computed with full attention. Float32 is the reference. Bfloat16, and
each kind of quantized weights with float32 and bfloat16 activations, are compared with it by the error of the logits,
top-1 agreement, KL divergence and perplexity. With --perplexity, only the perplexities with float32 activations are
computed, which takes less memory. For needle tasks, run
`jshadow eval MODEL --tasks needle_noise,needle_docs [--quantize int8]`.
"""

import argparse
import json
from pydoc_data import topics

import jax
import numpy as np

import jshadow
from jshadow.ops.projections import KINDS

TOPICS = (
    "assert",
    "binary",
    "calls",
    "class",
    "comparisons",
    "compound",
    "context-managers",
    "customization",
    "exceptions",
)


def logits_of(model: str, ids: np.ndarray, dtype: str, quantize: str | None) -> tuple[np.ndarray, int]:
    """Return the float32 logits [T, V] of all tokens, and the bytes of all weights."""
    params = jshadow.load(model, dtype, quantize=quantize)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    logits, _ = jshadow.prefill(
        params, ids[None], np.array([len(ids)]), jshadow.Full(), capacity=len(ids), logits="all"
    )
    return np.asarray(logits[0]), size


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities over the last axis."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def compared(name: str, got: np.ndarray, truth: np.ndarray, ids: np.ndarray) -> dict[str, float | str]:
    """Compare logits `got` with the reference `truth`, both [T, V], and return one row."""
    error, log_probs, true_log_probs = got - truth, log_softmax(got), log_softmax(truth)
    return {
        "what": name,
        "rms_error": float(np.sqrt((error**2).mean())),
        "largest_error": float(np.abs(error).max()),
        "deviation_of_logits": float(truth.std()),
        "top1_agreement": float((got.argmax(-1) == truth.argmax(-1)).mean()),
        "kl": float((np.exp(true_log_probs) * (true_log_probs - log_probs)).sum(-1).mean()),
        "perplexity": perplexity_of(got, ids),
    }


def perplexity_of(logits: np.ndarray, ids: np.ndarray, block: int = 256) -> float:
    """Return the perplexity of all tokens but the first, from the logits [T, V]. They are made wide in blocks."""
    total = 0.0
    for first in range(0, len(ids) - 1, block):
        targets = ids[first + 1 : first + block + 1]
        total -= log_softmax(logits[first : first + len(targets)])[np.arange(len(targets)), targets].sum()
    return float(np.exp(total / (len(ids) - 1)))


def perplexities(model: str, ids: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the perplexity with float32 activations for each kind of weights, and its ratio to that of plain ones."""
    found: dict[str, dict[str, float]] = {}
    for kind in (None, *KINDS):
        logits, size = logits_of(model, ids, "float32", kind)
        value = perplexity_of(logits, ids)
        first = next(iter(found.values()))["perplexity"] if found else value
        found[kind or "float32"] = {"perplexity": value, "ratio": value / first, "bytes": size}
    return found


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--perplexity", action="store_true", help="only perplexities, with float32 activations")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokenizer = jshadow.load(args.model).tokenizer
    text = "".join(topics.topics[name] for name in TOPICS)
    ids = np.asarray(tokenizer.encode(text)[: args.tokens])
    assert len(ids) == args.tokens, f"the text has {len(ids)} tokens only"
    if args.perplexity:
        told = perplexities(args.model, ids)
        print(json.dumps({"tokens": len(ids), "results": told}) if args.json else told)
        return
    truth, whole = logits_of(args.model, ids, "float32", None)
    half, halved = logits_of(args.model, ids, "bfloat16", None)
    rows = [compared("float32", truth, truth, ids), compared("bfloat16 to float32", half, truth, ids)]
    sizes = {"float32": whole, "bfloat16": halved}
    for kind in KINDS:
        wide, _ = logits_of(args.model, ids, "float32", kind)
        rows.append(compared(f"{kind}, float32 activations, to float32", wide, truth, ids))
        short, sizes[kind] = logits_of(args.model, ids, "bfloat16", kind)
        rows.append(compared(f"{kind}, bfloat16 activations, to float32", short, truth, ids))
        rows.append(compared(f"{kind} to bfloat16", short, half, ids))
    if args.json:
        print(json.dumps({"tokens": len(ids), "bytes": sizes, "results": rows}))
        return
    print(f"{len(ids)} tokens; bytes of all weights: {sizes}")
    print("| what | RMS error | largest | top-1 | KL | perplexity |\n|---|---|---|---|---|---|")
    columns = {"rms_error": ".4f", "largest_error": ".3f", "top1_agreement": ".4f", "kl": ".6f", "perplexity": ".3f"}
    for row in rows:
        print(" | ".join([f"| {row['what']}", *(format(row[key], form) for key, form in columns.items())]) + " |")
    print(f"deviation of the logits: {rows[0]['deviation_of_logits']:.3f}")


if __name__ == "__main__":
    main()
