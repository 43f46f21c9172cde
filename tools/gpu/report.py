"""Writes gpu.md: the measurements of all parts as tables, with each goal and whether it is met."""

from collections.abc import Callable, Iterator
from pathlib import Path

from gpu.__main__ import PARTS
from gpu.formats import Row, giga, number, part_of, percent, table
from gpu.goals import goals
from gpu.runner import FAILED, MEASURED, SHOWN, errors, load

KERNELS = 25  # number of kernels of a profile that the page shows


def write_page(out: Path) -> str:
    """Write gpu.md from the results of all parts in a folder, and return its text."""
    found = {part: load(out / f"{part}.json") for part in PARTS}
    text = markdown({part: results for part, results in found.items() if results}, load(out / "baseline.json"))
    (out / "gpu.md").write_text(text)
    return text


def markdown(parts: dict[str, Row], baseline: Row | None = None) -> str:
    """Return the whole page.

    Args:
        parts: the results of each part that ran, by name.
        baseline: the contents of baseline.json.
    """
    lines = ["# GPU figures", ""]
    if any(results.get("dry_run") for results in parts.values()):
        lines += ["A dry run: sizes are tiny, figures mean nothing.", ""]
    lines += [*table(("goal", "aimed at", "measured", "row", ""), goals(parts)), ""]
    if entries := (baseline or {}).get("entries"):
        lines += ["## Best speed of full attention", "", *table(*baseline_table(entries)), ""]
    for name, results in parts.items():
        lines += [*part_lines(name, results)]
    return "\n".join(lines).rstrip() + "\n"


def part_lines(part: str, results: Row) -> list[str]:
    """Return the lines of a part: its machine, and a table for each section."""
    machine = ", ".join(f"{key} {value}" for key, value in results.get("machine", {}).items())
    lines = [f"# Part {part}", "", machine, "", *(f"- {note}" for note in results.get("notes", [])), ""]
    if (origin := results.get("ceilings_from", "measured")) != "measured":
        lines += [f"Bounds and shares of the bus are those of the {origin}", ""]
    sections = results.get("sections", {})
    shown: set[str] = set()
    for title, names, head, cells in TABLES:
        if not (rows := [row for name in names for row in sections.get(name, [])]):
            continue
        shown |= set(names)
        good = [cell for row in rows if row["status"] in SHOWN for cell in cells(row)]
        lines += [f"## {title}", "", *(table(head, good) if good else ["Nothing measured."]), "", *others(rows), ""]
    return [*lines, *others([row for name, rows in sections.items() if name not in shown for row in rows]), ""]


def baseline_table(entries: list[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table of baseline.json."""
    keys = ("device", "jax", "capacity", "batch", "tokens_per_second", "date", "commit")
    head = ("device", "jax", "capacity", "rows", "tokens a second", "date", "commit")
    return head, [tuple(number(entry.get(key)) for key in keys) for entry in entries]


def others(rows: list[Row]) -> list[str]:
    """Return one line for each row that was not measured, or only in part, and for each way that is not available."""
    lines = [f"- {row['name']}: {row['status']}{told(row)}" for row in rows if row["status"] != MEASURED]
    absent = [(row["name"], way, why) for row in rows for way, why in row.get("not_available", {}).items()]
    return lines + [f"- {name}: {way} is not available: {why}".replace("\n", " ") for name, way, why in absent]


def told(row: Row) -> str:
    """Return the reasons why a row was not measured."""
    reasons = [*errors(row), *([row["why"]] if row.get("why") else []), *row.get("wrong", [])]
    return ": " + "; ".join(str(reason).replace("\n", " ") for reason in reasons) if reasons else ""


# Cells of each section's table


def check_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the line of one check."""
    skip = ("name", "status", "ok", "seconds", "wrong", "error")
    details = ", ".join(f"{key} {number(value)}" for key, value in row.items() if key not in skip)
    yield row["name"], "wrong" if row["status"] == FAILED else "right", details, f"{row['seconds']:.1f}"


def ceiling_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each peak rate, or for each property of the bus and the clocks."""
    for name, value in row.get("per_second", {}).items():
        unit = "GFLOP" if name.startswith("matmul") else "GB"
        yield name, f"{value / 1e9:,.1f} {unit} a second", row["from"]
    if "per_second" not in row:
        yield from ((name, str(value), "nvidia-smi") for name, value in row.items() if "." in name)


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
            row["code"] if row["code"] == "full" else f"{row['code']}, {row['fetch']}",
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


def generate_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the line of one generation."""
    yield (
        row["name"].removeprefix("generate, "),
        f"{row['prefill_seconds']:.2f}",
        number(row["decode_tokens_per_second"]),
        giga(row["device_kv_bytes"]),
        giga(row["host_kv_bytes"]),
        giga(row["peak_device_bytes"]),
    )


def stage_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each stage."""
    for stage, value in row["milliseconds"].items():
        yield f"{row['code']}, {row['batch']} x {row['capacity']:,}", stage, number(value)


def dense_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each way to compute full attention."""
    for way, value in row["milliseconds"].items():
        name = f"torch {row['torch']}, {way}" if "torch" in row else way
        yield f"{row['batch']} x {row['capacity']:,}", name, number(value)


def profile_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield one line for each of the longest kernels, and one for all together."""
    steps, total = row["steps"], sum(kernel["seconds"] for kernel in row["kernels"])
    counts = sum(kernel["count"] for kernel in row["kernels"])
    for name, count, seconds in (
        (f"all {len(row['kernels'])}", counts, total),
        *((kernel["name"], kernel["count"], kernel["seconds"]) for kernel in row["kernels"][:KERNELS]),
    ):
        each = (f"{count / steps:.4g}", number(seconds / steps, 1e3), percent(seconds / total))
        yield row["name"].removeprefix("profile, "), name, *each


def compress_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the line of one context, or one line for each algorithm of eigenvectors."""
    if "side" in row:
        for way, value in row["milliseconds"].items():
            yield f"eigenvectors of {row['side']:,} columns, {way}", number(value), "-", "-", "-", "-"
        return
    factors, pieces, fused = (row.get(f"{key}_seconds") for key in ("factor", "attention", "fused_attention"))
    yield (
        f"{row['tokens']:,}",
        number(factors, 1e3),
        number(pieces, 1e3),
        part_of(factors, pieces),
        number(fused, 1e3),
        part_of(factors, fused),
    )


TABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Row], Iterator[tuple[str, ...]]]], ...] = (
    ("Correctness", ("kernels", "features"), ("check", "", "found", "seconds"), check_cells),
    ("Machine", ("ceilings",), ("machine", "", ""), ceiling_cells),
    (
        "Fetch of one layer",
        ("fetch",),
        ("way", "MB over the bus", "us", "least to most", "empty program, us", "GB a second", "of the bus"),
        fetch_cells,
    ),
    (
        "Decode",
        ("decode", "decode-more"),
        (
            "code",
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
    (
        "jshadow.generate, one prompt",
        ("generate",),
        ("prompt", "prefill, s", "tokens a second", "KV on the device, GB", "on the host, GB", "peak so far, GB"),
        generate_cells,
    ),
    ("Kernels of a step", ("profile",), ("step", "kernel", "a step", "ms a step", "of all"), profile_cells),
    ("Full attention of one layer", ("dense",), ("rows x capacity", "way", "ms"), dense_cells),
    ("One layer's decode step", ("stages",), ("rows x capacity", "stage", "ms"), stage_cells),
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
