"""Writes gpu.md: the measurements as tables for docs/benchmarks/gpu.md, with each goal and whether it is met."""

from collections.abc import Callable, Iterator
from typing import Any

from gpu.runner import FAILED, MEASURED, SHOWN, errors

Row = dict[str, Any]


def markdown(results: Row) -> str:
    """Return the whole page. A part that did not run has a line that says so."""
    parts = results["parts"]
    lines = ["# GPU figures", ""]
    if results["dry_run"]:
        lines += ["A dry run: sizes are tiny, figures mean nothing.", ""]
    lines += [", ".join(f"{key} {value}" for key, value in results["machine"].items()), ""]
    lines += [*table(("goal", "aimed at", "measured", "row", ""), goals(results)), ""]
    if results.get("ceilings_from", "measured") != "measured":
        lines += [f"Bounds and shares of the bus are those of the {results['ceilings_from']}", ""]
    for title, names, head, cells in TABLES:
        rows = [row for name in names for row in parts.get(name, [])]
        good = [cell for row in rows if row["status"] in SHOWN for cell in cells(row)]
        lines += [f"## {title}", "", *(table(head, good) if good else ["Nothing measured."]), ""]
        lines += [*others(rows), ""]
    known = {name for _, names, _, _ in TABLES for name in names}
    lines += others([row for name, rows in parts.items() if name not in known for row in rows])
    return "\n".join(lines).rstrip() + "\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


def line(cells: tuple[str, ...]) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def others(rows: list[Row]) -> list[str]:
    """Return one line for each row that was not measured, or only in part."""
    return [f"- {row['name']}: {row['status']}{told(row)}" for row in rows if row["status"] != MEASURED]


def told(row: Row) -> str:
    """Return the reasons why a row was not measured."""
    reasons = [*errors(row), *([row["why"]] if row.get("why") else []), *row.get("wrong", [])]
    return ": " + "; ".join(str(reason).replace("\n", " ") for reason in reasons) if reasons else ""


# Goals


def goals(results: Row) -> list[tuple[str, ...]]:
    """Return the rows of the table of goals: the goal, its bound, the measured number, the task, and the verdict."""
    fetch = [row for row in measured(results, "fetch") if row["name"].startswith("zero_copy") and not row["kept_share"]]
    bus = max(fetch, key=lambda row: row["share_of_bus"], default=None)
    rows = [
        row
        for row in measured(results, "decode")
        if row["kind"] == "zero_copy" and row["capacity"] == results.get("longest")
    ]
    row = max(rows, key=lambda row: row["batch"], default=None)
    phases = {phase["share_set"]: phase for phase in row["phases"] if "error" not in phase} if row else {}
    taken = f"zero_copy, {row['batch']} x {row['capacity']:,}" if row else "-"

    def of(share: float, key: str) -> float | None:
        return phases.get(share, {}).get(key)

    def needed(share: float, aim: float) -> str:
        """Describe the ratio at the roofline, and the share of the roofline that the goal needs."""
        ratio, part = of(share, "ratio_to_full"), of(share, "share_of_bound")
        return (
            f"; the bound's own is {ratio / part:.2f}, {percent(aim * part / ratio)} needed" if ratio and part else ""
        )

    wanted = (
        (
            "misses by zero copy, share of the measured bus",
            0.7,
            bus and bus["share_of_bus"],
            bus["name"] if bus else "-",
        ),
        (
            "decode, 60 % of the selection kept, to full attention's best",
            3.0,
            of(0.6, "ratio_to_full"),
            taken + needed(0.6, 3.0),
        ),
        ("decode, nothing kept, to full attention's best", 1.4, of(0.0, "ratio_to_full"), taken + needed(0.0, 1.4)),
        ("decode, share of the planner's roofline", 0.5, of(0.6, "share_of_bound"), taken),
    )
    dry = results["dry_run"]
    return [
        (name, f"at least {aim}", "-" if got is None else f"{got:.2f}", where, verdict(aim, got, dry))
        for name, aim, got, where in wanted
    ]


def verdict(aim: float, got: float | None, dry: bool) -> str:
    """Return whether a goal is met. In a dry run no goal is measured."""
    return "not measured" if got is None or dry else "met" if got >= aim else "not met"


def measured(results: Row, part: str) -> list[Row]:
    """Return the measured rows of a part."""
    return [row for row in results["parts"].get(part, []) if row["status"] in SHOWN and "error" not in row]


