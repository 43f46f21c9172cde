"""Scores of answers, distances between predictions, and the table rows made of them."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TELLING = 0.6  # a task tells nothing where its control finds this share of what full attention finds


def found(answer: str, output: str) -> bool:
    """Whether the number `answer` stands in the output, and not as a part of a longer number."""
    return bool(answer) and re.search(rf"(?<!\d){re.escape(answer)}(?!\d)", output) is not None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities over the last axis, in float64."""
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(full: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(full || other) in nats at each position of logits [..., V]."""
    p, q = log_softmax(full), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


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


def cell(records: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One table row's figures from the samples of one policy, and of full attention in the same order.

    Args:
        records: with "score" (percent), "hits" (one a question; empty for agreement), "kl" (nats, or None),
            "attended_tokens" and "hit_rate".
        full: the same samples under full attention.
    """
    score, stderr = mean_stderr([record["score"] for record in records])
    row: dict[str, Any] = {"score": score, "stderr": stderr, "samples": len(records)}
    row |= {name: mean_known([record[name] for record in records]) for name in ("attended_tokens", "hit_rate")}
    pairs = [pair for mine, its in zip(records, full, strict=True) for pair in zip(mine["hits"], its["hits"], strict=True)]
    if not pairs:
        row["kl"], row["kl_stderr"] = mean_stderr([record["kl"] for record in records])
        return row | {"top1": score, "top1_stderr": stderr}
    both, by_full = sum(mine and its for mine, its in pairs), sum(its for _, its in pairs)
    turns = np.mean([record["hits"] for record in records], axis=0) * 100
    row |= {"asked": len(pairs), "found": sum(mine for mine, _ in pairs), "found_by_full": by_full}
    row |= {"found_by_both": both, "recall_of_full": 100 * both / by_full if by_full else None}
    return row | {"turns": turns.tolist()}


def verdict(by_full: int, by_control: int) -> str:
    """What a negative control says about its task, in words that begin with "ok" where the task tells something."""
    if not by_full:
        return "full attention finds nothing: the task tells nothing"
    share = f"the control finds {by_control} of the {by_full} that full attention finds ({by_control / by_full:.0%})"
    return f"{share}: the task tells nothing" if by_control >= TELLING * by_full else f"ok: {share}"


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Recall of full over all needle rows, one entry a policy; the controls of all lengths make one entry together."""
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "found" in row:
            own = ("control", row["control_of"]) if row["control_of"] else (row["policy"], None)
            groups.setdefault(own, []).append(row)
    entries = []
    for (policy, control_of), members in groups.items():
        totals = {name: sum(row[name] for row in members) for name in ("asked", "found", "found_by_full", "found_by_both")}
        by_full = totals["found_by_full"]
        share = 100 * totals["found_by_both"] / by_full if by_full else None
        entry = {"policy": policy, "control_of": control_of, **totals, "recall_of_full": share}
        if control_of is not None:
            entry["control"] = verdict(by_full, totals["found_by_both"])
        entries.append(entry)
    return entries
