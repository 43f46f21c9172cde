"""The search for a pattern of sparse prefill: on one text, it finds the best attention of equal cost for each head.

It is MInference's kernel-aware search (Jiang et al. 2024, arXiv 2407.02490, section 3.3) with exact counts in place of
timings. All candidates of a head cost the same: a share of the tiles of M x M scores that exact causal attention has.

- vertical-slash, once for each number of columns in `VERTICALS`, with as many diagonals as the other tiles allow;
- A-shape with `INITIAL` first columns, and as many nearest diagonals as the other tiles allow;
- block-sparse, with as many key blocks for each query block as the tiles allow.

The numbers of columns are those of the published candidates, scaled by tokens / 32,768 for a shorter text. M columns
cost one tile for each query block after them, even if some lie in a block that is computed anyway. Each head takes the
candidate with the largest attention mass: the probability that exact attention gives to the keys which the candidate
attends to. It is a mean over the queries from number `SKIPPED`, or from the middle of a shorter text, on. As in a
prefill, the last queries of the text choose the columns and diagonals.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.prompt_walk import prompts_of
from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill import HeadPattern, Pattern, VerticalSlash
from jshadow.engine.sparse_prefill.estimate import block_means, line_sums
from jshadow.engine.sparse_prefill.patterns import as_json
from jshadow.errors import ConfigError, PromptError
from jshadow.ops.attention import group_queries
from jshadow.weights.convert.files import staged_file

VERTICALS = (30, 100, 500, 1000, 3500)  # numbers of columns of the published candidates
INITIAL = 100  # number of first columns of the A-shape
PUBLISHED = 32768  # for a text with fewer tokens, these numbers of columns are scaled
SKIPPED = 2500  # number of first queries that do not count, because they see little of the text


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        pattern: each head's best candidate.
        names: names of the C candidates, "vertical_slash 30" and so on.
        recovered: attention mass of each candidate, float [L, h_q, C]. It is nan for a candidate that does not fit, and
            in layers with the model's own window.
        tiles: cost of each candidate, as a share of the tiles of causal attention. Its shape is that of `recovered`.
        best: index of the candidate that each head takes, int [L, h_q]; -1 in layers with a window.
    """

    pattern: Pattern
    names: tuple[str, ...]
    recovered: np.ndarray
    tiles: np.ndarray
    best: np.ndarray

    def summary(self) -> list[dict[str, Any]]:
        """Return the number of heads, the mean mass and the mean cost of each candidate, and of each head's best."""
        rows = []
        for index, name in enumerate(self.names):
            figures = means(self.recovered[..., index], self.tiles[..., index])
            rows.append({"candidate": name, "heads": int((self.best == index).sum()), **figures})
        best, heads = np.maximum(self.best, 0)[..., None], int((self.best >= 0).sum())
        figures = means(*(np.take_along_axis(values, best, axis=2) for values in (self.recovered, self.tiles)))
        return [*rows, {"candidate": "best of each head", "heads": heads, **figures}]


def means(recovered: np.ndarray, tiles: np.ndarray) -> dict[str, float | None]:
    """Return the mean attention mass and the mean share of the tiles, over the heads for which they are not nan."""
    known = ~np.isnan(recovered)
    if not known.any():
        return {"recovered": None, "tiles": None}
    return {"recovered": float(recovered[known].mean()), "tiles": float(tiles[known].mean())}


