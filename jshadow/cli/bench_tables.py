"""The tables that `jshadow bench` prints."""

from typing import Any

from jshadow.cli.console import console, print_table


def print_model(rows: list[dict[str, Any]], part: str, tokens: int) -> None:
    """Print the table of `bench decode` or `bench prefill`, with a line for each setting that was not measured.

    Ratios are to transformers if it was measured, else to full attention.

    Args:
        rows: the rows of `evaluation.speed.bench_model`.
        part: "decode" or "prefill".
        tokens: number of tokens of all prompts together.
    """
    from rich.table import Table

    decode = part == "decode"
    name, least, most, limit = (
        ("step_seconds", "least", "most", "bound_seconds")
        if decode
        else ("prefill_seconds", "prefill_least", "prefill_most", "prefill_bound_seconds")
    )
    there = [row for row in rows if row["error"] is None]
    # transformers if it ran, else full attention, else any other
    first = min(there, key=lambda row: (row["fetch"] is not None, row["policy"] != "full"), default={"setting": "-"})
    unit, scale = ("step, ms", 1e3) if decode else ("prefill, s", 1.0)
    table = Table(
        "",
        unit,
        "least to most",
        "tokens/s",
        f"{first['setting']} / this",
        "to its bound",
        "device MB",
        "host MB",
        "moved MB a step",
    )
    for row in rows:
        if row["error"] is not None:
            table.add_row(label_of(row), "not measured")
            continue
        rate = row["tokens_per_second"] if decode else tokens / row[name]
        table.add_row(
            label_of(row),
            f"{row[name] * scale:.2f}",
            f"{row[least] * scale:.2f} to {row[most] * scale:.2f}",
            f"{rate:,.1f}",
            f"{first[name] / row[name]:.2f}",
            f"{row[name] / row[limit]:.2f}" if row[limit] else "",
            *(
                "" if row[size] is None else f"{row[size] / 1e6:,.1f}"
                for size in ("bytes_device", "bytes_host", "bytes_moved")
            ),
        )
    print_table(table, console(140))
    for row in rows:
        if row["fallback"]:
            print(f"{row['setting']}: {row['fallback']}")
        if row["error"]:
            print(f"{label_of(row)}: not measured: {row['error']}")


def label_of(row: dict[str, Any]) -> str:
    """Return a row's setting, as on the command line, and its fetch mode."""
    return str(row["setting"]) + (f", {row['fetch']}" if row["fetch"] else "")


def print_rows(rows: list[dict[str, Any]], context: int) -> None:
    """Print the table of `bench layer` for one context length. Ratios are to the fastest dense row of the run."""
    from rich.table import Table

    dense = min(row["step_seconds"] for row in rows if row["policy"] == "full" or row["fetch"] is None)
    table = Table(
        f"{context:,} tokens",
        "step, ms",
        "least to most",
        "dense / this",
        "to its bound",
        "device MB",
        "host MB",
        "moved MB",
    )
    for row in rows:
        table.add_row(
            label_of(row),
            *milliseconds(row),
            f"{dense / row['step_seconds']:.2f}",
            times_bound(row),
            *(f"{row[name] / 1e6:,.1f}" for name in ("bytes_device", "bytes_host", "bytes_moved")),
        )
    print_table(table, console(140))


def print_stages(rows: list[dict[str, Any]]) -> None:
    """Print the stages of each policy. For a stage that is part of another stage, the line names that stage."""
    from rich.table import Table

    table = Table("stage", "ms", "least to most", "to its bound", "read MB", "from the host MB", "million operations")
    for row in rows:
        inner = f" (of {row['part_of']})" if row["part_of"] else ""
        table.add_row(
            f"{row['setting']}: {row['stage']}{inner}",
            *milliseconds(row),
            times_bound(row),
            f"{row['bytes_read'] / 1e6:,.1f}",
            f"{row['bytes_fetched'] / 1e6:,.1f}",
            f"{row['flops'] / 1e6:,.1f}",
        )
    print_table(table, console(140))


def milliseconds(row: dict[str, Any]) -> tuple[str, str]:
    """Return the median of a row's times, and their range, in milliseconds."""
    return f"{row['step_seconds'] * 1e3:.1f}", f"{row['least'] * 1e3:.1f} to {row['most'] * 1e3:.1f}"


def times_bound(row: dict[str, Any]) -> str:
    """Return the ratio of a row's time to its bound, or "" if the bound is zero."""
    return f"{row['step_seconds'] / row['bound_seconds']:.2f}" if row["bound_seconds"] else ""


def print_growth(rows: list[dict[str, Any]]) -> None:
    """Print the ratio of the step times at the longest and the shortest context, for each setting."""
    shortest, longest = (pick(row["context"] for row in rows) for pick in (min, max))
    if shortest == longest:
        return
    grown = []
    for row in rows:
        if row["context"] == longest:
            before = next(r for r in rows if r["context"] == shortest and r["setting"] == row["setting"])
            grown.append(f"{row['setting']} {row['step_seconds'] / before['step_seconds']:.2f}")
    print(f"times as long at {longest:,} as at {shortest:,} tokens: {', '.join(grown)}")


def print_ceilings(best: dict[str, float]) -> None:
    """Print the measured rates that the bounds are computed from."""
    rates = ", ".join(f"{name} {value / 1e9:,.1f} G/s" for name, value in best.items())
    print(f"bounds from the rates measured on this machine: {rates}")


def print_speculation(rows: list[dict[str, Any]]) -> None:
    """Print the table of `bench speculate`: the rows of `evaluation.speed.speculation`."""
    from rich.table import Table

    table = Table(
        "task",
        "system",
        "tokens/s",
        "this / plain",
        "least to most",
        "tokens a cycle",
        "kept",
        "acceptance",
        "same tokens",
    )
    for row in rows:
        table.add_row(
            row["task"],
            row["system"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
            "-" if row["tokens_a_cycle"] is None else f"{row['tokens_a_cycle']:.2f}",
            "-" if row["accepted"] is None else f"{row['accepted']:.0%}",
            "-" if row["acceptance"] is None else f"{row['acceptance']:.3f}",
            f"{'yes' if row['same'] else 'NO'}, {row['new_tokens']}",
        )
    print_table(table, console(140))


def print_cycles(rows: list[dict[str, Any]]) -> None:
    """Print the table of `bench layer --speculate`: the rows of `bench_cycle`."""
    from rich.table import Table

    table = Table(
        "tokens", "full step, ms", "drafts, ms", "check, ms", "tokens a cycle", "this / full", "least to most"
    )
    for row in rows:
        table.add_row(
            f"{row['context']:,}",
            *(f"{row[f'{name}_seconds'] * 1e3:.2f}" for name in ("step", "draft", "check")),
            f"{row['tokens_a_cycle']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
        )
    print_table(table, console(140))
