"""The goals for a GPU, and whether the measurements meet them."""

from typing import Any

from gpu.formats import Row, percent
from gpu.runner import SHOWN

# Name, code, fetch modes of which the better one counts, share of chunks that stay, and the speed to full attention's.
RATIOS = (
    ("packed(small=True), values on the device", "packed small", ("resident",), 0.6, 10.0),
    ("packed(), values in host memory, 60 % stay", "packed", ("zero_copy",), 0.6, 5.0),
    ("the paper's settings, 60 % stay", "paper", ("zero_copy", "device_put"), 0.6, 2.5),
)
BUS, BOUND = 0.7, 0.5


def goals(parts: dict[str, Row]) -> list[tuple[str, ...]]:
    """Return the rows of the table of goals.

    Args:
        parts: the results of each part, by name.

    Returns:
        For each goal: its name, its bound, the measured number, the task, and the verdict.
    """
    checks, decode = parts.get("checks", {}), parts.get("decode", {})
    found = [bus_goal(checks)]
    for name, code, fetches, share, aim in RATIOS:
        best = max(
            (one for fetch in fetches if (one := taken(decode, code, fetch, share))),
            key=lambda one: one[1],
            default=None,
        )
        where, ratio, needed = best or ("-", None, "")
        told = f"{where}; {percent(aim / needed)} of its bound needed" if isinstance(needed, float) else where
        found.append(line(f"decode to full attention's best: {name}", aim, ratio, told, decode))
    for name, code, fetches, share, _ in RATIOS[:2]:
        phase, where = phase_of(decode, code, fetches[0], share)
        found.append(
            line(f"decode, share of the planner's bound: {name}", BOUND, phase.get("share_of_bound"), where, decode)
        )
    return found


def bus_goal(checks: Row) -> tuple[str, ...]:
    """Return the goal of a fetch."""
    rows = [
        row for row in measured(checks, "fetch") if row["kernel"] and not row["kept_share"] and not row["sequential"]
    ]
    best = max(rows, key=lambda row: row["share_of_bus"], default={})
    name = "misses by zero copy, share of the measured bus"
    return line(name, BUS, best.get("share_of_bus"), best.get("name", "-"), checks)


def phase_of(decode: Row, code: str, fetch: str, share: float) -> tuple[Row, str]:
    """Return a phase of the largest batch at the longest context, and the name of its row; empty if there is none."""
    rows = [
        row
        for row in measured(decode, "decode")
        if (row["code"], row["fetch"], row["capacity"]) == (code, fetch, decode.get("longest"))
    ]
    row = max(rows, key=lambda row: row["batch"], default=None)
    if row is None:
        return {}, "-"
    phases = (phase for phase in row["phases"] if phase["share_set"] == share and "error" not in phase)
    return next(phases, {}), row["name"]


def taken(decode: Row, code: str, fetch: str, share: float) -> tuple[str, float, float | None] | None:
    """Return the name of a row, its ratio to full attention and the ratio of its bound, or None if there is none."""
    phase, name = phase_of(decode, code, fetch, share)
    ratio, part = phase.get("ratio_to_full"), phase.get("share_of_bound")
    return (name, ratio, ratio / part if part else None) if ratio else None


def line(name: str, aim: float, got: Any, where: str, results: Row) -> tuple[str, ...]:
    """Return the cells of a goal. In a dry run no goal is measured."""
    missing = got is None or results.get("dry_run")
    verdict = "not measured" if missing else "met" if got >= aim else "not met"
    return name, f"at least {aim:g}", "-" if got is None else f"{got:.2f}", where, verdict


def measured(results: Row, section: str) -> list[Row]:
    """Return the measured rows of a section."""
    rows = results.get("sections", {}).get(section, [])
    return [row for row in rows if row["status"] in SHOWN and "error" not in row]