def search_pattern(
    params: Any,
    tokens: Any,
    *,
    share: float = 0.3,
    settings: VerticalSlash | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Search for a pattern for `VerticalSlash(pattern=...)`.

    Args:
        params: the model.
        tokens: token ids of a typical text, int [S]. The text is cut to whole blocks.
        share: maximum cost of a head, as a share of the tiles of causal attention.
        settings: its block, last_queries, first_columns and local_diagonals are used. None means VerticalSlash().
        progress: called with (layers done, number of layers).

    Raises:
        PromptError: the tokens are not one list, or are fewer than two blocks.
        ConfigError: share is out of range, or so small that no candidate fits.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share must be above 0 and at most 1, got {share!r}")
    settings = settings or VerticalSlash()
    text, config = np.asarray(tokens), params.config
    count = text.size // settings.block
    if text.ndim != 1 or count < 2:
        raise PromptError(f"tokens must be [S] with at least {2 * settings.block}, got shape {text.shape}")
    heads: list[tuple[HeadPattern, ...]] = []
    recovered: list[np.ndarray] = []
    tiles: list[np.ndarray] = []
    best: list[np.ndarray] = []
    names: tuple[str, ...] = ()
    for layer, prompt in enumerate(prompts_of(params, text[: count * settings.block])):
        ranks = line_ranks(prompt, config.attention_scale, settings)
        sizes, costs, names = layer_candidates(ranks, share, settings)
        mass = recovered_mass(prompt, ranks, sizes, config.attention_scale, settings.block)
        mass[np.isnan(costs)] = np.nan
        if config.attention_kind(layer).window is not None:
            mass, costs = np.full_like(mass, np.nan), np.full_like(costs, np.nan)
            chosen, row = np.full(config.q_heads, -1), [HeadPattern("a_shape", (1, 1))] * config.q_heads  # not read
        elif np.isnan(mass).all(1).any():
            raise ConfigError(f"share must leave room for the local diagonals of {text.size} tokens, got {share}")
        else:
            chosen = np.nanargmax(mass, axis=1)
            row = [head_pattern(sizes[head, index]) for head, index in enumerate(chosen)]
        heads.append(tuple(row))
        for values, value in ((recovered, mass), (tiles, costs), (best, chosen)):
            values.append(value)
        if progress is not None:
            progress(layer + 1, config.num_layers)
    pattern = Pattern(tuple(heads), settings.block)
    return Found(pattern, names, np.stack(recovered), np.stack(tiles), np.stack(best))


def head_pattern(row: np.ndarray) -> HeadPattern:
    """Return the pattern of a head from its values (columns, diagonals, by_position, blocks)."""
    columns, diagonals, by_position, blocks = (int(size) for size in row)
    if blocks:
        return HeadPattern("block_sparse", (blocks,))
    return HeadPattern("a_shape" if by_position else "vertical_slash", (columns, diagonals))


def line_ranks(prompt: PromptKV, scale: float, settings: VerticalSlash) -> list[np.ndarray]:
    """Return the rank of each column and of each diagonal, both int32 [h, S]. A prefill takes the lowest ranks."""
    assert prompt.q_post is not None
    tail = prompt.q_post[:, -settings.last_queries :]
    sums = jax.jit(line_sums, static_argnums=3)(tail, prompt.k_post, prompt.lengths, scale)
    ranks = []
    for its, forced in zip(sums, (settings.first_columns, settings.local_diagonals), strict=True):
        score = np.where(np.arange(its.shape[2]) < forced, np.inf, np.asarray(its[0]))
        ranks.append(np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1, kind="stable").astype(np.int32))
    return ranks


def diagonals_for(ranks: np.ndarray, tiles: int, block: int) -> tuple[int, int]:
    """Return how many diagonals of one head, best first, touch at most `tiles` tiles, and how many tiles they touch.

    Args:
        ranks: rank of each diagonal, int [S].
        tiles: maximum number of tiles that they may touch.
        block: number of tokens in a block.
    """
    count = len(ranks) // block
    cut = ranks.reshape(count, block)
    # A block D before the query block holds distances from (D - 1) * M + 1 to (D + 1) * M - 1.
    before = np.concatenate([np.full((1, block - 1), len(ranks)), cut[:-1, 1:]])
    first = np.minimum(before.min(1, initial=len(ranks)), cut.min(1))
    order = np.argsort(first, kind="stable")
    cost = np.cumsum(count - order)
    kept = int(np.searchsorted(cost, tiles, side="right"))
    if kept == count:
        return len(ranks), int(cost[-1])
    most = int(first[order[kept]])  # the next diagonals would exceed `tiles`
    return most, int((count - order)[first[order] < most].sum())


