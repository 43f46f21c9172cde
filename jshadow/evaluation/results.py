"""From the samples of a task to result rows and printed tables."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jshadow.evaluation.metrics import mean_known, mean_stderr
from jshadow.policies import Policy, Wrapper
from jshadow.policies.settings import changed_settings, policy_settings

TELLING = 0.6  # a task cannot tell policies apart if its control finds this share of what full attention finds


def tidy(total: float) -> float:
    """A sum of scores as a whole number where it is one."""
    return int(total) if total == int(total) else total


def scores_of(record: Mapping[str, Any]) -> list[float]:
    """The score of each question, 0 to 1. A record without scores has hits only."""
    return record.get("scores", record["hits"])


def score_row(
    records: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]], depths: Sequence[float | None] = ()
) -> dict[str, Any]:
    """The figures of one result row, from the samples of one policy on one task.

    Args:
        records: with "score" (percent), "hits" (one a question; empty for agreement), "kl" (nats, or None),
            "attended_tokens" and "hit_rate"; "scores" (0 to 1, one a question) where a score may lie between 0 and 1,
            "apart" where the questions are no turns, and "ppl".
        full: the same samples under full attention, in the same order.
        depths: where the fact of each sample was planted, 0 to 1. A None, or an empty sequence: unknown.
    """
    score, stderr = mean_stderr([record["score"] for record in records])
    row: dict[str, Any] = {"score": score, "stderr": stderr, "samples": len(records)}
    row |= {name: mean_known([record[name] for record in records]) for name in ("attended_tokens", "hit_rate")}
    pairs = [
        pair
        for record, full_record in zip(records, full, strict=True)
        for pair in zip(scores_of(record), scores_of(full_record), strict=True)
    ]
    if not pairs:
        row["kl"], row["kl_stderr"] = mean_stderr([record["kl"] for record in records])
        row |= {"ppl": mean_perplexity(records), "ppl_full": mean_perplexity(full)}
        return row | {"top1": score, "top1_stderr": stderr}
    both, by_full = tidy(sum(min(pair) for pair in pairs)), tidy(sum(of_full for _, of_full in pairs))
    row |= {"asked": len(pairs), "found": tidy(sum(score for score, _ in pairs)), "found_by_full": by_full}
    row |= {"found_by_both": both, "recall_of_full": 100 * both / by_full if by_full else None}
    row |= {"turns": turn_scores(records)}
    known = [depth for depth in depths if depth is not None]
    if known and len(known) == len(depths):
        by_depth: dict[float, list[float]] = {}
        for depth, record in sorted(zip(known, records, strict=True), key=lambda pair: pair[0]):
            by_depth.setdefault(depth, []).append(record["score"])
        row |= {"depths": list(by_depth), "depth_scores": [mean_stderr(scores)[0] for scores in by_depth.values()]}
    return row


def mean_perplexity(records: Sequence[Mapping[str, Any]]) -> float | None:
    """The perplexity over the tokens of all samples, of which each has equally many; None where a record lacks it."""
    known = [record["ppl"] for record in records if record.get("ppl") is not None]
    return math.exp(mean_stderr([math.log(value) for value in known])[0]) if len(known) == len(records) else None


def turn_scores(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Percent by turn; questions asked apart, or conversations of several lengths, are one turn together."""
    counts = {len(record["hits"]) for record in records}
    if len(counts) > 1 or any(record.get("apart") for record in records):
        return [mean_stderr([record["score"] for record in records])[0]]
    return (np.mean([scores_of(record) for record in records], axis=0) * 100).tolist()


