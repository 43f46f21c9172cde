"""Pictures of the results of `evaluate` and of `jshadow.evaluation.analysis`. Only this package imports matplotlib.

A function takes plain numbers and returns a matplotlib Figure. If a path is given, it also writes the file, completely
or not at all. The same numbers give the same bytes. A method has the same color and marker in all pictures
(`style.look_of`).
"""

from jshadow.evaluation.plots.observations import (
    KIND_NAMES,
    plot_hit_rates,
    plot_least_cosines,
    plot_spectra,
    plot_subspaces,
)
from jshadow.evaluation.plots.results import check_plot, plot_memory, plot_needles, plot_turns
from jshadow.evaluation.plots.style import FORMATS
from jshadow.evaluation.plots.sweeps import plot_sweep

__all__ = [
    "FORMATS",
    "KIND_NAMES",
    "check_plot",
    "plot_hit_rates",
    "plot_least_cosines",
    "plot_memory",
    "plot_needles",
    "plot_spectra",
    "plot_subspaces",
    "plot_sweep",
    "plot_turns",
]