# Cells of each part's table


def check_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the line of one check."""
    skip = ("name", "status", "ok", "seconds", "wrong", "error")
    details = ", ".join(f"{key} {number(value)}" for key, value in row.items() if key not in skip)
    yield row["name"], "wrong" if row["status"] == FAILED else "right", details, f"{row['seconds']:.1f}"


def ceiling_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each peak rate."""
    for name, value in row["per_second"].items():
        unit = "GFLOP" if name.startswith("matmul") else "GB"
        yield name, f"{value / 1e9:,.1f} {unit}", row["from"]


def fetch_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the line of one way to fetch."""
    times = [f"{row[key] * 1e6:,.0f}" for key in ("fetch_seconds", "least", "most")]
    empty, rate = number(row["empty_seconds"], 1e6), f"{row['bytes_per_second'] / 1e9:.1f}"
    share = percent(row["share_of_bus"])
    yield row["name"], f"{row['bytes'] / 1e6:.2f}", times[0], f"{times[1]} to {times[2]}", empty, rate, share


def decode_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each share of repeated chunks."""
    for phase in row["phases"]:
        if "error" in phase:
            continue
        ratio, share = phase["ratio_to_full"], phase["share"]
        yield (
            row["kind"],
            f"{row['capacity']:,}",
            str(row["batch"]),
            "-" if share is None else percent(share),
            f"{phase['tokens_per_second']:.1f}",
            f"{phase['least']:.1f} to {phase['most']:.1f}",
            f"{phase['single_tokens_per_second']:.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
            percent(phase["share_of_bound"]),
            f"{phase['fetched_bytes_per_step'] / 1e9:.3f}",
            giga(row["device_bytes"]),
            giga(row["peak_device_bytes"]),
            giga(row["host_bytes"]),
            f"{row['compile_seconds']:.0f}",
        )


def stage_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each stage."""
    told = ", packed" if row.get("packed") else ""
    for stage, value in row["milliseconds"].items():
        yield f"{row['batch']} x {row['capacity']:,}{told}", stage, number(value)


def compress_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the line of one context."""
    factors, pieces, fused = (row.get(f"{key}_seconds") for key in ("factor", "attention", "fused_attention"))
    yield (
        f"{row['tokens']:,}",
        number(factors, 1e3),
        number(pieces, 1e3),
        part_of(factors, pieces),
        number(fused, 1e3),
        part_of(factors, fused),
    )


def number(value: Any, times: float = 1.0) -> str:
    """Format a number with three digits. A missing number or an error becomes a dash."""
    if value is None or isinstance(value, dict):
        return "-"
    return f"{value * times:.3g}" if isinstance(value, float) else str(value)


def part_of(value: Any, whole: Any) -> str:
    """Format value / whole in percent, or a dash if one of them was not measured."""
    return percent(value / whole) if isinstance(value, float) and isinstance(whole, float) else "-"


def percent(value: float) -> str:
    """Format a share of 1 in percent."""
    return f"{100 * value:.1f} %"


def giga(value: int | None) -> str:
    """Format bytes in units of 1e9."""
    return "-" if value is None else f"{value / 1e9:.2f}"


TABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Row], Iterator[tuple[str, ...]]]], ...] = (
    ("Correctness", ("correctness",), ("check", "", "found", "seconds"), check_cells),
    ("Ceilings", ("ceilings",), ("ceiling", "a second", ""), ceiling_cells),
    (
        "Fetch of one layer",
        ("fetch",),
        ("way", "MB over the bus", "us", "least to most", "empty program, us", "GB a second", "of the bus"),
        fetch_cells,
    ),
    (
        "Decode",
        ("decode", "decode-more", "decode-packed"),
        (
            "policy",
            "capacity",
            "rows",
            "kept",
            "tokens a second",
            "least to most",
            "step by step",
            "to full",
            "of the bound",
            "GB fetched a step",
            "device GB",
            "peak so far, GB",
            "host GB",
            "compile, s",
        ),
        decode_cells,
    ),
    ("One layer's decode step", ("layer",), ("rows x capacity", "stage", "ms"), stage_cells),
    (
        "Compressing a prompt, one layer",
        ("compress",),
        (
            "tokens",
            "Gram, eigenvectors and factors, ms",
            "attention in pieces, ms",
            "factors to it",
            "fused attention, ms",
            "factors to it",
        ),
        compress_cells,
    ),
)
