"""A recurrent layer of 2,000 random rows is that of a NumPy oracle, however their tokens are cut into calls.

So is a short convolution between two gates, which has no state.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import family_config
from few import one_of

from jshadow.cache.recurrence import RECENT, Held, RecurrentTokens, empty, read_tokens, step_tokens
from jshadow.engine.prefill.layer import Given, LayerPlan, read_piece
from jshadow.models.config import Recurrent
from jshadow.models.transformer import abstract_weights
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.machine import prefill_peak
from jshadow.policies import Full
from jshadow.policies.recurrent import RecurrentPrefill

SIZES = Recurrent(layers=(0,), key_heads=2, value_heads=6, key_dim=8, value_dim=12, taps=4)
CONVOLUTION = Recurrent(layers=(0,), key_heads=2, value_heads=2, key_dim=12, value_dim=12, taps=3, kind="convolution")
MAMBA = dataclasses.replace(SIZES, value_dim=10, kind="mamba2")
EVERY = (SIZES, MAMBA, CONVOLUTION)
KINDS = pytest.mark.parametrize("sizes", EVERY, ids=lambda sizes: sizes.kind)
ROWS = 500
# The most tokens of a row in each call: a prompt in pieces, decode steps, turns of a few tokens and of many.
PIECE, FEW = 70, 5
CALLS = [PIECE, PIECE, *[FEW] * 9, RECENT, *[FEW] * 2, PIECE, *[FEW] * 3, RECENT, PIECE, FEW]


class Text(NamedTuple):
    """Random tokens of many rows: float32 [B, S, ...]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray


def random_text(rng, sizes: Recurrent, rows: int, tokens: int) -> tuple[Text, list[np.ndarray]]:
    """Tokens and the kernels of the convolution. Decays are weak in some heads and strong in others."""
    shapes = [(sizes.key_heads, sizes.key_dim)] * 2 + [(sizes.value_heads, sizes.value_dim)]
    q, k, v = (rng.standard_normal((rows, tokens, *shape), dtype=np.float32) for shape in shapes)
    decay = -np.exp(rng.uniform(-6, 3, (rows, 1, sizes.value_heads)) + rng.standard_normal((rows, tokens, 1)))
    beta = rng.uniform(0, 1, (rows, tokens, sizes.value_heads))
    taps = [rng.standard_normal((sizes.taps, *shape), dtype=np.float32) for shape in shapes]
    return Text(q, k, v, decay.astype(np.float32), beta.astype(np.float32)), taps[0 if sizes.has_state else 2 :]


