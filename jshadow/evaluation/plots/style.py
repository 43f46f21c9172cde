"""The style of all pictures: one colour and marker a method, plain axes, and files without dates."""

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jshadow.errors import ConfigError

LONG = 72  # letters of a line's name where it has room
FORMATS = (".svg", ".png", ".pdf")
PLAIN = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}  # no date in a file
# A method needs no line here: `look_of` makes a look of any name. These are chosen by hand, so that they go together:
# colours that the common kinds of colour blindness tell apart (Okabe and Ito; Tol); the families of methods have a hue
# each, and within one the markers differ.
METHODS = {
    "full": ("0.55", "o"),
    "streaming_llm": ("#000000", "x"),
    "h2o": ("#CC79A7", "s"),
    "less": ("#AA4499", "h"),
    "snapkv": ("#882255", "P"),
    "quest": ("#0072B2", "^"),
    "loki": ("#56B4E9", "v"),
    "infinigen": ("#999933", "<"),
    "infllm": ("#332288", ">"),
    "omnikv": ("#56B4E9", "D"),
    "kivi": ("#009E73", "*"),
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
Draw = TypeVar("Draw", bound=Callable[..., Any])


def look_of(name: str, number: int = 0) -> dict[str, Any]:
    """Line2D properties of a method: its colour always; dashes and a hollow marker for its n-th setting in one panel.

    Args:
        name: as a row's "name". One that is not in METHODS gets a colour and a marker that follow from its name.
        number: of the method's settings in the panel, 0 the first.
    """
    if name in METHODS:
        colour, mark = METHODS[name]
    else:
        hashed = zlib.crc32(name.encode())
        colour, mark = SERIES[hashed % len(SERIES)], MARKS[hashed // len(SERIES) % len(MARKS)]
    look = {"color": colour, "marker": mark, "linestyle": DASHES[number % len(DASHES)]}
    return look if not number else look | {"markerfacecolor": "white", "marker": MARKS[number % len(MARKS)]}


def series_look(number: int) -> dict[str, Any]:
    """Line2D properties of the n-th line of a picture whose lines are no methods."""
    return {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number // len(SERIES) % len(DASHES)]}


def styled(draw: Draw) -> Draw:
    """Draw and write in our style, whatever the user's matplotlibrc says."""

    @functools.wraps(draw)
    def inside(*args: Any, **options: Any) -> Any:
        import matplotlib

        # the defaults first: a picture must not depend on who draws it
        look: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE}
        with matplotlib.rc_context(look):
            return draw(*args, **options)

    return inside  # type: ignore[return-value]


def plain(text: str, most: int = 32) -> str:
    """Text for a picture: no mathematics between dollar signs, and not so long that no room is left to draw."""
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def panels(
    count: int, columns: int, width: float, height: float, *, beside: float = 0.0, **options: Any
) -> tuple[Any, list[Any]]:
    """A figure of `count` axes in rows of at most `columns`, each width x height inches; and the axes in order.

    `beside`: inches for what stands at the right of all of them.
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
    """Raise ConfigError where there is nothing to draw."""
    if not len(rows):
        raise ConfigError(f"a picture of {what} needs at least one, got none")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """A name to write to that becomes the file `path` when the block ends, or vanishes when it fails.

    Raises:
        ConfigError: the file cannot be written; `what` names it.
    """
    target = Path(path)
    part = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"{what} must be a file that can be written, got {str(path)!r}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def write(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Write a figure where a path is given, whole or not at all, and return it.

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
