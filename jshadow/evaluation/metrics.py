"""Metrics of logits, and means with their standard errors."""

import math
from collections.abc import Sequence

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the natural logarithms of the softmax over the last axis, float64."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(full: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return KL(full || other) in nats at each position of logits [..., V], float64 [...]."""
    p, q = log_softmax(full), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Return exp of the mean loss of tokens [T], in nats. Row t of logits [T, V] is the prediction of token t."""
    losses = -np.take_along_axis(log_softmax(logits), np.asarray(tokens)[:, None], axis=-1)
    return float(np.exp(losses.mean()))


def top1(full: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return whether two arrays of logits [..., V] have the same most likely token, bool [...].

    Of equal logits, the lower token id counts as the most likely one.
    """
    return np.argmax(full, axis=-1) == np.argmax(other, axis=-1)


def mean_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, which is None for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return mean_stderr(known)[0] if known else None
