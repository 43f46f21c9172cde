"""The measurements of the ShadowKV paper on a model and a text: spectra, subspaces, landmarks, hit rates, sweeps."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jshadow.cache import offload
from jshadow.cache.prompt_walk import check_text, walk_layers
from jshadow.engine import decode
from jshadow.errors import ConfigError, PromptError
from jshadow.evaluation.plan import Entry, Setup, TaskPlan
from jshadow.evaluation.results import task_rows
from jshadow.evaluation.runner import Progress, run_cases
from jshadow.evaluation.tasks import Case, Sample
from jshadow.models.transformer import Heads
from jshadow.ops.attention import causal_attention
from jshadow.ops.layout import to_chunks
from jshadow.policies import Full, Policy, ShadowKV
from jshadow.policies.checks import check_range
from jshadow.policies.shadowkv.landmarks import chunk_landmarks


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer for a text of S tokens, all float32.

    Attributes:
        k_pre: keys before RoPE and after bias and norm, [S, h_kv, d].
        k_post: keys after RoPE, [S, h_kv, d].
        v: values [S, h_kv, d].
        x_in: hidden states [S, D]: the normalized input that queries, keys and values are projected from.
    """

    k_pre: np.ndarray
    k_post: np.ndarray
    v: np.ndarray
    x_in: np.ndarray


def text_of(params: Any, tokens: Any) -> np.ndarray:
    """Check the tokens of one text and return them as int32 [S]. Raises PromptError as `prompt_tensors` does."""
    ids = check_text(params.config, tokens)
    if ids.shape[0] != 1:
        raise PromptError(f"tokens must be one text [S], got {ids.shape[0]} rows")
    return np.asarray(ids[0])


def prompt_tensors(
    params: Any, tokens: Any, *, progress: Callable[[int, int], None] | None = None
) -> Iterator[LayerTensors]:
    """Compute keys before and after RoPE, values and hidden states of a text (ShadowKV, section 3.1).

    The paper calls them K, K^RoPE, V and X.

    Args:
        params: the model's Params.
        tokens: token ids of the text, int32 [S], without padding.
        progress: called with (number of layers done, number of layers), when the next layer is requested.

    Returns:
        An iterator over the LayerTensors of all layers. Each is computed when it is requested. A layer takes
        4 * S * (3 * h_kv * d + D) bytes.

    Raises:
        PromptError: there are no tokens or more than one text, an id is out of range, or the text is longer than the
            model's context. It is raised by the call itself.
    """
    ids = jax.device_put(text_of(params, tokens)[None])
    return layers_of(params, ids, progress)


def layers_of(params: Any, ids: Array, progress: Callable[[int, int], None] | None) -> Iterator[LayerTensors]:
    """Compute `prompt_tensors` of ids [1, S] that are already checked."""

    def keep(heads: Heads, turn: Any, kind: Any) -> tuple[Array, tuple[Array, ...]]:
        k = turn.keys(heads.k_pre)
        scale = params.config.attention_scale
        out, _ = causal_attention(turn.queries(heads.q_pre), k, heads.v, scale, 0, kind.window, heads.sinks)
        return out, (heads.k_pre, k, heads.v, heads.x_in)

    for tensors in walk_layers(params, ids, keep, progress):
        yield LayerTensors(*(np.asarray(part, np.float32)[0] for part in tensors))


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


@dataclasses.dataclass(frozen=True)
class HitRates:
    """A comparison of the selections of consecutive decode steps. The first step has no previous one and is left out.

    Attributes:
        selected: int64 [steps - 1, layers], the number of selected chunks, summed over KV heads.
        hits: int64 [steps - 1, layers], how many of these were also selected in the previous step. If the policy has a
            pool, how many of these were in the pool.
        policy: the resolved policy.
        prompt_tokens: number of tokens before the first step.
    """

    selected: np.ndarray
    hits: np.ndarray
    policy: ShadowKV
    prompt_tokens: int

    @property
    def rates(self) -> np.ndarray:
        """The share of the selected chunks that are hits, float64 [steps - 1, layers]."""
        return self.hits / np.maximum(self.selected, 1)

    @property
    def mean(self) -> float:
        """The share of the selected chunks that are hits, over all steps and layers."""
        return float(self.hits.sum() / max(int(self.selected.sum()), 1))


