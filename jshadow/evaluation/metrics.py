"""Numbers from logits and scores: the KL divergence, the perplexity, the agreement, means and their standard errors."""

import math
from collections.abc import Sequence

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities over the last axis, in float64."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(full: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(full || other) in nats at each position of logits [..., V]."""
    p, q = log_softmax(full), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    """exp of the mean loss of tokens [T], each scored by the logits [T, V] of the position before it."""
    losses = -np.take_along_axis(log_softmax(logits), np.asarray(tokens)[:, None], axis=-1)
    return float(np.exp(losses.mean()))


def top1(full: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether the likeliest token is the same, at each position of logits [..., V]; ties go to the lower id."""
    return np.argmax(full, axis=-1) == np.argmax(other, axis=-1)


def mean_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; None where a single value leaves it unknown."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def mean_known(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return mean_stderr(known)[0] if known else None
