"""Turning the samples of a task into result rows, printed tables and a file."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jshadow.evaluation.data import whole_file
from jshadow.evaluation.metrics import mean_known, mean_stderr
from jshadow.evaluation.plan import SERVED, Entry, Setup, TaskPlan, label
from jshadow.evaluation.tasks.needles import PHASE_TASKS, PHASES
from jshadow.planner.machine import footprint, step_footprint
from jshadow.policies import Policy
from jshadow.policies.capabilities import attention_of
from jshadow.policies.settings import policy_settings

RESULTS_FILE = "results.json"
_SETTING = re.compile(r":(?=[\w.]+=)")  # what stands before each setting in the label of a policy
_TELLING = 0.6  # a task cannot tell policies apart if its control finds this share of the answers of full attention


def _tidy(total: float) -> float:
    """Return a whole number as an int."""
    return int(total) if total == int(total) else total


def _scores_of(record: Mapping[str, Any]) -> list[float]:
    """Return the score of each question, from 0 to 1. A record without "scores" has only hits."""
    return record.get("scores", record["hits"])


def score_row(
    records: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]], depths: Sequence[float | None] = ()
) -> dict[str, Any]:
    """Compute the numbers of one result row from the samples of one policy on one task.

    Args:
        records: the records of all samples. Each has "score" (percent), "hits" (one for each question; empty for
            agreement tasks), "kl" (nats, or None), "attended_tokens" and "hit_rate". It has "scores" (from 0 to 1, one
            for each question) if a score is neither 0 nor 1, "apart" if its questions are independent, and "ppl" for
            agreement tasks.
        full: the records of the same samples under full attention, in the same order.
        depths: place of the fact of each sample, from 0 to 1. If any is None, or there are none, the row has no depths.
    """
    score, stderr = mean_stderr([record["score"] for record in records])
    row: dict[str, Any] = {"score": score, "stderr": stderr, "samples": len(records)}
    row |= {name: mean_known([record[name] for record in records]) for name in ("attended_tokens", "hit_rate")}
    pairs = [
        pair
        for record, full_record in zip(records, full, strict=True)
        for pair in zip(_scores_of(record), _scores_of(full_record), strict=True)
    ]
    if not pairs:
        row["kl"], row["kl_stderr"] = mean_stderr([record["kl"] for record in records])
        row |= {"ppl": _mean_perplexity(records), "ppl_full": _mean_perplexity(full)}
        return row | {"top1": score, "top1_stderr": stderr}
    both, by_full = _tidy(sum(min(pair) for pair in pairs)), _tidy(sum(of_full for _, of_full in pairs))
    row |= {"asked": len(pairs), "found": _tidy(sum(score for score, _ in pairs)), "found_by_full": by_full}
    row |= {"found_by_both": both, "recall_of_full": 100 * both / by_full if by_full else None}
    row |= {"turns": _turn_scores(records)}
    known = [depth for depth in depths if depth is not None]
    if known and len(known) == len(depths):
        by_depth: dict[float, list[float]] = {}
        for depth, record in sorted(zip(known, records, strict=True), key=lambda pair: pair[0]):
            by_depth.setdefault(depth, []).append(record["score"])
        row |= {"depths": list(by_depth), "depth_scores": [mean_stderr(scores)[0] for scores in by_depth.values()]}
    return row


def _mean_perplexity(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the perplexity over the tokens of all samples, or None if a record lacks it."""
    known = [record["ppl"] for record in records if record.get("ppl") is not None]
    return math.exp(mean_stderr([math.log(value) for value in known])[0]) if len(known) == len(records) else None