def hit_rates(params: Any, tokens: Any, policy: ShadowKV, steps: int, *, fetch: str = "resident") -> HitRates:
    """Decode the last tokens of a text one by one, and compare each step's selection with that of the previous step.

    Args:
        params: the model's Params.
        tokens: token ids of the text, int32 [S]. All but the last `steps` tokens are prefilled. Then the last tokens
            are fed one by one. Feeding a text avoids the repetitions of greedy generation.
        policy: a ShadowKV (or ShadowKVPlus) that selects chunks at this length.
        steps: number of decode steps, at least 2.
        fetch: fetch mode. All modes give the same selections.

    Raises:
        PromptError: see `prompt_tensors`.
        ConfigError: the policy is not ShadowKV, steps is out of range, or the text is too short for a selection.
    """
    ids = text_of(params, tokens)
    if not isinstance(policy, ShadowKV):
        raise ConfigError(f"policy must be a ShadowKV, got {policy!r}")
    check_range("hit_rates", "steps", steps, 2, max(2, len(ids) - 1))
    resolved = policy.resolve(params.config, len(ids))
    prompt = len(ids) - steps
    if reason := resolved.fallback(params.config, prompt):
        raise ConfigError(f"tokens must leave chunks to select from: {reason}")
    _, state = decode.prefill(
        params,
        ids[None, :prompt],
        np.array([prompt], np.int32),
        resolved,
        capacity=len(ids),
        fetch=offload.resolve_fetch(fetch),
    )
    caches, chosen = [], []  # the chunks in the cache after each step [layers, h_kv, P], and which the step selected
    for token in ids[prompt:]:
        _, state = decode.decode_step(params, np.array([token], np.int32), state)
        lives = [layer.live for layer in state.layers]
        held = [np.asarray(live.resident)[0] for live in lives]
        ages = [None if live.ages is None else np.asarray(live.ages)[0] for live in lives]
        caches.append(np.stack(held))
        chosen.append(np.stack([at >= 0 if age is None else age == 0 for at, age in zip(held, ages, strict=True)]))
    now, before, selected = np.stack(caches[1:]), np.stack(caches[:-1]), np.stack(chosen[1:])
    repeated = (now[..., :, None] == before[..., None, :]).any(axis=-1) & selected
    return HitRates(selected.sum(axis=(2, 3)), repeated.sum(axis=(2, 3)), resolved, prompt)


def sweep(
    params: Any,
    texts: Sequence[Any],
    policies: Sequence[Policy],
    *,
    steps: int = 64,
    fetch: str = "resident",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure the distance of each policy from full attention, and its bytes (ShadowKV, figures 8 and 9, table 15).

    The paper reports task accuracy. This function prefills all but the last `steps` tokens of each text, and feeds the
    last ones as one turn. At each of these positions it compares the next-token distribution with that of full
    attention.

    Args:
        params: the model's Params.
        texts: the token ids of each text, int32 [S]. All texts have the same length.
        policies: the policies to compare. Full attention is always added.
        steps: number of tokens that are compared in each text.
        fetch: fetch mode. The rows have the bytes in this mode, and also the bytes with values offloaded.
        progress: called with (number of texts done, number of texts).

    Returns:
        Rows in the format of `jshadow.evaluation.runner.evaluate`: full attention first, then one for each policy in
        order. They have top1 (percent), kl (KL(full || policy) in nats), the standard errors of both over texts, the
        bytes, attended_tokens and hit_rate. `settings` has the resolved settings.

    Raises:
        PromptError: see `prompt_tensors`.
        ConfigError: there is no text or no policy, texts differ in length, or steps or a setting is out of range.
    """
    ids = [text_of(params, text) for text in texts]
    lengths = sorted(set(map(len, ids)))
    if len(lengths) != 1:
        raise ConfigError(f"texts must be at least one text, all of the same length, got lengths {lengths}")
    if not policies or any(not isinstance(policy, Policy) for policy in policies):
        raise ConfigError(f"policies must be a non-empty list of policies, got {policies!r}")
    [total] = lengths
    check_range("sweep", "steps", steps, 1, total - 1)
    prompt = total - steps
    entries = tuple(Entry(policy) for policy in dict.fromkeys([Full(), *policies]))
    cases = tuple(
        Case((Sample("", "", "", "", steps),), tuple(text[:prompt].tolist()), forced=tuple(text[prompt:].tolist()))
        for text in ids
    )
    setup = Setup(params, offload.resolve_fetch(fetch), None, {})
    plan = TaskPlan("agreement", prompt, total, cases, entries)
    table, run = [], [entry.policy for entry in entries if entry.policy is not None]
    for policy in run:
        policy.resolve(params.config, total)  # raises the errors of settings before anything runs
    for index in range(len(cases)):
        records = (record for [record] in run_cases(setup, plan, [index], run))
        table.append(dict(zip(run, records, strict=True)))
        if progress is not None:
            progress(index + 1, len(cases))
    return task_rows(setup, plan, table)