def convolved(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The convolution of inputs [B, S, n, d] over the tokens, in float64."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (len(kernel) - 1, 0), (0, 0), (0, 0)))
    return np.sum([padded[:, j : j + x.shape[1]] * kernel[j] for j in range(len(kernel))], axis=0)


def oracle(sizes: Recurrent, text: Text, taps: list[np.ndarray]) -> np.ndarray:
    """The outputs [B, S, n_v, d_v] of rows that read all tokens one after the other, in float64."""
    if not sizes.has_state:
        return text.q * convolved(text.k * text.v, taps[0])
    mixed = [convolved(x, kernel) for x, kernel in zip(text[:3], taps, strict=True)]
    parts = [one / (1 + np.exp(-one)) for one in mixed]
    if sizes.corrects:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in parts[:2])
        parts[:2] = q / sizes.key_dim**0.5, k
    q, k = (np.repeat(x, sizes.value_heads // sizes.key_heads, axis=2) for x in parts[:2])
    state = np.zeros((len(q), sizes.value_heads, sizes.key_dim, sizes.value_dim))
    outs = []
    for token in range(q.shape[1]):
        state *= np.exp(text.log_decay[:, token].astype(np.float64))[..., None, None]
        seen = np.einsum("bhde,bhd->bhe", state, k[:, token]) if sizes.corrects else 0
        update = text.beta[:, token, :, None] * (parts[2][:, token] - seen)
        state += k[:, token, :, :, None] * update[:, :, None]
        outs.append(np.einsum("bhde,bhd->bhe", state, q[:, token]))
    return np.stack(outs, axis=1)


@functools.cache
def program(size: int):
    """The call that a layer makes for `size` tokens."""
    return jax.jit(step_tokens if size <= RECENT else read_tokens)


def following(x: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """The next tokens of each row, [B, size, ...] of [B, S, ...]."""
    return x[np.arange(len(lengths))[:, None], lengths[:, None] + np.arange(size)]


def call(
    sizes: Recurrent, held: Held, text: Text, taps: list, lengths: np.ndarray, counts: np.ndarray, size: int, run=None
):
    """Give the next counts[b] tokens of each row to the layer. The padding has the tokens that come after them."""
    q, k, v, *gates = (following(x, lengths, size) for x in text)
    valid = np.arange(size) < counts[:, None]
    given = tuple(gates) if sizes.has_state else None
    new = RecurrentTokens((q, k, v), given, tuple(taps), None, lengths.astype(np.int32), valid, sizes)
    out, held = (run or program(size))(held, new)
    return np.asarray(out), held


def same_bits(one: Held, other: Held, rows: np.ndarray, others: np.ndarray | None = None) -> None:
    """Some rows of all arrays are equal bit by bit to these rows of the others, or to rows `others` of them."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a)[rows], np.asarray(b)[rows if others is None else others]
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def start(rows: int, sizes: Recurrent) -> Held:
    """A layer that has read nothing."""
    shapes = jax.eval_shape(lambda: empty(rows, sizes, jnp.float32))
    held: Held = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return held


@KINDS
@pytest.mark.parametrize("seed", one_of(4, range(4)))
def test_random_rows_are_those_of_the_oracle(seed, sizes):
    """Each row takes its own random number of tokens in each call. If it takes none, it keeps its bits."""
    rng = np.random.default_rng(seed)
    text, taps = random_text(rng, sizes, ROWS, sum(CALLS) + PIECE)
    want, held, lengths = oracle(sizes, text, taps), start(ROWS, sizes), np.zeros(ROWS, np.int64)
    for size in CALLS:
        counts = rng.integers(0, size + 1, ROWS) * (rng.random(ROWS) > 0.2)
        out, after = call(sizes, held, text, taps, lengths, counts, size)
        real = np.arange(size) < counts[:, None]
        np.testing.assert_allclose(out[real], following(want, lengths, size)[real], rtol=1e-4, atol=1e-5)
        same_bits(held, after, counts == 0)
        held, lengths = after, lengths + counts
        if sizes.has_state:
            folded = np.asarray(held.folded)
            assert ((folded <= lengths) & (folded > lengths - 2 * RECENT)).all()


@pytest.mark.slow
@KINDS
def test_prompts_in_pieces_of_many_sizes_are_read_as_whole_ones(sizes):
    """Rows of up to 70 tokens, in pieces of every 23rd size from 1, 4 or 7 to 70."""
    rng, tokens = np.random.default_rng(9), PIECE
    text, taps = random_text(rng, sizes, 8, 2 * tokens)
    want, ends = oracle(sizes, text, taps), np.array([70, 69, 64, 41, 17, 3, 1, 0])
    read = jax.jit(read_tokens)
    for size in range(1 + 3 * EVERY.index(sizes), tokens + 1, 23):
        held = start(len(ends), sizes)
        for first in range(0, tokens, size):
            lengths = np.minimum(first, ends)
            counts = np.clip(ends - first, 0, size)
            out, after = call(sizes, held, text, taps, lengths, counts, size, read)
            real = np.arange(size) < counts[:, None]
            np.testing.assert_allclose(out[real], following(want, lengths, size)[real], rtol=1e-4, atol=1e-5)
            same_bits(held, after, counts == 0)
            held = after


@KINDS
def test_a_row_depends_on_no_other_row_and_on_no_padding(sizes):
    """Its bits are the same in another place of a batch, beside rows that read nothing, and with other padding."""
    rng, calls = np.random.default_rng(7), (PIECE, FEW, RECENT, FEW, PIECE, FEW)
    text, taps = random_text(rng, sizes, ROWS, sum(calls) + PIECE)
    turned, few = np.arange(ROWS)[::-1], rng.random(ROWS) < 0.1
    held, moved, alone = (start(ROWS, sizes) for _ in range(3))
    lengths = np.zeros(ROWS, np.int64)
    for size in calls:
        counts = rng.integers(1, size + 1, ROWS)
        after = lengths + counts
        padded = Text(*(x.copy() for x in text))
        for x in padded:
            later = np.arange(x.shape[1]) >= after[:, None]
            x[later] = rng.permutation(x[later])
        held = call(sizes, held, text, taps, lengths, counts, size)[1]
        moved = call(sizes, moved, Text(*(x[turned] for x in padded)), taps, lengths[turned], counts[turned], size)[1]
        alone = call(sizes, alone, padded, taps, np.where(few, lengths, 0), np.where(few, counts, 0), size)[1]
        same_bits(held, moved, np.arange(ROWS), turned)
        same_bits(held, alone, few)
        lengths = after


@KINDS
def test_a_guess_follows_the_token_before_it_and_is_not_stored(sizes):
    """A step of a policy that speculates has a token and a guess, whose output is that of a token."""
    rng = np.random.default_rng(8)
    text, taps = random_text(rng, sizes, ROWS, 12 * FEW)
    want, held, lengths = oracle(sizes, text, taps), start(ROWS, sizes), np.zeros(ROWS, np.int64)
    for _ in range(10):
        counts = rng.integers(1, FEW, ROWS)
        out, after = call(sizes, held, text, taps, lengths, counts, FEW)
        np.testing.assert_allclose(out, following(want, lengths, FEW), rtol=1e-4, atol=1e-5)
        held, lengths = after, lengths + counts


@pytest.mark.parametrize(
    ("rows", "size", "dtype", "heads", "kind"),
    one_of(
        4,
        [
            (3, 100, "float32", (2, 6), "delta"),
            (1, 2048, "bfloat16", (16, 48), "delta"),
            (2, 512, "float32", (16, 32), "delta"),
            (1, 2048, "bfloat16", (8, 8), "convolution"),
            (3, 100, "float32", (2, 2), "convolution"),
        ],
    ),
)
def test_a_piece_of_a_prompt_keeps_to_the_bound(rows, size, dtype, heads, kind):
    """The temporaries of its compiled program are within the planner's bound."""
    sizes = dataclasses.replace(SIZES, key_heads=heads[0], value_heads=heads[1], key_dim=128, value_dim=128, kind=kind)
    config = dataclasses.replace(family_config("qwen3_5"), model_dim=256, ffn_dim=512, context=2**15, recurrent=sizes)
    plan = LayerPlan(config.at(0), config.attention_kind(0), False, 0, size, RecurrentPrefill())
    abstract = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda leaf: abstract(leaf.shape, dtype), abstract_weights(config)["layer_0"])
    given = Given(weights, inverse_frequencies(config.rope, config.head_dim))
    prompt = jax.eval_shape(lambda lengths: plan.empty_prompt(lengths, 0, dtype), abstract((rows,), "int32"))
    held, x = jax.eval_shape(lambda: empty(rows, sizes, dtype)), abstract((rows, 2 * size, 256), dtype)
    compiled = read_piece.lower(given, x, prompt, None, held, np.int32(0), plan=plan).compile()
    shape = {"batch": rows, "tokens": 2 * size, "capacity": 2 * size + 64, "dtype": dtype, "prefill_chunk": size}
    bound = prefill_peak(config, Full(), **shape)["piece"]
    assert compiled.memory_analysis().temp_size_in_bytes <= bound
    assert RecurrentPrefill().piece_bytes(config, rows, 2 * size, size) <= bound
