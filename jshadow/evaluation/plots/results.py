"""Pictures of the rows of `evaluate`: needles by length and depth, scores against device memory, turn by turn."""

import importlib.util
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.plots.style import FORMATS, LONG, look_of, need, panels, plain, styled, write

Row = Mapping[str, Any]
WIDE, MOST_ACROSS = 4.2, 4  # inches of a panel, panels side by side
MOST_NUMBERS = 12  # cells of a heat map's row or column up to which each has its number written in


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
    check_matplotlib()


def check_matplotlib() -> None:
    """Raise ConfigError where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib: pip install 'jshadow[plots]'")


def with_turns(rows: Iterable[Row]) -> list[Row]:
    """Rows that `plot_turns` draws."""
    return [row for row in rows if len(row.get("turns") or ()) > 1]


def with_scores(rows: Iterable[Row]) -> list[Row]:
    """Rows that `plot_needles` draws: a score for each of several depths, of one fact and not of several in turn."""
    return [row for row in rows if len(row.get("depths") or ()) > 1 and len(row.get("turns") or ()) < 2]


def with_memory(rows: Iterable[Row], measure: str) -> list[Row]:
    """Rows that `plot_memory` draws."""
    return [row for row in rows if row.get(measure) is not None and row.get("served_device_bytes")]


def looks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The look of each row of one panel: a method's second setting has its colour and marker, and dashes."""
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
    """Draw the share of right answers by turn, a line a policy, a panel a task and length.

    Args:
        rows: of `evaluate`; those with several turns are drawn.
        path: .svg, .png or .pdf to write.

    Returns:
        The Figure.

    Raises:
        ConfigError: no such row, or a file that cannot be written.
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
            if row["name"] == "full":  # broad, behind the others, which may lie on it
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
    """Draw a heat map of needles found, length by depth, a panel a task and policy (ShadowKV, figure 10).

    Args:
        rows: of `evaluate`; those with "depths" of the needle, and "depth_scores" (percent) at each, are drawn.
        path: .svg, .png or .pdf to write.

    Returns:
        The Figure.

    Raises:
        ConfigError: no such row, a task with other depths at other lengths, or a file that cannot be written.
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
    """A row's policy in a few words: its method, then the share it was given or the settings that are not defaults."""
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
    """Draw accuracy against device memory: a mark a method, a line where one has several settings or shares.

    Memory is that of the KV cache of one request in bfloat16, with what the method offloads on the host. ShadowKV with
    another key code is a line of its own, and so is each sweep.

    Args:
        rows: of `evaluate`; those that have the measure are drawn, a panel a task and length.
        path: .svg, .png or .pdf to write.
        measure: "score", "top1" or "kl"; the axis of "kl" is logarithmic, and full attention (0) is not on it.
        moved: also draw it against the bytes that a step moves from the host, in a panel beside each.

    Returns:
        The Figure.

    Raises:
        ConfigError: an unknown measure, no row that has it, or a file that cannot be written.
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
    """The key of a row's line. Rows of one method, key code, role (control or not) and training share a line."""
    codec = (row.get("settings") or {}).get("keys", "lowrank")
    name = row["name"] + (f" {codec}" if codec != "lowrank" else "")
    return name + (" (control)" if row.get("control_of") else "") + (" (fitted)" if row.get("fitted") else "")


def lines_of(row: Row) -> list[str]:
    """The lines that a row is a mark of: one a sweep that it is in."""
    names = row.get("sweeps") or ()
    return [f"{kind_of(row, name)}, {FIELDS.get(name, name)}" for name in names] or [method_of(row)]


def kind_of(row: Row, field: str) -> str:
    """The method whose setting is swept; one that has other landmarks is another one."""
    settings = row.get("settings") or {}
    tokens = settings.get("landmarks.tokens")
    details = {
        "landmarks.tokens": f"landmarks of {tokens}" if tokens not in (None, settings.get("chunk_size")) else "",
        "landmarks.levels": "2 levels" if settings.get("landmarks.levels") == 2 else "",
        "landmarks.order": "variance" if settings.get("landmarks.order") == 2 else "",
    }
    return ", ".join([method_of(row), *(text for name, text in details.items() if text and name != field)])


def error_of(measure: str) -> str:
    """The key of a measure's standard error in a row."""
    return "stderr" if measure == "score" else f"{measure}_stderr"
