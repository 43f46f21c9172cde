"""Compare the summaries that select pages: `python benchmarks/landmarks_published.py MODEL`.

A summary of a page of keys gives every query an estimate of the attention to the page. The pages with the highest
estimates are selected. The summaries are those of ShadowKV, those of `packed()` in one level, the bounds of Quest
(arXiv 2406.10774), and those of LOCKS (arXiv 2607.24555): the mean of a page in 8 bits, some principal directions of
its keys in 4 bits, and the coefficients of each key in 8 bits.

The last queries of a text select pages until the budget is used. In all rows they also attend to 8 outlier chunks of 8
tokens, by ShadowKV's rule. The figures of a row are the attention that is left out, and the squared error of the
attention output relative to its squared norm: means over layers, heads and queries, with the standard error over texts.
Keys and values are exact, so the only error is that of the selection.
"""

import functools
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from estimation_zone import CHUNK, QUERIES, SOURCES, arguments, causal_logits, layers_of, split_heads

import jshadow
from jshadow.evaluation import metrics

PAGE = 16  # tokens in the largest page
OUTLIERS = 8  # number of chunks

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Summary(NamedTuple):
    """A kind of summary.

    Attributes:
        name: name of the row.
        page: tokens in a page.
        size: bytes of a page with keys of d numbers, called as size(d).
        scores: maps scaled queries [QUERIES, g, d] and pages [n, page, d] to logarithms of masses [QUERIES, g, n].
        bound: whether pages are ranked by the largest number of any query head. Otherwise by the largest softmax.
    """

    name: str
    page: int
    size: Callable[[int], float]
    scores: Scores
    bound: bool = False


def main() -> None:
    """Run the benchmark and print a table."""
    args = arguments(__doc__)
    params, budgets = jshadow.load(args.model, dtype="float32"), [int(part) for part in args.budgets.split(",")]
    dim = params.config.head_dim
    print("| text | budget | summary | bytes of a key | attention left out | squared error |\n" + "| --- " * 6 + "|")
    for source in args.texts.split(","):
        found: dict[tuple[int, Summary], list[np.ndarray]] = {}
        for sample in range(args.samples):
            text = list(itertools.islice(SOURCES[source](params.tokenizer, random.Random(sample)), args.tokens))
            heads = [head for layer in layers_of(params, text) for head in split_heads(*layer)]
            for budget, summary in itertools.product(budgets, SUMMARIES):
                lost = np.mean([losses(*head, summary, budget) for head in heads], axis=0)
                found.setdefault((budget, summary), []).append(lost)
        for (budget, summary), values in found.items():
            cells = [metrics.mean_stderr(list(column)) for column in np.array(values).T]
            size = f"{summary.size(dim) / summary.page:.1f}"
            figures = " | ".join(f"{mean:.4f} ({stderr or 0:.4f})" for mean, stderr in cells)
            print(f"| {source} | {budget} | {summary.name} | {size} | {figures} |", flush=True)


