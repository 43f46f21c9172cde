"""The sparse attentions of a prefill by name, and attention of a piece of queries over the keys chosen for each head.

On a GPU, a kernel reads the chosen keys as lists: the key blocks with keys on a chosen diagonal, and other columns.
Elsewhere XLA computes it tile by tile. A tile has M queries and M keys. The work grows with the number
of chosen keys, not with the length of the prompt.
"""

import abc
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.estimate import KEY_TILE, line_sums
from jshadow.engine.sparse_prefill.lines import (
    HeadSizes,
    Lines,
    Pattern,
    choose,
    load_pattern,
    make_lines,
    strip_blocks,
)
from jshadow.errors import ConfigError, check_integer
from jshadow.models.config import AttentionKind, ModelConfig, check_positive
from jshadow.ops.attention import MASKED, causal_attention
from jshadow.ops.layout import KeyLists, Keys, attend_over, run
from jshadow.policies.prefill_attention import PrefillAttention, PrefillPiece

_GATHERED = 256  # number of keys that a head gathers at once


class _Chosen(struct.PyTreeNode):
    """The keys that the heads of a layer attend to, and the tiles that were computed so far.

    Attributes:
        lines: the chosen columns and diagonals. None if attention is exact.
        tiles: number of tiles that each head needed, int32 [B, h_q]. M gathered columns count as one tile.
        ran: number of tiles that each head computed, int32 [B, h_q]. In XLA, a head computes whole turns of GATHERED
            keys.
    """

    lines: Lines | None
    tiles: Array
    ran: Array


