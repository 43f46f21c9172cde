"""Write the pictures and one HTML file of the results of `jshadow eval`.

    python benchmarks/report.py DIR [--plot FILE]

DIR is the --out of `jshadow eval`, or a file that has what `jshadow eval --json` printed. report.html and the pictures
are written beside it. --plot also draws right answers by turn to a .svg, .png or .pdf file.
"""

import argparse
import base64
import functools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import plots
from plots import FIELDS, check_matplotlib, with_memory, with_scores, with_turns

from jshadow.errors import ConfigError
from jshadow.evaluation.data import whole_file
from jshadow.evaluation.machine import machine
from jshadow.evaluation.results import RESULTS_FILE, pooled

Row = Mapping[str, Any]
TEMPLATE = Path(__file__).with_name("report.html.jinja")
REPORT = "report.html"
NOTHING = "–"
POOLED = {"policy", "control_of", "asked", "found", "found_by_full", "found_by_both"}


class Picture(NamedTuple):
    """A picture that can be drawn from the rows.

    Attributes:
        name: name of the file, without extension.
        caption: the caption in the report.
        draw: function that draws the picture and writes it to a path.
    """

    name: str
    caption: str
    draw: Callable[[Path], Any]


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: the text of the cell.
        value: the number that the column is sorted by, or None.
    """

    text: str
    value: float | None = None


def pictures(rows: Sequence[Row]) -> list[Picture]:
    """Return the pictures that can be drawn from these rows, or none if matplotlib is not installed."""
    try:
        check_matplotlib()
    except ConfigError:
        return []
    drawn = []
    if with_memory(rows, "score"):
        drawn.append(
            Picture(
                "memory_score",
                "Score against the KV bytes that a request keeps on the device",
                lambda path: plots.plot_memory(rows, path),
            )
        )
    if [row for row in with_memory(rows, "kl") if row["kl"] > 0 and row["name"] != "full"]:
        moved = any(row.get("served_moved_bytes") for row in rows)
        against = "the KV bytes on the device" + (", and the bytes that a step moves from the host" if moved else "")
        draw = functools.partial(plots.plot_memory, rows, measure="kl", moved=moved)
        drawn.append(Picture("memory_kl", f"Divergence from full attention against {against}", draw))
    if with_scores(rows):
        drawn.append(
            Picture(
                "needles",
                "Needles found by length of the prompt and depth of the needle",
                lambda path: plots.plot_needles(rows, path),
            )
        )
    if with_turns(rows):
        drawn.append(Picture("turns", "Right answers turn by turn", lambda path: plots.plot_turns(rows, path)))
    for name in dict.fromkeys(name for row in rows for name in row.get("sweeps") or ()):
        drawn.append(
            Picture(
                f"sweep_{name}", f"What {FIELDS.get(name, name)} does", functools.partial(plots.plot_sweep, rows, name)
            )
        )
    return drawn


def number(value: float | None, spec: str, error: float | None = None, scale: float = 1.0) -> Cell:
    """Format a number, with its standard error if there is one, as a cell.

    Args:
        value: the number, or None for an empty cell.
        spec: the format of both numbers, such as ".1f".
        error: the standard error, or None.
        scale: factor on both numbers.
    """
    if value is None:
        return Cell(NOTHING)
    shown = value if scale == 1 else scale * value  # without a scale, an integer stays an integer
    return Cell(format(shown, spec) + ("" if error is None else f" ± {format(scale * error, spec)}"), shown)


COLUMNS = (
    "prompt, tokens",
    "policy",
    "share, %",
    "score, %",
    "recall of full, %",
    "same next token, %",
    "KL, nats",
    "device, MB",
    "of full's, %",
    "full / this",
    "host, MB",
    "attended tokens",
    "hit rate, %",
    "samples",
)


def line_of(row: Row) -> list[Cell]:
    """Return the cells of one row of the table, one for each of COLUMNS."""
    name = row["policy"] + (" (control)" if row.get("control_of") else "") + (" (fitted)" if row.get("fitted") else "")
    served, full = row.get("served_device_bytes"), row.get("served_full_bytes")
    share = served / full if served and full else None
    score = Cell(NOTHING) if row.get("top1") is not None else number(row.get("score"), ".1f", row.get("stderr"))
    return [
        number(row["length"], ",d"),
        Cell(name),
        number(row.get("share"), "g", scale=100),
        score,
        number(row.get("recall_of_full"), ".1f"),
        number(row.get("top1"), ".1f", row.get("top1_stderr")),
        number(row.get("kl"), ".4f", row.get("kl_stderr")),
        number(served, ",.2f", scale=1e-6),
        number(share, ".1f", scale=100),
        number(share and 1 / share, ".2f"),
        number(row.get("host_bytes"), ",.2f", scale=1e-6),
        number(row.get("attended_tokens"), ",.0f"),
        number(row.get("hit_rate"), ".1f", scale=100),
        number(row.get("samples"), "d"),
    ]


def table_of(task: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table of one task for the template: its lines without empty columns, and the notes below them."""
    lines = [line_of(row) for row in rows]
    shown = [i for i in range(len(COLUMNS)) if any(line[i].text != NOTHING for line in lines)]
    notes = [f"{row['length']:,} tokens, control: {row['control']}" for row in rows if row.get("control")]
    prefills = {row.get("prefill", "exact") for row in rows}
    notes += [
        f"prefill{'' if len(prefills) == 1 else ' of ' + row['name']}: {row['prefill']}"
        for row in rows
        if row.get("prefill", "exact") != "exact"
    ]
    return {
        "task": task,
        "columns": [COLUMNS[i] for i in shown],
        "lines": [
            {"cells": [line[i] for i in shown], "infeasible": row.get("infeasible")}
            for line, row in zip(lines, rows, strict=True)
        ],
        "notes": list(dict.fromkeys(notes)),
    }


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ConfigError unless these are rows in the format of `evaluate`."""
    if isinstance(rows, str | Mapping) or not rows:
        raise ConfigError(f"rows must be a non-empty list of results of evaluate, got {rows!r}")
    for row in rows:
        missing = [
            key for key in ("task", "length", "policy", "name") if not isinstance(row, Mapping) or key not in row
        ]
        if missing:
            raise ConfigError(f"a row must have {missing[0]!r}, got {row!r}")


def embedded(picture: Picture, folder: Path) -> dict[str, str]:
    """Draw a picture, and return its caption and a data URI.

    Each SVG is a separate image, because two SVGs in one document may have equal ids.
    """
    path = folder / f"{picture.name}.svg"
    picture.draw(path)
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return {"caption": picture.caption, "source": f"data:image/svg+xml;base64,{data}"}


def report(rows: Sequence[Row], command: str | Sequence[str], ran_on: Mapping[str, str] | None) -> str:
    """Return the HTML text of the report that `write_report` writes."""
    check_rows(rows)
    by_task = {task: [row for row in rows if row["task"] == task] for task in dict.fromkeys(r["task"] for r in rows)}
    with tempfile.TemporaryDirectory() as folder:
        drawn = [embedded(picture, Path(folder)) for picture in pictures(rows)]
    needles = pooled([row for row in rows if row.keys() >= POOLED])
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        command=command if isinstance(command, str) else shlex.join(command),
        machine=machine() if ran_on is None else ran_on,
        ran=sorted({row["fetch"] for row in rows if row.get("fetch")}),
        tables=[table_of(task, of_task) for task, of_task in by_task.items()],
        pooled=needles,
        pictures=drawn,
    )


def write_report(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    *,
    command: str | Sequence[str] = "",
    ran_on: Mapping[str, str] | None = None,
) -> None:
    """Write an evaluation as one HTML file without external resources.

    It has tables, pictures, a description of the machine, the package versions and the command line.

    Args:
        rows: the rows that `evaluate` returned, or the "results" of `jshadow eval --json`.
        path: file to create or to replace. It is written completely or not at all.
        command: the command line that produced the rows, as one string or as a list of arguments.
        ran_on: the description of the machine, as `jshadow.evaluation.machine.machine` gives it. None: this machine.

    Raises:
        ConfigError: there are no rows, a row lacks its task, length, policy or name, or the file cannot be written.
    """
    text = report(rows, command, ran_on)
    with whole_file(path, "report") as part:
        part.write_text(text, encoding="utf-8")


def write_results(path: str | os.PathLike[str]) -> list[Path]:
    """Write the pictures (PNG) and report.html of some results beside their file. Older ones are replaced.

    Args:
        path: results.json of `jshadow eval --out`, the directory that holds it, or a file with the output of --json.

    Returns:
        The paths of the written files, report.html last.

    Raises:
        ConfigError: see `read_results` and `write_report`.
    """
    found = read_results(path)
    rows, folder = found["results"], file_of(path).parent
    paths = []
    for picture in pictures(rows):
        paths.append(folder / f"{picture.name}.png")
        picture.draw(paths[-1])
    write_report(rows, folder / REPORT, command=found.get("command", ""), ran_on=found.get("machine"))
    return [*paths, folder / REPORT]


def file_of(path: str | os.PathLike[str]) -> Path:
    """Return the file of results that a path stands for."""
    return Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path)


def read_results(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a file of results. Raises ConfigError if it cannot be read or has no rows."""
    try:
        found = json.loads(file_of(path).read_bytes())
        check_rows(found["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"results must be a file that jshadow eval wrote, got {str(path)!r}: {error!r}") from error
    return dict(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Write what the command line asks for. Returns 0, or 2 for an error of jshadow's."""
    add = argparse.ArgumentParser(description="Write the pictures and one HTML file of the results of `jshadow eval`.")
    add.add_argument("results", metavar="DIR", help="the --out of `jshadow eval`, or a file with its JSON output")
    add.add_argument("--plot", metavar="FILE", help="draw right answers by turn (.svg, .png, .pdf)")
    args = add.parse_args(argv)
    try:
        if args.plot is not None:
            plots.plot_turns(read_results(args.results)["results"], args.plot)
        for path in write_results(args.results):
            print(path)
    except ConfigError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
