"""How fast the singular values of keys, values and hidden states fall, and which subspace they span (ShadowKV 3.1)."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import LayerTensors
from jshadow.policies.checks import check_range

KINDS = ("k_pre", "k_post", "v", "x_in")  # fields of LayerTensors


def as_matrix(tensor: np.ndarray) -> np.ndarray:
    """Tokens by columns, float64: of [S, h, d] all heads side by side, as algorithm 1 factors keys; [S, m] as is."""
    if tensor.ndim not in (2, 3) or not tensor.size:
        raise ConfigError(f"a tensor of analysis must be [S, h, d] or [S, m], and some, got {tensor.shape}")
    return np.asarray(tensor, np.float64).reshape(tensor.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Spectra:
    """Singular values of a text's tensors, layer by layer.

    Attributes:
        values: by kind ("k_pre", "k_post", "v", "x_in"), float64 [layers, columns], each layer's falling and relative
            to its largest; zero from the text's length on. Columns are h_kv * d, of "x_in" the model's width.
    """

    values: Mapping[str, np.ndarray]

    def energy(self, kind: str, rank: int) -> np.ndarray:
        """Share of the squared Frobenius norm that the best `rank` columns keep, float64 [layers] in [0, 1].

        What a truncated SVD of that rank loses is the rest. A layer of zeros loses nothing: 1.

        Raises:
            ConfigError: an unknown kind, or a rank that is not in 0 .. columns.
        """
        if kind not in self.values:
            raise ConfigError(f"kind must be one of {sorted(self.values)}, got {kind!r}")
        squares = self.values[kind] ** 2
        check_range("spectra", "rank", rank, 0, squares.shape[1])
        total = squares.sum(axis=1)
        return np.where(total > 0, squares[:, :rank].sum(axis=1) / np.where(total > 0, total, 1.0), 1.0)

    def rank_for(self, kind: str, share: float) -> np.ndarray:
        """The least rank that keeps this share of the energy, int64 [layers]. Raises ConfigError."""
        if not 0 < share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {share!r}")
        if kind not in self.values:
            raise ConfigError(f"kind must be one of {sorted(self.values)}, got {kind!r}")
        energy = np.cumsum(self.values[kind] ** 2, axis=1)
        # a share of 1 must not depend on the last bit of a sum
        return (energy < share * energy[:, -1:] * (1 - 1e-12)).sum(axis=1) + (energy[:, -1] > 0)


def singular_values(layers: Iterable[LayerTensors], kinds: Iterable[str] = KINDS) -> Spectra:
    """Relative singular values of each layer's tensors (ShadowKV, section 3.1 and figure 1, left).

    Tensors are not centred, for algorithm 1 factors keys as they are. They are the roots of the Gram matrix's
    eigenvalues in float64: what is below 1e-8 of the largest is rounding, as it is in float32 tensors themselves.

    Args:
        layers: from `prompt_tensors`, consumed once.
        kinds: which of KINDS.

    Raises:
        ConfigError: an unknown kind, or no layers.
    """
    names = tuple(kinds)
    if not names or any(name not in KINDS for name in names):
        raise ConfigError(f"kinds must be among {KINDS}, got {names}")
    falls: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for layer in layers:
        for name in names:
            matrix = as_matrix(getattr(layer, name))
            values = np.sqrt(np.maximum(np.linalg.eigvalsh(matrix.T @ matrix)[::-1], 0.0))
            values[matrix.shape[0] :] = 0.0
            falls[name].append(values / values[0] if values[0] > 0 else values)
    if not falls[names[0]]:
        raise ConfigError("layers must be the tensors of at least one layer, got none")
    return Spectra({name: np.stack(rows) for name, rows in falls.items()})


def right_basis(tensor: np.ndarray, rank: int) -> np.ndarray:
    """The first `rank` right singular vectors of a tensor's matrix, float64 [columns, rank]. Raises ConfigError."""
    matrix = as_matrix(tensor)
    check_range("subspace_similarity", "rank", rank, 1, min(matrix.shape))
    return np.linalg.eigh(matrix.T @ matrix)[1][:, ::-1][:, :rank]


def subspace_similarity(first: np.ndarray, second: np.ndarray, rank: int) -> float:
    """D of ShadowKV, section 3.1: how much the rank-r subspaces of two texts' rows have in common.

    With the right singular vectors P1, P2 [columns, r] of the two truncated SVDs, the Frobenius inner product of their
    projections, <P1 P1^T, P2 P2^T> / r. 1 for the same subspace, 0 for orthogonal ones, and for two subspaces that
    have nothing to do with each other r / columns in the mean.

    Args:
        first, second: [S, h, d] or [S, m], as many columns in both; S may differ.
        rank: r, at most the columns and the tokens of either.

    Raises:
        ConfigError: other shapes, or a rank out of range.
    """
    one, two = right_basis(first, rank), right_basis(second, rank)
    if one.shape[0] != two.shape[0]:
        raise ConfigError(f"second must have as many columns as first, {one.shape[0]}, got {two.shape[0]}")
    return float(np.sum((one.T @ two) ** 2) / rank)


@dataclasses.dataclass(frozen=True)
class Subspaces:
    """D by layer between the subspace of a context and others, float64 [layers].

    Attributes:
        extended: the context with its continuation, as in the paper's figure.
        continuation: the continuation alone, which shares no token with the context.
        other: another text.
        chance: rank / columns, the mean of D for subspaces drawn at random.
    """

    extended: np.ndarray
    continuation: np.ndarray
    other: np.ndarray
    chance: float


def compare_subspaces(
    text: Iterable[LayerTensors], other: Iterable[LayerTensors], context: int, rank: int, kind: str = "k_pre"
) -> Subspaces:
    """Do keys keep to one subspace within a text, and between texts? (ShadowKV, section 3.1 and figure 1, middle.)

    Args:
        text: from `prompt_tensors`: the context and its continuation. What later tokens are does not change earlier
            keys, so that the context's own are its first rows.
        other: those of another text.
        context: tokens of the context; at least `rank`, with `rank` more behind them.
        rank: of the truncated SVDs.
        kind: one of KINDS.

    Raises:
        ConfigError: a text too short for the rank, a kind that is none, or layers that differ in number.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind must be one of {KINDS}, got {kind!r}")
    layers, others = list(text), list(other)
    if len(layers) != len(others) or not layers:
        raise ConfigError(f"other must have as many layers as text, {len(layers)} and some, got {len(others)}")
    rows: list[list[float]] = []
    for here, there in zip(layers, others, strict=True):
        tensor = getattr(here, kind)
        check_range("compare_subspaces", "context", context, rank, max(rank, tensor.shape[0] - rank))
        base = tensor[:context]
        rows.append([subspace_similarity(base, one, rank) for one in (tensor, tensor[context:], getattr(there, kind))])
    table = np.array(rows)
    extended, continuation, apart = table.T
    return Subspaces(extended, continuation, apart, rank / as_matrix(getattr(layers[0], kind)).shape[1])
