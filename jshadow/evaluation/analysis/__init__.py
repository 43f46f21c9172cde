"""The measurements of the ShadowKV paper on a model and a text: spectra, subspaces, landmarks, hit rates, sweeps.

Functions return frozen records of NumPy arrays, or rows in the format of `evaluate`. `evaluation.plots` draws them.
"""

from jshadow.evaluation.analysis.chunks import ChunkSimilarity, chunk_similarity
from jshadow.evaluation.analysis.hits import HitRates, hit_rates
from jshadow.evaluation.analysis.spectra import (
    KINDS,
    Spectra,
    Subspaces,
    compare_subspaces,
    singular_values,
    subspace_similarity,
)
from jshadow.evaluation.analysis.sweeps import sweep
from jshadow.evaluation.analysis.tensors import LayerTensors, prompt_tensors

__all__ = [
    "KINDS",
    "ChunkSimilarity",
    "HitRates",
    "LayerTensors",
    "Spectra",
    "Subspaces",
    "chunk_similarity",
    "compare_subspaces",
    "hit_rates",
    "prompt_tensors",
    "singular_values",
    "subspace_similarity",
    "sweep",
]
