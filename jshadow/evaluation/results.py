"""From answers to figures: scores, distances, table rows, and the file in which finished samples are kept."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jshadow.errors import ConfigError
from jshadow.policies import Policy, Wrapper
from jshadow.policies.settings import changed_settings

RESULTS = "samples.jsonl"
TELLING = 0.6  # a task tells nothing where its control finds this share of what full attention finds


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
    """exp of the mean loss of tokens [T], each by the logits [T, V] of the place before it."""
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


def tidy(total: float) -> float:
    """A sum of scores as a whole number where it is one."""
    return int(total) if total == int(total) else total


def scores_of(record: Mapping[str, Any]) -> list[float]:
    """Each question's score, 0 to 1; older records have hits alone."""
    return record.get("scores", record["hits"])


def cell(
    records: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]], depths: Sequence[float | None] = ()
) -> dict[str, Any]:
    """One table row's figures from the samples of one policy, and of full attention in the same order.

    Args:
        records: with "score" (percent), "hits" (one a question; empty for agreement), "kl" (nats, or None),
            "attended_tokens" and "hit_rate"; "scores" (0 to 1, one a question) where they are more than hits, "apart"
            where questions are no turns, and "ppl".
        full: the same samples under full attention.
        depths: of the samples, where their facts were planted; None, or none at all: unknown.
    """
    score, stderr = mean_stderr([record["score"] for record in records])
    row: dict[str, Any] = {"score": score, "stderr": stderr, "samples": len(records)}
    row |= {name: mean_known([record[name] for record in records]) for name in ("attended_tokens", "hit_rate")}
    pairs = [
        pair for mine, its in zip(records, full, strict=True)
        for pair in zip(scores_of(mine), scores_of(its), strict=True)
    ]  # fmt: skip
    if not pairs:
        row["kl"], row["kl_stderr"] = mean_stderr([record["kl"] for record in records])
        row |= {"ppl": mean_perplexity(records), "ppl_full": mean_perplexity(full)}
        return row | {"top1": score, "top1_stderr": stderr}
    both, by_full = tidy(sum(min(pair) for pair in pairs)), tidy(sum(its for _, its in pairs))
    row |= {"asked": len(pairs), "found": tidy(sum(mine for mine, _ in pairs)), "found_by_full": by_full}
    row |= {"found_by_both": both, "recall_of_full": 100 * both / by_full if by_full else None}
    row |= {"turns": turn_scores(records)}
    if depths and None not in depths:
        at = sorted({depth for depth in depths if depth is not None})
        found = [[r["score"] for r, own in zip(records, depths, strict=True) if own == depth] for depth in at]
        row |= {"depths": at, "depth_scores": [mean_stderr(some)[0] for some in found]}
    return row


