"""Pictures of the rows of `evaluate`: needles by length and depth, scores by device memory, scores by turn."""

import importlib.util
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.plots.style import FORMATS, LONG, look_of, need, panels, plain, styled, write

Row = Mapping[str, Any]
WIDE, MOST_ACROSS = 4.2, 4  # width of a panel in inches, maximum number of panels in a row
MOST_NUMBERS = 12  # a heat map with at most this many rows and columns has a number in each cell


def check_plot(path: str | os.PathLike[str], tasks: Sequence[str], turns_of: Mapping[str, int]) -> None:
    """Check, before anything runs, that a picture by turn of these tasks can be drawn and written.

    Args:
        path: file to write.
        tasks: names of the tasks.
        turns_of: number of turns of each task, by name.

    Raises:
        ConfigError: the path is unsuitable, no task has several turns, or matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix not in FORMATS:
        raise ConfigError(f"plot must be a file that ends with one of {FORMATS}, got {str(path)!r}")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"plot must lie in a directory that exists, got {str(path)!r}")
    if all(turns_of.get(task, 1) < 2 for task in tasks):
        raise ConfigError(f"plot needs a task of several turns such as needle_multiturn, got {list(tasks)}")
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib: pip install 'jshadow[plots]'")


def with_turns(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that `plot_turns` draws: those with several turns."""
    return [row for row in rows if len(row.get("turns") or ()) > 1]