def losses(q: np.ndarray, k: np.ndarray, v: np.ndarray, summary: Summary, budget: int) -> tuple[float, float]:
    """Return the attention that is left out, and the relative squared error, for one KV head."""
    page, split = summary.page, (len(k) - QUERIES) // PAGE * PAGE
    logits, causal = causal_logits(q, k, split)
    weights, outlier = softmax(logits), outlier_tokens(k[:split])
    scores = summary.scores(q, k[:split].reshape(-1, page, k.shape[1]))
    ranked = np.where(outlier.reshape(-1, page).all(axis=1), -np.inf, scores)
    ranked = (ranked if summary.bound else softmax(ranked)).max(axis=1)
    chosen = np.zeros(ranked.shape, bool)
    np.put_along_axis(chosen, np.argsort(-ranked, axis=1)[:, : budget // page], True, axis=1)
    near = np.concatenate([np.repeat(chosen, page, axis=1) | outlier, causal], axis=1)[:, None] * weights
    mass, want = near.sum(axis=2, keepdims=True), weights @ v
    error = ((near @ v / mass - want) ** 2).sum(axis=(1, 2)) / (want**2).sum(axis=(1, 2))
    return float(1 - mass.mean()), float(error.mean())


def outlier_tokens(k: np.ndarray) -> np.ndarray:
    """Mark the tokens of the chunks whose keys k [S, d] have the least cosines with their mean."""
    chunks = k.reshape(-1, CHUNK, k.shape[1])
    means = chunks.mean(axis=1, keepdims=True)
    cosines = (chunks * means).sum(axis=2) / np.linalg.norm(chunks, axis=2) / np.linalg.norm(means, axis=2)
    outlier = np.zeros(len(chunks), bool)
    outlier[np.argsort(cosines.min(axis=1))[:OUTLIERS]] = True
    return np.repeat(outlier, CHUNK)


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def log_sum(x: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exponentials over the last axis."""
    top = x.max(axis=-1, keepdims=True)
    return (top + np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))[..., 0]


def rounded(x: np.ndarray, most: int, axis: int = -1) -> np.ndarray:
    """Round numbers to integers from -most to most times a scale. The numbers along `axis` share a scale."""
    scale = np.maximum(np.abs(x).max(axis=axis, keepdims=True), 1e-8) / most
    return np.round(x / scale) * scale


# Summaries: each maps queries [QUERIES, g, d] and pages [n, page, d] to [QUERIES, g, n]


def by_means(q: np.ndarray, pages: np.ndarray, parts: int, most: int | None, variance: bool) -> np.ndarray:
    """Score by the means of equal parts of a page, in floating point or in integers up to `most`.

    With `variance`, the keys of a part are taken to be normally distributed, with one variance for all columns.
    """
    count, page, dim = pages.shape
    split = pages.reshape(count, parts, page // parts, dim)
    means = split.mean(axis=2)
    logits = np.einsum("tgd,npd->tgnp", q, means if most is None else rounded(means, most))
    if variance:
        spread = ((split - means[:, :, None]) ** 2).mean(axis=(2, 3))
        logits = logits + (q**2).sum(axis=-1)[..., None, None] * spread / 2
    return log_sum(logits)


def by_bounds(q: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Score by Quest's bound: the sum over columns of the larger product with the minimum or the maximum."""
    least, most = pages.min(axis=1), pages.max(axis=1)
    return np.maximum(q, 0) @ most.T + np.minimum(q, 0) @ least.T


def by_directions(q: np.ndarray, pages: np.ndarray, rank: int) -> np.ndarray:
    """Score as LOCKS does, by keys that are rebuilt from the mean and the `rank` first principal directions."""
    mean = pages.mean(axis=1, keepdims=True)
    left, sizes, right = np.linalg.svd(pages - mean, full_matrices=False)
    coefficients, directions = rounded(left[..., :rank] * sizes[:, None, :rank], 127), rounded(right[:, :rank], 7)
    logits = np.einsum("tgd,npd->tgnp", q, rounded(mean, 127) + coefficients @ directions)
    return log_sum(logits)


def by_keys(q: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Score by the keys themselves: by the attention that a page really has."""
    return log_sum(np.einsum("tgd,npd->tgnp", q, pages))


def direction_bytes(page: int, rank: int, dim: int) -> float:
    """Return the bytes of LOCKS' summary of a page. Each direction, each key and the mean have a scale of 2 bytes."""
    return rank * (dim / 2 + 2) + page * (rank + 2) + dim + 2


def directions(page: int, rank: int) -> Summary:
    """Return LOCKS' summary of pages with `rank` directions."""
    scores = functools.partial(by_directions, rank=rank)
    return Summary(
        f"LOCKS, {rank} direction{'s' * (rank > 1)}, pages of {page}",
        page,
        functools.partial(direction_bytes, page, rank),
        scores,
    )


SUMMARIES = (
    Summary(
        "mean of 8, 16 bits (ShadowKV)",
        8,
        lambda d: 2 * d,
        functools.partial(by_means, parts=1, most=None, variance=False),
    ),
    Summary(
        "means of 2, 4 bits, variance, one level",
        8,
        lambda d: 4 * (d / 2 + 4),
        functools.partial(by_means, parts=4, most=7, variance=True),
    ),
    Summary("bounds, pages of 16 (Quest)", 16, lambda d: 4 * d, by_bounds, bound=True),
    Summary("bounds, pages of 8 (Quest)", 8, lambda d: 4 * d, by_bounds, bound=True),
    directions(16, 2),
    directions(16, 4),
    directions(16, 8),
    directions(8, 1),
    directions(8, 2),
    Summary("all keys, pages of 16", 16, lambda d: 16 * 2 * d, by_keys),
    Summary("all keys, pages of 8", 8, lambda d: 8 * 2 * d, by_keys),
)


if __name__ == "__main__":
    main()
