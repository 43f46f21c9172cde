"""Pictures of evaluation results and of what `jshadow.analysis` finds. Only this package imports matplotlib.

A function takes plain numbers and returns matplotlib's Figure. With a path it writes the file too, whole or not at all.
The same numbers give the same bytes. A method has one colour and one marker in all pictures (`style.look_of`).
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