def with_scores(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that `plot_needles` draws: those with scores at several depths and a single turn."""
    return [row for row in rows if len(row.get("depths") or ()) > 1 and len(row.get("turns") or ()) < 2]


def with_memory(rows: Iterable[Row], measure: str) -> list[Row]:
    """Return the rows that `plot_memory` draws: those with the measure and the device bytes."""
    return [row for row in rows if row.get(measure) is not None and row.get("served_device_bytes")]


def looks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the line style of each row of one panel. Each setting of a method has its own dashes and marker."""
    seen: dict[str, list[Any]] = {}
    marks = []
    for row in rows:
        settings = seen.setdefault(row["name"], [])
        setting = (row.get("policy"), row.get("share"), row.get("control_of"))
        if setting not in settings:
            settings.append(setting)
        marks.append(look_of(row["name"], settings.index(setting)))
    return marks


@styled
def plot_turns(rows: Sequence[Row], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the share of right answers by turn. There is one panel for each task and length, and one line for a policy.

    Args:
        rows: rows of `evaluate`. Those with several turns are drawn.
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure.

    Raises:
        ConfigError: no row has several turns, or the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = with_turns(rows)
    need(drawn, "turns")
    places = list(dict.fromkeys((row["task"], row["length"]) for row in drawn))
    most = max(sum((row["task"], row["length"]) == place for row in drawn) for place in places)
    figure, axes = panels(len(places), MOST_ACROSS, WIDE, 3.0 + 0.17 * most, sharey=True)
    for axis, (task, length) in zip(axes, places, strict=True):
        panel = [row for row in drawn if (row["task"], row["length"]) == (task, length)]
        for row, look in zip(panel, looks(panel), strict=True):
            share = row["served_device_bytes"] / row["served_full_bytes"]
            if row["name"] == "full":  # a broad line behind the others, which may cover it
                look |= {"color": "0.7", "linewidth": 7, "zorder": 1}
            axis.plot(
                range(1, len(row["turns"]) + 1),
                row["turns"],
                alpha=0.85,
                **look,
                label=f"{plain(row['name'])} ({100 * share:.0f} % of full's bytes)",
            )
        axis.set_title(f"{plain(task)}, {length:,} tokens, {panel[0]['samples']} samples")
        axis.set_xlabel("turn")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes[0].set_ylabel("right answers, %")
    axes[0].set_ylim(-4, 104)
    return write(figure, path)


@styled
def plot_needles(rows: Sequence[Row], path: str | os.PathLike[str] | None = None) -> Any:
    """Draw heat maps of found needles by length and depth (ShadowKV, figure 10), one for each task and policy.

    Args:
        rows: rows of `evaluate`. Those with several "depths" and their "depth_scores" (percent) are drawn.
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure.

    Raises:
        ConfigError: no row has several depths, the depths of a task differ between lengths, or the file cannot be
            written.
    """
    import numpy as np

    drawn = with_scores(rows)
    need(drawn, "needles")
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in drawn:
        key = (row["task"], policy_title(row))
        groups.setdefault(key, {})[row["length"]] = row
    figure, axes = panels(len(groups), MOST_ACROSS, 2.8, 2.9, beside=0.9)
    image = None
    for axis, ((task, title), by_length) in zip(axes, groups.items(), strict=True):
        lengths = sorted(by_length)
        depths = {tuple(row["depths"]) for row in by_length.values()}
        if len(depths) != 1:
            raise ConfigError(f"rows must have the same depths at every length of {task}, got {sorted(depths)}")
        [at] = depths
        grid = np.array([by_length[length]["depth_scores"] for length in lengths], float).T
        image = axis.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto", origin="upper")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45 * (len(lengths) > 4))
        shown = range(0, len(at), max(1, -(-len(at) // MOST_NUMBERS)))
        axis.set_yticks(list(shown), [f"{100 * at[i]:.0f}" for i in shown])
        axis.grid(visible=False)
        if max(grid.shape) <= MOST_NUMBERS:
            for (depth, length), value in np.ndenumerate(grid):
                ink = "black" if value > 50 else "white"
                axis.text(length, depth, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=7)
        axis.set_title("\n".join(map(plain, [*title.split("\n"), task])), fontsize=8)
        axis.set_xlabel("prompt, tokens")
    for axis in axes[::MOST_ACROSS]:
        axis.set_ylabel("depth of the needle, %")
    figure.colorbar(image, ax=axes, label="found, %", shrink=0.8, aspect=40)
    return write(figure, path)


def policy_title(row: Row) -> str:
    """Describe the policy of a row by its method and its share, or by the settings that are not defaults."""
    marks = "".join([" (control)" if row.get("control_of") else "", " (fitted)" if row.get("fitted") else ""])
    if row.get("share"):
        return f"{row['name']}{marks}, {100 * row['share']:g} %"
    name, _, settings = row["policy"].partition(":")
    return "\n".join([f"{name}{marks}", *textwrap.wrap(settings.replace(":", ", "), 30)])


FIELDS = {
    "rank": "rank",
    "chunk_size": "chunk size, tokens",
    "budget": "budget, tokens",
    "outlier_chunks": "outlier chunks a KV head",
    "local_chunks": "local chunks",
    "keys.bits": "bits a column",
    "landmarks.tokens": "tokens a landmark",
    "landmarks.levels": "levels of landmarks",
    "landmarks.order": "order of landmarks",
}
SIZES = {"served_device_bytes": "KV bytes on the device, MB", "served_moved_bytes": "from the host a step, MB"}
MEASURES = {"score": "score, %", "top1": "same next token as full attention, %", "kl": "KL(full, method), nats"}


@styled
def plot_memory(
    rows: Sequence[Row], path: str | os.PathLike[str] | None = None, *, measure: str = "score", moved: bool = False
) -> Any:
    """Plot a quality measure against device memory.

    A method with one setting is a single mark. A method with several settings, or several shares of full attention's
    memory, is a line. Each key code of ShadowKV and each sweep is a separate line. Device memory is the KV cache of one
    request in bfloat16. Offloaded rows are not counted. There is one panel for each task and length.

    Args:
        rows: rows of `evaluate`. Those that have the measure are drawn.
        path: .svg, .png or .pdf file to write, or None.
        measure: "score", "top1" or "kl". The axis of "kl" is logarithmic and leaves out full attention, which has 0.
        moved: whether to add panels with the bytes that a step moves from the host on the horizontal axis.

    Returns:
        The Figure.

    Raises:
        ConfigError: the measure is unknown, no row has it, or the file cannot be written.
    """
    if measure not in MEASURES:
        raise ConfigError(f"measure must be one of {tuple(MEASURES)}, got {measure!r}")
    drawn = with_memory(rows, measure)
    if measure == "kl":
        drawn = [row for row in drawn if row["kl"] > 0 and row["name"] != "full"]
    need(drawn, f"{measure} against memory")
    sizes = ["served_device_bytes", *(["served_moved_bytes"] if moved else [])]
    places = list(dict.fromkeys((row["task"], row["length"], size) for row in drawn for size in sizes))
    methods = list(dict.fromkeys((row["name"], name) for row in drawn for name in lines_of(row)))
    longest = min(LONG, max(len(name) for _, name in methods))
    figure, axes = panels(len(places), 2, WIDE, 3.4, beside=max(1.8, 0.075 * longest))
    handles: dict[str, Any] = {}
    for axis, (task, length, size) in zip(axes, places, strict=True):
        panel = [row for row in drawn if (row["task"], row["length"]) == (task, length)]
        for base, name in methods:
            points = sorted(
                ((row.get(size) or 0) / 1e6, row[measure], row.get(error_of(measure)) or 0.0)
                for row in panel
                if name in lines_of(row)
            )
            if not points:
                continue
            look = look_of(base, [one for one in methods if one[0] == base].index((base, name)))
            if base == "full":
                axis.axhline(points[0][1], color=look["color"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            line = axis.errorbar(
                *zip(*[p[:2] for p in points], strict=True),
                yerr=[p[2] for p in points],
                elinewidth=0.8,
                alpha=0.9,
                **look,
            )
            handles.setdefault(name, line)
        axis.set_title(f"{plain(task)}, {length:,} tokens, {panel[0]['samples']} samples")
        axis.set_xlabel(SIZES[size])
        axis.set_ylabel(MEASURES["top1" if "top1" in panel[0] and measure == "score" else measure])
        axis.set_xlim(left=0)
        if measure == "kl":
            axis.set_yscale("log", nonpositive="clip")
        else:
            axis.set_ylim(-4 if min(row[measure] for row in panel) < 50 else None, 104)
    figure.legend(handles.values(), [plain(name, LONG) for name in handles], loc="outside right upper")
    return write(figure, path)


def method_of(row: Row) -> str:
    """Return the name of a row's line. Rows of the same method, key code, control and fitted flag share a line."""
    codec = (row.get("settings") or {}).get("keys", "lowrank")
    name = row["name"] + (f" {codec}" if codec != "lowrank" else "")
    return name + (" (control)" if row.get("control_of") else "") + (" (fitted)" if row.get("fitted") else "")


def lines_of(row: Row) -> list[str]:
    """Return the names of the lines that a row belongs to: one for each of its sweeps, or that of its method."""
    names = row.get("sweeps") or ()
    return [f"{kind_of(row, name)}, {FIELDS.get(name, name)}" for name in names] or [method_of(row)]


def kind_of(row: Row, field: str) -> str:
    """Return the name of the method whose setting `field` is swept, including its settings of landmarks."""
    settings = row.get("settings") or {}
    tokens = settings.get("landmarks.tokens")
    details = {
        "landmarks.tokens": f"landmarks of {tokens}" if tokens not in (None, settings.get("chunk_size")) else "",
        "landmarks.levels": "2 levels" if settings.get("landmarks.levels") == 2 else "",
        "landmarks.order": "variance" if settings.get("landmarks.order") == 2 else "",
    }
    return ", ".join([method_of(row), *(text for name, text in details.items() if text and name != field)])


def error_of(measure: str) -> str:
    """Return the key of a measure's standard error in a row."""
    return "stderr" if measure == "score" else f"{measure}_stderr"
