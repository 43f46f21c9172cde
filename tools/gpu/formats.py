"""Formats numbers and tables of gpu.md."""

from typing import Any

Row = dict[str, Any]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


def line(cells: tuple[str, ...]) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
