"""Pictures of evaluation results; matplotlib is imported here alone (the extra `plots`)."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError

FORMATS = (".svg", ".png", ".pdf")
MARKS = "os^Dv<>Pph*X"


def check_plot(path: str | os.PathLike[str], tasks: Sequence[str], turns_of: Mapping[str, int]) -> None:
    """Raise ConfigError where a picture of these tasks could not be drawn or written, before anything runs.

    Args:
        path: file to write.
        tasks: what will be measured.
        turns_of: questions that each task asks in turn.
    """
    target = Path(path)
    if target.suffix not in FORMATS:
        raise ConfigError(f"plot must be a file that ends with one of {FORMATS}, got {str(path)!r}")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"plot must lie in a directory that exists, got {str(path)!r}")
    if all(turns_of.get(task, 1) < 2 for task in tasks):
        raise ConfigError(f"plot needs a task of several turns such as needle_multiturn, got {list(tasks)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib: pip install 'jshadow[plots]'")


def plot_turns(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the share of right answers by turn, a line a policy, a panel a length; written whole or not at all.

    Args:
        rows: of `evaluate`; those with several turns are drawn.
        path: .svg, .png or .pdf.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = [row for row in rows if len(row.get("turns") or ()) > 1]
    panels = list(dict.fromkeys((row["task"], row["length"]) for row in drawn))
    figure = Figure(figsize=(1.0 + 4.2 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(row["policy"] for row in drawn))
    for axis, (task, length) in zip(axes, panels, strict=True):
        for row in drawn:
            if (row["task"], row["length"]) != (task, length):
                continue
            number = names.index(row["policy"])
            share = row["served_device_bytes"] / row["served_full_bytes"]
            band = row["name"] == "full"  # broad, behind the others, which may lie on it
            axis.plot(
                range(1, len(row["turns"]) + 1), row["turns"], marker=MARKS[number % len(MARKS)],
                color="0.7" if band else f"C{number % 10}", linewidth=7 if band else 1.5, alpha=0.85,
                label=f"{row['name']} ({100 * share:.0f} % of full's bytes)",
            )  # fmt: skip
        axis.set_title(f"{task}, {length:,} tokens, {drawn[0]['samples']} samples", fontsize=9)
        axis.set_xlabel("turn")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("right answers, %")
    axes[0].set_ylim(-4, 104)
    target = Path(path)
    part = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        # no date in the file: the same figures make the same picture
        figure.savefig(part, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"plot must be a file that can be written, got {str(path)!r}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
