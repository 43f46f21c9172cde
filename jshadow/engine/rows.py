"""Batches whose rows have sampling settings of their own, held in arrays with a value for each row.

B is the number of rows, V the size of the vocabulary, W = ceil(V / 32) the number of words of a bit mask, and K the
largest number of biased tokens. A new value compiles nothing. A row draws the same tokens in every slot, in every
batch and beside every neighbor. With equal logits, a row draws with the random numbers of `generate` for one prompt
with the same seed.

The filters sort nothing. The last token that a filter keeps is found by a search over the bits of the logits. All sums
are sums of integers, so their order does not matter. Maxima are exact too, and everything else is elementwise. So a row
keeps the same tokens in every batch.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int, UInt

from jshadow.cache.state import Reads, Writes
from jshadow.engine.checks import as_array, check_sampling
from jshadow.engine.sampling import COLDEST, NO_TOKEN, Sampler, seed_key
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.engine.types import Tokens
from jshadow.errors import ConfigError, PromptError, check_integer
from jshadow.models.config import ModelConfig, check_positive

_EVERY = 2**32 - 1  # a limit that no sum reaches: all tokens are kept
_WHOLE = 2.0**31  # the sum of the shares of a row, apart from rounding
_DISTANCE_BITS = 32  # bits of a float32
_BITS = 2  # bits of the cut that each round of the search finds


def keep_likely(
    logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"], min_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Return which tokens the filters of each row keep. They apply in the order top_k, top_p, min_p, as in `Sampler`.

    Args:
        logits: float32 [B, V], divided by the temperature, minus the largest logit of the row. So the largest is 0.
        top_k: int32 [B]. Keep the k most likely tokens, the lower ids in a tie. 0 is off.
        top_p: float32 [B] in (0, 1]. Keep the fewest tokens whose probabilities sum to at least p. 1 is off.
        min_p: float32 [B] in [0, 1]. Keep tokens whose probability is at least min_p times the largest. 0 is off.

    Returns:
        bool [B, V]. A token with the logit -inf is dropped. The most likely token is kept.
    """
    weights = jnp.exp(logits)
    keep = logits > -jnp.inf

    def first_k(keep: Array) -> Array:
        limits = jnp.where(top_k > 0, top_k.astype(jnp.uint32), jnp.uint32(_EVERY))
        return keep & _keep_first(logits, jnp.ones(logits.shape, jnp.uint32), limits)

    def first_p(keep: Array) -> Array:
        parts = shares(jnp.where(keep, weights, 0.0))
        limits = jnp.ceil(top_p * parts.sum(axis=-1, dtype=jnp.uint32).astype(jnp.float32)).astype(jnp.uint32)
        limits = jnp.where(top_p < 1, jnp.maximum(limits, 1), jnp.uint32(_EVERY))
        return keep & _keep_first(logits, parts, limits)

    # A program for all settings, which does the work of a filter only if a row has this filter.
    keep = jax.lax.cond((top_k > 0).any(), first_k, lambda keep: keep, keep)
    keep = jax.lax.cond((top_p < 1).any(), first_p, lambda keep: keep, keep)
    return keep & (weights >= min_p[:, None])


