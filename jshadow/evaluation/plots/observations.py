"""Pictures of what `jshadow.analysis` finds: spectra, subspaces, least cosines, hit rates."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jshadow.evaluation.plots.style import MARKS, need, panels, series_look, styled, write

Path = str | os.PathLike[str] | None
KIND_NAMES = {"k_pre": "pre-RoPE keys", "k_post": "post-RoPE keys", "v": "values", "x_in": "hidden states"}
SMALLEST = 1e-3  # relative singular values below are not drawn


def band(axis: Any, x: Any, table: np.ndarray, look: dict[str, Any], label: str | None) -> None:
    """The mean over axis 0 of a table [layers, points], and where eight of ten layers lie."""
    axis.fill_between(x, *np.quantile(table, (0.1, 0.9), axis=0), color=look["color"], alpha=0.12, linewidth=0)
    axis.plot(x, table.mean(axis=0), label=label, **look)


@styled
def plot_spectra(texts: Mapping[str, Mapping[str, np.ndarray]], path: Path = None) -> Any:
    """Draw how fast singular values fall and what a rank keeps (ShadowKV, figure 1, left), a row of panels a text.

    Lines are means over layers, bands hold eight of ten layers; up to as many columns as the narrowest tensor has.

    Args:
        texts: by name, `Spectra.values`: by kind, relative singular values [layers, columns].
        path: .svg, .png or .pdf to write.

    Returns:
        The Figure.

    Raises:
        ConfigError: no text, or a file that cannot be written.
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
    """Draw the similarity D of a context's subspace to others by layer (ShadowKV, section 3.1; figure 1, middle).

    Args:
        lines: by what the context is compared with, D [layers].
        chance: the mean of D for subspaces drawn at random.
        path: .svg, .png or .pdf to write.

    Returns:
        The Figure.

    Raises:
        ConfigError: no line, or a file that cannot be written.
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
    """Draw how badly landmarks represent their chunks at worst (ShadowKV, section 3.2; figure 5, middle).

    Left, the share of all chunks whose least cosine is below a value, on a logarithmic axis that shows the outliers.
    Right, by layer: the median, and a band from the first to the 99th percentile.

    Args:
        texts: by name, `ChunkSimilarity.least` [layers, h_kv, chunks].
        path: .svg, .png or .pdf to write.

    Returns:
        The Figure.

    Raises:
        ConfigError: no text, or a file that cannot be written.
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
    """Draw how much of a selection was selected in the step before (ShadowKV, section 3.2; figure 5, right).

    Left by step (mean over layers; eight of ten layers in the band), right by layer (mean over steps).

    Args:
        texts: by name, `HitRates.rates` [steps - 1, layers].
        path: .svg, .png or .pdf to write.

    Returns:
        The Figure.

    Raises:
        ConfigError: no text, or a file that cannot be written.
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