def column_tiles(columns: np.ndarray, count: int, block: int) -> int:
    """Return the tiles that the columns (int [n]) of a head cost. Each query block gathers the columns before it."""
    before = np.searchsorted(np.sort(columns), np.arange(count) * block)
    return int((-(-before // block)).sum())


def layer_candidates(
    ranks: list[np.ndarray], share: float, settings: VerticalSlash
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the candidates of a layer's heads. `ranks` is from `line_ranks`.

    Returns:
        The sizes as in HeadSizes, int [h, C, 4]; the cost as a share of the causal tiles, float [h, C], with nan for
        a candidate that does not fit; and the C names.
    """
    by_column, by_diagonal = ranks
    tokens, block = by_column.shape[1], settings.block
    count = tokens // block
    causal = count * (count + 1) // 2
    budget = int(share * causal)
    nearest, local = np.arange(tokens), min(settings.local_diagonals, tokens)
    scaled = list(dict.fromkeys(scaled_size(size, tokens, settings.first_columns) for size in VERTICALS))
    names = [f"vertical_slash {size}" for size in scaled]
    initial = scaled_size(INITIAL, tokens, 1)
    blocks = max((b for b in range(1, count + 1) if block_tiles(b, count) <= budget), default=0)
    rows, costs = [], []
    for columns, diagonals in zip(by_column, by_diagonal, strict=True):
        made = []
        for size in scaled:
            taken = column_tiles(np.flatnonzero(columns < size), count, block)
            most, used = diagonals_for(diagonals, budget - taken, block)
            made.append(((size, most, 0, 0), taken + used, most >= local))
        taken = column_tiles(np.arange(initial), count, block)
        most, used = diagonals_for(nearest, budget - taken, block)
        made.append(((initial, most, 1, 0), taken + used, most >= 1))
        made.append(((0, 0, 0, blocks), block_tiles(blocks, count), blocks >= 1))
        rows.append([row for row, _, _ in made])
        costs.append([cost / causal if fits else np.nan for _, cost, fits in made])
    names += [f"a_shape {initial}", f"block_sparse {blocks}"]
    return np.array(rows, np.int32), np.array(costs), tuple(names)


def scaled_size(size: int, tokens: int, least: int) -> int:
    """Scale a published number of columns to a text of `tokens` tokens. The result is at least `least`."""
    return min(tokens, max(least, 1, round(size * min(1.0, tokens / PUBLISHED))))


def block_tiles(blocks: int, count: int) -> int:
    """Return the number of tiles if each of `count` query blocks attends to up to `blocks` key blocks."""
    return sum(min(blocks, index + 1) for index in range(count))


def recovered_mass(
    prompt: PromptKV, ranks: list[np.ndarray], sizes: np.ndarray, scale: float, block: int
) -> np.ndarray:
    """Return the attention mass of each candidate, float [h, C]. `sizes` is int [h, C, 4], as in HeadSizes."""
    first = min(SKIPPED, prompt.k_post.shape[1] // 2) // block
    mass = _recovered(prompt, *ranks, sizes, scale=scale, block=block, first=first)
    return np.array(mass, np.float64)


@functools.partial(jax.jit, static_argnames=("scale", "block", "first"))
def _recovered(
    prompt: PromptKV, columns: Array, diagonals: Array, sizes: Array, *, scale: float, block: int, first: int
) -> Array:
    """Compute the result of `recovered_mass`, one query block after another from block number `first` on."""
    q, k, lse, lengths = prompt.q_post, prompt.k_post, prompt.lse, prompt.lengths
    assert q is not None
    assert lse is not None
    tokens, heads = q.shape[1:3]
    count, index = tokens // block, jnp.arange(tokens)
    q_means, k_means = (block_means(x, lengths, 0, block)[0] for x in (q, k))
    block_scores = jnp.einsum("hgqd,hkd->hgqk", q_means.reshape(k.shape[2], -1, count, q.shape[3]), k_means)
    block_scores = block_scores.reshape(heads, count, count)
    grouped = group_queries(q, k.shape[2])[0]

    def one(number: Array) -> Array:
        rows = number * block + jnp.arange(block)
        tile = lax.dynamic_slice_in_dim(grouped, number * block, block, axis=2)
        scores = jnp.einsum("hgtd,shd->hgts", tile, k[0], preferred_element_type=jnp.float32) * scale
        its = lax.dynamic_slice_in_dim(lse[0], number * block, block, axis=1)
        back = rows[:, None] - index
        probs = jnp.where(back >= 0, jnp.exp(scores.reshape(heads, block, tokens) - its[..., None]), 0)
        near = jnp.maximum(back, 0)
        slant = diagonals[:, near]
        own = jnp.arange(count)
        blocks = jnp.where(own == number, jnp.inf, jnp.where(own < number, block_scores[:, number], -jnp.inf))
        place = jnp.repeat(rank(blocks), block, axis=1)[:, None]

        def kept(size: Array) -> Array:
            n_columns, n_diagonals, by_position, n_blocks = (size[:, part, None, None] for part in range(4))
            best = (columns[:, None] < n_columns) | (slant < n_diagonals)
            nearest = (index < n_columns) | (near < n_diagonals)
            chosen = jnp.where(by_position > 0, nearest, best) | (place < n_blocks)
            return jnp.where(chosen, probs, 0).sum((1, 2))

        return lax.map(kept, sizes.swapaxes(0, 1))

    start = jnp.zeros((sizes.shape[1], heads))
    total = lax.fori_loop(first, count, lambda number, total: total + one(number), start)
    return total.T / ((count - first) * block)


def rank(scores: Array) -> Array:
    """Return the rank of each score [h, n] in falling order. In a tie, the lower index has the lower rank."""
    return jnp.argsort(jnp.argsort(-scores, axis=1, stable=True), axis=1, stable=True)


def save_pattern(path: str | os.PathLike[str], found: Found, about: dict[str, Any]) -> None:
    """Write a pattern and the figures of its search to a JSON file. It is written completely or not at all.

    Args:
        path: file to create or to replace.
        found: the result of `search_pattern`.
        about: other plain values to store in the file, such as the model and the number of tokens.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with staged_file(Path(path).expanduser()) as fresh:
        fresh.write_text(as_json(found.pattern, about | {"candidates": found.summary()}), encoding="utf-8")
