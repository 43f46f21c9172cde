"""Measure attention to chunks that are not selected, through their means: `python benchmarks/estimation_zone.py MODEL`.

RetroInfer (arXiv 2505.02922) calls this the estimation zone: the tokens that are not selected attend as one token for
each cluster, with its mean key and mean value. Here the clusters are ShadowKV's chunks. The last queries of a text
select the best chunks by landmarks of two tokens. The figure of a row is the squared error of the attention output,
relative to its squared norm: the mean over layers, heads and queries, with the standard error over texts. Keys and
values are exact, so the only error is that of the selection.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import jshadow
from jshadow.cache.prompt_walk import walk_layers
from jshadow.evaluation import metrics
from jshadow.evaluation.tasks import documentation
from jshadow.evaluation.tasks.agreement_texts import essay_tokens
from jshadow.models.transformer import Heads
from jshadow.ops.attention import causal_attention

CHUNK, PART = 8, 2  # tokens in a chunk, and in a landmark
QUERIES = 32  # number of queries at the end of the text; they are also the window
SOURCES = {"documentation": documentation, "essays": essay_tokens}


def main() -> None:
    """Run the benchmark and print a table."""
    args = arguments(__doc__)
    params = jshadow.load(args.model, dtype="float32")
    print("| text | budget | attention to the rest | squared error |\n| --- | --- | --- | --- |")
    for source, budget in itertools.product(args.texts.split(","), map(int, args.budgets.split(","))):
        lost: dict[str, list[float]] = {}
        for sample in range(args.samples):
            text = list(itertools.islice(SOURCES[source](params.tokenizer, random.Random(sample)), args.tokens))
            heads = [errors(*head, budget) for layer in layers_of(params, text) for head in split_heads(*layer)]
            for name in heads[0]:
                lost.setdefault(name, []).append(float(np.mean([one[name] for one in heads])))
        for name, values in lost.items():
            mean, stderr = metrics.mean_stderr(values)
            print(f"| {source} | {budget} | {name} | {mean:.4f} ({stderr or 0:.4f}) |", flush=True)


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line: the model, the texts, and how many tokens are selected."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--budgets", default="256,512", help="numbers of selected tokens, comma list")
    parser.add_argument("--texts", default="documentation", help="documentation, essays (extra `ruler`), comma list")
    return parser.parse_args()


def layers_of(params: Any, text: list[int]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the last scaled queries [QUERIES, h_q, d], and keys after RoPE and values [S, h_kv, d], of each layer."""

    def keep(heads: Heads, turn: Any, kind: Any) -> tuple[Any, tuple[Any, ...]]:
        q, k, scale = turn.queries(heads.q_pre), turn.keys(heads.k_pre), params.config.attention_scale
        out, _ = causal_attention(q, k, heads.v, scale, 0, kind.window, heads.sinks)
        return out, (q[:, -QUERIES:] * scale, k, heads.v)

    for tensors in walk_layers(params, jnp.asarray(text)[None], keep, None):
        yield tuple(np.asarray(part[0], np.float64) for part in tensors)


def split_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield queries [QUERIES, g, d], keys and values [S, d] of each KV head."""
    for head, queries in enumerate(np.split(q, k.shape[1], axis=1)):
        yield queries, k[:, head], v[:, head]


def causal_logits(q: np.ndarray, k: np.ndarray, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits [QUERIES, g, S], and which tokens from `split` on a query sees, bool [QUERIES, S - split]."""
    causal = np.arange(split, len(k)) <= len(k) - QUERIES + np.arange(QUERIES)[:, None]
    logits = q @ k.T
    logits[:, :, split:][~np.broadcast_to(causal[:, None], logits[:, :, split:].shape)] = -np.inf
    return logits, causal


def errors(q: np.ndarray, k: np.ndarray, v: np.ndarray, budget: int) -> dict[str, float]:
    """Return the relative squared error of each kind of attention to the rest, for one KV head. It has n chunks."""
    n, dim = (len(k) - QUERIES) // CHUNK, k.shape[1]
    split = n * CHUNK
    logits, causal = causal_logits(q, k, split)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    want = weights @ v / weights.sum(axis=2, keepdims=True)
    by_part = q @ k[:split].reshape(-1, PART, dim).mean(axis=1).T - logits.max(axis=2, keepdims=True)
    part_mass = PART * np.exp(by_part)  # [QUERIES, g, parts]
    mass = part_mass.reshape(*part_mass.shape[:2], n, -1).sum(axis=3)
    scores = (mass / mass.sum(axis=2, keepdims=True)).max(axis=1)  # [QUERIES, n]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=1)[:, : budget // CHUNK], True, axis=1)
    near = np.concatenate([np.repeat(chosen, CHUNK, axis=1), causal], axis=1)[:, None] * weights
    sums, total = near @ v, near.sum(axis=2, keepdims=True)

    def rest(masses: np.ndarray, each: int, values: np.ndarray) -> float:
        """Add clusters with these masses [QUERIES, g, m] and values [m, d], `each` of them for a chunk."""
        far = masses * ~np.repeat(chosen, each, axis=1)[:, None]
        got = (sums + far @ values) / (total + far.sum(axis=2, keepdims=True))
        return float((((got - want) ** 2).sum(axis=(1, 2)) / (want**2).sum(axis=(1, 2))).mean())

    chunks, parts = (v[:split].reshape(-1, size, dim).mean(axis=1) for size in (CHUNK, PART))
    by_chunk = CHUNK * np.exp(q @ k[:split].reshape(n, CHUNK, dim).mean(axis=1).T - logits.max(axis=2, keepdims=True))
    true = weights[:, :, :split].reshape(*mass.shape, CHUNK).sum(axis=3)
    return {
        "none": rest(mass * 0, 1, chunks),
        "mean key and mean value of a chunk": rest(by_chunk, 1, chunks),
        "mean keys of two tokens, mean value of a chunk": rest(mass, 1, chunks),
        "mean keys of two tokens, mean value of the prompt": rest(mass, 1, np.repeat(chunks.mean(0)[None], n, axis=0)),
        "mean keys and mean values of two tokens": rest(part_mass, CHUNK // PART, parts),
        "true mass, mean value of a chunk": rest(true, 1, chunks),
    }


if __name__ == "__main__":
    main()