def mean_perplexity(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Of all samples' tokens together, which are equally many each; None where an older record has none."""
    known = [record["ppl"] for record in records if record.get("ppl") is not None]
    return math.exp(mean_stderr([math.log(value) for value in known])[0]) if len(known) == len(records) else None


def turn_scores(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Percent by turn; questions asked apart, or conversations of several lengths, are one turn together."""
    counts = {len(record["hits"]) for record in records}
    if len(counts) > 1 or any(record.get("apart") for record in records):
        return [mean_stderr([record["score"] for record in records])[0]]
    return (np.mean([scores_of(record) for record in records], axis=0) * 100).tolist()


def verdict(by_full: float, by_control: float) -> str:
    """What a negative control says about its task, in words that begin with "ok" where the task tells something."""
    if not by_full:
        return "full attention finds nothing: the task tells nothing"
    share = f"the control finds {by_control:.4g}, full attention {by_full:.4g} ({by_control / by_full:.0%})"
    return f"{share}: the task tells nothing" if by_control >= TELLING * by_full else f"ok: {share}"


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Recall of full over all rows of questions, one entry a policy; controls of all lengths make one together."""
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "found" in row:
            own = ("control", row["control_of"]) if row["control_of"] else (row["policy"], None)
            groups.setdefault(own, []).append(row)
    entries = []
    for (policy, control_of), members in groups.items():
        names = ("asked", "found", "found_by_full", "found_by_both")
        totals = {name: tidy(sum(row[name] for row in members)) for name in names}
        by_full = totals["found_by_full"]
        share = 100 * totals["found_by_both"] / by_full if by_full else None
        entry = {"policy": policy, "control_of": control_of, **totals, "recall_of_full": share}
        if control_of is not None:
            entry["control"] = verdict(by_full, totals["found"])
        entries.append(entry)
    return entries


def label(policy: Policy) -> str:
    """A policy as `--policies` takes it: NAME, then :key=value where a setting is not its default."""
    if isinstance(policy, Wrapper):
        keys = [name for name in policy.settings() if name != "inner"]
        around = [f"{policy.name}.{name}={json.dumps(getattr(policy, name))}" for name in keys]
        return ":".join([label(policy.inner), *around])
    changed = changed_settings(policy)
    return ":".join([policy.name, *(f"{name}={json.dumps(value)}" for name, value in changed.items())])


def figures(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The result table."""
    titles = (
        "task",
        "length",
        "policy",
        "score %",
        "recall of full %",
        "KL",
        "ppl",
        "KV bytes",
        "full / this",
        "repeats %",
    )
    table = Table(*titles)

    def form(value: float | None, spec: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(scale * value, spec)

    for row in rows:
        name = row["policy"] + (" (control)" if row["control_of"] else "") + (" (fitted)" if row["fitted"] else "")
        score = form(row["score"], ".1f") + ("" if row["stderr"] is None else f" ± {row['stderr']:.1f}")
        table.add_row(
            row["task"], f"{row['length']:,}", name, score, form(row.get("recall_of_full"), ".1f"),
            form(row.get("kl"), ".4f"), form(row.get("ppl"), ".3f"), f"{row['offloaded_device_bytes']:,}",
            f"{row['full_bytes'] / row['offloaded_device_bytes']:.2f}", form(row["hit_rate"], ".1f", 100.0),
        )  # fmt: skip
    return table


def infeasible_row(task: str, length: int, name: str, share: float | None, why: str | None) -> dict[str, Any]:
    """The row of a policy that no setting brings down to a share."""
    nothing = ("score", "stderr", "device_bytes", "host_bytes", "full_bytes", "offloaded_device_bytes",
               "served_device_bytes", "served_full_bytes", "served_moved_bytes", "settings")  # fmt: skip
    return {
        "task": task, "length": length, "policy": name, "name": name, "share": share, "infeasible": why,
        "control_of": None, "control": None, "fitted": False, **dict.fromkeys(nothing),
    }  # fmt: skip


def show_shares(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One line a length and policy: its bytes, what each task says. Full attention, then by share, then the sweeps."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        given = row["share"] is None and row["name"] != "full"  # its settings are what the user said, no share's
        name = (row["policy"] if given else row["name"]) + (" (fitted)" if row.get("fitted") else "")
        share = row["share"] or (0.0 if given else 1.0)
        lines.setdefault((row["length"], share, name), {})[row["task"]] = row
    table = Table("length", "share %", "policy", "KV bytes", "of full %", *(f"{task} %" for task in tasks), "KL")
    for (length, share, name), found in sorted(lines.items(), key=lambda item: (item[0][0], -item[0][1])):
        row = next(iter(found.values()))
        front = [f"{length:,}", f"{100 * share:g}" if share else "-", name]
        if row["infeasible"]:
            table.add_row(*front, "-", "at least " + row["infeasible"].rpartition("at least ")[2].partition(" of ")[0])
            continue
        size, scores = row["served_device_bytes"], (found[task] for task in tasks)
        marks = [f"{one['score']:.1f}" + ("" if one["stderr"] is None else f" ± {one['stderr']:.1f}") for one in scores]
        told = [(one["kl"], one["kl_stderr"]) for one in found.values() if one.get("kl") is not None]
        divergence = [f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}") for value, error in told]
        table.add_row(*front, f"{size:,}", f"{100 * size / row['served_full_bytes']:.1f}", *marks, *divergence[:1])
    console.print(table)
    console.print("KV bytes are those on the device, in bfloat16, with what the method offloads on the host.")


def cut_short(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Task, length, contexts cut and samples of what did not fit the model whole."""
    cut = ((r["task"], r["length"], r["truncated"], r["samples"]) for r in rows if r.get("truncated"))
    return list(dict.fromkeys(cut))


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the table, what the controls say, and the recall over all tasks with questions."""
    console.print(figures(rows))
    if rows:
        console.print(f"Ran {rows[0]['fetch']}; KV bytes are those on the device with values offloaded.")
    for prefill in dict.fromkeys(row.get("prefill", "exact") for row in rows):
        if prefill != "exact":
            console.print(f"Prefill of all policies, full attention too: {prefill}.")
    for task, length, said in dict.fromkeys((row["task"], row["length"], row["control"]) for row in rows):
        if said is not None:
            console.print(f"{task} at {length:,}, control: {said}")
    for task, length, cut, samples in cut_short(rows):
        console.print(f"{task} at {length:,}: {cut} of {samples} contexts were cut in the middle to fit the model")
    for entry in pooled(rows):
        both, by_full = entry["found_by_both"], entry["found_by_full"]
        told = f"finds {both:.6g} of the {by_full:.6g} that full attention finds"
        console.print(f"all questions, {entry['policy']}: {told}")
        if entry["control_of"]:
            console.print(f"all questions, control of {entry['control_of']}: {entry['control']}")


class Store:
    """Finished samples by key, kept in a JSONL file so that a run that was killed goes on where it stopped.

    A key covers the model's weights, the prompt's token ids, capacity, fetch mode and the policy's settings. A damaged
    line costs only its own sample.

    Attributes:
        damaged: lines that were not read.
    """

    FIELDS = frozenset({"key", "score", "hits", "kl", "outputs", "attended_tokens", "hit_rate"})

    def __init__(self, out: str | os.PathLike[str] | None) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.path: Path | None = None
        self.damaged = 0
        if out is None:
            return
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            self.path = Path(out) / RESULTS
            data = self.path.read_bytes() if self.path.exists() else b""
            if data and not data.endswith(b"\n"):
                self._write(b"\n")
        except OSError as error:
            raise ConfigError(f"out must be a directory that can be written, got {str(out)!r}: {error}") from error
        for line in filter(bytes.strip, data.split(b"\n")):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and record.keys() >= self.FIELDS:
                self.records[record["key"]] = record
            else:
                self.damaged += 1

    def add(self, key: str, record: Mapping[str, Any], context: Mapping[str, Any]) -> None:
        """Keep one sample's record, on disk before this returns."""
        self.records[key] = {"key": key, **context, **record}
        if self.path is not None:
            self._write(json.dumps(self.records[key]).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """Append in one write, so that a line is whole or the last."""
        assert self.path is not None
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