def _keep_first(
    logits: Float[Array, "B V"], weights: UInt[Array, "B V"], limits: UInt[Array, " B"]
) -> Bool[Array, "B V"]:
    """Return which tokens come before the limit, if the tokens are ordered from the largest logit to the smallest.

    A token is kept if the weights of all tokens before it in this order sum to less than the limit of its row. In a
    tie, the lower id comes first.

    Args:
        logits: float32 [B, V], at most 0.
        weights: uint32 [B, V]. The sum of a row is below 2**32.
        limits: uint32 [B], at least 1.

    Returns:
        bool [B, V].
    """
    distances = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.uint32)  # in the order of the absolute values

    def closer(cut: Array) -> Array:
        return jnp.where(distances < cut[:, None], weights, 0).sum(axis=-1, dtype=jnp.uint32)

    def next_bits(index: Array, cut: Array) -> Array:
        step = jnp.uint32(1) << (_DISTANCE_BITS - _BITS * (index + 1)).astype(jnp.uint32)
        below = [closer(cut + times * step) < limits for times in range(1, 2**_BITS)]
        return cut + step * sum(below[1:], below[0].astype(jnp.uint32))

    # The largest distance before which the weights sum to less than the limit. Only the tokens at it may be cut.
    cut = jax.lax.fori_loop(0, _DISTANCE_BITS // _BITS, next_bits, jnp.zeros(limits.shape, jnp.uint32))
    tied = distances == cut[:, None]
    ties = jnp.where(tied, weights, 0)
    before = closer(cut)[:, None] + jnp.cumsum(ties, axis=-1, dtype=jnp.uint32) - ties
    return (distances < cut[:, None]) | (tied & (before < limits[:, None]))


def shares(weights: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Return the weights of each row as integers that sum to about 2**31.

    Args:
        weights: float32 [B, V] in [0, 1], with at least one 1 in each row.

    Returns:
        uint32 [B, V]. A row sums to at most 2**31 + V, apart from the rounding of float32. A part of this sum, divided
        by the sum, is wrong by at most V / 2**31.
    """
    scale = jnp.full((len(weights), 1), _WHOLE / weights.shape[-1], jnp.float32)
    for _ in range(2):  # the first scale is for equal weights; the second round makes up for what rounding up added
        parts = jnp.ceil(weights * scale).astype(jnp.uint32)
        scale = scale * (_WHOLE / parts.sum(axis=-1, keepdims=True, dtype=jnp.uint32).astype(jnp.float32))
    return jnp.round(weights * scale).astype(jnp.uint32)


# The value that turns a penalty off, the lowest value and the highest.
_PENALTIES = {
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 0.01, 100.0),
}
_MOST_BIAS = 100.0


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """How the tokens of one request are drawn. The default is greedy.

    The logits are changed in the order repetition penalty, presence and frequency penalty, bias, grammar mask. Then the
    sampler applies.

    Attributes:
        sampler: temperature and filters.
        seed: integer of 64 bits.
        presence_penalty: subtracted from the logits of the tokens that the request has drawn, in [-2, 2].
        frequency_penalty: subtracted once for each time that the token was drawn, in [-2, 2].
        repetition_penalty: divisor of a logit above 0, and factor of any other, for tokens of the prompt and drawn
            tokens, in [0.01, 100]. 1 is off. (Keskar et al., CTRL, 2019, section 4.1)
        logit_bias: token ids, and what is added to their logits, in [-100, 100].

    Raises:
        ConfigError: a value is out of range.
    """

    sampler: Sampler = dataclasses.field(default_factory=Sampler)
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sampling(self.sampler, self.seed)
        if self.sampler is None:
            raise ConfigError("sampler must be a Sampler, got None")
        for name, (_, low, high) in _PENALTIES.items():
            _check_number(f"row.{name}", getattr(self, name), low, high)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"row.logit_bias must be a mapping from token id to number, got {self.logit_bias!r}")
        for token, value in self.logit_bias.items():
            _check_number(f"row.logit_bias[{token!r}]", value, -_MOST_BIAS, _MOST_BIAS)


@dataclasses.dataclass(frozen=True)
class RowParts:
    """Which arrays the rows of a batch have. Rows with other parts make other programs, so an engine chooses once.

    Attributes:
        vocab_size: V, the number of logits.
        penalties: whether rows may have penalties. This takes V numbers and W words a row.
        bias_limit: K, the largest number of tokens with a bias in a row. 0 means that rows have no bias.
        grammar: whether rows have a mask of allowed tokens. This takes W words a row.

    Raises:
        ConfigError: a value is out of range.
    """

    vocab_size: int
    penalties: bool = False
    bias_limit: int = 0
    grammar: bool = False

    def __post_init__(self) -> None:
        check_positive("parts", vocab_size=self.vocab_size)
        check_integer("parts.bias_limit", self.bias_limit, least=0)


def check_row(settings: RowSettings, parts: RowParts) -> None:
    """Check that a batch has the parts that the settings of a row need.

    Raises:
        ConfigError: it has no penalties, or its rows have fewer biased tokens.
        PromptError: a biased token is out of range.
    """
    for name, (off, _, _) in _PENALTIES.items():
        if (value := getattr(settings, name)) != off and not parts.penalties:
            raise ConfigError(f"row.{name} must be {off} in a batch without penalties, got {value}")
    if (count := len(settings.logit_bias)) > parts.bias_limit:
        raise ConfigError(f"row.logit_bias must have at most bias_limit={parts.bias_limit} tokens, got {count}")
    _check_row_ids("logit_bias", list(settings.logit_bias), parts.vocab_size)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not (isinstance(value, int | float) and low <= value <= high):
        raise ConfigError(f"{name} must lie in [{low}, {high}], got {value!r}")


def _check_row_ids(name: str, tokens: Tokens, size: int) -> np.ndarray:
    """Return token ids of one request as int32 [n]. Raises PromptError if an id is not in [0, size)."""
    array = as_array(tokens, name)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise PromptError(f"{name} must be integers with 1 axis, got {array.dtype} {array.shape}")
    if (bad := array[(array < 0) | (array >= size)]).size:
        raise PromptError(f"{name} must lie in [0, vocab_size={size}), got {int(bad[0])}")
    return array.astype(np.int32)


_HOTTEST = float(np.finfo(np.float32).max)  # higher temperatures are lowered to this one
WORD = 32  # bits in a word of a mask


class RowSampling(struct.PyTreeNode):
    """The settings of each row, and what its next draw depends on. `RowSettings` describes the values.

    Attributes:
        temperature: float32 [B]. 0 means greedy.
        top_k: int32 [B]. 0 is off.
        top_p: float32 [B]. 1 is off.
        min_p: float32 [B]. 0 is off.
        presence_penalty, frequency_penalty, repetition_penalty: float32 [B].
        seed: the data of the PRNG key of each row, uint32 [B, 2].
        step: number of tokens that each row has drawn, int32 [B].
        counts: how often each row has drawn each token, int32 [B, V]. None without penalties.
        prompt: bit mask of the tokens in the prompt, uint32 [B, W]. None without penalties.
        bias_ids: token ids with a bias, int32 [B, K], filled up with V. None without a bias.
        bias_values: what is added to their logits, float32 [B, K]. None without a bias.
        allowed: bit mask of the tokens that may be drawn, uint32 [B, W], from `pack_mask`. It is to be replaced before
            a draw if it changes. None without a grammar.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    seed: UInt[Array, "B 2"]
    step: Int[Array, " B"]
    counts: Int[Array, "B V"] | None = None
    prompt: UInt[Array, "B W"] | None = None
    bias_ids: Int[Array, "B K"] | None = None
    bias_values: Float[Array, "B K"] | None = None
    allowed: UInt[Array, "B W"] | None = None


# Making rows


def row_of(settings: Sampler | RowSettings, parts: RowParts, *, prompt: Tokens = (), drawn: Tokens = ()) -> RowSampling:
    """Return the settings of one request as arrays with one row, in which every token is allowed.

    Args:
        settings: a Sampler alone has the seed 0.
        parts: the parts of the batch that the row is for.
        prompt: token ids of the prompt, for the repetition penalty.
        drawn: token ids that the request has drawn before, if it is to go on where it was stopped.

    Raises:
        ConfigError: the settings need a part that the batch does not have, or have more biased tokens than its limit.
        PromptError: a token id is out of range.
    """
    if isinstance(settings, Sampler):
        settings = RowSettings(settings)
    check_row(settings, parts)
    sampler, size = settings.sampler, parts.vocab_size
    values: dict[str, Any] = {
        "temperature": np.float32(np.clip(sampler.temperature, COLDEST, _HOTTEST) if sampler.temperature else 0),
        "top_k": np.int32(0 if sampler.top_k is None else min(sampler.top_k, size)),
        "top_p": np.float32(1 if sampler.top_p is None else sampler.top_p),
        "min_p": np.float32(0 if sampler.min_p is None else sampler.min_p),
        "seed": np.asarray(jax.random.key_data(seed_key(settings.seed))),
    }
    values |= {name: np.float32(getattr(settings, name)) for name in _PENALTIES}
    read, made = _check_row_ids("prompt", prompt, size), _check_row_ids("drawn", drawn, size)
    values["step"] = np.int32(len(made))
    if parts.penalties:
        values["counts"] = np.bincount(made, minlength=size).astype(np.int32)
        values["prompt"] = pack_mask(np.bincount(read, minlength=size) > 0)
    values |= _bias(settings.logit_bias, parts)
    if parts.grammar:
        values["allowed"] = pack_mask(np.ones(size, bool))
    return RowSampling(**{name: jax.device_put(np.asarray(value)[None]) for name, value in values.items()})


def idle_rows(parts: RowParts, count: int) -> RowSampling:
    """Return `count` greedy rows, to be replaced with `set_row`. Raises ConfigError if the count is below 1."""
    check_positive("rows", count=count)
    row = jax.tree.map(np.asarray, row_of(RowSettings(), parts))
    return jax.tree.map(lambda array: jax.device_put(np.repeat(array, count, axis=0)), row)


def set_row(rows: RowSampling, index: int, row: RowSampling) -> RowSampling:
    """Return the rows with row `index` replaced by the only row of `row`. No value of it compiles anything.

    Raises:
        ConfigError: the index is out of range, or the row has other parts than the rows.
    """
    count = len(rows.temperature)
    if not 0 <= index < count:
        raise ConfigError(f"index must lie in [0, {count}), got {index}")
    for field in dataclasses.fields(RowSampling):
        held, given = getattr(rows, field.name), getattr(row, field.name)
        want, got = held if held is None else (1, *held.shape[1:]), given if given is None else given.shape
        if want != got:
            raise ConfigError(f"row.{field.name} must have the shape {want}, got {got}")
    return _set_row(rows, jnp.int32(index), row)


@jax.jit
def _set_row(rows: RowSampling, index: Array, row: RowSampling) -> RowSampling:
    return jax.tree.map(lambda held, given: held.at[index].set(given[0]), rows, row)


def pack_mask(mask: np.ndarray) -> np.ndarray:
    """Return a mask, bool [..., V], as uint32 [..., W]. Token 32 w + i is bit i of word w, counted from the lowest."""
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % WORD)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def _bias(bias: Mapping[int, float], parts: RowParts) -> dict[str, np.ndarray]:
    if not parts.bias_limit:
        return {}
    ids, values = np.full(parts.bias_limit, parts.vocab_size, np.int32), np.zeros(parts.bias_limit, np.float32)
    ids[: len(bias)] = _check_row_ids("logit_bias", list(bias), parts.vocab_size)
    values[: len(bias)] = list(bias.values())
    return {"bias_ids": ids, "bias_values": values}


# Drawing


@jax.jit
def draw(
    rows: RowSampling, logits: Float[Array, "B V"], active: Bool[Array, " B"] | None = None
) -> tuple[Int[Array, " B"], RowSampling]:
    """Draw a token for each row.

    Draw number t of a row uses the PRNG key fold_in(fold_in(seed, t), 0), as row 0 of `generate` does.

    Args:
        logits: float32 or bfloat16 [B, V].
        active: bool [B]. The other rows count neither the draw nor its token, which is to be ignored. None means all.

    Returns:
        The token ids, int32 [B], and the rows for the next draw. A row gets NO_TOKEN if its logits contain a NaN, or if
        no token is left with a logit above -inf.
    """
    scores = _change(rows, logits.astype(jnp.float32))
    top = scores.max(axis=-1, keepdims=True)
    greedy = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    warm = rows.temperature > 0
    # On a GPU, XLA reads the predicate of a cond on the host, unless its command buffers may hold conditionals.
    tokens = jax.lax.cond(warm.any(), lambda: jnp.where(warm, _draw_warm(rows, scores, top), greedy), lambda: greedy)
    fails = jnp.isnan(logits).any(axis=-1) | ~(top[:, 0] > -jnp.inf)
    tokens = jnp.where(fails, NO_TOKEN, tokens)
    counted = jnp.ones(tokens.shape, bool) if active is None else active
    counts = rows.counts
    if counts is not None:
        counts = counts.at[jnp.arange(len(tokens)), tokens].add((counted & ~fails).astype(jnp.int32))
    return tokens, rows.replace(step=rows.step + counted, counts=counts)


def _draw_warm(rows: RowSampling, scores: Array, top: Array) -> Array:
    """Draw a token for each row, int32 [B], from changed logits [B, V] whose largest is `top` [B, 1]."""
    # The largest is set to 0, because an infinite one minus itself is NaN.
    cooled = jnp.where(scores == top, 0.0, (scores - top) / rows.temperature[:, None])
    keep = keep_likely(cooled, rows.top_k, rows.top_p, rows.min_p)

    def key_of(seed: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), step), 0)

    keys = jax.vmap(key_of)(rows.seed, rows.step)
    return jax.vmap(jax.random.categorical)(keys, jnp.where(keep, cooled, -jnp.inf)).astype(jnp.int32)


