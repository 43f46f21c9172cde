"""What sparse prefill attends to, in NumPy: dense masks of whole prompts, written from the paper (arXiv 2407.02490)."""

import numpy as np


def softmax(scores):
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def causal(n):
    return np.tril(np.ones((n, n), bool))


def largest(values, count):
    """A mask of the `count` largest; ties go to the lower index."""
    mask = np.zeros(len(values), bool)
    mask[np.argsort(-values, kind="stable")[:count]] = True
    return mask


def line_sums(q, k, scale, last):
    """Column and diagonal sums of the last queries of one head: q, k [n, d]."""
    n = len(q)
    columns, diagonals = np.zeros(n), np.zeros(n)
    for i in range(max(0, n - last), n):
        p = softmax(q[i] @ k[: i + 1].T * scale)
        columns[: i + 1] += p
        diagonals[: i + 1] += p[::-1]
    return columns, diagonals


def union(columns, diagonals):
    n = len(columns)
    distance = np.arange(n)[:, None] - np.arange(n)
    return causal(n) & (columns[None] | diagonals[np.abs(distance)])


def vertical_slash(q, k, scale, vertical, slash, last=64, first=30, local=100):
    columns, diagonals = line_sums(q, k, scale, last)
    columns[:first] = np.inf
    diagonals[:local] = np.inf
    return union(largest(columns, vertical), largest(diagonals, slash))


def a_shape(n, initial, local):
    index = np.arange(n)
    return union(index < initial, index < local)


def attend(q, k, v, mask, scale):
    return softmax(np.where(mask, q @ k.T * scale, -np.inf)) @ v
