"""gpu.md: the figures as tables for BENCHMARKS.md, with what was aimed at and whether it was reached."""

from collections.abc import Callable, Iterator
from typing import Any

from gpu.runner import MEASURED

Row = dict[str, Any]


def markdown(results: Row) -> str:
    """The whole page. Parts that did not run say so in their place."""
    parts = results["parts"]
    lines = ["# GPU figures", ""]
    if results["dry_run"]:
        lines += ["A dry run: sizes are tiny, figures mean nothing.", ""]
    lines += [", ".join(f"{key} {value}" for key, value in results["machine"].items()), ""]
    lines += [*table(("goal", "aimed at", "measured", ""), goals(results)), ""]
    for title, part, head, cells in TABLES:
        rows = parts.get(part, [])
        good = [cell for row in rows if row["status"] == MEASURED for cell in cells(row)]
        lines += [f"## {title}", "", *(table(head, good) if good else ["Nothing measured."]), ""]
        lines += [f"- {row['name']}: {row['status']}{told(row)}" for row in rows if row["status"] != MEASURED]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A markdown table."""
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


def line(cells: tuple[str, ...]) -> str:
    """A row of it."""
    return "| " + " | ".join(cells) + " |"


def told(row: Row) -> str:
    """Why a row is no figure."""
    reasons = [row[key] for key in ("error", "why") if row.get(key)] + list(row.get("wrong", []))
    return ": " + "; ".join(str(reason).replace("\n", " ") for reason in reasons) if reasons else ""


# Goals


def goals(results: Row) -> list[tuple[str, ...]]:
    """Each goal: what it says, the figure, whether it is met; "not measured" where there is none."""
    fetch = [row for row in measured(results, "fetch") if row["name"].startswith("zero_copy") and not row["kept_share"]]
    bus = max((row["share_of_bus"] for row in fetch), default=None)
    rows = measured(results, "decode")
    longest = max((row["capacity"] for row in rows), default=0)
    phases = [phase for row in rows if row["capacity"] == longest and row["kind"] != "full" for phase in row["phases"]]

    def best(share: float, key: str) -> float | None:
        found = [phase[key] for phase in phases if phase["share_set"] == share and phase[key] is not None]
        return max(found, default=None)

    wanted = (
        ("misses by zero copy, share of the measured bus", 0.7, bus),
        ("decode, 60 % of the selection kept, to full attention's best", 3.0, best(0.6, "ratio_to_full")),
        ("decode, nothing kept, to full attention's best", 1.4, best(0.0, "ratio_to_full")),
        ("decode, share of the planner's roofline", 0.5, best(0.6, "share_of_bound")),
    )
    return [(name, f"at least {aim}", "-" if got is None else f"{got:.2f}", verdict(aim, got, results["dry_run"]))
            for name, aim, got in wanted]  # fmt: skip


def verdict(aim: float, got: float | None, dry: bool) -> str:
    """Whether a goal is met; a dry run measures none."""
    return "not measured" if got is None or dry else "met" if got >= aim else "not met"


def measured(results: Row, part: str) -> list[Row]:
    """The rows of a part that are figures."""
    return [row for row in results["parts"].get(part, []) if row["status"] == MEASURED]


# Cells of each part's table


def check_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """What was checked."""
    skip = ("name", "status", "ok", "seconds", "wrong")
    details = ", ".join(f"{key} {number(value)}" for key, value in row.items() if key not in skip)
    yield row["name"], "right", details, f"{row['seconds']:.1f}"


def ceiling_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """One line a ceiling."""
    for name, value in row["per_second"].items():
        yield name, f"{value / 1e9:,.1f} {'GFLOP' if name.startswith('matmul') else 'GB'}"


def fetch_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """One way to fetch."""
    times = [f"{row[key] * 1e6:,.0f}" for key in ("fetch_seconds", "least", "most")]
    rate = f"{row['bytes_per_second'] / 1e9:.1f}"
    share = percent(row["share_of_bus"])
    yield row["name"], f"{row['bytes'] / 1e6:.2f}", times[0], f"{times[1]} to {times[2]}", rate, share


def decode_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """One line a repeat share."""
    for phase in row["phases"]:
        ratio, share = phase["ratio_to_full"], phase["share"]
        yield (
            row["kind"], f"{row['capacity']:,}", str(row["batch"]), "-" if share is None else percent(share),
            f"{phase['tokens_per_second']:.1f}", f"{phase['least']:.1f} to {phase['most']:.1f}",
            f"{phase['single_tokens_per_second']:.1f}", "-" if ratio is None else f"{ratio:.2f}",
            percent(phase["share_of_bound"]), f"{phase['fetched_bytes_per_step'] / 1e9:.3f}",
            giga(row["device_bytes"]), giga(row["peak_device_bytes"]), giga(row["host_bytes"]),
            f"{row['compile_seconds']:.0f}",
        )  # fmt: skip


def stage_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """One line a stage."""
    for stage, value in row["milliseconds"].items():
        yield f"{row['batch']} x {row['capacity']:,}", stage, f"{value:.3f}"


def compress_cells(row: Row) -> Iterator[tuple[str, ...]]:
    """One context."""
    fused = row.get("fused_attention_seconds")
    yield (
        f"{row['tokens']:,}", f"{row['factor_seconds'] * 1e3:.1f}", f"{row['attention_seconds'] * 1e3:.1f}",
        percent(row["factors_to_attention"]), "-" if fused is None else f"{fused * 1e3:.1f}",
        "-" if fused is None else percent(row["factors_to_fused"]),
    )  # fmt: skip


def number(value: Any) -> str:
    """Short."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: float) -> str:
    """Of one."""
    return f"{100 * value:.1f} %"


def giga(value: int | None) -> str:
    """Bytes in units of 1e9."""
    return "-" if value is None else f"{value / 1e9:.2f}"


TABLES: tuple[tuple[str, str, tuple[str, ...], Callable[[Row], Iterator[tuple[str, ...]]]], ...] = (
    ("Correctness", "correctness", ("check", "", "found", "seconds"), check_cells),
    ("Ceilings", "ceilings", ("ceiling", "a second"), ceiling_cells),
    ("Fetch of one layer", "fetch",
     ("way", "MB over the bus", "us", "least to most", "GB a second", "of the bus"), fetch_cells),
    ("Decode", "decode",
     ("policy", "capacity", "rows", "kept", "tokens a second", "least to most", "step by step", "to full",
      "of the bound", "GB fetched a step", "device GB", "peak so far, GB", "host GB", "compile, s"), decode_cells),
    ("One layer's decode step", "layer", ("rows x capacity", "stage", "ms"), stage_cells),
    ("Compressing a prompt, one layer", "compress",
     ("tokens", "Gram, eigenvectors and factors, ms", "attention in pieces, ms", "factors to it", "fused attention, ms",
      "factors to it"), compress_cells),
)  # fmt: skip