def _change(rows: RowSampling, logits: Array) -> Array:
    """Apply the penalties, the bias and the grammar mask to the logits, float32 [B, V]."""
    size = logits.shape[-1]
    if rows.counts is not None and rows.prompt is not None:
        drawn, factor = rows.counts > 0, rows.repetition_penalty[:, None]
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(drawn | _bits(rows.prompt, size), repeated, logits)
        logits = logits - jnp.where(drawn, rows.presence_penalty[:, None], 0.0)
        logits = logits - rows.frequency_penalty[:, None] * rows.counts
    if rows.bias_ids is not None:
        logits = logits.at[jnp.arange(len(logits))[:, None], rows.bias_ids].add(rows.bias_values, mode="drop")
    if rows.allowed is not None:
        logits = jnp.where(_bits(rows.allowed, size), logits, -jnp.inf)
    return logits


def _bits(words: Array, size: int) -> Array:
    """Unpack a mask, uint32 [B, W], to bool [B, size]."""
    bits = words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32) & 1
    return bits.reshape(len(words), -1)[:, :size].astype(bool)


MOST_LIKELY = 20  # tokens of which a step gives log-probabilities, as many as OpenAI's API has at most


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def row_logits(
    weights: dict, fed: tuple[Array, Array], reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Writes]:
    """Feed a token to each active row.

    Args:
        weights, config: the model.
        fed: the token of each row, int32 [B], and whether the row is active, bool [B]. A row that is not active does
            not change, and its logits have no meaning.
        reads, writes: the two halves of the state. The memory of `writes` is reused.

    Returns:
        The logits for the next token, float32 [B, V], and the new `writes`.
    """
    token, active = fed
    return step_writes(weights, config, token[:, None], active.astype("int32"), reads, writes)


@functools.partial(jax.jit, donate_argnames=("rows",))
def draw_rows(rows: RowSampling, logits: Array, active: Array | None = None) -> tuple[Array, RowSampling]:
    """Draw the next token of each row, as `draw` does. The memory of `rows` is reused."""
    return draw(rows, logits, active)


@jax.jit
def likely_tokens(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Return the log-probabilities of the drawn tokens and of the likeliest ones, before any sampling setting.

    Args:
        logits: float32 [B, V].
        tokens: the drawn tokens, int32 [B]. The value of a row with NO_TOKEN has no meaning.

    Returns:
        The log-probability of each drawn token, float32 [B]; the min(V, MOST_LIKELY) likeliest tokens, int32 [B, K],
        the likeliest first; and their log-probabilities, float32 [B, K].
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, min(MOST_LIKELY, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)
    return (chosen - total)[:, 0], ids, values - total
