"""Pictures of the results of `jshadow.evaluation.analysis`: spectra, subspaces, smallest cosines, hit rates."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.evaluation.plots.style import MARKS, need, panels, series_look, styled, write

Path = str | os.PathLike[str] | None
KIND_NAMES = {"k_pre": "pre-RoPE keys", "k_post": "post-RoPE keys", "v": "values", "x_in": "hidden states"}
SMALLEST = 1e-3  # lower end of the axis of relative singular values


def band(axis: Any, x: Any, table: np.ndarray, look: dict[str, Any], label: str | None) -> None:
    """Draw the mean over layers of a table [layers, points], and a band from the 10th to the 90th percentile."""
    axis.fill_between(x, *np.quantile(table, (0.1, 0.9), axis=0), color=look["color"], alpha=0.12, linewidth=0)
    axis.plot(x, table.mean(axis=0), label=label, **look)


@styled
def plot_spectra(texts: Mapping[str, Mapping[str, np.ndarray]], path: Path = None) -> Any:
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
def plot_subspaces(lines: Mapping[str, np.ndarray], chance: float, path: Path = None) -> Any:
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
def plot_least_cosines(texts: Mapping[str, np.ndarray], path: Path = None) -> Any:
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
def plot_hit_rates(texts: Mapping[str, np.ndarray], path: Path = None) -> Any:
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
