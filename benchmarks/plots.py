"""Pictures of the rows of `evaluate` and of what the module `analysis` measures.

A function takes plain numbers and returns a matplotlib Figure. If a path is given, it also writes the file, completely
or not at all. The same numbers give the same bytes. A method has the same color and marker in all pictures (`look_of`).
"""

import functools
import importlib.util
import os
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.evaluation.data import whole_file

LONG = 72  # maximum length of a line's name in a wide legend
FORMATS = (".svg", ".png", ".pdf")
PLAIN = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}  # metadata without a date
# The colors and markers of known methods. A method need not be listed, because `look_of` derives a look from any name.
# The colors can be told apart with the common kinds of color blindness (Okabe and Ito; Tol). Each family of methods has
# one hue, and its members have different markers.
METHODS = {
    "full": ("0.55", "o"),
    "offloaded": ("0.55", "s"),
    "streaming_llm": ("#000000", "x"),
    "h2o": ("#CC79A7", "s"),
    "less": ("#AA4499", "h"),
    "snapkv": ("#882255", "P"),
    "tova": ("#882255", "d"),
    "adakv": ("#117733", "P"),
    "keydiff": ("#AA4499", "*"),
    "expected_attention": ("#CC79A7", "H"),
    "kvzip": ("#882255", "*"),
    "quest": ("#0072B2", "^"),
    "rocketkv": ("#0072B2", "h"),
    "loki": ("#56B4E9", "v"),
    "infinigen": ("#999933", "<"),
    "infllm": ("#332288", ">"),
    "omnikv": ("#56B4E9", "D"),
    "kivi": ("#009E73", "*"),
    "quantized": ("#999999", "s"),
    "specache": ("#117733", "X"),
    "shadowkv": ("#D55E00", "o"),
    "shadowkv_plus": ("#E69F00", "p"),
}
SERIES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#332288", "#000000")
MARKS = "os^Dv<>P"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
STYLE: dict[str, Any] = {
    "svg.hashsalt": "jshadow",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.4",
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.1,
    "savefig.dpi": 150,
}


