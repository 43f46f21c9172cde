"""How well the mean of a chunk represents its keys (ShadowKV, section 3.2 and algorithm 1)."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import LayerTensors
from jshadow.ops.layout import to_chunks
from jshadow.policies.checks import check_range
from jshadow.policies.shadowkv.landmarks import chunk_landmarks


@dataclasses.dataclass(frozen=True)
class ChunkSimilarity:
    """The least cosine between a landmark and a key of its chunk, for every chunk of a text.

    Attributes:
        least: float32 [layers, h_kv, chunks], in the order of the text; a last part of a chunk is left out.
        chunk_size: tokens of a chunk.
    """

    least: np.ndarray
    chunk_size: int

    def quantiles(self, shares: Iterable[float] = (0.002, 0.01, 0.1, 0.5, 0.9)) -> np.ndarray:
        """The cosine that this share of each layer's chunks, all heads together, stays below: [layers, shares]."""
        flat = self.least.reshape(self.least.shape[0], -1)
        return np.quantile(flat, list(shares), axis=1).T

    def share_below(self, cosine: float) -> np.ndarray:
        """Share of each layer's chunks whose least cosine is below `cosine`, float64 [layers]."""
        return (self.least < cosine).mean(axis=(1, 2), dtype=np.float64)

    def outliers(self, count: int) -> np.ndarray:
        """The chunks that ShadowKV would keep exactly, the least first, ties to the lower id: [layers, h_kv, count].

        Of all whole chunks of the text; ShadowKV leaves its `local_chunks` last ones out, they are in the window.

        Raises:
            ConfigError: count is not in 0 .. chunks.
        """
        check_range("chunk_similarity", "count", count, 0, self.least.shape[2])
        return np.argsort(self.least, axis=2, kind="stable")[..., :count]

    def without_outliers(self, count: int) -> np.ndarray:
        """The least cosine of what is left for landmarks to represent, when `count` outliers are kept: [layers, h_kv].

        Raises:
            ConfigError: count is not in 0 .. chunks - 1.
        """
        check_range("chunk_similarity", "count", count, 0, self.least.shape[2] - 1)
        return np.sort(self.least, axis=2)[..., count]


def chunk_similarity(layers: Iterable[LayerTensors], chunk_size: int = 8) -> ChunkSimilarity:
    """Least cosine of each chunk's post-RoPE keys to their mean (ShadowKV, section 3.2 and figure 5, middle).

    The chunks begin at the text's first token and have the landmarks that ShadowKV scores, by the same function.

    Args:
        layers: from `prompt_tensors`, consumed once.
        chunk_size: tokens, at most those of the text.

    Raises:
        ConfigError: chunk_size out of range, or no layers.
    """
    check_range("chunk_similarity", "chunk_size", chunk_size, 1)
    measure = jax.jit(lambda keys, chunks: chunk_landmarks(to_chunks(keys, chunks, chunk_size))[1], static_argnums=1)
    similarities = []
    for layer in layers:
        tokens = layer.k_post.shape[0]
        check_range("chunk_similarity", "chunk_size", chunk_size, 1, tokens)
        similarities.append(np.asarray(measure(jnp.asarray(layer.k_post)[None], tokens // chunk_size))[0])
    if not similarities:
        raise ConfigError("layers must be the tensors of at least one layer, got none")
    return ChunkSimilarity(np.stack(similarities), chunk_size)