def verdict(by_full: float, by_control: float) -> str:
    """What a negative control says about its task. The text begins with "ok" where the task can tell policies apart."""
    if not by_full:
        return "full attention finds nothing: the task tells nothing"
    share = f"the control finds {by_control:.4g}, full attention {by_full:.4g} ({by_control / by_full:.0%})"
    return f"{share}: the task tells nothing" if by_control >= TELLING * by_full else f"ok: {share}"


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Recall of full attention over all rows of questions, one entry a policy. All controls share one entry."""
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "found" in row:
            group = ("control", row["control_of"]) if row["control_of"] else (row["policy"], None)
            groups.setdefault(group, []).append(row)
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
        keys = [name for name in policy_settings(policy) if name != "inner"]
        around = [f"{policy.name}.{name}={json.dumps(getattr(policy, name))}" for name in keys]
        return ":".join([label(policy.inner), *around])
    changed = changed_settings(policy)
    return ":".join([policy.name, *(f"{name}={json.dumps(value)}" for name, value in changed.items())])


def results_table(rows: Sequence[Mapping[str, Any]]) -> Table:
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
            row["task"],
            f"{row['length']:,}",
            name,
            score,
            form(row.get("recall_of_full"), ".1f"),
            form(row.get("kl"), ".4f"),
            form(row.get("ppl"), ".3f"),
            f"{row['offloaded_device_bytes']:,}",
            f"{row['full_bytes'] / row['offloaded_device_bytes']:.2f}",
            form(row["hit_rate"], ".1f", 100.0),
        )
    return table


def infeasible_row(task: str, length: int, name: str, share: float | None, why: str | None) -> dict[str, Any]:
    """The row of a policy that no setting brings down to a share."""
    nothing = (
        "score",
        "stderr",
        "device_bytes",
        "host_bytes",
        "full_bytes",
        "offloaded_device_bytes",
        "served_device_bytes",
        "served_full_bytes",
        "served_moved_bytes",
        "settings",
    )
    return {
        "task": task,
        "length": length,
        "policy": name,
        "name": name,
        "share": share,
        "infeasible": why,
        "control_of": None,
        "control": None,
        "fitted": False,
        **dict.fromkeys(nothing),
    }


def show_shares(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One line a length and policy: its bytes, what each task says. Full attention, then by share, then the sweeps."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        as_asked = (
            row["share"] is None and row["name"] != "full"
        )  # with the settings that the user gave, not at a share
        name = (row["policy"] if as_asked else row["name"]) + (" (fitted)" if row.get("fitted") else "")
        share = row["share"] or (0.0 if as_asked else 1.0)
        lines.setdefault((row["length"], share, name), {})[row["task"]] = row
    table = Table("length", "share %", "policy", "KV bytes", "of full %", *(f"{task} %" for task in tasks), "KL")
    for (length, share, name), by_task in sorted(lines.items(), key=lambda item: (item[0][0], -item[0][1])):
        row = next(iter(by_task.values()))
        front = [f"{length:,}", f"{100 * share:g}" if share else "-", name]
        if row["infeasible"]:
            table.add_row(*front, "-", "at least " + row["infeasible"].rpartition("at least ")[2].partition(" of ")[0])
            continue
        size, scores = row["served_device_bytes"], (by_task[task] for task in tasks)
        marks = [f"{one['score']:.1f}" + ("" if one["stderr"] is None else f" ± {one['stderr']:.1f}") for one in scores]
        distances = [(one["kl"], one["kl_stderr"]) for one in by_task.values() if one.get("kl") is not None]
        divergence = [f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}") for value, error in distances]
        table.add_row(*front, f"{size:,}", f"{100 * size / row['served_full_bytes']:.1f}", *marks, *divergence[:1])
    console.print(table)
    console.print("KV bytes are those on the device, in bfloat16, with what the method offloads on the host.")


def cut_short(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Task, length, contexts cut and samples of what did not fit the model whole."""
    cut = ((r["task"], r["length"], r["truncated"], r["samples"]) for r in rows if r.get("truncated"))
    return list(dict.fromkeys(cut))


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the table, what the controls say, and the recall over all tasks with questions."""
    console.print(results_table(rows))
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
        recall = f"finds {both:.6g} of the {by_full:.6g} that full attention finds"
        console.print(f"all questions, {entry['policy']}: {recall}")
        if entry["control_of"]:
            console.print(f"all questions, control of {entry['control_of']}: {entry['control']}")