def look_of(name: str, number: int = 0) -> dict[str, Any]:
    """Return the Line2D properties of a method.

    Args:
        name: the "name" of a row. If it is not in METHODS, its color and marker are derived from a hash of it.
        number: index of the setting among those of the method in one panel. All settings have the same color. Settings
            after the first have other dashes and a hollow marker.
    """
    if name in METHODS:
        color, mark = METHODS[name]
    else:
        hashed = zlib.crc32(name.encode())
        color, mark = SERIES[hashed % len(SERIES)], MARKS[hashed // len(SERIES) % len(MARKS)]
    look = {"color": color, "marker": mark, "linestyle": DASHES[number % len(DASHES)]}
    return look if not number else look | {"markerfacecolor": "white", "marker": MARKS[number % len(MARKS)]}


def series_look(number: int) -> dict[str, Any]:
    """Return the Line2D properties of line `number` of a picture whose lines are not methods."""
    return {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number // len(SERIES) % len(DASHES)]}


def styled[Draw: Callable[..., Any]](draw: Draw) -> Draw:
    """Decorate a function so that it draws and writes in the style of this module, independent of matplotlibrc."""

    @functools.wraps(draw)
    def inside(*args: Any, **options: Any) -> Any:
        import matplotlib

        # The defaults come first, so that a picture does not depend on the user's settings.
        look: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE}
        with matplotlib.rc_context(look):
            return draw(*args, **options)

    return inside  # type: ignore[return-value]


def plain(text: str, most: int = 32) -> str:
    """Shorten a text to `most` characters, and escape its dollar signs so that it is not read as mathematics."""
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def panels(
    count: int, columns: int, width: float, height: float, *, beside: float = 0.0, **options: Any
) -> tuple[Any, list[Any]]:
    """Create a figure of `count` axes in rows of at most `columns`.

    Args:
        count: number of axes.
        columns: maximum number of axes in a row.
        width: width of each axis in inches.
        height: height of each axis in inches.
        beside: additional width in inches to the right of all axes, for a legend or a color bar.
        **options: passed to `Figure.subplots`.

    Returns:
        The figure, and its axes in order.
    """
    from matplotlib.figure import Figure

    across = max(1, min(count, columns))
    down = max(1, -(-count // across))
    figure = Figure(figsize=(width * across + beside, height * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, **options).ravel().tolist()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def need(rows: Any, what: str) -> None:
    """Raise ConfigError if there is nothing to draw. `what` is the name of the picture in the message."""
    if not len(rows):
        raise ConfigError(f"a picture of {what} needs at least one row or line, got none")


def write(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Write a figure, completely or not at all, if a path is given. Returns the figure.

    Raises:
        ConfigError: the name does not end with one of FORMATS, or the file cannot be written.
    """
    if path is None:
        return figure
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise ConfigError(f"plot must be a file that ends with one of {FORMATS}, got {str(path)!r}")
    with whole_file(path, "plot") as part:
        figure.savefig(part, metadata=PLAIN[suffix])
    return figure


Row = Mapping[str, Any]
WIDE, MOST_ACROSS = 4.2, 4  # width of a panel in inches, maximum number of panels in a row
MOST_NUMBERS = 12  # a heat map with at most this many rows and columns has a number in each cell


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


CROWD = 3  # with more lines than this, the legend is below the panel
SWEPT_MEASURES = {
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
    shown = [measure for measure in SWEPT_MEASURES if any(measured(row, measure) is not None for row in drawn)]
    many = len({(row["task"], row["name"], row["length"]) for row in drawn})
    figure, axes = panels(len(shown), len(SWEPT_MEASURES), 3.4, 3.0 + (0.2 * many if many > CROWD else 0))
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
        axis.set_ylabel(SWEPT_MEASURES[measure])
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


Target = str | os.PathLike[str] | None
KIND_NAMES = {"k_pre": "pre-RoPE keys", "k_post": "post-RoPE keys", "v": "values", "x_in": "hidden states"}
SMALLEST = 1e-3  # lower end of the axis of relative singular values


def band(axis: Any, x: Any, table: np.ndarray, look: dict[str, Any], label: str | None) -> None:
    """Draw the mean over layers of a table [layers, points], and a band from the 10th to the 90th percentile."""
    axis.fill_between(x, *np.quantile(table, (0.1, 0.9), axis=0), color=look["color"], alpha=0.12, linewidth=0)
    axis.plot(x, table.mean(axis=0), label=label, **look)


@styled
def plot_spectra(texts: Mapping[str, Mapping[str, np.ndarray]], path: Target = None) -> Any:
    """Draw the singular values, and the squared norm that each rank keeps (ShadowKV, figure 1, left).

    Each text is one row of two panels. Lines are means over layers, and bands reach from the 10th to the 90th
    percentile. The horizontal axis ends at the number of columns of the narrowest tensor.

    Args:
        texts: maps the name of each text to its `Spectra.values`. These map the kind of a tensor to singular values
            [layers, columns], divided by the largest of their layer.
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure.

    Raises:
        ConfigError: there is no text, or the file cannot be written.
    """
    need(texts, "spectra")
    figure, axes = panels(2 * len(texts), 2, 4.2, 3.2)
    for row, (name, values) in enumerate(texts.items()):
        left, right = axes[2 * row : 2 * row + 2]
        width = min(table.shape[1] for table in values.values())
        for number, (kind, table) in enumerate(values.items()):
            look, squares = series_look(number), table**2
            energy = np.cumsum(squares, axis=1) / np.maximum(squares.sum(axis=1, keepdims=True), 1e-300)
            band(left, range(1, width + 1), np.maximum(table[:, :width], 1e-12), look, None)
            band(right, range(1, width + 1), 100 * energy[:, :width], look, KIND_NAMES.get(kind, kind))
        left.set_yscale("log")
        left.set_ylim(bottom=SMALLEST)
        left.set_xlabel("number of the singular value")
        left.set_ylabel("singular value, of the largest")
        right.set_xlabel("rank")
        right.set_ylabel("squared norm kept, %")
        right.set_ylim(top=101)
        right.legend(loc="lower right")
        for axis in (left, right):
            axis.set_title(name)
            axis.set_xlim(1, width)
    return write(figure, path)


@styled
def plot_subspaces(lines: Mapping[str, np.ndarray], chance: float, path: Target = None) -> Any:
    """Draw the similarity D of a context's subspace to others, by layer (ShadowKV, section 3.1; figure 1, middle).

    Args:
        lines: maps the name of each text that the context is compared with to its D [layers].
        chance: the mean of D for random subspaces.
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure.

    Raises:
        ConfigError: there is no line, or the file cannot be written.
    """
    need(lines, "subspaces")
    figure, [axis] = panels(1, 1, 5.6, 3.2)
    for number, (name, table) in enumerate(lines.items()):
        axis.plot(
            range(len(table)), table, label=name, marker=MARKS[number % len(MARKS)], markersize=4, **series_look(number)
        )
    axis.axhline(chance, color="0.5", linewidth=1, linestyle=(0, (4, 3)), label="by chance")
    axis.set_ylim(0, 1.03)
    axis.set_xlabel("layer")
    axis.set_ylabel("similarity of subspaces, D")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return write(figure, path)


@styled
def plot_least_cosines(texts: Mapping[str, np.ndarray], path: Target = None) -> Any:
    """Draw the smallest cosines of keys to their landmarks (ShadowKV, section 3.2; figure 5, middle).

    The left panel shows the share of all chunks whose smallest cosine is below a value. Its axis is logarithmic to show
    the outliers. The right panel shows for each layer the median, and a band from the 1st to the 99th percentile.

    Args:
        texts: maps the name of each text to its `ChunkSimilarity.least` [layers, h_kv, chunks].
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure.

    Raises:
        ConfigError: there is no text, or the file cannot be written.
    """
    need(texts, "least cosines")
    figure, [left, right] = panels(2, 2, 4.2, 3.2)
    for number, (name, least) in enumerate(texts.items()):
        look, flat = series_look(number), least.reshape(least.shape[0], -1)
        edges = np.linspace(-1, 1, 201)
        below = np.searchsorted(np.sort(flat, axis=None), edges) / flat.size
        left.plot(edges, np.where(below > 0, 100 * below, np.nan), label=name, **look)
        layers = range(len(flat))
        right.fill_between(layers, *np.quantile(flat, (0.01, 0.99), axis=1), color=look["color"], alpha=0.12, lw=0)
        right.plot(layers, np.median(flat, axis=1), label=name, **look)
    left.set_yscale("log")
    left.set_ylim(top=110)
    left.set_xlabel("least cosine of a key to its chunk's landmark")
    left.set_ylabel("chunks below, %")
    left.legend(loc="upper left")
    right.set_xlabel("layer")
    right.set_ylabel("least cosine in a chunk")
    return write(figure, path)


@styled
def plot_hit_rates(texts: Mapping[str, np.ndarray], path: Target = None) -> Any:
    """Draw the share of selected chunks that the previous step also selected (ShadowKV, section 3.2; figure 5, right).

    The left panel shows each step: the mean over layers, and a band from the 10th to the 90th percentile. The right
    panel shows each layer: the mean over steps.

    Args:
        texts: maps the name of each text to its `HitRates.rates` [steps - 1, layers].
        path: .svg, .png or .pdf file to write, or None.

    Returns:
        The Figure.

    Raises:
        ConfigError: there is no text, or the file cannot be written.
    """
    need(texts, "hit rates")
    figure, [left, right] = panels(2, 2, 4.2, 3.2, sharey=True)
    for number, (name, rates) in enumerate(texts.items()):
        look = series_look(number)
        band(left, range(2, len(rates) + 2), 100 * rates.T, look, name)
        right.plot(
            range(rates.shape[1]),
            100 * rates.mean(axis=0),
            marker=MARKS[number % len(MARKS)],
            markersize=4,
            label=name,
            **look,
        )
    left.set_ylim(0, 103)
    left.set_xlabel("decode step")
    left.set_ylabel("selected in the step before too, %")
    left.legend(loc="lower right")
    right.set_xlabel("layer")
    return write(figure, path)
