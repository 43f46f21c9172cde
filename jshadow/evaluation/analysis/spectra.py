"""Singular values of keys, values and hidden states, and the subspaces that they span (ShadowKV, section 3.1)."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import LayerTensors
from jshadow.policies.checks import check_range

KINDS = ("k_pre", "k_post", "v", "x_in")  # fields of LayerTensors


def as_matrix(tensor: np.ndarray) -> np.ndarray:
    """Turn a tensor [S, h, d] or [S, m] into a float64 matrix [S, h * d] or [S, m], as algorithm 1 does with keys."""
    if tensor.ndim not in (2, 3) or not tensor.size:
        raise ConfigError(f"a tensor must be [S, h, d] or [S, m] and not empty, got {tensor.shape}")
    return np.asarray(tensor, np.float64).reshape(tensor.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Spectra:
    """Singular values of a text's tensors, layer by layer.

    Attributes:
        values: maps the kind of a tensor ("k_pre", "k_post", "v" or "x_in", as in `LayerTensors`) to singular values,
            float64 [layers, columns]. The values of a layer are sorted, largest first, and divided by the largest. They
            are zero from index S on, where S is the number of tokens. There are h_kv * d columns, and D columns for
            "x_in".
    """

    values: Mapping[str, np.ndarray]

    def energy(self, kind: str, rank: int) -> np.ndarray:
        """Return the share of the squared Frobenius norm that a truncated SVD keeps, float64 [layers] in [0, 1].

        It is 1 for a layer of zeros.

        Raises:
            ConfigError: the kind is unknown, or the rank is not in 0 .. columns.
        """
        if kind not in self.values:
            raise ConfigError(f"kind must be one of {sorted(self.values)}, got {kind!r}")
        squares = self.values[kind] ** 2
        check_range("spectra", "rank", rank, 0, squares.shape[1])
        total = squares.sum(axis=1)
        return np.where(total > 0, squares[:, :rank].sum(axis=1) / np.where(total > 0, total, 1.0), 1.0)

    def rank_for(self, kind: str, share: float) -> np.ndarray:
        """Return the smallest rank whose `energy` is at least `share`, int64 [layers].

        Raises:
            ConfigError: the kind is unknown, or share is not in (0, 1].
        """
        if not 0 < share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {share!r}")
        if kind not in self.values:
            raise ConfigError(f"kind must be one of {sorted(self.values)}, got {kind!r}")
        energy = np.cumsum(self.values[kind] ** 2, axis=1)
        # The margin keeps the result for a share of 1 independent of rounding errors in the sums.
        return (energy < share * energy[:, -1:] * (1 - 1e-12)).sum(axis=1) + (energy[:, -1] > 0)


def singular_values(layers: Iterable[LayerTensors], kinds: Iterable[str] = KINDS) -> Spectra:
    """Compute the relative singular values of each layer's tensors (ShadowKV, section 3.1; figure 1, left).

    The mean of a tensor is not subtracted, because algorithm 1 does not subtract it either. The singular values are the
    square roots of the eigenvalues of the Gram matrix in float64. Relative values below 1e-8 are rounding errors.

    Args:
        layers: the layers from `prompt_tensors`. They are iterated once.
        kinds: some of KINDS.

    Raises:
        ConfigError: a kind is unknown, or there are no layers.
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
    """Return the first `rank` right singular vectors of a tensor's matrix, float64 [columns, rank].

    Raises:
        ConfigError: the rank is not in 1 .. the smaller side of the matrix.
    """
    matrix = as_matrix(tensor)
    check_range("subspace_similarity", "rank", rank, 1, min(matrix.shape))
    return np.linalg.eigh(matrix.T @ matrix)[1][:, ::-1][:, :rank]


def subspace_similarity(first: np.ndarray, second: np.ndarray, rank: int) -> float:
    """Compute the similarity D of the rank-r subspaces of two tensors' rows (ShadowKV, section 3.1).

    With the right singular vectors P1 and P2 [columns, r] of the two truncated SVDs, D is the Frobenius inner product
    of the projections, <P1 P1^T, P2 P2^T> / r. D is 1 for equal subspaces and 0 for orthogonal ones. For two random
    subspaces its mean is r / columns.

    Args:
        first: [S, h, d] or [S, m].
        second: a tensor with as many columns as first. S may differ.
        rank: r, at most the number of columns and the number of tokens of either tensor.

    Raises:
        ConfigError: a shape is wrong, or the rank is out of range.
    """
    one, two = right_basis(first, rank), right_basis(second, rank)
    if one.shape[0] != two.shape[0]:
        raise ConfigError(f"second must have as many columns as first ({one.shape[0]}), got {two.shape[0]}")
    return float(np.sum((one.T @ two) ** 2) / rank)


@dataclasses.dataclass(frozen=True)
class Subspaces:
    """The similarity D between the subspace of a context and three other subspaces, each float64 [layers].

    Attributes:
        extended: D to the subspace of the context with its continuation, as in the paper's figure.
        continuation: D to the subspace of the continuation only, which shares no token with the context.
        other: D to the subspace of another text.
        chance: rank / columns, the mean of D for random subspaces.
    """

    extended: np.ndarray
    continuation: np.ndarray
    other: np.ndarray
    chance: float


def compare_subspaces(
    text: Iterable[LayerTensors], other: Iterable[LayerTensors], context: int, rank: int, kind: str = "k_pre"
) -> Subspaces:
    """Compare the subspace of a context with those of its continuation and of another text.

    This shows whether keys stay in one subspace (ShadowKV, section 3.1; figure 1, middle).

    Args:
        text: the layers from `prompt_tensors` of the context and its continuation. The first `context` rows are those
            of the context, because later tokens do not change earlier keys.
        other: the layers of another text.
        context: number of tokens of the context. It is at least `rank`, and so is the rest of the text.
        rank: rank of the truncated SVDs.
        kind: one of KINDS.

    Raises:
        ConfigError: a text is too short for the rank, the kind is unknown, or the numbers of layers differ.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind must be one of {KINDS}, got {kind!r}")
    layers, others = list(text), list(other)
    if len(layers) != len(others) or not layers:
        raise ConfigError(f"other must have as many layers as text ({len(layers)}, at least 1), got {len(others)}")
    rows: list[list[float]] = []
    for here, there in zip(layers, others, strict=True):
        tensor = getattr(here, kind)
        check_range("compare_subspaces", "context", context, rank, max(rank, tensor.shape[0] - rank))
        base = tensor[:context]
        rows.append([subspace_similarity(base, one, rank) for one in (tensor, tensor[context:], getattr(there, kind))])
    table = np.array(rows)
    extended, continuation, apart = table.T
    return Subspaces(extended, continuation, apart, rank / as_matrix(getattr(layers[0], kind)).shape[1])
