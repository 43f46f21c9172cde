"""Pictures of the effect of one setting on answers, agreement with full attention, and bytes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.plots.results import FIELDS, error_of, kind_of
from jshadow.evaluation.plots.style import LONG, look_of, panels, plain, styled, write

Row = Mapping[str, Any]
CROWD = 3  # with more lines than this, the legend is below the panel
MEASURES = {
    "score": "right answers, %",
    "top1": "same next token, %",
    "kl": "KL(full, method), nats",
    "bytes": "device bytes, % of full's",
}


def measured(row: Row, measure: str) -> float | None:
    """Return the number of a measure in a row. Agreement tasks have no "score", because it equals "top1"."""
    if measure == "bytes":
        return float(100 * row["served_device_bytes"] / row["served_full_bytes"])
    value: float | None = row.get(measure)
    return value if measure != "score" or row.get("top1") is None else None


def place_of(row: Row, field: str) -> Any:
    """Return the position of a row on the horizontal axis: the number of the setting, or its name if it has none."""
    value = row["settings"][field]
    return value if isinstance(value, int | float) else str(value)


def steps_of(rows: Sequence[Row], field: str) -> list[Row]:
    """Return the rows that have the setting `field`, sorted by it.

    If any row belongs to a sweep, only the rows in the sweep of this setting are returned.
    """
    asked = [row for row in rows if (row.get("settings") or {}).get(field) is not None]
    if any(row.get("sweeps") for row in rows):
        asked = [row for row in asked if field in row.get("sweeps", ())]
    return sorted(asked, key=lambda row: row["settings"][field])


@styled
def plot_sweep(rows: Sequence[Row], field: str, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the effect of a setting on answers, agreement and device bytes (ShadowKV, figures 8 and 9, table 15).

    Args:
        rows: rows of `analysis.sweep` or `evaluate`. Those without the setting are left out. If any row belongs
            to a sweep, rows outside the sweep of this setting are also left out.
        field: the setting on the horizontal axis.
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure. It has one panel for each measure, with one line for each task, method and length.

    Raises:
        ConfigError: no row has the setting, or the file cannot be written.
    """
    drawn = [{**row, "name": kind_of(row, field)} for row in steps_of(rows, field)]
    if not drawn:
        raise ConfigError(f"field must be a setting that some row has, got {field!r}")
    shown = [measure for measure in MEASURES if any(measured(row, measure) is not None for row in drawn)]
    many = len({(row["task"], row["name"], row["length"]) for row in drawn})
    figure, axes = panels(len(shown), len(MEASURES), 3.4, 3.0 + (0.2 * many if many > CROWD else 0))
    for axis, measure in zip(axes, shown, strict=True):
        lines: dict[tuple[Any, ...], dict[Any, Row]] = {}
        for row in drawn:
            if measured(row, measure) is not None:
                task = None if measure == "bytes" else row["task"]  # the bytes are the same for every task
                lines.setdefault((task, row["name"], row["length"]), {})[place_of(row, field)] = row
        kinds: dict[str, int] = {}
        for line, at in lines.items():
            kind = line[1].partition(" ")[0]
            number = kinds[kind] = kinds.get(kind, -1) + 1
            error = None if measure == "bytes" else [row.get(error_of(measure)) or 0.0 for row in at.values()]
            axis.errorbar(
                list(at),
                [measured(row, measure) for row in at.values()],
                yerr=error,
                elinewidth=0.8,
                label=line_name(line, list(lines)),
                **look_of(kind, number),
            )
        axis.set_xlabel(FIELDS.get(field, field))
        axis.set_ylabel(MEASURES[measure])
        if measure == "score":
            axis.set_ylim(-4, 104)
        elif measure != "top1":
            axis.set_ylim(bottom=0)
        if many > CROWD:
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
        elif len(lines) > 1:
            axis.legend()
    return write(figure, path)


def line_name(line: tuple[Any, ...], lines: Sequence[tuple[Any, ...]]) -> str:
    """Join the parts of (task, method, length) that differ between lines into the name of a line."""
    parts = [f"{part:,} tokens" if isinstance(part, int) else str(part) for part in line]
    differing = [part for i, part in enumerate(parts) if len({other[i] for other in lines}) > 1]
    return plain(", ".join(differing) or parts[1], LONG)
