"""The result rows of one task: what is known before its samples run, and the figures of the finished samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from jshadow.evaluation import results
from jshadow.evaluation.plan import SERVED
from jshadow.evaluation.settings import Entry, Setup, TaskPlan
from jshadow.evaluation.tasks.needle_phases import PHASE_TASKS, PHASES
from jshadow.planner.machine import footprint, step_footprint
from jshadow.policies import Policy
from jshadow.policies.capabilities import attention_of
from jshadow.policies.settings import policy_settings

Record = Mapping[str, Any]


def settings_of(entry: Entry, resolved: Policy) -> dict[str, Any]:
    """Return the resolved settings of a policy.

    Resolving sets some settings to None because another one replaces them (keys.bits). If such a setting is swept, its
    given value is returned.
    """
    assert entry.policy is not None
    asked, settings = policy_settings(entry.policy), policy_settings(resolved)
    return settings | {name: asked[name] for name in entry.sweeps if settings[name] is None}


def row_heads(setup: Setup, plan: TaskPlan) -> list[dict[str, Any]]:
    """Return the rows of a task without the figures of its samples, one for each entry. JSON can hold them."""
    prefill = {"prefill": setup.prefill.label(plan.length) if setup.prefill else "exact"}
    return [prefill | row_head(setup, plan, entry) for entry in plan.entries]


def row_head(setup: Setup, plan: TaskPlan, entry: Entry) -> dict[str, Any]:
    """Return the row of one entry without the figures of its samples, and without the prefill of all."""
    params, fetch = setup.params, setup.fetch
    if entry.policy is None:
        return results.infeasible_row(plan.task, plan.length, entry.name, entry.share, entry.infeasible)
    sizes = plan.sizes | {"dtype": params.dtype.name}
    resolved = entry.policy.resolve(params.config, plan.capacity)
    used = footprint(params.config, resolved, **sizes, fetch=fetch)
    row: dict[str, Any] = {"task": plan.task, "length": plan.length, "policy": results.label(entry.policy)}
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
    """Return the rows of a task.

    Args:
        heads: what `row_heads` returned. The first is that of full attention.
        depths: place of the fact of each sample, from 0 to 1, as in a TaskPlan.
        table: for each sample, the records of the entries whose heads are not infeasible, in their order.
    """
    rows: list[dict[str, Any]] = []
    columns = iter(zip(*table, strict=True))
    phased = heads[0]["task"] in PHASE_TASKS
    full = [records[0] for records in table]
    for head in heads:
        figures = {}
        if not head["infeasible"]:
            records = next(columns)
            figures = results.score_row(records, full, depths) | (phase_figures(records) if phased else {})
        rows.append({**head, **figures})
    verdicts = [results.verdict(row["found_by_full"], row["found"]) for row in rows if row["control_of"]]
    worst = max(verdicts, key=lambda text: not text.startswith("ok"), default=None)
    return [row | {"control": worst} for row in rows]  # the verdict is about the task, so every row has it


def phase_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Return the number of answers asked for and found at each phase. Sample i has phase i modulo PHASES."""
    found = [results.tidy(sum(sum(results.scores_of(one)) for one in records[i::PHASES])) for i in range(PHASES)]
    return {"phase_asked": [len(records[i::PHASES]) for i in range(PHASES)], "phase_found": found}


def task_rows(setup: Setup, plan: TaskPlan, table: Sequence[Mapping[Policy, Record]]) -> list[dict[str, Any]]:
    """Return the result rows of one task at one length. `table` has the records of every policy for each case."""
    policies = [entry.policy for entry in plan.entries if entry.policy is not None]
    ordered = [[records[policy] for policy in policies] for records in table]
    return with_figures(row_heads(setup, plan), plan.depths, ordered)
