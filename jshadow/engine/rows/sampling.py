"""Sampling for a batch whose rows have settings of their own, held in arrays with a value for each row.

B is the number of rows, V the size of the vocabulary, W = ceil(V / 32) the number of words of a bit mask, and K the
largest number of biased tokens. A new value compiles nothing. A row draws the same tokens in every slot, in every
batch and beside every neighbor. With equal logits, a row draws with the random numbers of `generate` for one prompt
with the same seed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jshadow.engine.rows.filters import keep_likely
from jshadow.engine.rows.settings import PENALTIES, RowParts, RowSettings, check_row, check_row_ids
from jshadow.engine.sampling import COLDEST, NO_TOKEN, Sampler, seed_key
from jshadow.engine.types import Tokens
from jshadow.errors import ConfigError
from jshadow.models.config import check_positive

HOTTEST = float(np.finfo(np.float32).max)  # higher temperatures are lowered to this one
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
        "temperature": np.float32(np.clip(sampler.temperature, COLDEST, HOTTEST) if sampler.temperature else 0),
        "top_k": np.int32(0 if sampler.top_k is None else min(sampler.top_k, size)),
        "top_p": np.float32(1 if sampler.top_p is None else sampler.top_p),
        "min_p": np.float32(0 if sampler.min_p is None else sampler.min_p),
        "seed": np.asarray(jax.random.key_data(seed_key(settings.seed))),
    }
    values |= {name: np.float32(getattr(settings, name)) for name in PENALTIES}
    read, made = check_row_ids("prompt", prompt, size), check_row_ids("drawn", drawn, size)
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
    ids[: len(bias)] = check_row_ids("logit_bias", list(bias), parts.vocab_size)
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
        rows: the settings and the number of the draw.
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