class _Softmax(NamedTuple):
    """The state of an online softmax of one head, which has not seen all keys yet. All fields are float32.

    Attributes:
        top: largest score of each query so far.
        total: sum of exp(score - top).
        out: sum of the values, weighted with exp(score - top).
    """

    top: Float[Array, " M"]
    total: Float[Array, " M"]
    out: Float[Array, "M d"]

    def fold(self, scores: Float[Array, "M N"], seen: Bool[Array, "#M N"], v: Float[Array, "N d"]) -> "_Softmax":
        """Return the softmax after N more keys, of which only those in `seen` count."""
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(self.top, scores.max(-1))
        weight, shrink = jnp.exp(scores - top[:, None]), jnp.exp(self.top - top)
        part = jnp.matmul(weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return _Softmax(top, self.total * shrink + weight.sum(-1), self.out * shrink[:, None] + part)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the attention is cut into tiles.

    Attributes:
        scale: factor by which the scores are multiplied.
        block: M. A tile has M queries and M keys.
        implementation: "auto" is the kernel on a GPU and `_attend_tiles` elsewhere. See `pallas_kernels.choose`.
    """

    scale: float
    block: int
    implementation: str = "auto"


class _Head(NamedTuple):
    """One query head of one row.

    Attributes:
        row: index in the batch.
        number: number of the query head.
        kv: number of its KV head.
        slants: for each distance of a key block from a query block, which keys of it lie on a chosen diagonal of each
            query.
        in_column: which keys of each key block are chosen columns.
    """

    row: Int[Array, ""]
    number: Int[Array, ""]
    kv: Int[Array, ""]
    slants: Bool[Array, "n M M"]
    in_column: Bool[Array, "n M"]


def _attend_tiles(
    piece: PrefillPiece, prompt: PromptKV, chosen: _Chosen, lists: KeyLists, tiling: Tiling
) -> tuple[Float[Array, "B P h_q d"], _Chosen]:
    """Compute causal attention of a piece of queries over the chosen keys. Each key counts once."""
    q, first, block = piece.q_post, piece.first, tiling.block
    batch, length, heads, dim = q.shape
    group, count, lines = heads // prompt.k_post.shape[2], length // block, chosen.lines
    assert lines is not None

    def flat(x: Array) -> Array:
        return x.reshape(batch * heads, *x.shape[2:])

    def of_head(args: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array]:
        number, tiles, listed = args
        head = _head_of(lines, number // heads, number % heads, group)

        def of_block(args: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array]:
            place, tile, (ids, visited, columns, singles) = args
            state = _Softmax(jnp.full(block, MASKED), jnp.zeros(block), jnp.zeros((block, dim)))
            if piece.sinks is not None:
                state = state._replace(
                    top=jnp.full(block, piece.sinks[head.number].astype(jnp.float32)), total=jnp.ones(block)
                )
            state, ran = _fold_blocks(state, head, (place, tile), prompt, (ids, visited), tiling.scale)
            state, more = _fold_columns(state, head, tile, prompt, (columns, singles), tiling.scale)
            return state.out / state.total[:, None], ran + more

        out, ran = lax.map(of_block, (first // block + jnp.arange(count, dtype=jnp.int32), tiles, listed))
        return out, ran.sum()

    tiles = q.reshape(batch, count, block, heads, dim).transpose(0, 3, 1, 2, 4)
    listed = tuple(map(flat, (lists.blocks, lists.block_counts, lists.columns, lists.column_counts)))
    out, ran = lax.map(of_head, (jnp.arange(batch * heads), flat(tiles), listed))
    out = out.reshape(tiles.shape).transpose(0, 2, 3, 1, 4).reshape(q.shape).astype(q.dtype)
    needed = _tiles_needed(lists, block)
    return out, chosen.replace(tiles=chosen.tiles + needed, ran=chosen.ran + ran.reshape(batch, heads))


def _tiles_needed(lists: KeyLists, block: int) -> Int[Array, "B h_q"]:
    """Return the number of tiles that each head needs: key blocks, and columns in groups of `block`."""
    return (lists.block_counts - (-lists.column_counts // block)).sum(2)


def _head_of(lines: Lines, row: Int[Array, ""], number: Int[Array, ""], group: int) -> _Head:
    """Return one query head. `group` is the number of query heads of a KV head."""
    return _Head(row, number, number // group, _slanted(lines.near[row, number]), lines.in_column[row, number])


def _fold_blocks(
    state: _Softmax, head: _Head, tile: tuple[Array, Array], prompt: PromptKV, blocks: tuple[Array, Array], scale: float
) -> tuple[_Softmax, Array]:
    """Add the listed key blocks to the softmax of a query block. Return it, and the number of tiles that were computed.

    `tile` has the number of the query block and its queries [M, d]. `blocks` has the list, and how many of it count.
    """
    (place, q), (ids, visited) = tile, blocks
    block = q.shape[0]
    several = min(max(1, _GATHERED // block), ids.shape[0])
    ids = jnp.pad(ids, (0, -ids.shape[0] % several))
    query, key = place * block + jnp.arange(block)[:, None], jnp.arange(block)

    def step(turn: Array, state: _Softmax) -> _Softmax:
        some = lax.dynamic_slice_in_dim(ids, turn * several, several)
        seen = []
        for index, one in enumerate(some):
            pairs = (one * block + key <= query) & (turn * several + index < visited)
            seen.append(pairs & (head.slants[jnp.maximum(place - one, 0)] | head.in_column[one]))
        k_rows, v_rows = (_rows_of(x, head, some, block) for x in (prompt.k_post, prompt.v))
        scores = jnp.matmul(q, k_rows.T, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, jnp.concatenate(seen, axis=1), v_rows)

    turns = -(-visited // several)
    return lax.fori_loop(0, turns, step, state), turns * several


def _rows_of(x: Float[Array, "B S h_kv d"], head: _Head, blocks: Int[Array, " G"], block: int) -> Float[Array, "N d"]:
    """Return the rows of some key blocks, in their order. Slices of whole blocks copy faster than a gather of rows."""
    dim = x.shape[3]
    parts = [lax.dynamic_slice(x, (head.row, one * block, head.kv, 0), (1, block, 1, dim)) for one in blocks]
    return jnp.concatenate([part.reshape(block, dim) for part in parts])


def _slanted(near: Bool[Array, "G M2"]) -> Bool[Array, "G M M"]:
    """Return entry M + i - j of each row for query i and key j of a block. M2 is 2M.

    Rows that are repeated and cut one entry shorter shift by one from query to query. A gather would take longer.
    """
    count, double = near.shape
    block = double // 2
    back = jnp.roll(near[:, ::-1], block + 1, axis=1)  # entry x is near[M - x], modulo 2M
    rows = jnp.broadcast_to(back[:, None], (count, block, double)).reshape(count, -1)
    return rows[:, : block * (double - 1)].reshape(count, block, double - 1)[..., :block]


def open_columns(
    lines: Lines, index: Int[Array, ""], block: int
) -> tuple[Int[Array, "B h_q most"], Int[Array, "B h_q"]]:
    """Return the chosen columns that lie before query block `index` and outside of its key blocks, and their number.

    They are in rising order, padded with S. The columns inside of key blocks are attended to with these blocks. The
    query block's own block is one of these, so no causal mask is needed here.
    """
    back = index - lines.columns // block
    near = jnp.take_along_axis(lines.touched, jnp.clip(back, 0, lines.touched.shape[2] - 1), axis=2)
    single = (back > 0) & ~near
    past = lines.touched.shape[2] * block
    return jnp.sort(jnp.where(single, lines.columns, past), axis=-1), single.sum(-1).astype(jnp.int32)


def _fold_columns(
    state: _Softmax, head: _Head, q: Float[Array, "M d"], prompt: PromptKV, columns: tuple[Array, Array], scale: float
) -> tuple[_Softmax, Array]:
    """Add single keys to the softmax of a query block. Return it, and the number of tiles that were computed.

    `columns` is the list of keys [most], and how many of the first ones count.
    """
    (listed, count), block = columns, q.shape[0]
    several = min(max(_GATHERED // block, 1) * block, -(-listed.shape[0] // block) * block)
    listed = jnp.pad(listed, (0, -listed.shape[0] % several))

    def step(turn: Array, state: _Softmax) -> _Softmax:
        some = lax.dynamic_slice_in_dim(listed, turn * several, several)
        seen = (turn * several + jnp.arange(several) < count)[None]
        k_rows, v_rows = (x.at[head.row, some, head.kv].get(mode="clip") for x in (prompt.k_post, prompt.v))
        scores = jnp.matmul(q, k_rows.T, preferred_element_type=jnp.float32) * scale
        return state.fold(scores, seen, v_rows)

    turns = -(-count // several)
    return lax.fori_loop(0, turns, step, state), turns * (several // block)


def _attend_chosen(
    piece: PrefillPiece, prompt: PromptKV, chosen: _Chosen, tiling: Tiling
) -> tuple[Float[Array, "B P h_q d"], _Chosen]:
    """Compute causal attention of a piece over the chosen keys: by the kernel on a GPU, by `_attend_tiles` elsewhere.

    The arguments and results are those of `_attend_tiles`. A GPU uses `_attend_tiles` too if the kernel
    does not support the block size, the head width or the dtype.
    """
    assert chosen.lines is not None
    return run(
        tiling.implementation,
        functools.partial(_attend_lists, tiling=tiling),
        functools.partial(_attend_tiles, tiling=tiling),
        piece,
        prompt,
        chosen,
        _piece_lists(piece, prompt, chosen.lines, tiling.block),
    )


def _attend_lists(
    piece: PrefillPiece, prompt: PromptKV, chosen: _Chosen, lists: KeyLists, tiling: Tiling, interpret: bool
) -> tuple[Float[Array, "B P h_q d"], _Chosen]:
    """Compute the result of `_attend_tiles` with the kernel. The output of padding is 0."""
    keys = Keys(prompt.k_post, prompt.v, prompt.lengths)
    implementation = "interpret" if interpret else "pallas"
    options: Any = {"scale": tiling.scale, "sinks": piece.sinks, "implementation": implementation}
    out = attend_over(piece.q_post, keys, lists, piece.first, **options)
    needed = _tiles_needed(lists, tiling.block)
    return out, chosen.replace(tiles=chosen.tiles + needed, ran=chosen.ran + needed)


def _piece_lists(piece: PrefillPiece, prompt: PromptKV, lines: Lines, block: int) -> KeyLists:
    """Return the lists of a piece's n query blocks. No list names a key twice.

    A list of blocks is as long as the prompt has blocks. A list of columns is as long as `Lines.columns`.
    """
    index = piece.first // block + jnp.arange(piece.q_post.shape[1] // block, dtype=jnp.int32)
    blocks = jax.vmap(lambda one: strip_blocks(lines, one))(index)
    columns = jax.vmap(lambda one: open_columns(lines, one, block))(index)
    ids, counts, listed, more = (x.swapaxes(0, 1).swapaxes(1, 2) for x in (*blocks, *columns))
    shape = (*counts.shape[:2], prompt.k_post.shape[1])
    return KeyLists(ids, counts, listed, more, lines.near[..., block:].reshape(shape), lines.in_column.reshape(shape))


@dataclasses.dataclass(frozen=True)
class SparsePrefill(PrefillAttention):
    """The base of the attentions: each query head attends to chosen columns and diagonals.

    Attention is causal, its softmax is float32, and each key counts once. The work grows with the number of chosen
    keys, and not with S x S. `aux` is a `_Chosen`, which counts the tiles. If the settings cover the whole prompt,
    attention is exact.

    Attributes:
        block: number M of queries and of keys in a tile. It does not affect the result.

    Class attributes:
        name: the name for `--prefill`.
    """

    name = ""
    takes_sinks = True

    block: int = 64

    def __post_init__(self) -> None:
        check_positive(self.name, block=self.block)

    @property
    def multiple(self) -> int:  # type: ignore[override]
        """The number of tokens in a piece is a multiple of the block size."""
        return self.block

    def label(self, tokens: int | None = None) -> str:
        """Return the text for `--prefill`, with the settings that are not the defaults. A pattern is named by digest.

        If `tokens` is given and the settings cover that many tokens, a note says that the prefill is exact.
        """
        changed = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        shown = {key: value.digest() if isinstance(value, Pattern) else value for key, value in changed.items()}
        text = ":".join([self.name, *(f"{key}={value}" for key, value in shown.items())])
        whole = tokens is not None and "pattern" not in changed and self.covers(tokens)
        return f"{text} (exact: it covers {tokens:,} tokens)" if whole else text

    @abc.abstractmethod
    def covers(self, tokens: int) -> bool:
        """Whether every query of a prompt of `tokens` tokens attends to all keys before it."""

    @abc.abstractmethod
    def sizes(self, heads: int) -> HeadSizes:
        """Return the sizes of `heads` query heads. This is called only if there is no pattern."""

    @abc.abstractmethod
    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> Lines:
        """Return the chosen columns and diagonals."""

    @property
    @abc.abstractmethod
    def most_columns(self) -> int:
        """Static upper bound of `HeadSizes.columns`."""

    def begin(
        self, config: ModelConfig, kind: AttentionKind, prompt: PromptKV, q_tail: Array | None, learned: Any
    ) -> _Chosen:
        """Choose the lines of a layer; see PrefillAttention. `learned` has the HeadSizes of this layer, or is None."""
        batch, tokens = prompt.k_post.shape[:2]
        none = jnp.zeros((batch, config.q_heads), jnp.int32)
        counted = _Chosen(None, none, none)
        if learned is None and self.covers(tokens):
            return counted
        sizes = self.sizes(config.q_heads) if learned is None else jax.tree.map(jnp.asarray, learned)
        return counted.replace(lines=self.choose_lines(config, prompt, q_tail, sizes))

    def attend(
        self, config: ModelConfig, kind: AttentionKind, piece: PrefillPiece, prompt: PromptKV, aux: _Chosen
    ) -> tuple[Array, _Chosen]:
        """Compute attention of a piece over the chosen keys; see PrefillAttention."""
        scale = config.attention_scale
        if aux.lines is None:
            q, sinks = piece.q_post, piece.sinks
            return causal_attention(q, prompt.k_post, prompt.v, scale, piece.first, sinks=sinks)[0], aux
        return _attend_chosen(piece, prompt, aux, Tiling(scale, self.block))

    def piece_bytes(self, config: ModelConfig, batch: int, tokens: int, size: int) -> int:
        """Return the bytes of the sums, the chosen lines, the lists of a piece, a tile and the queries of a piece."""
        heads, dim = config.q_heads, config.head_dim
        gathered = max(_GATHERED, self.block)
        chosen = heads * tokens * 40  # sums, their order, masks; diagonals twice; the copies that a sort makes
        estimate = heads * self.tail * (4 * KEY_TILE + 2 * dim) * 4
        tile = heads * gathered * (4 * self.block + 4 * dim) * 4 + 3 * tokens * self.block  # and the masks of one head
        queries = 3 * heads * size * dim * 4
        # The kernel's lists, and the copy that a sort of the columns makes.
        lists = heads * -(-size // self.block) * (tokens // self.block + 2 * min(self.most_columns, tokens) + 2) * 4
        return batch * (chosen + estimate + tile + queries + lists)


@dataclasses.dataclass(frozen=True)
class AShape(SparsePrefill):
    """Attention to the first and the nearest tokens (the A-shape of MInference, arXiv 2407.02490, section 3.2).

    Attributes:
        initial: number of tokens at the start of the prompt that every query sees.
        local: number of nearest tokens that a query sees, including its own.

    Raises:
        ConfigError: a setting is out of range.
    """

    name = "a_shape"

    initial: int = 1024
    local: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, initial=self.initial, local=self.local)

    @property
    def most_columns(self) -> int:
        """Number of first columns."""
        return self.initial

    def covers(self, tokens: int) -> bool:
        """Whether all tokens are among the first tokens, or among the nearest tokens."""
        return max(self.initial, self.local) >= tokens

    def sizes(self, heads: int) -> HeadSizes:
        """Return the same sizes for all heads."""
        return HeadSizes.equal(heads, self.initial, self.local, by_position=True)

    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> Lines:
        """Return the same lines for every row. Padding comes after a row's queries, so the causal mask hides it."""
        batch, tokens = prompt.k_post.shape[:2]
        shape = (batch, config.q_heads, tokens)
        columns = jnp.broadcast_to(jnp.arange(min(self.initial, tokens), dtype=jnp.int32), (*shape[:2], self.initial))
        index = jnp.broadcast_to(jnp.arange(tokens), shape)
        return make_lines(columns, index < self.initial, index < self.local, self.block)


@dataclasses.dataclass(frozen=True)
class VerticalSlash(SparsePrefill):
    """Attention to the columns and diagonals with the largest sums (MInference, arXiv 2407.02490, section 3.2).

    The last `last_queries` real queries of each row attend to the whole prompt. Their probabilities are summed by
    column and by diagonal. All queries of the head attend to the columns and diagonals with the largest sums. (The
    published kernel rounds a diagonal up to blocks of 64 keys, and so attends to somewhat more keys.)

    Attributes:
        vertical: number of columns of each head.
        slash: number of diagonals of each head.
        last_queries: number of queries by which the columns and diagonals are chosen.
        first_columns: number of columns at the start of the prompt that are always chosen.
        local_diagonals: number of diagonals next to a query's own token that are always chosen.
        pattern: the kind and sizes of each head, which replace vertical and slash: a Pattern, the path of a file of
            MInference (see `load_pattern`), or None.

    Raises:
        ConfigError: a setting is out of range, or a pattern file cannot be read.
    """

    name = "vertical_slash"
    ahead = True

    vertical: int = 1000
    slash: int = 6096
    last_queries: int = 64
    first_columns: int = 30
    local_diagonals: int = 100
    pattern: Pattern | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("vertical", "slash", "last_queries", "local_diagonals")
        check_positive(self.name, **{name: getattr(self, name) for name in names})
        check_integer(f"{self.name}.first_columns", self.first_columns, least=0)
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", load_pattern(self.pattern))
        if self.pattern is not None and not isinstance(self.pattern, Pattern):
            raise ConfigError(f"{self.name}.pattern must be a Pattern or the path of a file, got {self.pattern!r}")

    @property
    def tail(self) -> int:  # type: ignore[override]
        """Number of last queries by which the columns and diagonals are chosen."""
        return self.last_queries

    @property
    def most_columns(self) -> int:
        """Maximum number of columns of a head."""
        return self.vertical

    def prepared(self, config: ModelConfig) -> tuple[PrefillAttention, HeadSizes | None]:
        """Return the sizes of a pattern as arrays, and this attention with their maxima; see PrefillAttention."""
        if not isinstance(self.pattern, Pattern):
            return self, None
        self.pattern.check(config)
        sizes = self.pattern.arrays()
        most = {"vertical": int(sizes.columns.max()), "slash": int(sizes.diagonals.max())}
        return dataclasses.replace(self, pattern=None, **most), sizes

    def covers(self, tokens: int) -> bool:
        """Whether all columns or all diagonals are chosen."""
        return max(self.vertical, self.slash) >= tokens

    def sizes(self, heads: int) -> HeadSizes:
        """Return the same sizes for all heads."""
        return HeadSizes.equal(heads, self.vertical, self.slash)

    def choose_lines(self, config: ModelConfig, prompt: PromptKV, q_tail: Array | None, sizes: HeadSizes) -> Lines:
        """Choose the lines by `line_sums`. An A-shaped head gets its first columns and nearest diagonals."""
        assert q_tail is not None
        tokens = prompt.k_post.shape[1]
        by_column, by_diagonal = line_sums(q_tail, prompt.k_post, prompt.lengths, config.attention_scale)
        columns, in_column = choose(
            by_column,
            sizes.columns,
            sizes.by_position,
            prompt.lengths,
            forced=self.first_columns,
            most=min(self.vertical, tokens),
        )
        _, diagonals = choose(
            by_diagonal,
            sizes.diagonals,
            sizes.by_position,
            prompt.lengths,
            forced=self.local_diagonals,
            most=min(self.slash, tokens),
        )
        return make_lines(columns, in_column, diagonals, self.block)


PREFILLS: dict[str, type[SparsePrefill]] = {"vertical_slash": VerticalSlash, "a_shape": AShape}


def parse_prefill(text: str) -> SparsePrefill | None:
    """Parse NAME or NAME:key=value:..., the value of `--prefill`. Returns None for "exact"."""
    name, *settings = text.split(":")
    if name == "exact" and not settings:
        return None
    if name not in PREFILLS:
        raise ConfigError(f"prefill must be one of {['exact', *sorted(PREFILLS)]}, got {text!r}")
    return PREFILLS[name](**_parse_settings(name, settings))


def _parse_settings(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` settings of the attention `name`. A value that is not JSON is a text."""
    fields = {field.name for field in dataclasses.fields(PREFILLS[name])}
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in fields:
            raise ConfigError(f"prefill must be {name}:KEY=VALUE with a key of {sorted(fields)}, got {setting!r}")
        try:
            values[key] = text if key == "pattern" else json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values