def _turn_scores(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the score of each turn in percent."""
    counts = {len(record["hits"]) for record in records}
    if len(counts) > 1 or any(record.get("apart") for record in records):
        return [mean_stderr([record["score"] for record in records])[0]]
    return (np.mean([_scores_of(record) for record in records], axis=0) * 100).tolist()


def verdict(by_full: float, by_control: float) -> str:
    """Describe a negative control, from the sums of the scores of full attention and of the control.

    The text begins with "ok" if the task can tell policies apart.
    """
    if not by_full:
        return "full attention finds nothing: the task tells nothing"
    share = f"the control finds {by_control:.4g}, full attention {by_full:.4g} ({by_control / by_full:.0%})"
    return f"{share}: the task tells nothing" if by_control >= _TELLING * by_full else f"ok: {share}"


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each policy, with its results over all rows with questions.

    The entry has "recall_of_full": the share, in percent, of the answers found by full attention that the policy also
    finds. All controls of a policy share one entry.
    """
    groups: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "found" in row:
            group = ("control", row["control_of"]) if row["control_of"] else (row["policy"], None)
            groups.setdefault(group, []).append(row)
    entries = []
    for (policy, control_of), members in groups.items():
        names = ("asked", "found", "found_by_full", "found_by_both")
        totals = {name: _tidy(sum(row[name] for row in members)) for name in names}
        by_full = totals["found_by_full"]
        share = 100 * totals["found_by_both"] / by_full if by_full else None
        entry = {"policy": policy, "control_of": control_of, **totals, "recall_of_full": share}
        if control_of is not None:
            entry["control"] = verdict(by_full, totals["found"])
        entries.append(entry)
    return entries


def short_names(labels: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return a short name of each label of a table, and sentences that tell what the names leave out.

    If a method runs with several settings, its names have only those settings in which they differ.
    """
    methods: dict[str, dict[str, list[str]]] = {}
    for one in labels:
        name, *settings = _SETTING.split(one)
        methods.setdefault(name, {})[one] = settings
    names: dict[str, str] = {}
    told: list[str] = []
    for name, of_method in methods.items():
        first, *others = of_method.values()
        common = [one for one in first if others and all(one in settings for settings in others)]
        names |= {
            one: ":".join([name, *(setting for setting in settings if setting not in common)])
            for one, settings in of_method.items()
        }
        if common:
            told.append(f"All rows of {name} have {', '.join(common)}.")
    return names, told


def _form(value: float | None, spec: str, error: float | None = None, scale: float = 1.0) -> str:
    """Return a number, with its standard error if there is one, or "-"."""
    if value is None:
        return "-"
    return format(scale * value, spec) + ("" if error is None else f" ± {error:{spec}}")


def _results_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of results, one line for each row."""
    table, (names, _) = Table("task", "length", "policy"), short_names(row["policy"] for row in rows)
    table.columns[2].overflow = "fold"  # a name that is cut could be that of another row
    for title in ("score %", "recall of full %", "KL", "ppl", "KV bytes", "full / this", "repeats %"):
        table.add_column(title)
    for row in rows:
        name = (
            names[row["policy"]] + (" (control)" if row["control_of"] else "") + (" (fitted)" if row["fitted"] else "")
        )
        table.add_row(
            row["task"],
            f"{row['length']:,}",
            name,
            _form(row["score"], ".1f", row["stderr"]),
            _form(row.get("recall_of_full"), ".1f"),
            _form(row.get("kl"), ".4f"),
            _form(row.get("ppl"), ".3f"),
            f"{row['offloaded_device_bytes']:,}",
            f"{row['full_bytes'] / row['offloaded_device_bytes']:.2f}",
            _form(row["hit_rate"], ".1f", scale=100.0),
        )
    return table


_RUN_BYTES = ("device_bytes", "host_bytes", "full_bytes")
_SERVED_BYTES = ("served_device_bytes", "served_full_bytes", "served_moved_bytes")
_UNKNOWN = ("score", "stderr", *_RUN_BYTES, "offloaded_device_bytes", *_SERVED_BYTES, "settings")


def show_shares(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print one table of all tasks, with one line for each length and policy.

    Full attention comes first, then policies at shares from the largest share, then policies with given settings. If a
    method runs at a share with several settings, its lines name them.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    settings: dict[tuple[Any, ...], set[str]] = {}
    names, told = short_names(row["policy"] for row in rows if not row["infeasible"])
    for row in rows:
        settings.setdefault((row["length"], row["share"], row["name"]), set()).add(row["policy"])
    lines: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        as_asked = row["share"] is None and row["name"] != "full"  # the policy runs with given settings, not at a share
        several = len(settings[row["length"], row["share"], row["name"]]) > 1
        name = (row["policy"] if as_asked or several else row["name"]) + (" (fitted)" if row.get("fitted") else "")
        share = row["share"] or (0.0 if as_asked else 1.0)
        lines.setdefault((row["length"], share, name), {})[row["task"]] = row
    table = Table("length", "share %", "policy", "KV bytes", "of full %", *(f"{task} %" for task in tasks), "KL")
    table.columns[2].overflow = "fold"
    for (length, share, name), by_task in sorted(lines.items(), key=lambda item: (item[0][0], -item[0][1])):
        row = next(iter(by_task.values()))
        shown = name.replace(row["policy"], names.get(row["policy"], row["policy"]))
        front = [f"{length:,}", f"{100 * share:g}" if share else "-", shown]
        if row["infeasible"]:
            table.add_row(*front, "-", "at least " + row["infeasible"].rpartition("at least ")[2].partition(" of ")[0])
            continue
        size, scores = row["served_device_bytes"], (by_task[task] for task in tasks)
        marks = [_form(one["score"], ".1f", one["stderr"]) for one in scores]
        divergence = [
            _form(one["kl"], ".4f", one["kl_stderr"]) for one in by_task.values() if one.get("kl") is not None
        ]
        table.add_row(*front, f"{size:,}", f"{100 * size / row['served_full_bytes']:.1f}", *marks, *divergence[:1])
    console.print(table)
    for sentence in told:
        console.print(sentence, highlight=False)
    console.print("KV bytes are those on the device, in bfloat16, with what the method offloads on the host.")


def write_results(rows: Sequence[Mapping[str, Any]], out: str | os.PathLike[str], about: Mapping[str, Any]) -> None:
    """Write the rows and their recall over all tasks to out/results.json, completely or not at all.

    `about` has further entries of the file. Raises ConfigError if it cannot be written.
    """
    with whole_file(Path(out) / RESULTS_FILE, "out") as part:
        part.write_text(json.dumps({"results": rows, "pooled": pooled(rows), **about}), encoding="utf-8")


def _cut_short(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Return (task, length, number of truncated contexts, number of samples) for tasks with truncated contexts."""
    cut = ((r["task"], r["length"], r["truncated"], r["samples"]) for r in rows if r.get("truncated"))
    return list(dict.fromkeys(cut))


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the table, the results of the controls, and the recall over all tasks with questions."""
    console.print(_results_table(rows))
    for sentence in short_names(row["policy"] for row in rows)[1]:
        console.print(sentence, highlight=False)
    if rows:
        console.print(f"Ran {rows[0]['fetch']}; KV bytes are those on the device with values offloaded.")
    for prefill in dict.fromkeys(row.get("prefill", "exact") for row in rows):
        if prefill != "exact":
            console.print(f"Prefill of all policies, full attention too: {prefill}.")
    for task, length, said in dict.fromkeys((row["task"], row["length"], row["control"]) for row in rows):
        if said is not None:
            console.print(f"{task} at {length:,}, control: {said}")
    for task, length, cut, samples in _cut_short(rows):
        console.print(f"{task} at {length:,}: {cut} of {samples} contexts were cut in the middle to fit the model")
    for entry in pooled(rows):
        both, by_full = entry["found_by_both"], entry["found_by_full"]
        recall = f"finds {both:.6g} of the {by_full:.6g} that full attention finds"
        console.print(f"all questions, {entry['policy']}: {recall}")
        if entry["control_of"]:
            console.print(f"all questions, control of {entry['control_of']}: {entry['control']}")


Record = Mapping[str, Any]


def settings_of(entry: Entry, resolved: Policy) -> dict[str, Any]:
    """Return the resolved settings of a policy.

    Resolving sets some settings to None because another one replaces them (keys.bits). A swept one has its given value.
    """
    assert entry.policy is not None
    asked, settings = policy_settings(entry.policy), policy_settings(resolved)
    return settings | {name: asked[name] for name in entry.sweeps if settings[name] is None}


def row_heads(setup: Setup, plan: TaskPlan) -> list[dict[str, Any]]:
    """Return the rows of a task without the figures of its samples, one for each entry. JSON can hold them."""
    prefill = {"prefill": setup.prefill.label(plan.length) if setup.prefill else "exact"}
    return [prefill | _row_head(setup, plan, entry) for entry in plan.entries]


def _row_head(setup: Setup, plan: TaskPlan, entry: Entry) -> dict[str, Any]:
    """Return the row of one entry without the figures of its samples, and without the prefill of all."""
    params, fetch = setup.params, setup.fetch
    row: dict[str, Any]
    if entry.policy is None:
        row = {"task": plan.task, "length": plan.length, "policy": entry.name, "name": entry.name, "share": entry.share}
        row |= {"infeasible": entry.infeasible, "control_of": None, "control": None, "fitted": False}
        return row | dict.fromkeys(_UNKNOWN)
    sizes = plan.sizes | {"dtype": params.dtype.name}
    resolved = entry.policy.resolve(params.config, plan.capacity)
    used = footprint(params.config, resolved, **sizes, fetch=fetch)
    row = {"task": plan.task, "length": plan.length, "policy": label(entry.policy)}
    row |= {"share": entry.share, "infeasible": None, "name": resolved.name}
    row |= {"settings": settings_of(entry, resolved)}
    row |= {"control_of": entry.control_of, "control": None, "capacity": plan.capacity, "fetch": fetch}
    row |= {"fitted": setup.arrays_of(resolved) is not None, "sweeps": list(entry.sweeps)}
    row |= {"truncated": sum(case.truncated > 0 for case in plan.cases)}
    row |= {name: used[name] for name in ("device_bytes", "host_bytes", "full_bytes")}
    offloaded = footprint(params.config, resolved, **sizes, fetch="device_put")
    row |= {"offloaded_device_bytes": offloaded["device_bytes"]}
    served = footprint(params.config, resolved, **sizes | {"dtype": SERVED}, fetch="device_put")
    row |= {"served_device_bytes": served["device_bytes"], "served_full_bytes": served["full_bytes"]}
    step = step_footprint(params.config, resolved, **sizes | {"dtype": SERVED}, fetch="device_put")
    row |= {"served_moved_bytes": step["bytes_moved"]}
    if attention := attention_of(resolved):
        row["prefill"] = attention.label(plan.length)
    return row


def with_figures(
    heads: Sequence[Record], depths: Sequence[float | None], table: Sequence[Sequence[Record]]
) -> list[dict[str, Any]]:
    """Return the rows of a task from what `row_heads` returned, where full attention is first.

    `table` has for each sample the records of the entries whose heads are not infeasible, in their order. `depths` are
    those of the TaskPlan.
    """
    rows: list[dict[str, Any]] = []
    columns = iter(zip(*table, strict=True))
    phased = heads[0]["task"] in PHASE_TASKS
    full = [records[0] for records in table]
    for head in heads:
        figures = {}
        if not head["infeasible"]:
            records = next(columns)
            figures = score_row(records, full, depths) | (_phase_figures(records) if phased else {})
        rows.append({**head, **figures})
    verdicts = [verdict(row["found_by_full"], row["found"]) for row in rows if row["control_of"]]
    worst = max(verdicts, key=lambda text: not text.startswith("ok"), default=None)
    return [row | {"control": worst} for row in rows]  # the verdict is about the task, so every row has it


def _phase_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Return the number of answers asked for and found at each phase. Sample i has phase i modulo PHASES."""
    found = [_tidy(sum(sum(_scores_of(one)) for one in records[i::PHASES])) for i in range(PHASES)]
    return {"phase_asked": [len(records[i::PHASES]) for i in range(PHASES)], "phase_found": found}


def task_rows(setup: Setup, plan: TaskPlan, table: Sequence[Mapping[Policy, Record]]) -> list[dict[str, Any]]:
    """Return the result rows of one task at one length. `table` has the records of every policy for each case."""
    policies = [entry.policy for entry in plan.entries if entry.policy is not None]
    ordered = [[records[policy] for policy in policies] for records in table]
    return with_figures(row_heads(setup, plan), plan.depths, ordered)
