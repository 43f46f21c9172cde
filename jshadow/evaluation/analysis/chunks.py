"""Measures how well the mean of a chunk represents its keys (ShadowKV, section 3.2 and algorithm 1)."""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import LayerTensors
from jshadow.ops.layout import to_chunks
from jshadow.policies.checks import check_range
from jshadow.policies.shadowkv.landmarks import chunk_landmarks


@dataclasses.dataclass(frozen=True)
class ChunkSimilarity:
    """The smallest cosine between a landmark and a key of its chunk, for every chunk of a text.

    Attributes:
        least: float32 [layers, h_kv, chunks], in the order of the text. An incomplete last chunk is left out.
        chunk_size: number of tokens of a chunk.
    """

    least: np.ndarray
    chunk_size: int

    def quantiles(self, shares: Iterable[float] = (0.002, 0.01, 0.1, 0.5, 0.9)) -> np.ndarray:
        """Return quantiles of the cosines of each layer, over all heads and chunks.

        Args:
            shares: the quantiles to return, each in [0, 1].

        Returns:
            float [layers, shares].
        """
        flat = self.least.reshape(self.least.shape[0], -1)
        return np.quantile(flat, list(shares), axis=1).T

    def share_below(self, cosine: float) -> np.ndarray:
        """Return the share of each layer's chunks whose smallest cosine is below `cosine`, float64 [layers]."""
        return (self.least < cosine).mean(axis=(1, 2), dtype=np.float64)

    def outliers(self, count: int) -> np.ndarray:
        """Return the chunks that ShadowKV would keep exact, smallest cosine first: int [layers, h_kv, count].

        Of two chunks with equal cosines, the one with the lower id is first. All complete chunks of the text are
        candidates. ShadowKV itself leaves out the last `local_chunks`, because they are in its window.

        Raises:
            ConfigError: count is not in 0 .. chunks.
        """
        check_range("chunk_similarity", "count", count, 0, self.least.shape[2])
        return np.argsort(self.least, axis=2, kind="stable")[..., :count]

    def without_outliers(self, count: int) -> np.ndarray:
        """Return the smallest cosine of all chunks except the `count` outliers, float32 [layers, h_kv].

        Raises:
            ConfigError: count is not in 0 .. chunks - 1.
        """
        check_range("chunk_similarity", "count", count, 0, self.least.shape[2] - 1)
        return np.sort(self.least, axis=2)[..., count]


def chunk_similarity(layers: Iterable[LayerTensors], chunk_size: int = 8) -> ChunkSimilarity:
    """Compute the smallest cosine of each chunk's post-RoPE keys to their mean (ShadowKV, 3.2 and figure 5, middle).

    The chunks start at the first token of the text. Their means are the landmarks of ShadowKV, computed by the same
    function.

    Args:
        layers: the layers from `prompt_tensors`. They are iterated once.
        chunk_size: number of tokens of a chunk. It is at most the length of the text.

    Raises:
        ConfigError: chunk_size is out of range, or there are no layers.
    """
    check_range("chunk_similarity", "chunk_size", chunk_size, 1)
    measure = jax.jit(lambda keys, chunks: chunk_landmarks(to_chunks(keys, chunks, chunk_size))[1], static_argnums=1)
    similarities = []
    for layer in layers:
        tokens = layer.k_post.shape[0]
        check_range("chunk_similarity", "chunk_size", chunk_size, 1, tokens)
        similarities.append(np.asarray(measure(layer.k_post[None], tokens // chunk_size))[0])
    if not similarities:
        raise ConfigError("layers must be the tensors of at least one layer, got none")
    return ChunkSimilarity(np.stack(similarities), chunk_size)
