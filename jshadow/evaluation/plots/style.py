"""The style of all pictures: one color and marker for each method, plain axes, and files without dates."""

import functools
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.whole_file import whole_file

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
